"""Folders whose matrices are in fp8 with a scale for each block, read as what they stand for.

DeepSeek-AI, "DeepSeek-V3" (2024), section 3.3: a matrix `X.weight` in e4m3 is multiplied, block by
block of 128 x 128 as a rule, by the elements of `X.weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainkit.weights.hub.ropes import told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainkit.types import Weights
    from trainkit.weights.checkpoint.tensor_files import Stored

SCALES = "_scale_inv"
"""What the name of a matrix is followed by in that of its scales."""

_CODES = "float8_e4m3fn"
_KNOWN = {"quant_method": ("fp8",), "fmt": (None, "e4m3"), "expert_dtype": (None, "fp8")}


def quantization_problem(said: Any) -> str | None:
    """Say why the weights that a `quantization_config` describes cannot be read.

    Examples:
        >>> quantization_problem({"quant_method": "fp8", "weight_block_size": [128, 128]})
        >>> quantization_problem({"quant_method": "gptq"})
        "quantization_config: quant_method is 'gptq'; fp8 in blocks is what is read"
    """
    table = said if isinstance(said, Mapping) else {}
    wrong = [key for key, allowed in _KNOWN.items() if table.get(key) not in allowed]
    block = table.get("weight_block_size")
    sizes = block if isinstance(block, list) and len(block) == 2 else [0]
    if any(type(size) is not int or size < 1 for size in sizes):
        wrong.append("weight_block_size")
    if not wrong:
        return None
    what = f"{wrong[0]} is {told(table.get(wrong[0]))}"
    return f"quantization_config: {what}; fp8 in blocks is what is read"


def scales_of(
    found: Mapping[str, Stored], names: Sequence[str], block: Sequence[int]
) -> tuple[dict[str, Stored], list[str]]:
    """Return the scales of those of some matrices that are in fp8, and what is wrong with them.

    Args:
        found: The tensors of a folder.
        names: The tensors of its model.
        block: The rows and columns of a block.

    Returns:
        The scales by the names of the matrices; a sentence for each that has none of its shape.

    Examples:
        >>> from trainkit.weights.checkpoint.tensor_files import Stored
        >>> found = {"a": Stored("float8_e4m3fn", (3, 2), ())}
        >>> scales_of(found, ["a"], [2, 2])
        ({}, ['a is in fp8, and there is no a_scale_inv of shape [2, 1] in floating point'])
    """
    scales: dict[str, Stored] = {}
    problems: list[str] = []
    for name in names:
        if name not in found or found[name].dtype != _CODES:
            continue
        sizes = zip(found[name].shape, block, strict=False)
        shape, held = [-(-size // part) for size, part in sizes], found.get(name + SCALES)
        fits = held is not None and [*held.shape] == shape and len(found[name].shape) == 2
        if held is None or not fits or not getattr(torch, held.dtype).is_floating_point:
            wanted = f"{name}{SCALES} of shape {shape} in floating point"
            problems.append(f"{name} is in fp8, and there is no {wanted}")
        else:
            scales[name] = held
    return scales, problems


def dequantized(weights: Weights, names: Sequence[str], block: Sequence[int]) -> Weights:
    """Return a `Weights` function of which some matrices are multiplied by their scales, in fp32.

    A box is multiplied by the scales of the blocks of the whole matrix that it lies in, in the
    memory of its fp32 values and of a row of scales for each 128 rows: any part of a matrix is the
    same as that part of the whole.

    Args:
        weights: Reads the matrices in fp8, their scales by the names with `SCALES`, and the rest.
        names: The matrices in fp8.
        block: The rows and columns of a block.

    Examples:
        >>> stored = {"a": torch.ones(3, 2), "a_scale_inv": torch.tensor([[2.0], [5.0]])}
        >>> def read(name, shape, offset):
        ...     return stored[name][offset[0] : offset[0] + shape[0]]
        >>> dequantized(read, ["a"], (2, 2))("a", (2, 2), (1, 0))
        tensor([[2., 2.],
                [5., 5.]])
    """
    known = {*names}

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        values = weights(name, shape, offset)
        if name not in known:
            return values
        values = values.float()
        if not values.numel():
            return values
        sides = [*zip(offset, shape, block, strict=True)]
        first = [start // part for start, _, part in sides]
        ends = [-(-(start + size) // part) for start, size, part in sides]
        counts = [end - begin for begin, end in zip(first, ends, strict=True)]
        grid = weights(name + SCALES, counts, first).float()
        columns = torch.arange(offset[1], offset[1] + shape[1]) // block[1] - first[1]
        for i, scales in enumerate(grid[:, columns]):
            begin = (first[0] + i) * block[0] - offset[0]
            values[max(begin, 0) : begin + block[0]] *= scales
        return values

    return read
