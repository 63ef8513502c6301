"""Quantize matrices: NF4 with double quantization, NVFP4, int4, int8, and fp8 in blocks or rows.

Blocks are blocks of the full matrix: along a row from column 0 on, and in fp8 along the rows too,
from row 0 on. So the code of an element depends on its index in the full matrix alone, and a shard
that starts at a block's start has the codes of the full matrix. nvfp4 and fp8_row also need the
largest magnitude of the full matrix, or of full rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import ceil
from types import MappingProxyType
from typing import Literal, get_args

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.types import NumericsError, check_choice
from trainkit.weights.hub.quantized import E2M1

QuantizationFormat = Literal["nf4", "int8", "fp8", "int4", "nvfp4", "fp8_row"]
"""The names of the formats."""

STORABLE: tuple[QuantizationFormat, ...] = ("nf4", "int8", "fp8", "int4", "nvfp4")
"""The formats that a model can store: the bytes of a row do not depend on other rows, or in fp8 on
other blocks of rows. So nvfp4 then has a level for each row."""

# The number of consecutive elements of a row that share a scale; in fp8 of 128 rows at a time.
NF4_BLOCK = 64
INT8_BLOCK = 128
FP8_BLOCK = 128
INT4_BLOCK = 32
NVFP4_BLOCK = 16

NF4_GROUP = 256
"""The number of consecutive scales of a row in nf4 that share two levels."""

FP8_LARGEST = 448.0
E2M1_LARGEST = 6.0
"""The largest values of e4m3 and e2m1."""

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the sixteen codes of NF4, as fractions of their block's largest magnitude."""

# In the order of the codes: nvfp4 has a sign bit, int4 is a two's complement.
_VALUES: Mapping[QuantizationFormat, tuple[float, ...]] = MappingProxyType(
    {
        "nf4": NF4_VALUES,
        "nvfp4": (*E2M1, *(-x for x in E2M1)),
        "int4": (*map(float, range(8)), *map(float, range(-8, 0))),
    }
)

HALF_STEPS: Mapping[QuantizationFormat, float] = MappingProxyType(
    {
        "nf4": min(b - a for a, b in pairwise(NF4_VALUES)) / 2,
        "int8": 0.5,
        "fp8": 0.125,
        "int4": 0.5,
        "nvfp4": 0.5,
    }
)
"""About half the distance between codes, in scales: the rounding error. For nf4 where codes are
closest, for fp8 and nvfp4 at values of 2 to 4 scales."""

# Both values of each byte: a lookup per byte is faster than unpacking its halves first.
_PAIRS = {
    form: np.array([(values[i >> 4], values[i & 15]) for i in range(256)], np.float32)
    for form, values in _VALUES.items()
}
_TINY = torch.finfo(torch.float32).tiny  # divisor in place of 0, the scale of a block of zeros


@attrs.frozen(eq=False)
class QuantizedMatrix:
    """A quantized matrix `[..., R, C]`.

    Attributes:
        form: The format.
        codes: For nf4, nvfp4 and int4 uint8 `[..., R, ceil(C / 2)]`, two codes in a byte, the first
            in the upper half; for the others int8 or e4m3 `[..., R, C]`.
        scales: For each of the N = ceil(C / block) blocks of a row: uint8 `[..., R, N]` for nf4,
            e4m3 for nvfp4, fp32 for int4 and int8; fp32 `[..., ceil(R / 128), N]` for fp8, and
            `[..., R, 1]` for fp8_row.
        levels: For nf4 the least scale and the step between scales in each of the G = ceil(N / 256)
            groups of blocks in a row, fp32 `[..., R, G, 2]`; for nvfp4 the factor of all scales,
            fp32 `[..., 1, 1]`, or of those of a row, `[..., R, 1]`.
        shape: The shape of the matrix.
        dtype: The dtype of the matrix, to which `dequantize` converts by default.
    """

    form: QuantizationFormat
    codes: Tensor
    scales: Tensor
    levels: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors."""
        return sum(x.nbytes for x in (self.codes, self.scales, self.levels) if x is not None)


def quantize(
    weight: Tensor, form: QuantizationFormat, *, largest: Tensor | None = None
) -> QuantizedMatrix:
    """Quantize a matrix to a format; 0 stays 0.

    | form | bits per element | elements that share a scale: the scale; codes |
    |---|---|---|
    | nf4 | 4.13 | 64 of a row: their largest magnitude; sixteen numbers, for normal weights |
    | int8 | 8.25 | 128 of a row: 1/127 of their largest magnitude; whole numbers |
    | fp8 | 8 | 128 x 128, as in DeepSeek-V3 (`weight_scale_inv`): 1/448 of theirs; e4m3 |
    | int4 | 5 (4.5 with scales in bf16) | 32 of a row: 1/7.5 of theirs; -8 to 7, as torchao's |
    | nvfp4 | 4.5 | 16 of a row: 1/6 of theirs, in e4m3 after division by 1/2,688 of the matrix's |
    | fp8_row | 8 | a row: 1/448 of its largest magnitude; e4m3 |

    The scales of nf4 are in turn rounded to 256 levels between the least and the largest of each
    256 consecutive ones in a row. nvfp4 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
    negatives, which GPUs from Blackwell on multiply.

    Besides fp32's rounding, the error of a dequantized element is at most: in nf4 0.152 times its
    block's largest magnitude plus 1/510 of the range of the scales in its group; in int8 1/254 and
    in int4 1/15 of its block's largest; in fp8 and fp8_row 1/16 of its own magnitude, or 1/28,672
    of the largest that shares its scale if that is more; in nvfp4 17/96 of its block's largest plus
    1/458,752 of the matrix's.

    Args:
        weight: `[..., R, C]`, converted to fp32.
        form: The format.
        largest: For a shard in nvfp4 the largest magnitude of the full matrix, `[..., 1, 1]`
            (larger values are clamped), or those of rows, `[..., R, 1]`, for a factor of the scales
            of each row; in fp8_row that of the elements that share a scale,
            `[..., R, 1]` or `[..., 1, 1]`. By default those of `weight`.

    Raises:
        NumericsError: A value is not finite.
        ValueError: `weight` is no floating-point matrix, or the format is unknown.

    References:
        nf4: Dettmers et al., "QLoRA" (2023), where groups of scales run across rows, and the mean
        of all scales is subtracted first. int8: Dettmers et al., "8-bit optimizers via block-wise
        quantization" (2022). fp8: DeepSeek-AI, "DeepSeek-V3 technical report" (2024). nvfp4:
        NVIDIA, "Pretraining large language models with NVFP4" (2025).

    Examples:
        >>> quantize(torch.ones(2, 128), "int8").nbytes
        264
        >>> quantize(torch.tensor([[0.0, 0.5, -1.0, 2.0]]), "int8").codes
        tensor([[  0,  32, -64, 127]], dtype=torch.int8)
        >>> dequantize(quantize(torch.tensor([[0.0, 0.5, -1.0, 2.0]]), "nf4"))
        tensor([[ 0.0000,  0.4922, -1.0501,  2.0000]])
        >>> dequantize(quantize(torch.tensor([[0.0, 0.7, -1.3, 6.0]]), "nvfp4")).tolist()
        [[0.0, 0.5, -1.5, 6.0]]
        >>> dequantize(quantize(torch.tensor([[0.0, 0.3, -1.0, 448.0]]), "fp8")).tolist()
        [[0.0, 0.3125, -1.0, 448.0]]
        >>> dequantize(quantize(torch.tensor([[0.0, 1.2, -7.5, 7.5]]), "int4")).tolist()
        [[0.0, 1.0, -8.0, 7.0]]
        >>> dequantize(quantize(torch.tensor([[0.0, 0.3, 448.0], [0, 0, 0]]), "fp8_row"))[0, 1]
        tensor(0.3125)
    """
    check_choice(
        get_args(QuantizationFormat) if largest is None else ("nvfp4", "fp8_row"),
        "quantize",
        form=form,
    )
    if weight.ndim < 2 or not weight.is_floating_point():
        raise ValueError(
            f"quantize: it takes a matrix of floating point, or several, got {weight.dtype} of "
            f"shape {tuple(weight.shape)}"
        )
    x = weight.detach().float()
    if not bool(x.isfinite().all()):
        count = int((~x.isfinite()).sum())
        raise NumericsError(
            f"quantize: {count:,} value{'s are' if count > 1 else ' is'} not finite, and would "
            "take whole blocks along; a block's scale is its largest magnitude"
        )
    return _quantize(x, form, largest, weight.dtype)


def quantize_dequantize(
    x: Tensor, form: QuantizationFormat, *, largest: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize a matrix, without checking that it is finite.

    A non-finite value makes its scale non-finite, and with it all values that share the scale.

    Args:
        x: `[..., R, C]`.
        form: The format.
        largest: As in `quantize`.

    Examples:
        >>> quantize_dequantize(torch.tensor([[0.0, 1.2, -7.5, 7.5]]), "int4")
        tensor([[ 0.,  1., -8.,  7.]])
    """
    return dequantize(_quantize(x.detach().float(), form, largest, x.dtype))


def dequantize(quantized: QuantizedMatrix, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantize a matrix: codes times scales, rounded once to fp32, then to `dtype`.

    Args:
        quantized: The quantized matrix.
        dtype: By default the dtype of the original matrix.

    Examples:
        >>> dequantize(quantize(torch.ones(1, 3, dtype=torch.bfloat16), "int8"))
        tensor([[1., 1., 1.]], dtype=torch.bfloat16)
    """
    scales = quantized.scales
    if quantized.form == "nf4" and quantized.levels is not None:
        scales = scales_of(scales, quantized.levels)
    if quantized.form == "nvfp4" and quantized.levels is not None:
        scales = scales.float() * quantized.levels
    if quantized.form == "fp8":
        scales = scales.repeat_interleave(FP8_BLOCK, -2)[..., : quantized.shape[-2], :]
    if quantized.form == "fp8_row":
        return (quantized.codes.float() * scales).to(dtype or quantized.dtype)
    values = times_scales(quantized.codes, scales, quantized.form, columns=quantized.shape[-1])
    return values.to(dtype or quantized.dtype)


# --------------------------------------------------------------------------------------- the parts


def block_of(form: QuantizationFormat) -> int:
    """Return the number of elements of a row that share a scale.

    Examples:
        >>> block_of("nf4")
        64
    """
    blocks = {"nf4": NF4_BLOCK, "int4": INT4_BLOCK, "nvfp4": NVFP4_BLOCK}
    return blocks.get(form, FP8_BLOCK)


def times_scales(
    codes: Tensor,
    scales: Tensor,
    form: QuantizationFormat,
    *,
    columns: int,
    first: int = 0,
    noise: Tensor | None = None,
) -> Tensor:
    """Multiply the values of codes by their scales, in fp32, for some columns of a matrix.

    Args:
        codes: The codes of the columns, `[..., R, columns]`; for nf4 half as many bytes.
        scales: fp32 `[..., R, N]`, of all blocks of each row.
        form: The format.
        columns: The number of columns.
        first: The index of the first column in the matrix.
        noise: fp32 `[..., R, columns]`, added to the values before scales multiply them.

    Examples:
        >>> codes = torch.tensor([[2, 3]], dtype=torch.int8)
        >>> times_scales(codes, torch.tensor([[1.0, 10.0]]), "int8", columns=2, first=127)
        tensor([[ 2., 30.]])
    """
    block = block_of(form)
    if form in _PAIRS:
        pairs = torch.from_numpy(_PAIRS[form]).to(codes.device)
        values = nn.functional.embedding(codes.int(), pairs).flatten(-2)[..., :columns]
    else:
        values = codes.float()
    if noise is not None:
        values += noise
    if first % block or columns % block or not columns:
        return values * scales.repeat_interleave(block, -1)[..., first : first + columns]
    # Whole blocks: the product broadcasts over each block, without a scale per element in memory.
    block_scales = scales[..., first // block : (first + columns) // block]
    blocks = values.unflatten(-1, (-1, block))
    return blocks.mul_(block_scales.unsqueeze(-1)).flatten(-2)


def scales_of(rounded: Tensor, levels: Tensor) -> Tensor:
    """Dequantize the scales of nf4 to fp32 `[..., R, N]`, from their codes and levels.

    Examples:
        >>> scales_of(torch.tensor([[0, 2]], dtype=torch.uint8), torch.tensor([[[1.0, 0.5]]]))
        tensor([[1., 2.]])
    """
    per_scale = levels.repeat_interleave(NF4_GROUP, -2)[..., : rounded.shape[-1], :]
    least, step = per_scale.unbind(-1)
    return least + rounded * step


_Parts = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, levels


def _quantize_nf4(x: Tensor) -> _Parts:
    blocks, scales = _split_into_blocks(x, NF4_BLOCK)
    values = torch.tensor(NF4_VALUES, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    indices = torch.bucketize(_divide_by_scales(blocks, scales), middles, out_int32=True)
    # Double quantization. The last scale fills up the last group: that changes no level.
    count = scales.shape[-1]
    padding = scales[..., -1:].expand(*scales.shape[:-1], -count % NF4_GROUP)
    groups = torch.cat([scales, padding], -1).unflatten(-1, (-1, NF4_GROUP))
    least, largest = groups.aminmax(dim=-1)
    step = (largest - least) / 255
    levels = torch.stack([least, step], -1)
    rounded = _divide_by_scales(groups - least.unsqueeze(-1), step).round_().clamp_(0, 255)
    rounded = rounded.to(torch.uint8).flatten(-2)[..., :count].contiguous()
    return _pack_pairs(indices, x), rounded, levels


def _quantize_int8(x: Tensor) -> _Parts:
    blocks, largest = _split_into_blocks(x, INT8_BLOCK)
    scales = largest / 127
    codes = _divide_by_scales(blocks, scales).round_().clamp_(-127, 127).to(torch.int8)
    codes = codes.flatten(-2)[..., : x.shape[-1]].contiguous()
    return codes, scales, None


def _quantize_fp8(x: Tensor) -> _Parts:
    rows = x.shape[-2]
    num_missing = max(1, ceil(rows / FP8_BLOCK)) * FP8_BLOCK - rows
    # Rows of zeros complete the last blocks, and change none of their maxima.
    padded = nn.functional.pad(x, (0, 0, 0, num_missing))
    blocks, largest = _split_into_blocks(padded, FP8_BLOCK)
    scales = largest.unflatten(-2, (-1, FP8_BLOCK)).amax(-2) / FP8_LARGEST
    codes = _e4m3(_divide_by_scales(blocks, scales.repeat_interleave(FP8_BLOCK, -2)))
    codes = codes.flatten(-2)[..., :rows, : x.shape[-1]].contiguous()
    return codes, scales, None


def _quantize_nvfp4(x: Tensor, largest: Tensor | None = None) -> _Parts:
    blocks, block_largest = _split_into_blocks(x, NVFP4_BLOCK)
    largest = largest_of(x, rows=False) if largest is None else largest.float()
    # The block with the largest element gets the scale 448, the largest that e4m3 has.
    level = largest / (E2M1_LARGEST * FP8_LARGEST)
    scales = _e4m3(block_largest / E2M1_LARGEST / level.clamp_min(_TINY))
    scaled = _divide_by_scales(blocks, scales.float() * level)
    size = scaled.abs().clamp_max(E2M1_LARGEST)
    # e2m1 has a mantissa of one bit: steps of 0.5 below 2, of 1 from 2 to 4, of 2 from 4 to 6.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # torch rounds halves to even, and so to the even code, as the hardware does.
    size = (size / step).round() * step
    indices = torch.bucketize(size, torch.tensor(E2M1, device=x.device), out_int32=True)
    indices |= scaled.signbit().int() << 3  # the upper of four bits
    return _pack_pairs(indices, x), scales, level


def _quantize_int4(x: Tensor) -> _Parts:
    blocks, largest = _split_into_blocks(x, INT4_BLOCK)
    scales = largest / 7.5  # between 7 and 8: codes go from -8 to 7
    # Multiplying by the reciprocal, not dividing, gives the same bits as torchao.
    scaled = blocks * (1 / scales.clamp_min(_TINY)).unsqueeze(-1)
    codes = scaled.round_().clamp_(-8, 7).to(torch.int32) & 15  # two's complement
    return _pack_pairs(codes, x), scales, None


def _quantize_fp8_row(x: Tensor, largest: Tensor | None = None) -> _Parts:
    largest = largest_of(x, rows=True) if largest is None else largest.float()
    scales = largest / FP8_LARGEST
    codes = _e4m3(x / scales.clamp_min(_TINY))
    return codes, scales, None


_QUANTIZERS: dict[QuantizationFormat, Callable[..., _Parts]] = {
    "nf4": _quantize_nf4,
    "int8": _quantize_int8,
    "fp8": _quantize_fp8,
    "int4": _quantize_int4,
    "nvfp4": _quantize_nvfp4,
    "fp8_row": _quantize_fp8_row,
}


def _quantize(
    x: Tensor, form: QuantizationFormat, largest: Tensor | None, dtype: torch.dtype
) -> QuantizedMatrix:
    """Quantize a matrix in fp32, which is finite."""
    quantizer = _QUANTIZERS[form]
    codes, scales, levels = quantizer(x) if largest is None else quantizer(x, largest)
    return QuantizedMatrix(form, codes, scales, levels, shape=tuple(x.shape), dtype=dtype)


def largest_of(x: Tensor, *, rows: bool) -> Tensor:
    """Return the largest magnitude of each row, `[..., R, 1]`, or of each matrix, `[..., 1, 1]`.

    Examples:
        >>> largest_of(torch.tensor([[1.0, -2.0], [0.0, 0.5]]), rows=True).flatten()
        tensor([2.0000, 0.5000])
    """
    dims = (-1,) if rows else (-2, -1)
    if not x.numel():  # amax() raises over no elements
        return x.sum(dims, keepdim=True)
    return x.abs().amax(dims, keepdim=True)


def _e4m3(x: Tensor) -> Tensor:
    # e4m3fn has no infinity, and not every version of torch saturates in the cast.
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def _pack_pairs(codes: Tensor, like: Tensor) -> Tensor:
    """Pack adjacent 4-bit codes, in blocks `[..., R, N, size]`, into bytes."""
    # The padding of the last block goes, but for one code where the number of columns is odd.
    num_codes = 2 * ceil(like.shape[-1] / 2)
    pairs = codes.to(torch.uint8).flatten(-2)[..., :num_codes]
    upper, lower = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return upper << 4 | lower


def _split_into_blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Split a matrix into blocks along its rows, `[..., R, N, size]`; also return their maxima.

    The last block is padded with zeros; even a matrix without columns has one block.
    """
    columns = x.shape[-1]
    num_missing = max(1, ceil(columns / size)) * size - columns
    blocks = nn.functional.pad(x, (0, num_missing)).unflatten(-1, (-1, size))
    return blocks, blocks.abs().amax(-1)


def _divide_by_scales(blocks: Tensor, scales: Tensor) -> Tensor:
    """Divide blocks by their scales; blocks of zeros stay zeros."""
    return blocks / scales.clamp_min(_TINY).unsqueeze(-1)


def codes_per_byte(form: QuantizationFormat) -> int:
    """Return the number of elements in a byte of codes.

    Examples:
        >>> codes_per_byte("nf4"), codes_per_byte("fp8")
        (2, 1)
    """
    return 2 if form in _PAIRS else 1


def scale_bytes(form: QuantizationFormat, columns: int) -> int:
    """Return the number of bytes of the scales of a row.

    Examples:
        >>> scale_bytes("nf4", 4096), scale_bytes("fp8", 4096)
        (72, 128)
    """
    count = max(1, ceil(columns / block_of(form)))
    if form == "nf4":  # a byte per scale, and two levels in fp32 per group
        return count + 8 * ceil(count / NF4_GROUP)
    if form == "nvfp4":  # a byte per scale, and the row's level in fp32
        return count + 4
    return 4 * count
