"""What optimizers keep in fewer bits than they compute in: moments in blocks, rounded parameters.

No layout changes a bit of it: a block of a moment lies in one row of the whole tensor, and what a
parameter is rounded by follows from its name and its index; see `noise.rounded_rows`.
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
"""How moments are kept. bf16 rounds up or down at random: a moment moves by a thousandth of itself
in a step, less than half the distance of two bf16 numbers, and rounded to nearest would never move.
8bit is a float of 8 bits, three of its fraction, whose largest exponent is
that of 256 numbers of a row; matrices whose rows are no multiple of 256 numbers, and vectors, in
fp32. The sign, if there is one, takes a bit: smaller than 2^-15 of the largest becomes 0. A second
moment has none: it reaches down to 2^-31, and never becomes 0. What is between two codes is rounded
up in as many steps as it is nearer to the upper one, or a moment would not follow gradients that
change it by less than half a code's width, 3 to 6 %, in a step."""

Rounding = Literal["nearest", "stochastic", "kahan"]
"""What becomes of a step that is smaller than the last bit of a parameter in bf16: nothing; all of
it, with the probability that makes it right on average; or it waits, in a second number in bf16."""

BLOCK = 256
SIGNED, UNSIGNED = np.int32(127), np.int32(255)
"""The largest codes of 8 bits: of a first moment, which has a sign, and of a second."""
SHIFT = 20
"""Bits of an fp32 number that a code of 8 bits leaves out: it keeps three of the fraction."""
SIZE, NAN = 0x7FFFFFFF, 0x7FC00000
_PER_COLUMN, _PER_STEP = 0xC13FA9A9, 0x91E10DA5
"""2^32 over the plastic number and over its square: multiples of both are spread evenly."""


def moment_bytes(kind: Moments) -> float:
    """Return the bytes of a moment for each element of a matrix in fp32 or bf16.

    Examples:
        >>> moment_bytes("8bit")
        1.015625
    """
    return {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / BLOCK}[kind]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter of a dtype is stepped."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_name(name: str) -> str:
    """Return the name under which the scales of a moment in 8 bits are kept."""
    return f"{name}_scale"


def is_in_blocks(p: Tensor, kind: Moments) -> bool:
    """Say whether moments of a parameter are kept in blocks of 8 bits.

    Raises:
        ValueError: One of them would lie on several ranks.

    Examples:
        >>> is_in_blocks(torch.ones(2, 512), "8bit"), is_in_blocks(torch.ones(2, 500), "8bit")
        (True, False)
    """
    if kind != "8bit" or p.dim() < 2 or p.shape[-1] % BLOCK:
        return False
    if (part := get_local_box(p).local.shape[-1]) % BLOCK:
        raise ValueError(
            f"moments in 8 bits: rows of {p.shape[-1]} numbers are cut into parts of {part}, within"
            f" blocks of {BLOCK}; cut them otherwise, or keep their moments in bf16"
        )
    return True


def empty_moment(p: Tensor, name: str, kind: Moments) -> dict[str, Tensor]:
    """Return a moment of zeros for a parameter, placed as it is, by the names it is kept under.

    Examples:
        >>> {x: tuple(m.shape) for x, m in empty_moment(torch.ones(2, 512), "m", "8bit").items()}
        {'m': (2, 512), 'm_scale': (2, 2)}
    """
    length, in_blocks = p.shape[-1] if p.dim() else 1, is_in_blocks(p, kind)
    kinds = {"bf16": torch.bfloat16, "8bit": torch.uint8} if in_blocks or kind == "bf16" else {}
    made = {name: empty_rows_like(p, length, kinds.get(kind, wide(p.dtype)))}
    if in_blocks:
        made[scale_name(name)] = empty_rows_like(p, length // BLOCK, torch.float32)
    for tensor in made.values():
        get_local_box(tensor).local.zero_()
    return made


def read_moment(name: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a flat part of a moment as numbers; its own memory where it is kept in that dtype.

    Args:
        name: The moment's.
        parts: What is kept of it, by name.
        dtype: Of the numbers.
    """
    codes, scales = parts[name], parts.get(scale_name(name))
    if scales is None:
        return codes.to(dtype)
    most = most_of(name)
    codes = codes.view(-1, BLOCK).to(torch.int32)
    base = (scales.view(torch.int32) >> SHIFT) - most
    size = codes & most
    bits = torch.where(size > 0, (size + base[:, None]) << SHIFT, 0)
    return (bits | ((codes & (255 - most)) << 24)).view(torch.float32).view(-1).to(dtype)


def most_of(name: str) -> int:
    """Return the largest code of a moment in 8 bits: without its sign, which second moments lack.

    Examples:
        >>> most_of("exp_avg"), most_of("exp_avg_sq")
        (127, 255)
    """
    return 255 if name.endswith("_sq") else 127


def up_of(step: Any, device: torch.device | str = "cpu") -> Tensor:
    """Return what is added to each number of a block before its last bits are cut off, int32 [256].

    Over steps it takes all values evenly, and so it does in a step over a block: a moment that
    hardly moves is right on average.

    Args:
        step: The count of steps.
        device: Where the result is made.

    References:
        Roberts, "The unreasonable effectiveness of quasirandom sequences" (2018): R2.

    Examples:
        >>> 0.49 < float(up_of(7).double().mean()) / 2**20 < 0.51
        True
    """
    counted = torch.as_tensor(step, device=device).to(torch.int64) * _PER_STEP
    columns = torch.arange(BLOCK, device=device) * _PER_COLUMN
    return (((columns + counted) & MASK_32) >> (32 - SHIFT)).to(torch.int32)


def written_moment(
    name: str, values: Tensor, parts: Mapping[str, Tensor], step: Any
) -> dict[str, Tensor]:
    """Return what is kept of a part of a moment, by name; in 8 bits, of a whole number of blocks.

    Args:
        name: The moment's.
        values: Flat.
        parts: What was kept of it, by name.
        step: The count of steps, from which follows what is rounded up.

    Examples:
        >>> kept = {"m": torch.empty(256, dtype=torch.uint8), "m_scale": torch.empty(1)}
        >>> kept = written_moment("m", torch.full((256,), 3.0), kept, 1)
        >>> read_moment("m", kept, torch.float32)[0]
        tensor(3.)
    """
    if scale_name(name) not in parts:
        return {name: values}
    bits, most = values.to(torch.float32).view(torch.int32).view(-1, BLOCK), most_of(name)
    size = bits & SIZE
    top = (size.amax(-1).clamp(max=NAN) + ((1 << SHIFT) - 1)) >> SHIFT
    base = (top - most).clamp(min=0)
    codes = ((size + up_of(step, bits.device)) >> SHIFT) - base[:, None]
    codes = torch.maximum(codes, size.clamp(max=most >> 7))  # second moments that are not 0: 1
    codes |= (bits >> 24) & 0x80
    scales = ((base + most) << SHIFT).view(torch.float32)
    return {name: codes.to(torch.uint8).view(-1), scale_name(name): scales}
