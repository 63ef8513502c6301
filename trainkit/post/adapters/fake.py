"""Quantisation-aware training: forward sees what rounding will make of a model, backward does not.

A fake-quantised layer keeps its weight as it is. In forward the weight goes to a format of few bits
and back, and what enters the layer too where that is asked for; gradients pass as if neither had
been rounded. What is trained so loses little when it is quantised for good.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
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
"""What activations are rounded to, with scales for each token."""


@attrs.frozen(eq=False)
class _Fake:
    """How a layer's operands are rounded, and the axes over which its sides are cut."""

    name: str
    weights: QuantizationFormat
    activations: Activation | None
    inputs: Axis = SOLO
    outputs: Axis = SOLO

    def __deepcopy__(self, memo: Any) -> _Fake:
        return self  # it holds process groups

    def weight(self, x: Tensor) -> Tensor:
        """Return a weight as it will be; what spans the whole of it is sought on all ranks."""
        largest = None
        if self.weights in ("nvfp4", "fp8_row"):
            largest = all_max(largest_of(x, rows=self.weights == "fp8_row"), self.inputs)
        if largest is not None and self.weights == "nvfp4":
            largest = all_max(largest, self.outputs)
        return quantize_dequantize(x, self.weights, largest=largest)

    def activation(self, x: Tensor) -> Tensor:
        """Return what enters a layer as it will be; features may be cut."""
        if self.activations == "fp8_row":
            largest = all_max(largest_of(x, rows=True), self.inputs)
            return quantize_dequantize(x, "fp8_row", largest=largest)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ends = torch.stack([-wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)])
        low, high = all_max(ends.clamp_min(0), self.inputs).unbind()
        scale = ((high + low) / 255).clamp_min(torch.finfo(torch.float32).tiny)
        zero = (-128 + (low / scale).round()).clamp(-128, 127)
        codes = ((wide * (1 / scale)).round() + zero).clamp(-128, 127)
        return ((codes - zero) * scale).to(x.dtype)


def fake_quantize(
    weights: QuantizationFormat = "int4",
    activations: Activation | None = None,
    *,
    modules: str | None = None,
) -> Transform:
    r"""Return the transform that lets layers compute with rounded weights, and train plain ones.

    It stands before adapters and `tensor`, in the place of `float8`. Names, values and dtypes of
    parameters stay what they are, so a checkpoint or an exported folder holds plain weights, which
    have been trained for being quantised: by `quantize_model_`, or by whatever serves them. Blocks
        and
    scales are those of the whole matrix in every layout.

    | weights, activations | what serves it |
    |---|---|
    | "int4", "int8" | torchao's Int8DynamicActivationIntxWeightConfig, on phones and CPUs |
    | "int4", None | torchao's IntxWeightOnlyConfig |
    | "fp8_row", "fp8_row" | torchao's Float8DynamicActivationFloat8WeightConfig, on GPUs |
    | any format, None | see `quantize`; "fp8" has blocks of 128 x 128, "nvfp4" of 16 |

    Args:
        weights: The format of weights.
        activations: "int8" rounds each token to 256 steps between its least and largest feature,
            "fp8_row" to e4m3; None leaves activations alone.
        modules: A regular expression of names in the whole model: linear layers, and experts
            ("layers.0.mlp.experts"), all three weights of them. None takes all linear layers that
            can, but the head.

    Returns:
        A transform for `build_stages`.

    Raises:
        ConfigError: When applied: the pattern is none, matches nothing or a layer that cannot, rows
            are no whole blocks of int4 or nvfp4, or tp cuts a block.
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
        problem = partial(_problem, weights)
        layers, left_out = choose_layers(module, modules, by="fake_quantize", problem=problem)
        for name, layer in layers.items():
            mixin = FakeExperts if isinstance(layer, ExpertWeights) else Fake
            mix_in_(layer, mixin, fake=_Fake(name, weights, activations))
        how = f"fake {weights}" + (f" on {activations}" if activations else "")
        note_computation_(layers.values(), left_out, how)
        return module

    return Transform(apply, kind="rounded")


def _problem(form: QuantizationFormat, part: nn.Module) -> str | None:
    problem = None if type(part) is ExpertWeights else plain_problem(part)
    if problem:
        return problem
    block = block_of(form) if form in ("int4", "nvfp4") else 1
    uneven = [p.shape[-1] for p in part.parameters() if p.ndim > 1 and p.shape[-1] % block]
    return f"has rows of {uneven[0]}, no whole blocks of {block}" if uneven else None


class Fake(nn.Module):
    """Mixin: a linear layer whose forward pass sees a rounded weight, and rounded inputs."""

    fake: _Fake
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        weight = _straight(self.weight, self.fake.weight).to(x.dtype)
        if self.fake.activations is not None:
            x = _straight(x, self.fake.activation)
        return nn.functional.linear(x, weight, self.bias)

    def cut_(self, style: ParallelStyle, axis: Axis) -> ParallelStyle:
        """Record which side of the weight tensor parallelism shards.

        Effects:
            From here on scales that span that side are a maximum over `axis`.

        Raises:
            ConfigError: The ranks' parts of the side are not whole blocks of the format.
        """
        dim, form = style.cuts.get("weight"), self.fake.weights
        if dim is None:
            return style
        part = self.weight.shape[dim] // axis.count
        columns = {"nf4": NF4_BLOCK * NF4_GROUP, "fp8_row": 1}.get(form, block_of(form))
        block = columns if dim else (FP8_BLOCK if form == "fp8" else 1)
        if part % block:
            raise ConfigError(
                f"fake_quantize: tp = {axis.count} leaves {self.fake.name!r} a side of {part}, "
                f"and {form} has blocks of {block} there, which it would cut; lower tp, or let the "
                "pattern of modules leave it out",
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

    fake: _Fake

    def product(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows `[N, D]` with the rounded weights of their experts."""
        weight = _straight(getattr(self, name), self.fake.weight)
        if self.fake.activations is not None:
            rows = _straight(rows, self.fake.activation)
        return grouped_product(rows, counts, weight)


def _straight(x: Tensor, rounded: Any) -> Tensor:
    apply: Any = _Straight.apply
    if torch.compiler.is_compiling():  # formats are records, and ranks may talk: it traces neither
        apply = torch.compiler.disable(apply)
    return apply(x, rounded)


class _Straight(torch.autograd.Function):
    """What a function makes of a tensor, with the gradient passed on as it came."""

    @staticmethod
    def forward(_: Any, x: Tensor, rounded: Any) -> Tensor:  # pyrefly: ignore[bad-override]
        return rounded(x)

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
    """Quantise a model for good by torchao, as `fake_quantize` let it expect.

    Args:
        model: A whole one in one process: one that was fake-quantised, or that has loaded what was
            exported of it, of ours or of `transformers`.
        weights: As in `fake_quantize`; int4, with int8 or without, or fp8_row with fp8_row.
        activations: As above.
        modules: As above.

    Returns:
        The model. In fp32 it computes what the fake-quantised one does, but for the order of sums.

    Raises:
        ConfigError: torchao has no such formats, or not on this device; a parameter is sharded; or
            see `modules`.
        ImportError: torchao is absent; it comes with the extra "lowbit".

    Effects:
        Replaces the layers' weights by torchao's quantised ones, which are not trained.

    References:
        torchao, https://github.com/pytorch/ao.

    Examples:
        >>> model = quantize_model_(nn.Sequential(nn.Linear(32, 1)), "int4")
        >>> type(model[0].weight).__name__
        'IntxUnpackedToInt8Tensor'
    """
    device = next(model.parameters()).device.type
    known = [("int4", None), ("int4", "int8"), *([("fp8_row",) * 2] if device == "cuda" else [])]
    if (weights, activations) not in known:
        raise ConfigError(
            f"quantize_model_: torchao quantises weights and activations on {device} to "
            f"{', '.join(map(str, known))}, not to {(weights, activations)}",
            where="weights",
            got=(weights, activations),
            want=known,
        )
    for name, p in model.named_parameters():
        if hasattr(p, "placements"):
            what = f"{name!r} is sharded; build the model in one process, from its checkpoint"
            raise ConfigError(f"quantize_model_: {what}", where=name)
    for part in model.modules():
        for mixin in (Fake, FakeExperts):
            if isinstance(part, mixin):
                take_out_(part, mixin)
                del part.fake
    layers, _ = choose_layers(
        model, modules, by="quantize_model_", problem=partial(_problem, weights)
    )
    chosen = {*layers.values()}
    with quietly():
        from torchao import quantization as ao  # noqa: PLC0415 (an extra, and seconds of import)

        group = ao.PerGroup(block_of("int4"))
        how: dict[str, Any] = {"weight_dtype": getattr(torch, "int4")}  # noqa: B009 (has no stub)
        if activations is None:
            made = ao.IntxWeightOnlyConfig(**how, granularity=group)
        elif activations == "int8":
            made = ao.Int8DynamicActivationIntxWeightConfig(**how, weight_granularity=group)
        else:
            made = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
        ao.quantize_(model, made, filter_fn=lambda part, _: part in chosen)
    return model


@contextmanager
def quietly() -> Iterator[None]:
    """Keep to itself what a library says of kernels for other machines while it is loaded.

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

LINEARS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "plain": (),
        "float8_tensorwise": (float8, "tensorwise"),
        "float8_rowwise": (float8, "rowwise"),
        "float8_rowwise_with_gw_hp": (float8, "rowwise_with_gw_hp"),
        "qat_int4": (fake_quantize, "int4"),
        "qat_int8_int4": (fake_quantize, "int4", "int8"),
        "qat_fp8": (fake_quantize, "fp8_row", "fp8_row"),
        "qat_nvfp4": (fake_quantize, "nvfp4"),
    }
)
"""What a recipe calls the ways in which linear layers can compute, and the transform of each."""


def make_linear_transforms(linears: str, modules: str | None = None) -> list[Transform]:
    """Return the transforms, one or none, that a name in `LINEARS` stands for.

    Args:
        linears: The name.
        modules: See `float8` and `fake_quantize`.

    Raises:
        ConfigError: Modules are named for "plain", which leaves all alone.
        ValueError: There is no such name.

    Examples:
        >>> (
        ...     make_linear_transforms("plain"),
        ...     [step.kind for step in make_linear_transforms("qat_int4")],
        ... )
        ([], ['rounded'])
    """
    check_choice(tuple(LINEARS), "make_linear_transforms", linears=linears)
    if not LINEARS[linears]:
        if modules is not None:
            what = "linear_modules says which layers compute otherwise, and linears is plain"
            raise ConfigError(what, where="linear_modules", got=modules)
        return []
    make, *how = LINEARS[linears]
    return [make(*how, modules=modules)]
