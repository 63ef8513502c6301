"""What optimizers keep in fewer bits than they compute in: moments in blocks, rounded parameters.

No layout changes a bit of it: a block of a moment lies in one row of the whole tensor, and what a
parameter is rounded by follows from its name and its index; see `noise.rounded_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from trainkit.parallel.naming import box_of, empty_rows_like

Moments = Literal["fp32", "bf16", "8bit"]
"""How moments are kept. 8bit is fp8 (e4m3) times a scale for each 256 numbers of a row, of second
moments their roots; matrices whose rows are no multiple of 256 numbers, and vectors, in fp32."""

Rounding = Literal["nearest", "stochastic", "kahan"]
"""What becomes of a step that is smaller than the last bit of a parameter in bf16: nothing; all of
it, with the probability that makes it right on average; or it waits, in a second number in bf16."""

BLOCK = 256
_MOST, _LEAST = 448.0, 2.0**-6
"""The largest and the smallest normal number of e4m3: smaller ones are not used."""


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


def empty_moment(p: Tensor, name: str, kind: Moments) -> dict[str, Tensor]:
    """Return a moment of zeros for a parameter, placed as it is, by the names it is kept under.

    Raises:
        ValueError: A block of 8-bit moments would lie on several ranks.

    Examples:
        >>> {x: tuple(m.shape) for x, m in empty_moment(torch.ones(2, 512), "m", "8bit").items()}
        {'m': (2, 512), 'm_scale': (2, 2)}
    """
    length = p.shape[-1] if p.dim() else 1
    in_blocks = kind == "8bit" and p.dim() > 1 and length % BLOCK == 0
    if in_blocks and box_of(p).local.shape[-1] % BLOCK:
        raise ValueError(
            f"moments in 8 bits: rows of {length} numbers are cut into parts of "
            f"{box_of(p).local.shape[-1]}, within blocks of {BLOCK}; cut them otherwise, or keep "
            "their moments in bf16"
        )
    kinds = (
        {"bf16": torch.bfloat16, "8bit": torch.float8_e4m3fn} if in_blocks or kind == "bf16" else {}
    )
    made = {name: empty_rows_like(p, length, kinds.get(kind, wide(p.dtype)))}
    if in_blocks:
        made[scale_name(name)] = empty_rows_like(p, length // BLOCK, torch.float32)
    for tensor in made.values():
        box_of(tensor).local.zero_()
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
    found = (codes.to(dtype).view(-1, BLOCK) * scales[:, None]).view(-1)
    return found.square_() if name.endswith("_sq") else found


def written_moment(name: str, values: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is kept of a part of a moment, by name; in 8 bits, of a whole number of blocks.

    A second moment is never rounded to 0, by which an update would be divided.

    Examples:
        >>> kept = {"m": torch.empty(256), "m_scale": torch.empty(1)}
        >>> kept = written_moment("m", torch.full((256,), 3.0), kept)
        >>> read_moment("m", kept, torch.float32)[0]
        tensor(3.)
    """
    if scale_name(name) not in parts:
        return {name: values}
    is_root = name.endswith("_sq")
    blocks = (values.sqrt() if is_root else values).view(-1, BLOCK)
    scales = (blocks.abs().amax(-1) / _MOST).to(torch.float32)
    found = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    least = found.sign() * _LEAST if is_root else torch.zeros_like(found)
    found = torch.where(found.abs() < _LEAST, least, found)
    return {name: found.to(torch.float8_e4m3fn).view(-1), scale_name(name): scales}
