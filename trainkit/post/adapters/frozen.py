"""Store frozen matrices quantized, and dequantize them in the forward and backward pass.

A quantized module keeps its name and those of its parameters. A parameter stores codes, a row of
bytes for each row of the matrix, and a second one the bytes of the scales of each row. Rows are
independent, so everything that shards rows (FSDP, tensor parallelism along outputs, experts) shards
bytes. Where columns are sharded, every rank has all scales of its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.models.experts import ExpertWeights, grouped_product
from trainkit.models.mixins import mix_in_
from trainkit.noise import normal_by_quantile
from trainkit.parallel.materialize import Fill, narrow_to_box
from trainkit.parallel.name_patterns import match_names
from trainkit.parallel.parameters import canonical_name
from trainkit.parallel.styles import ParallelStyle
from trainkit.parallel.transforms import Transform
from trainkit.post.adapters.formats import (
    FP8_BLOCK,
    HALF_STEPS,
    NF4_GROUP,
    STORABLE,
    QuantizationFormat,
    QuantizedMatrix,
    block_of,
    codes_per_byte,
    largest_of,
    quantize,
    scale_bytes,
    scales_of,
    times_scales,
)
from trainkit.types import Axis, ConfigError, NumericsError, ParallelState, Weights, check_choice

SCALES = "_scales"
"""The suffix of a parameter with scales, after the name of its codes."""

Multiply = Callable[[Tensor, Tensor], Tensor]
"""A product x W^T, as `nn.functional.linear`."""

_MAX_ELEMENTS = 1 << 18  # that are read and quantized at a time, and so exist in fp32


@attrs.frozen
class QuantizationSpec:
    """The quantization of a matrix `[..., R, C]`.

    Attributes:
        form: The format.
        shape: The shape of the whole matrix.
        dtype: The dtype in which the model was made.
        first: The first column of this rank's codes: not 0 where columns are sharded.
    """

    form: QuantizationFormat
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int = 0


@attrs.frozen(eq=False)
class Noise:
    """Noise on a dequantized matrix, within `add_quantization_noise`.

    Attributes:
        key: The random key, int64, 0-d, on the device of the codes.
        scale: The standard deviation in `HALF_STEPS`, fp32, 0-d.
        offset: The first row of this rank's shard, an index for each dimension but the last.
    """

    key: Tensor
    scale: Tensor
    offset: tuple[int, ...]


def quantized(form: QuantizationFormat = "nf4", *, modules: str = "layers.*.*.*") -> Transform:
    r"""Return the transform that quantizes and freezes matrices; it comes first in a plan.

    Linear layers, and the weights of experts, whose names match are quantized while they are
    filled, some rows at a time, from the `weights` of `build_stages`: no rank ever has a whole
    matrix in fp32. Blocks are those of the whole matrix, and the bytes of a row do not depend on
    the rank, so every layout has the same bits. Other parameters are not frozen here. In the names
    of a checkpoint `weight` is then the codes, and `weight_scales` the scales.

    A matrix is dequantized to the dtype of its input in forward, and once more in backward.

    Args:
        form: "nf4", "int8", "fp8", "int4" or "nvfp4", the last with a level for each row in place
            of one for the matrix; see `quantize`.
        modules: A pattern of names in the whole model (`parallel.name_patterns`), of linear layers
            ("layers.0.attention.wq") and of experts, all weights of them
            ("layers.0.mlp.experts").

    Returns:
        A transform for `build_stages`, or for a model that has its weights.

    Raises:
        ConfigError: The format is unknown; when applied: the pattern is invalid or matches nothing,
            parameters are sharded already, or torch cannot shard bytes.
        NumericsError: While it is filled: a value is not finite.

    References:
        Dettmers et al., "QLoRA" (2023).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.ModuleDict({"up": nn.Linear(64, 4), "norm": nn.RMSNorm(4)})
        >>> _ = quantized("nf4", modules="up")(model, solo_parallel())
        >>> {name: (p.dtype, tuple(p.shape)) for name, p in model.up.named_parameters()}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'weight': (torch.uint8, (4, 32)), 'bias': (torch.float32, (4,)),
         'weight_scales': (torch.uint8, (4, 9))}
    """
    check_choice(STORABLE, "quantized", form=form)

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if ps.fsdp.count * ps.dp_replicate.count > 1 and not can_shard_bytes():
            raise ConfigError(
                f"quantized: FSDP of torch {torch.__version__} cannot shard bytes; take torch "
                "2.12 or later, or a layout without dp_shard and dp_replicate",
                where="dp_shard",
                got=torch.__version__,
            )
        parts = {
            canonical_name(path): part
            for path, part in module.named_modules()
            # A subclass with another forward pass may read its weight directly, and find bytes.
            if (isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward)
            or type(part) is ExpertWeights
        }
        names = match_names(modules, parts, function="quantized", kind="linear layer or experts")
        for name in names:
            _quantize_module_(name, parts[name], form)
        return module

    return Transform(apply, kind="quantized")


def can_shard_bytes() -> bool:
    """Return whether FSDP of this torch can shard parameters of bytes: from 2.12 on.

    FSDP of 2.11 expects gradients of all that it shards, and casts bytes to the compute dtype.

    Examples:
        >>> can_shard_bytes() == (torch.__version__ >= "2.12")
        True
    """
    return torch.__version__ >= "2.12"


def dequantize_parameter(
    module: Any,
    name: str = "weight",
    dtype: torch.dtype | None = None,
    *,
    rows: slice = slice(None),
) -> Tensor:
    """Return a module's matrix, or this rank's shard of it, dequantized if it is quantized.

    Within `add_quantization_noise` the values include the noise, as in the module's forward pass.

    Args:
        module: A module; if its parameters are sharded, within its forward pass.
        name: The parameter.
        dtype: By default the dtype that the model was created in.
        rows: The rows to return.

    Examples:
        >>> dequantize_parameter(nn.Linear(2, 3)).shape
        torch.Size([3, 2])
    """
    spec = get_quantization(module, name)
    if spec is None:
        weight = getattr(module, name)[..., rows, :]
        return weight if dtype is None else weight.to(dtype)
    # What tp or ep shards is a DTensor; FSDP has gathered its shards by now.
    codes, scales = (
        x.to_local() if hasattr(x, "to_local") else x
        for x in (getattr(module, name), getattr(module, name + SCALES))
    )
    noise = noise_of(module, name)
    if noise is not None:
        # The noise of an element is a function of its index in the full matrix.
        *lead, start = noise.offset
        noise = attrs.evolve(noise, offset=(*lead, start + (rows.start or 0)))
    return dequantize_rows(
        codes[..., rows, :], scales[..., rows, :], spec, dtype or spec.dtype, noise
    )


def get_quantizations(module: nn.Module) -> dict[str, QuantizationSpec]:
    """Return the quantization of each quantized matrix, by its name in the whole model.

    Examples:
        >>> get_quantizations(nn.Linear(1, 1))
        {}
    """
    return {
        canonical_name(f"{path}.{key}" if path else key): spec
        for path, part in module.named_modules()
        for key, spec in vars(part).get("quantizations", {}).items()
    }


def round_weights(weights: Weights, quantizations: Mapping[str, QuantizationSpec]) -> Weights:
    """Return weights with quantized matrices rounded, in fp32.

    A plain model with these weights computes the same as a quantized model with `weights`.

    Args:
        weights: The weights.
        quantizations: The matrices by name, from `get_quantizations`.

    Examples:
        >>> from trainkit.post.adapters.formats import dequantize
        >>> random = torch.rand(1, 3)
        >>> read = lambda name, shape, offset: random
        >>> rounded = round_weights(read, {"w": QuantizationSpec("int8", (1, 3), torch.float32)})
        >>> torch.equal(rounded("w", (1, 3), (0, 0)), dequantize(quantize(random, "int8")))
        True
    """

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in quantizations:
            return weights(name, shape, offset)
        spec = attrs.evolve(quantizations[name], first=0)
        # Whole rows are quantized, whatever columns are wanted: scales span blocks of columns.
        box = tuple(shape[:-1]), tuple(offset[:-1])
        codes, scales = _read_rows(weights, name, spec, box)
        values = dequantize_rows(codes, scales, spec, torch.float32)
        return values[..., offset[-1] : offset[-1] + shape[-1]]

    return read


def get_quantization(module: nn.Module, name: str = "weight") -> QuantizationSpec | None:
    """Return the quantization of a module's matrix, None where it is not quantized.

    Examples:
        >>> get_quantization(nn.Linear(1, 1))
    """
    return vars(module).get("quantizations", {}).get(name)


def noise_of(module: nn.Module, name: str) -> Noise | None:
    """Return the noise on a module's matrix, None outside of `add_quantization_noise`.

    Examples:
        >>> noise_of(nn.Linear(1, 1), "weight")
    """
    return vars(module).get("noises", {}).get(name)


# ----------------------------------------------------------------------------------------- modules


def _quantize_module_(name: str, module: Any, form: QuantizationFormat) -> None:
    """Replace a module's matrices by codes and scales, on the meta device until they are filled."""
    is_linear = isinstance(module, nn.Linear)
    quantizations = dict[str, QuantizationSpec]()
    fills = dict[str, Fill]()
    fill = _FillRows(quantizations)  # one for codes and scales, so that it computes them together
    for key in ("weight",) if is_linear else module.weight_names:
        weight = getattr(module, key)
        if hasattr(weight, "placements"):
            raise ConfigError(
                f"quantized: {name!r} is sharded already; quantized() comes first in a plan",
                where=name,
            )
        spec = QuantizationSpec(form, tuple(weight.shape), weight.dtype)
        quantizations[key] = spec
        fills |= {key: fill, key + SCALES: fill}
        # `materialize_` fills these later, from the `weights` of `build_stages`.
        if weight.is_meta:
            codes, scales = _allocate_rows(spec, weight.shape[:-1], device="meta")
        else:
            # A model that has its values already, as `quantized(...)(model, ...)` gets.
            codes, scales = _read_rows(
                weights_of_tensor(weight.detach()), f"{name}.{key}", spec, None
            )
        for parameter_name, stored in ((key, codes), (key + SCALES, scales)):
            parameter = nn.Parameter(stored.to(weight.device), requires_grad=False)
            setattr(module, parameter_name, parameter)
    mix_in_(
        module,
        Quantized if is_linear else QuantizedExperts,
        quantizations=quantizations,
        fills=fills,
    )


def weights_of_tensor(full: Tensor) -> Weights:
    """Return a `Weights` that reads one tensor, under any name.

    Examples:
        >>> weights_of_tensor(torch.arange(4))("any", (2,), (1,))
        tensor([1, 2])
    """
    return lambda _, shape, offset: narrow_to_box(full, shape, offset)


class _QuantizedModule(nn.Module):
    quantizations: dict[str, QuantizationSpec]
    fills: dict[str, Fill]

    def shard_by_style_(self, style: ParallelStyle, axis: Axis) -> ParallelStyle:
        """Return the style with scales sharded where it shards the rows of a matrix.

        Effects:
            Where columns are sharded, records which of them this rank has: `axis` is not used
            for communication.
        """
        for key, spec in self.quantizations.items():
            if style.shard_dims.get(key) == 0:
                style = _with_scales(style, key)
            elif key in style.shard_dims:
                # Scales stay whole: a shard of columns need not start at a block's start.
                num_columns = spec.shape[-1] // axis.count
                self.quantizations[key] = attrs.evolve(spec, first=axis.index * num_columns)
        return style


class Quantized(_QuantizedModule):
    """Mixin: a linear layer whose frozen weight is quantized."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        # Before the product, so that the weight is dequantized to the dtype of the product.
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        y = _multiply(self, "weight", x, nn.functional.linear)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class QuantizedExperts(_QuantizedModule):
    """Mixin: experts whose frozen weights are quantized."""

    def product(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows `[N, D]` with the dequantized weights of their experts."""
        return _multiply(self, name, rows, _Grouped(counts))


def _multiply(module: Any, name: str, x: Tensor, multiply: Multiply) -> Tensor:
    return _TimesFrozen.apply(
        x,
        getattr(module, name),
        getattr(module, name + SCALES),
        (module.quantizations[name], multiply, noise_of(module, name)),
    )


@cache  # all layers of a style share one object
def _with_scales(style: ParallelStyle, key: str) -> ParallelStyle:
    return attrs.evolve(style, shard_dims={**style.shard_dims, key + SCALES: 0})


class _Grouped:
    """The product of rows with the matrices of their experts."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_product(rows, self.counts, weight)


class _TimesFrozen(torch.autograd.Function):
    """A product with a matrix that is dequantized in forward, and again in backward."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        product: tuple[QuantizationSpec, Multiply, Noise | None],
    ) -> Tensor:
        spec, multiply, noise = product
        # Neither the dequantized weight nor x: the weight is frozen, so d_x needs only the codes.
        ctx.save_for_backward(codes, scales)
        ctx.spec = spec
        ctx.multiply = multiply
        ctx.noise = noise
        return multiply(x, dequantize_rows(codes, scales, spec, x.dtype, noise))

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        codes, scales = ctx.saved_tensors
        weight = dequantize_rows(codes, scales, ctx.spec, d_y.dtype, ctx.noise)
        d_x = ctx.multiply(d_y.contiguous(), weight.transpose(-2, -1))
        return d_x, None, None, None


# ------------------------------------------------------------------------------------------- bytes


def _pack_rows(quantized: QuantizedMatrix, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the bytes of the codes and of the scales of some rows."""
    codes = quantized.codes[..., rows, :].view(torch.uint8)
    if quantized.levels is not None:  # nf4 and nvfp4: a row's levels stand before its scales
        levels = quantized.levels
        if quantized.form == "nf4":
            levels = levels.flatten(-2)
        both = levels.contiguous().view(torch.uint8), quantized.scales.view(torch.uint8)
        return codes, torch.cat(both, -1)[..., rows, :]
    scales = quantized.scales
    if quantized.form == "fp8":  # each row has a copy of its block's scales, to shard rows alone
        scales = scales.repeat_interleave(FP8_BLOCK, -2)[..., : quantized.shape[-2], :]
    return codes, scales[..., rows, :].contiguous().view(torch.uint8)


def dequantize_rows(
    codes: Tensor,
    scales: Tensor,
    spec: QuantizationSpec,
    dtype: torch.dtype,
    noise: Noise | None = None,
) -> Tensor:
    """Dequantize bytes of codes and scales: rows of a matrix, `[..., R, columns]`.

    Examples:
        >>> codes, scales = torch.tensor([[2]], dtype=torch.uint8), torch.ones(1, 1)
        >>> spec = QuantizationSpec("int8", (1, 1), torch.float32)
        >>> dequantize_rows(codes, scales.view(torch.uint8), spec, torch.float64)
        tensor([[2.]], dtype=torch.float64)
    """
    form = spec.form
    full_columns = spec.shape[-1]
    # Of an odd number of columns, the last byte has one code.
    columns = min(codes.shape[-1] * codes_per_byte(form), full_columns - spec.first)
    # Bytes are cloned, since a view as fp32 needs contiguous and aligned memory.
    if form == "nf4":
        groups = ceil(max(1, ceil(full_columns / block_of(form))) / NF4_GROUP)
        level_bytes = scales[..., : 8 * groups].clone(memory_format=torch.contiguous_format)
        levels = level_bytes.view(torch.float32).unflatten(-1, (-1, 2))
        fp32_scales = scales_of(scales[..., 8 * groups :], levels)
    elif form == "nvfp4":
        level = scales[..., :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        fp32_scales = scales[..., 4:].view(torch.float8_e4m3fn).float() * level
    else:
        fp32_scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
        if form != "int4":  # whose codes are pairs, as those of nf4 and nvfp4
            codes = codes.view(torch.int8 if form == "int8" else torch.float8_e4m3fn)
    code_noise = None
    if noise is not None:
        shape = (*codes.shape[:-1], columns)
        code_noise = normal_by_quantile(noise.key, shape, (*noise.offset, spec.first))
        code_noise = code_noise * (noise.scale * HALF_STEPS[form])
    return times_scales(
        codes, fp32_scales, form, columns=columns, first=spec.first, noise=code_noise
    ).to(dtype)


class _FillRows:
    """Fill boxes of a module's codes and scales: both are computed at once, and scales cached.

    Whole rows are read, and in fp8 all rows of a block, even if this rank has a part of them.
    """

    def __init__(self, quantizations: Mapping[str, QuantizationSpec]) -> None:
        self.quantizations = quantizations
        self.cached_scales: dict[Any, Tensor] = {}

    def __call__(
        self, weights: Weights, name: str, shape: Sequence[int], offset: Sequence[int]
    ) -> Tensor:
        matrix = name.removesuffix(SCALES)
        spec = self.quantizations[matrix.rpartition(".")[2]]
        rows = tuple(shape[:-1]), tuple(offset[:-1])
        # Codes are filled first. The scales of a linear layer are here by then; of experts, whose
        # codes all come before their scales, only those of the last matrix.
        if name != matrix and (matrix, *rows) in self.cached_scales:
            return self.cached_scales.pop((matrix, *rows))
        codes, scales = _read_rows(weights, matrix, spec, rows)
        if name != matrix:
            return scales
        # Of one matrix at a time: a cache of all of them would hold the scales of the model.
        self.cached_scales = {(matrix, *rows): scales}
        return codes[..., offset[-1] : offset[-1] + shape[-1]]


def _read_rows(
    weights: Weights,
    name: str,
    spec: QuantizationSpec,
    box: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> tuple[Tensor, Tensor]:
    """Return the bytes of the rows `[..., R]` in a box (shape, offset), by default of all rows."""
    *lead, height, columns = spec.shape
    full_box = ((*lead, height), (0,) * (len(lead) + 1))
    shape, offset = box or full_box
    codes, scales = _allocate_rows(spec, shape, device="cpu")
    start = offset[-1]
    end = start + shape[-1]
    # A bounded number of elements at a time, and whole blocks of fp8, which span rows.
    step = max(1, _MAX_ELEMENTS // max(columns, 1) // FP8_BLOCK) * FP8_BLOCK
    # `index` counts the experts in the box; a plain matrix has a single one, ().
    for index in itertools.product(*map(range, shape[:-1])):
        matrix = [first + i for first, i in zip(offset[:-1], index, strict=True)]
        for low in range(start // FP8_BLOCK * FP8_BLOCK, end, step):
            high = min(low + step, height)
            box_shape = (*[1] * len(matrix), high - low, columns)
            values = weights(name, box_shape, (*matrix, low, 0))
            try:
                # A level of the whole matrix would make rows depend on each other.
                largest = largest_of(values.float(), rows=True) if spec.form == "nvfp4" else None
                quantized = quantize(values, spec.form, largest=largest)
            except NumericsError as error:
                raise NumericsError(f"{name}: {error.what}", where=name) from error
            # Of a block that other ranks have a part of, only this rank's rows are stored.
            first = max(low, start)
            last = min(high, end)
            row_codes, row_scales = _pack_rows(quantized, slice(first - low, last - low))
            in_box = (*index, slice(first - start, last - start))
            codes[in_box] = row_codes.reshape(last - first, -1)
            scales[in_box] = row_scales.reshape(last - first, -1)
    return codes, scales


def _allocate_rows(
    spec: QuantizationSpec, shape: Sequence[int], *, device: str
) -> tuple[Tensor, Tensor]:
    """Return uninitialized bytes for the codes and the scales of rows `[..., R]`."""
    columns = spec.shape[-1]
    code_bytes = ceil(columns / codes_per_byte(spec.form))
    return (
        torch.empty(*shape, code_bytes, dtype=torch.uint8, device=device),
        torch.empty(*shape, scale_bytes(spec.form, columns), dtype=torch.uint8, device=device),
    )
