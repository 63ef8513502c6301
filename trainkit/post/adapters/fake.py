"""Quantization-aware training: the forward pass rounds, the backward pass does not.

A fake-quantized layer stores its weight as before. In forward the weight is quantized and
dequantized, and the layer's input too if the transform says so; gradients pass as if neither had
been rounded. A model that was trained so loses little when it is quantized for good.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor, nn

from trainkit.collectives import all_max
from trainkit.models.experts import ExpertWeights, grouped_product
from trainkit.models.mixins import mix_in_, take_out_
from trainkit.parallel.linear_layers import choose_layers, note_computation_, plain_problem
from trainkit.parallel.styles import ParallelStyle
from trainkit.parallel.transforms import Transform
from trainkit.post.adapters.float8 import float8
from trainkit.post.adapters.formats import (
    FP8_BLOCK,
    NF4_BLOCK,
    NF4_GROUP,
    QuantizationFormat,
    block_of,
    largest_of,
    quantize_dequantize,
)
from trainkit.types import SOLO, Axis, ConfigError, ParallelState, check_choice

Activation = Literal["int8", "fp8_row"]
"""Formats of activations, with scales for each token."""


@attrs.frozen(eq=False)
class _Rounding:
    """How a layer's operands are rounded, and the axes that shard its sides."""

    name: str
    weights: QuantizationFormat
    activations: Activation | None
    inputs: Axis = SOLO
    outputs: Axis = SOLO

    def __deepcopy__(self, memo: Any) -> _Rounding:
        return self  # it holds process groups

    def round_weight(self, x: Tensor) -> Tensor:
        """Round a weight; scales of the whole matrix, or of rows, are a maximum over ranks."""
        # Other formats have scales of blocks, and tp never cuts a block (`shard_by_style_`).
        largest = None
        if self.weights in ("nvfp4", "fp8_row"):
            largest = all_max(largest_of(x, rows=self.weights == "fp8_row"), self.inputs)
        if largest is not None and self.weights == "nvfp4":
            largest = all_max(largest, self.outputs)
        return quantize_dequantize(x, self.weights, largest=largest)

    def round_activation(self, x: Tensor) -> Tensor:
        """Round the input of a layer, whose features may be sharded."""
        if self.activations == "fp8_row":  # a row is a token: each has a scale
            largest = all_max(largest_of(x, rows=True), self.inputs)
            return quantize_dequantize(x, "fp8_row", largest=largest)
        # int8 per token, asymmetric, as torchao does it: codes from -128 to 127 for the range from
        # `-low` to `high`, which always contains 0, so that 0 has a code (`zero`) and stays 0.
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        lowest = values.amin(-1, keepdim=True)
        highest = values.amax(-1, keepdim=True)
        # Negated, so that one maximum over ranks finds both ends of the range.
        ends = torch.stack([-lowest, highest])
        low, high = all_max(ends.clamp_min(0), self.inputs).unbind()
        scale = ((high + low) / 255).clamp_min(torch.finfo(torch.float32).tiny)
        zero = (-128 + (low / scale).round()).clamp(-128, 127)
        # Times the reciprocal, as torchao does it: a division would round some values differently.
        codes = ((values * (1 / scale)).round() + zero).clamp(-128, 127)
        return ((codes - zero) * scale).to(x.dtype)


def fake_quantize(
    weights: QuantizationFormat = "int4",
    activations: Activation | None = None,
    *,
    modules: str | None = None,
) -> Transform:
    r"""Return the transform for quantization-aware training: layers compute with rounded weights.

    It comes before adapters and `tensor`, in place of `float8`. Parameters keep their names,
    values and dtypes, so a checkpoint or an exported folder holds plain weights. Quantize them
    afterwards, by `quantize_model_` or in the server. Blocks and scales are those of the whole
    matrix in every layout.

    | weights, activations | quantized by |
    |---|---|
    | "int4", "int8" | torchao's Int8DynamicActivationIntxWeightConfig, on phones and CPUs |
    | "int4", None | torchao's IntxWeightOnlyConfig |
    | "fp8_row", "fp8_row" | torchao's Float8DynamicActivationFloat8WeightConfig, on GPUs |
    | any format, None | see `quantize`; "fp8" has blocks of 128 x 128, "nvfp4" of 16 |

    Args:
        weights: The format of weights.
        activations: "int8" rounds each token to 256 steps between its least and largest feature,
            "fp8_row" to e4m3; None does not round activations.
        modules: A pattern of names in the whole model (`parallel.name_patterns`), of linear layers
            and of experts ("layers.0.mlp.experts"), all three weights of them. None chooses all
            suitable linear layers but the head.

    Returns:
        A transform for `build_stages`.

    Raises:
        ConfigError: When applied: the pattern is invalid, matches nothing or a layer that is not
            suitable; rows are not whole blocks of int4 or nvfp4; or tp cuts a block.
        ValueError: A format is unknown.

    References:
        Jacob et al., "Quantization and training of neural networks" (2018); Bengio et al.,
        "Estimating or propagating gradients through stochastic neurons" (2013).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Sequential(nn.Linear(32, 1, bias=False))
        >>> _ = nn.init.constant_(model[0].weight, 7.5)
        >>> fake_quantize("int4")(model, solo_parallel())(torch.ones(1, 32))  # 7.5 becomes 7
        tensor([[224.]], grad_fn=...)
    """
    check_choice(get_args(QuantizationFormat), "fake_quantize", weights=weights)
    if activations is not None:
        check_choice(get_args(Activation), "fake_quantize", activations=activations)

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        del ps
        problem = partial(_find_problem, weights)
        layers, left_out = choose_layers(module, modules, by="fake_quantize", problem=problem)
        for name, layer in layers.items():
            mixin = FakeExperts if isinstance(layer, ExpertWeights) else Fake
            mix_in_(layer, mixin, fake=_Rounding(name, weights, activations))
        description = f"fake {weights}" + (f" on {activations}" if activations else "")
        note_computation_(layers.values(), left_out, description)
        return module

    return Transform(apply, kind="rounded")


def _find_problem(form: QuantizationFormat, part: nn.Module) -> str | None:
    """Return why a layer cannot be quantized to a format, or None."""
    problem = None if type(part) is ExpertWeights else plain_problem(part)
    if problem:
        return problem
    # torchao and GPUs take only whole blocks of these two; elsewhere the last one may be short.
    block = block_of(form) if form in ("int4", "nvfp4") else 1
    row_lengths = [p.shape[-1] for p in part.parameters() if p.ndim > 1]
    uneven = [length for length in row_lengths if length % block]
    return f"has rows of {uneven[0]}, no whole blocks of {block}" if uneven else None


class Fake(nn.Module):
    """Mixin: a linear layer whose forward pass sees a rounded weight, and rounded inputs."""

    fake: _Rounding
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        # Cast before the rounding: inside `linear` autocast would do it afterwards.
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        weight = _round_straight_through(self.weight, self.fake.round_weight).to(x.dtype)
        if self.fake.activations is not None:
            x = _round_straight_through(x, self.fake.round_activation)
        return nn.functional.linear(x, weight, self.bias)

    def shard_by_style_(self, style: ParallelStyle, axis: Axis) -> ParallelStyle:
        """Record which side of the weight tensor parallelism shards.

        Effects:
            From here on scales that span that side are a maximum over `axis`.

        Raises:
            ConfigError: The ranks' parts of the side are not whole blocks of the format.
        """
        dim = style.shard_dims.get("weight")
        form = self.fake.weights
        if dim is None:
            return style
        local_size = self.weight.shape[dim] // axis.count
        if dim == 0:
            block = FP8_BLOCK if form == "fp8" else 1  # of the other formats rows are independent
        else:  # nf4 rounds scales in groups, and fp8_row takes a maximum over ranks
            block = {"nf4": NF4_BLOCK * NF4_GROUP, "fp8_row": 1}.get(form, block_of(form))
        if local_size % block:
            raise ConfigError(
                f"fake_quantize: tp = {axis.count} leaves {self.fake.name!r} a side of "
                f"{local_size}, and {form} has blocks of {block} there, which it would cut; lower "
                "tp, or let the pattern of modules leave it out",
                where="tp",
                got=axis.count,
            )
        if dim == 0:
            self.fake = attrs.evolve(self.fake, outputs=axis)
        else:
            self.fake = attrs.evolve(self.fake, inputs=axis)
        return style


class FakeExperts(ExpertWeights):
    """Mixin: experts whose products see rounded weights, and rounded inputs."""

    fake: _Rounding

    def product(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows `[N, D]` with the rounded weights of their experts."""
        weight = _round_straight_through(getattr(self, name), self.fake.round_weight)
        if self.fake.activations is not None:
            rows = _round_straight_through(rows, self.fake.round_activation)
        return grouped_product(rows, counts, weight)


def _round_straight_through(x: Tensor, round_: Callable[[Tensor], Tensor]) -> Tensor:
    apply: Any = _StraightThrough.apply
    if torch.compiler.is_compiling():  # it traces neither our records nor collectives
        apply = torch.compiler.disable(apply)
    return apply(x, round_)


class _StraightThrough(torch.autograd.Function):
    """The straight-through estimator: rounds in forward, and passes the gradient on unchanged."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        _: Any, x: Tensor, round_: Callable[[Tensor], Tensor]
    ) -> Tensor:
        return round_(x)

    @staticmethod
    def backward(_: Any, d_y: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return d_y, None


# ----------------------------------------------------------------------------------------- convert


def quantize_model_(
    model: nn.Module,
    weights: QuantizationFormat = "int4",
    activations: Activation | None = None,
    *,
    modules: str | None = None,
) -> nn.Module:
    """Quantize a model by torchao, in the formats that `fake_quantize` trained it for.

    Args:
        model: A whole model in one process: the fake-quantized one, or one with its exported
            weights, ours or of `transformers`.
        weights: As in `fake_quantize`: int4, with int8 or without, or fp8_row with fp8_row.
        activations: As in `fake_quantize`.
        modules: As in `fake_quantize`.

    Returns:
        The model. In fp32 it computes the same as the fake-quantized one, up to the order of sums.

    Raises:
        ConfigError: torchao has no such formats, or not on this device; a parameter is sharded; or
            see `modules`.
        ImportError: torchao is absent; it comes with the extra "lowbit".

    Effects:
        Replaces the layers' weights by torchao's quantized ones, which are not trained.

    References:
        torchao, https://github.com/pytorch/ao.

    Examples:
        >>> model = quantize_model_(nn.Sequential(nn.Linear(32, 1)), "int4")
        >>> type(model[0].weight).__name__
        'IntxUnpackedToInt8Tensor'
    """
    device = next(model.parameters()).device.type
    # torchao multiplies in float8 on GPUs only.
    known = [("int4", None), ("int4", "int8")]
    if device == "cuda":
        known.append(("fp8_row", "fp8_row"))
    if (weights, activations) not in known:
        raise ConfigError(
            f"quantize_model_: torchao quantizes weights and activations on {device} to "
            f"{', '.join(map(str, known))}, not to {(weights, activations)}",
            where="weights",
            got=(weights, activations),
            want=known,
        )
    for name, p in model.named_parameters():
        if hasattr(p, "placements"):
            raise ConfigError(
                f"quantize_model_: {name!r} is sharded; build the model in one process, from its "
                "checkpoint",
                where=name,
            )
    for part in model.modules():  # torchao quantizes plain linear layers
        for mixin in (Fake, FakeExperts):
            if isinstance(part, mixin):
                take_out_(part, mixin)
                del part.fake
    problem = partial(_find_problem, weights)
    layers, _ = choose_layers(model, modules, by="quantize_model_", problem=problem)
    # A module equals only itself, so the filter below compares identities.
    chosen = {*layers.values()}
    with quietly():
        from torchao import quantization as ao  # noqa: PLC0415 (an extra, and seconds of import)

        group = ao.PerGroup(block_of("int4"))
        int4 = getattr(torch, "int4")  # noqa: B009 (has no stub)
        if activations is None:
            config = ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=group)
        elif activations == "int8":
            config = ao.Int8DynamicActivationIntxWeightConfig(
                weight_dtype=int4, weight_granularity=group
            )
        else:
            config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
        ao.quantize_(model, config, filter_fn=lambda part, _: part in chosen)
    return model


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings, such as those of a library about kernels for other machines.

    Examples:
        >>> with quietly():
        ...     logging.getLogger("torchao").warning("Failed to load ...")
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ------------------------------------------------------------------------------------------- flags

LINEARS: Mapping[str, Callable[..., Transform] | None] = MappingProxyType(
    {
        "plain": None,
        "float8_tensorwise": partial(float8, "tensorwise"),
        "float8_rowwise": partial(float8, "rowwise"),
        "float8_rowwise_with_gw_hp": partial(float8, "rowwise_with_gw_hp"),
        "qat_int4": partial(fake_quantize, "int4"),
        "qat_int8_int4": partial(fake_quantize, "int4", "int8"),
        "qat_fp8": partial(fake_quantize, "fp8_row", "fp8_row"),
        "qat_nvfp4": partial(fake_quantize, "nvfp4"),
    }
)
"""The values of a recipe's `--linears`, and the transform of each."""


def make_linear_transforms(linears: str, modules: str | None = None) -> list[Transform]:
    """Return the transforms, one or none, of a name in `LINEARS`.

    Args:
        linears: The name.
        modules: See `float8` and `fake_quantize`.

    Raises:
        ConfigError: `modules` is given with "plain", which changes no layer.
        ValueError: There is no such name.

    Examples:
        >>> (
        ...     make_linear_transforms("plain"),
        ...     [step.kind for step in make_linear_transforms("qat_int4")],
        ... )
        ([], ['rounded'])
    """
    check_choice(tuple(LINEARS), "make_linear_transforms", linears=linears)
    make = LINEARS[linears]
    if make is not None:
        return [make(modules=modules)]
    if modules is not None:
        raise ConfigError(
            "linear_modules chooses the layers that linears changes, and linears is plain",
            where="linear_modules",
            got=modules,
        )
    return []
