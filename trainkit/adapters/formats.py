"""Matrices in few bits: NF4 with doubly quantised scales, int8, and fp8 in square blocks.

Blocks are blocks of the whole matrix: along a row of its last dimension from column 0 on, and in
fp8 along rows too, from row 0 on. So what an element becomes depends on its place in the whole
matrix alone, and a part that begins where a block does is quantised as it is in the whole.
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

from trainkit.types import NumericsError, among

Format = Literal["nf4", "int8", "fp8"]
"""The names of the formats."""

NF4_BLOCK, NF4_GROUP, INT8_BLOCK, FP8_BLOCK = 64, 256, 128, 128
FP8_LARGEST = 448.0
"""The largest number of e4m3."""

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What the sixteen codes of NF4 stand for, as parts of their block's largest magnitude."""

HALF_STEPS: Mapping[Format, float] = MappingProxyType(
    {"nf4": min(b - a for a, b in pairwise(NF4_VALUES)) / 2, "int8": 0.5, "fp8": 0.125}
)
"""About half the way from one code to the next, in scales: what quantising is off by. Of nf4 where
codes are closest, of fp8 for what is 2 to 4 scales large."""

_PAIRS = np.array([(NF4_VALUES[i >> 4], NF4_VALUES[i & 15]) for i in range(256)], np.float32)
_LEAST = torch.finfo(torch.float32).tiny


@attrs.frozen(eq=False)
class Quantized:
    """A matrix `[..., R, C]` in few bits.

    Attributes:
        form: Its format.
        codes: uint8 `[..., R, ceil(C / 2)]` of nf4, two codes in a byte, the first in the upper
            half; int8 or e4m3 `[..., R, C]` of the others.
        scales: Of each block of N = ceil(C / block) in a row: uint8 `[..., R, N]` of nf4, fp32 of
            int8; fp32 `[..., ceil(R / 128), N]` of fp8.
        levels: Of nf4 only: of each G = ceil(N / 256) groups of blocks in a row the least scale,
            and the step from one scale to the next, fp32 `[..., R, G, 2]`.
        shape: That of the matrix.
        dtype: That of the matrix, and of what `dequantize` gives by default.
    """

    form: Format
    codes: Tensor
    scales: Tensor
    levels: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors."""
        return sum(x.nbytes for x in (self.codes, self.scales, self.levels) if x is not None)


def quantize_nf4(weight: Tensor) -> Quantized:
    """Quantise a matrix to 4.13 bits an element, for weights that are distributed normally.

    Each 64 elements of a row are divided by the largest magnitude among them and rounded to the
    nearest of sixteen numbers. These magnitudes, the scales, are in turn rounded to 256 levels
    between the least and the largest of each 256 that follow each other in a row. 0 stays 0.

    Args:
        weight: `[..., R, C]`, computed with in fp32.

    Returns:
        The codes; dequantised, an element is off by at most 0.152 times its block's largest
        magnitude plus 1/510 of the range of the scales in its group, and fp32's rounding.

    Raises:
        NumericsError: A value is not finite.
        ValueError: It is no matrix of floating point.

    References:
        Dettmers et al., "QLoRA" (2023); there groups of scales run across rows, and have the mean
        of all scales taken off.

    Examples:
        >>> whole = quantize_nf4(torch.tensor([[0.0, 0.5, -1.0, 2.0]]))
        >>> dequantize(whole)
        tensor([[ 0.0000,  0.4922, -1.0501,  2.0000]])
    """
    blocks, scales = _blocks(_checked(weight, "quantize_nf4"), NF4_BLOCK)
    values = torch.tensor(NF4_VALUES, device=weight.device)
    middles = (values[1:] + values[:-1]) / 2
    indices = torch.bucketize(_divided(blocks, scales), middles, out_int32=True).to(torch.uint8)
    pairs = indices.flatten(-2)[..., : 2 * ceil(weight.shape[-1] / 2)].unflatten(-1, (-1, 2))
    upper, lower = pairs.unbind(-1)
    levels, rounded = _levels(scales)
    shape = tuple(weight.shape)
    return Quantized("nf4", upper << 4 | lower, rounded, levels, shape, weight.dtype)


def quantize_int8(weight: Tensor) -> Quantized:
    """Quantise a matrix to 8.25 bits an element.

    Each 128 elements of a row are divided by 1/127 of the largest magnitude among them, and rounded
    to whole numbers. 0 stays 0.

    Args:
        weight: `[..., R, C]`, computed with in fp32.

    Returns:
        The codes; dequantised, an element is off by at most 1/254 of its block's largest magnitude,
        and fp32's rounding.

    Raises:
        NumericsError: A value is not finite.
        ValueError: It is no matrix of floating point.

    References:
        Dettmers et al., "8-bit optimizers via block-wise quantization" (2022).

    Examples:
        >>> quantize_int8(torch.tensor([[0.0, 0.5, -1.0, 2.0]])).codes
        tensor([[  0,  32, -64, 127]], dtype=torch.int8)
    """
    blocks, largest = _blocks(_checked(weight, "quantize_int8"), INT8_BLOCK)
    scales = largest / 127
    codes = _divided(blocks, scales).round_().clamp_(-127, 127).to(torch.int8)
    codes = codes.flatten(-2)[..., : weight.shape[-1]].contiguous()
    return Quantized("int8", codes, scales, None, tuple(weight.shape), weight.dtype)


def quantize_fp8_block(weight: Tensor) -> Quantized:
    """Quantise a matrix to e4m3 with a scale for each block of 128 x 128.

    Args:
        weight: `[..., R, C]`, computed with in fp32.

    Returns:
        The codes; dequantised, an element is off by at most 1/16 of its own magnitude, or of
        1/28,672 of its block's largest if that is more, and fp32's rounding.

    Raises:
        NumericsError: A value is not finite.
        ValueError: It is no matrix of floating point.

    References:
        DeepSeek-AI, "DeepSeek-V3 technical report" (2024); there the scales are `weight_scale_inv`.

    Examples:
        >>> dequantize(quantize_fp8_block(torch.tensor([[0.0, 0.3, -1.0, 448.0]]))).tolist()
        [[0.0, 0.3125, -1.0, 448.0]]
    """
    x = _checked(weight, "quantize_fp8_block")
    rows = x.shape[-2]
    short = max(1, -(-rows // FP8_BLOCK)) * FP8_BLOCK - rows
    blocks, largest = _blocks(nn.functional.pad(x, (0, 0, 0, short)), FP8_BLOCK)
    scales = largest.unflatten(-2, (-1, FP8_BLOCK)).amax(-2) / FP8_LARGEST
    scaled = _divided(blocks, scales.repeat_interleave(FP8_BLOCK, -2))
    codes = scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    codes = codes.flatten(-2)[..., :rows, : x.shape[-1]].contiguous()
    return Quantized("fp8", codes, scales, None, tuple(weight.shape), weight.dtype)


QUANTIZE: Mapping[Format, Callable[[Tensor], Quantized]] = MappingProxyType(
    {"nf4": quantize_nf4, "int8": quantize_int8, "fp8": quantize_fp8_block}
)
"""What quantises to a format."""


def quantize(weight: Tensor, form: Format) -> Quantized:
    """Quantise a matrix to a format by name.

    Examples:
        >>> quantize(torch.ones(2, 128), "int8").nbytes
        264
    """
    among(get_args(Format), "quantize", form=form)
    return QUANTIZE[form](weight)


def dequantize(quantized: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """Return the matrix that codes stand for, each product rounded once to fp32, then to `dtype`.

    Args:
        quantized: The codes.
        dtype: By default that of the matrix which was quantised.

    Examples:
        >>> dequantize(quantize_int8(torch.ones(1, 3, dtype=torch.bfloat16)))
        tensor([[1., 1., 1.]], dtype=torch.bfloat16)
    """
    scales = quantized.scales
    if quantized.levels is not None:
        scales = scales_of(scales, quantized.levels)
    if quantized.form == "fp8":
        scales = scales.repeat_interleave(FP8_BLOCK, -2)[..., : quantized.shape[-2], :]
    values = times_scales(quantized.codes, scales, quantized.form, columns=quantized.shape[-1])
    return values.to(dtype or quantized.dtype)


def add_low_rank(
    base: Tensor | Quantized,
    b: Tensor,
    a: Tensor,
    *,
    scale: float,
    to: torch.dtype | Format = torch.float32,
) -> Tensor | Quantized:
    """Return a matrix with a product of low rank added to it in fp32: base + scale * b @ a.

    Args:
        base: `[..., R, C]`, in few bits or not.
        b: `[..., R, r]`.
        a: `[..., r, C]`.
        scale: alpha / r as a rule.
        to: What the sum is rounded to: a dtype, or a format, to which it is quantised anew.

    Raises:
        NumericsError: It is to be quantised, and is not finite.

    References:
        Hu et al., "LoRA" (2021).

    Examples:
        >>> base = quantize_int8(torch.ones(2, 3))
        >>> add_low_rank(base, torch.ones(2, 1), torch.ones(1, 3), scale=0.5)
        tensor([[1.5000, 1.5000, 1.5000],
                [1.5000, 1.5000, 1.5000]])
    """
    whole = dequantize(base, torch.float32) if isinstance(base, Quantized) else base.float()
    merged = whole + scale * (b.float() @ a.float())
    return merged.to(to) if isinstance(to, torch.dtype) else quantize(merged, to)


# -------------------------------------------------------------------------------------- the pieces


def block_of(form: Format) -> int:
    """Return how many elements of a row a scale is for.

    Examples:
        >>> block_of("nf4")
        64
    """
    return {"nf4": NF4_BLOCK, "int8": INT8_BLOCK, "fp8": FP8_BLOCK}[form]


def times_scales(
    codes: Tensor,
    scales: Tensor,
    form: Format,
    *,
    columns: int,
    first: int = 0,
    noise: Tensor | None = None,
) -> Tensor:
    """Return in fp32 what some columns of a matrix are: what codes stand for, times scales.

    Args:
        codes: Those of the columns, `[..., R, columns]`, or half as many bytes of nf4.
        scales: fp32 `[..., R, N]`, of all blocks of each row.
        form: The format.
        columns: How many columns there are.
        first: Which column of the matrix is the first one.
        noise: fp32 `[..., R, columns]`, added to what codes stand for, before scales.

    Examples:
        >>> codes = torch.tensor([[2, 3]], dtype=torch.int8)
        >>> times_scales(codes, torch.tensor([[1.0, 10.0]]), "int8", columns=2, first=127)
        tensor([[ 2., 30.]])
    """
    block = block_of(form)
    if form == "nf4":
        pairs = torch.from_numpy(_PAIRS).to(codes.device)
        values = nn.functional.embedding(codes.int(), pairs).flatten(-2)[..., :columns]
    else:
        values = codes.float()
    if noise is not None:
        values += noise
    if first % block or columns % block or not columns:
        return values * scales.repeat_interleave(block, -1)[..., first : first + columns]
    own = scales[..., first // block : (first + columns) // block]
    return values.unflatten(-1, (-1, block)).mul_(own.unsqueeze(-1)).flatten(-2)


def scales_of(rounded: Tensor, levels: Tensor) -> Tensor:
    """Return the scales, fp32 `[..., R, N]`, of nf4's rounded ones and their groups' levels.

    Examples:
        >>> scales_of(torch.tensor([[0, 2]], dtype=torch.uint8), torch.tensor([[[1.0, 0.5]]]))
        tensor([[1., 2.]])
    """
    least, step = (
        x.repeat_interleave(NF4_GROUP, -1)[..., : rounded.shape[-1]] for x in levels.unbind(-1)
    )
    return least + rounded * step


def _levels(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels `[..., R, G, 2]` of each group of scales, and the scales rounded to them."""
    count = scales.shape[-1]
    short = -(-count // NF4_GROUP) * NF4_GROUP - count
    last = scales[..., -1:].expand(*scales.shape[:-1], short)
    groups = torch.cat([scales, last], -1).unflatten(-1, (-1, NF4_GROUP))
    least, largest = groups.aminmax(dim=-1)
    step = (largest - least) / 255
    levels = torch.stack([least, step], -1)
    rounded = _divided(groups - least.unsqueeze(-1), step).round_().clamp_(0, 255)
    return levels, rounded.to(torch.uint8).flatten(-2)[..., :count].contiguous()


def _blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a matrix in blocks along its rows, `[..., R, N, size]`, and their largest magnitudes.

    A short block is filled up by zeros; even a matrix without columns has one.
    """
    columns = x.shape[-1]
    short = max(1, -(-columns // size)) * size - columns
    blocks = nn.functional.pad(x, (0, short)).unflatten(-1, (-1, size))
    largest = blocks.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        count = int((~x.isfinite()).sum())
        raise NumericsError(
            f"quantize: {count:,} value{'s are' if count > 1 else ' is'} not finite, and would "
            "take whole blocks along; a block's scale is its largest magnitude"
        )
    return blocks, largest


def _divided(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return blocks over their scales; those of zeros stay zeros."""
    return blocks / scales.clamp_min(_LEAST).unsqueeze(-1)


def _checked(weight: Tensor, by: str) -> Tensor:
    if weight.ndim < 2 or not weight.is_floating_point():
        got = f"{weight.dtype} of shape {tuple(weight.shape)}"
        raise ValueError(f"{by}: it takes a matrix of floating point, or several, got {got}")
    return weight.detach().float()


def codes_per_byte(form: Format) -> int:
    """Return how many elements a byte of codes holds.

    Examples:
        >>> codes_per_byte("nf4"), codes_per_byte("fp8")
        (2, 1)
    """
    return 2 if form == "nf4" else 1


def scale_bytes(form: Format, columns: int) -> int:
    """Return the bytes that a row of a matrix has for its scales, each row by itself.

    Examples:
        >>> scale_bytes("nf4", 4096), scale_bytes("fp8", 4096)
        (72, 128)
    """
    count = max(1, ceil(columns / block_of(form)))
    return count + 8 * ceil(count / NF4_GROUP) if form == "nf4" else 4 * count
