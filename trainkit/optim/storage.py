"""Low-precision optimizer state: blockwise quantized moments, and rounding of bf16 parameters.

Results do not depend on the layout: a block of a moment lies in one row of the full tensor, and the
random bits of rounding depend on the parameter's name and index; see `noise.round_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainkit.noise.rounding import MASK_32
from trainkit.parallel.parameters import empty_rows_like, get_local_box

Moments = Literal["fp32", "bf16", "8bit"]
"""The format of moments.

"bf16" uses stochastic rounding. A moment changes by a thousandth of itself in a step, less than
half the spacing of bf16 numbers, so rounded to nearest it would never change.

"8bit" is a float of 8 bits with a shared exponent per block of 256 numbers of a row: three bits of
fraction, and a sign bit for first moments. A first moment below 2^-15 of the block's largest
becomes 0. A second moment has no sign; it reaches down to 2^-31 and never becomes 0. Rounding is
dithered over the steps, since otherwise a moment would not follow gradients that change it by less
than half the spacing of codes, 3 to 6 %, in a step. Vectors, and matrices whose rows are not
multiples of 256 numbers, are in fp32."""

Rounding = Literal["nearest", "stochastic", "kahan"]
"""The rounding of bf16 parameters. An update smaller than the last bit is lost ("nearest"), applied
with the probability that is right on average ("stochastic"), or accumulated in a second bf16 number
("kahan")."""

BLOCK = 256
SIGNED, UNSIGNED = np.int32(127), np.int32(255)
"""The largest codes of 8 bits: of a first moment, which has a sign, and of a second."""
SHIFT = 20
"""The bits of an fp32 number that a code of 8 bits omits: three bits of the fraction remain."""
SIZE = 0x7FFFFFFF
"""The bits of an fp32 number without its sign."""
NAN = 0x7FC00000
"""The bits of an fp32 NaN, to which larger ones are clamped."""
_PER_COLUMN, _PER_STEP = 0xC13FA9A9, 0x91E10DA5
"""2^32 over the plastic number and over its square: multiples of both are spread evenly."""


def moment_bytes(kind: Moments) -> float:
    """Return the bytes of a moment per element of a matrix in fp32 or bf16.

    Examples:
        >>> moment_bytes("8bit")
        1.015625
    """
    return {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / BLOCK}[kind]


def get_step_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the step of a parameter is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_name(name: str) -> str:
    """Return the name of the scales of an 8-bit moment in the optimizer state."""
    return f"{name}_scale"


def is_in_blocks(p: Tensor, kind: Moments) -> bool:
    """Return whether the moments of a parameter are stored in 8-bit blocks.

    Raises:
        ValueError: The layout would split a block over ranks.

    Examples:
        >>> is_in_blocks(torch.ones(2, 512), "8bit"), is_in_blocks(torch.ones(2, 500), "8bit")
        (True, False)
    """
    if kind != "8bit" or p.dim() < 2 or p.shape[-1] % BLOCK:
        return False
    if (local_length := get_local_box(p).local.shape[-1]) % BLOCK:
        raise ValueError(
            f"moments in 8 bits: rows of {p.shape[-1]} numbers are sharded into {local_length} per "
            f"rank, which splits blocks of {BLOCK}; choose another layout, or moments in bf16"
        )
    return True


def empty_moment(p: Tensor, name: str, kind: Moments) -> dict[str, Tensor]:
    """Return the zero moment of a parameter, sharded as it is, as entries of the optimizer state.

    Examples:
        >>> {x: tuple(m.shape) for x, m in empty_moment(torch.ones(2, 512), "m", "8bit").items()}
        {'m': (2, 512), 'm_scale': (2, 2)}
    """
    length = p.shape[-1] if p.dim() else 1  # a scalar has one row of one number
    entries: dict[str, Tensor] = {}
    if is_in_blocks(p, kind):
        entries[name] = empty_rows_like(p, length, torch.uint8)
        entries[scale_name(name)] = empty_rows_like(p, length // BLOCK, torch.float32)
    else:
        dtype = torch.bfloat16 if kind == "bf16" else get_step_dtype(p.dtype)
        entries[name] = empty_rows_like(p, length, dtype)
    for tensor in entries.values():
        get_local_box(tensor).local.zero_()
    return entries


def read_moment(name: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Decode a flat part of a moment; no copy if it is stored in that dtype.

    Args:
        name: The name of the moment.
        parts: Its entries of the optimizer state, by name.
        dtype: The dtype of the result.
    """
    codes = parts[name]
    scales = parts.get(scale_name(name))
    if scales is None:
        return codes.to(dtype)
    largest = get_largest_code(name)
    codes = codes.view(-1, BLOCK).to(torch.int32)
    base = (scales.view(torch.int32) >> SHIFT) - largest
    size = codes & largest
    bits = torch.where(size > 0, (size + base[:, None]) << SHIFT, 0)
    sign = (codes & (255 - largest)) << 24  # from bit 7 to bit 31
    return (bits | sign).view(torch.float32).view(-1).to(dtype)


def get_largest_code(name: str) -> int:
    """Return the largest 8-bit code of a moment, without the sign bit that first moments have.

    Examples:
        >>> get_largest_code("exp_avg"), get_largest_code("exp_avg_sq")
        (127, 255)
    """
    return 255 if name.endswith("_sq") else 127


def make_offsets(step: Any, device: torch.device | str = "cpu") -> Tensor:
    """Return the dither of a block, int32 [256]: it is added before the last bits are truncated.

    It is a low-discrepancy sequence over steps and over the columns of a block, so a moment that
    hardly changes is right on average.

    Args:
        step: The number of steps.
        device: The device of the result.

    References:
        Roberts, "The unreasonable effectiveness of quasirandom sequences" (2018): R2.

    Examples:
        >>> 0.49 < float(make_offsets(7).double().mean()) / 2**20 < 0.51
        True
    """
    steps = torch.as_tensor(step, device=device).to(torch.int64) * _PER_STEP
    columns = torch.arange(BLOCK, device=device) * _PER_COLUMN
    return (((columns + steps) & MASK_32) >> (32 - SHIFT)).to(torch.int32)


def encode_moment(
    name: str, values: Tensor, parts: Mapping[str, Tensor], step: Any
) -> dict[str, Tensor]:
    """Encode a flat part of a moment as entries of the optimizer state; undoes `read_moment`.

    Args:
        name: The name of the moment.
        values: Its values; for 8 bits, a multiple of a block.
        parts: Its earlier entries, by name, which have the format.
        step: The number of steps, on which the rounding depends.

    Examples:
        >>> entries = {"m": torch.empty(256, dtype=torch.uint8), "m_scale": torch.empty(1)}
        >>> entries = encode_moment("m", torch.full((256,), 3.0), entries, 1)
        >>> read_moment("m", entries, torch.float32)[0]
        tensor(3.)
    """
    if scale_name(name) not in parts:
        return {name: values}
    # A positive float orders as its bits do, so sizes are compared and shifted as integers. A code
    # is the size's upper bits (exponent and three bits of fraction), counted from the block's base.
    bits = values.to(torch.float32).view(torch.int32).view(-1, BLOCK)
    largest = get_largest_code(name)
    size = bits & SIZE
    # Rounded up, so that the largest number of a block cannot overflow its codes.
    top = (size.amax(-1).clamp(max=NAN) + ((1 << SHIFT) - 1)) >> SHIFT
    base = (top - largest).clamp(min=0)
    codes = ((size + make_offsets(step, bits.device)) >> SHIFT) - base[:, None]
    # A second moment above 0 gets at least code 1: a step divides by its root.
    codes = torch.maximum(codes, size.clamp(max=largest >> 7))
    codes |= (bits >> 24) & 0x80  # the sign, from bit 31 to bit 7
    scales = ((base + largest) << SHIFT).view(torch.float32)
    return {name: codes.to(torch.uint8).view(-1), scale_name(name): scales}


def write_unless_skipped_(out: Tensor, values: Tensor, found_inf: Tensor | None) -> None:
    """Write the values of a step, unless it is skipped on the device: `found_inf` is set and not 0.

    Effects:
        Writes `out`.

    Examples:
        >>> out = torch.zeros(2)
        >>> write_unless_skipped_(out, torch.ones(2), torch.tensor(1.0))
        >>> out
        tensor([0., 0.])
    """
    if found_inf is not None:
        # Not by a factor of 0 for a skipped step: 0 times NaN is NaN.
        values = torch.where(found_inf > 0, out, values.to(out.dtype))
    out.copy_(values)
