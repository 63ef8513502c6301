"""Read folders whose matrices are in fp8 with a scale for each block.

DeepSeek-AI, "DeepSeek-V3" (2024), section 3.3: a matrix `X.weight` in e4m3 is multiplied, block by
block (usually of 128 x 128), by the elements of `X.weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainkit.weights.hub.ropes import short_repr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainkit.types import Weights
    from trainkit.weights.checkpoint.tensor_files import Stored

SCALES = "_scale_inv"
"""The suffix of the name of a matrix's scales."""

_FP8 = "float8_e4m3fn"
# None stands for a missing key.
_SUPPORTED = {"quant_method": ("fp8",), "fmt": (None, "e4m3"), "expert_dtype": (None, "fp8")}


def find_quantization_problem(value: Any) -> str | None:
    """Return why the weights of a `quantization_config` cannot be read, or None.

    Examples:
        >>> find_quantization_problem({"quant_method": "fp8", "weight_block_size": [128, 128]})
        >>> find_quantization_problem({"quant_method": "gptq"})
        "quantization_config: quant_method is 'gptq'; only fp8 in blocks is supported"
    """
    table = value if isinstance(value, Mapping) else {}
    wrong = [key for key, allowed in _SUPPORTED.items() if table.get(key) not in allowed]
    block = table.get("weight_block_size")
    # A wrong form becomes a size of 0, which is an error below.
    sizes = block if isinstance(block, list) and len(block) == 2 else [0]
    if any(type(size) is not int or size < 1 for size in sizes):
        wrong.append("weight_block_size")
    if not wrong:
        return None
    return (
        f"quantization_config: {wrong[0]} is {short_repr(table.get(wrong[0]))}; only fp8 in blocks "
        "is supported"
    )


def find_scales(
    tensors: Mapping[str, Stored], names: Sequence[str], block: Sequence[int]
) -> tuple[dict[str, Stored], list[str]]:
    """Return the scales of the matrices in fp8, and the problems with them.

    Args:
        tensors: The tensors of a folder.
        names: The tensors of its model.
        block: The rows and columns of a block.

    Returns:
        The scales by the names of the matrices; a message for each matrix without matching scales.

    Examples:
        >>> from trainkit.weights.checkpoint.tensor_files import Stored
        >>> tensors = {"a": Stored("float8_e4m3fn", (3, 2), ())}
        >>> find_scales(tensors, ["a"], [2, 2])
        ({}, ['a is in fp8, but there is no a_scale_inv of shape [2, 1] in floating point'])
    """
    scales: dict[str, Stored] = {}
    problems: list[str] = []
    for name in names:
        if name not in tensors or tensors[name].dtype != _FP8:
            continue
        sizes = zip(tensors[name].shape, block, strict=False)
        # Rounded up: the last block along a side may be smaller.
        shape = [-(-size // block_size) for size, block_size in sizes]
        scale = tensors.get(name + SCALES)
        if (
            scale is not None
            and [*scale.shape] == shape
            and len(tensors[name].shape) == 2
            and getattr(torch, scale.dtype).is_floating_point
        ):
            scales[name] = scale
        else:
            problems.append(
                f"{name} is in fp8, but there is no {name}{SCALES} of shape {shape} in floating "
                "point"
            )
    return scales, problems


def dequantize_weights(weights: Weights, names: Sequence[str], block: Sequence[int]) -> Weights:
    """Return a `Weights` function with some matrices multiplied by their scales, in fp32.

    A box is multiplied by the scales of the blocks of the full matrix, so any part of a matrix
    equals that part of the whole. It takes the memory of the box in fp32.

    Args:
        weights: Reads the matrices in fp8, their scales under the names with `SCALES`, and all
            other tensors.
        names: The matrices in fp8.
        block: The rows and columns of a block.

    Examples:
        >>> stored = {"a": torch.ones(3, 2), "a_scale_inv": torch.tensor([[2.0], [5.0]])}
        >>> def read(name, shape, offset):
        ...     return stored[name][offset[0] : offset[0] + shape[0]]
        >>> dequantize_weights(read, ["a"], (2, 2))("a", (2, 2), (1, 0))
        tensor([[2., 2.],
                [5., 5.]])
    """
    quantized = {*names}

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        values = weights(name, shape, offset)
        if name not in quantized:
            return values
        values = values.float()  # fp8 has no arithmetic of its own
        if not values.numel():
            return values
        sides = [*zip(offset, shape, block, strict=True)]
        first = [start // block_size for start, _, block_size in sides]
        ends = [-(-(start + size) // block_size) for start, size, block_size in sides]
        counts = [end - start for start, end in zip(first, ends, strict=True)]
        # Only the scales of blocks that the box touches are read, a few bytes for each.
        grid = weights(name + SCALES, counts, first).float()
        # The column of `grid` for each column of the box, which may start inside a block.
        indices = torch.arange(offset[1], offset[1] + shape[1])
        columns = indices // block[1] - first[1]
        for i, scales in enumerate(grid[:, columns]):
            # The block's first row, seen from the box: negative where the box begins inside the
            # block.
            start = (first[0] + i) * block[0] - offset[0]
            values[max(start, 0) : start + block[0]] *= scales
        return values

    return read
