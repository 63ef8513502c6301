"""Read folders whose matrices are in fp8 or MXFP4 with a scale for each block.

DeepSeek-AI, "DeepSeek-V3" (2024), section 3.3: a matrix `X.weight` in e4m3 is multiplied, block by
block (usually of 128 x 128), by the elements of `X.weight_scale_inv`.

Open Compute Project, "OCP microscaling formats (MX) specification" (2023), as in gpt-oss: the
matrices of experts `X`, `[E, in, out]`, are `X_blocks`, uint8 `[E, out, in / 32, 16]` with two
numbers of 4 bits (e2m1) in a byte, the first in its low bits; each block of 32 has a power of 2 in
`X_scales`, uint8 `[E, out, in / 32]`, the exponent plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
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
_MX_BLOCK = 32
_MX_PARTS = ("_blocks", "_scales")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def find_quantization_problem(value: Any) -> str | None:
    """Return why the weights of a `quantization_config` cannot be read, or None.

    Examples:
        >>> find_quantization_problem({"quant_method": "fp8", "weight_block_size": [128, 128]})
        >>> find_quantization_problem({"quant_method": "gptq"})
        "quantization_config: quant_method is 'gptq'; only fp8 in blocks and mxfp4 are supported"
    """
    table = value if isinstance(value, Mapping) else {}
    if table.get("quant_method") == "mxfp4":
        return None
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
        "and mxfp4 are supported"
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


# ------------------------------------------------------------------------------------------- MXFP4


def find_packed(
    tensors: Mapping[str, Stored], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Stored], dict[str, Stored], list[str]]:
    """Return the tensors of a folder as they are unpacked, those of packed ones, and the problems.

    Args:
        tensors: The tensors of a folder.
        shapes: The shapes of the tensors of its model.

    Returns:
        The tensors with those in MXFP4 under their own names, in bf16, and without their parts;
        the parts; a message for each tensor whose parts do not fit it.

    Examples:
        >>> from trainkit.weights.checkpoint.tensor_files import Stored
        >>> sizes = {"x_blocks": (2, 3, 2, 16), "x_scales": (2, 3, 2)}
        >>> tensors = {name: Stored("uint8", shape, ()) for name, shape in sizes.items()}
        >>> unpacked, parts, problems = find_packed(tensors, {"x": (2, 64, 3)})
        >>> unpacked["x"].dtype, unpacked["x"].shape, [*parts], problems
        ('bfloat16', (2, 64, 3), ['x_blocks', 'x_scales'], [])
    """
    parts: dict[str, Stored] = {}
    unpacked = dict(tensors)
    problems: list[str] = []
    for name, shape in shapes.items():
        own = {name + part: tensors[name + part] for part in _MX_PARTS if name + part in tensors}
        if name in tensors or not own:
            continue
        blocks = (*shape[:-2], shape[-1], shape[-2] // _MX_BLOCK) if len(shape) > 1 else ()
        wanted = dict(
            zip((name + part for part in _MX_PARTS), ((*blocks, 16), blocks), strict=True)
        )
        found = {x: stored.shape for x, stored in own.items() if stored.dtype == "uint8"}
        if found != wanted or shape[-2] % _MX_BLOCK:
            problems.append(
                f"{name} of shape {list(shape)} in MXFP4 must be "
                + " and ".join(f"{x}, uint8 {list(size)}" for x, size in wanted.items())
                + f", and its columns whole blocks of {_MX_BLOCK}; there are "
                + " and ".join(f"{x}, {y.dtype} {list(y.shape)}" for x, y in own.items())
            )
        unpacked = {x: stored for x, stored in unpacked.items() if x not in own}
        unpacked[name] = attrs.evolve(
            next(iter(own.values())), dtype="bfloat16", shape=tuple(shape)
        )
        parts |= own
    return unpacked, parts, problems


def unpack_weights(weights: Weights, names: Sequence[str]) -> Weights:
    """Return a `Weights` function with some matrices unpacked from MXFP4, exactly, in bf16.

    Args:
        weights: Reads the parts of the matrices, and all other tensors.
        names: The matrices in MXFP4.

    Examples:
        >>> stored = {"x_blocks": torch.full((1, 1, 16), 0x92), "x_scales": torch.tensor([[128]])}
        >>> unpacked = unpack_weights(lambda name, shape, offset: stored[name].byte(), ["x"])
        >>> unpacked("x", (3, 1), (0, 0)).flatten()
        tensor([ 2., -1.,  2.], dtype=torch.bfloat16)
    """
    packed = {*names}

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in packed:
            return weights(name, shape, offset)
        # Ours has the input last but one, the file has it last, in blocks.
        first = offset[-2] // _MX_BLOCK
        count = -(-(offset[-2] + shape[-2]) // _MX_BLOCK) - first
        box = (*shape[:-2], shape[-1], count)
        start = (*offset[:-2], offset[-1], first)
        codes = weights(name + _MX_PARTS[0], (*box, 16), (*start, 0))
        exponents = weights(name + _MX_PARTS[1], box, start).int() - 127
        values = torch.tensor((*_E2M1, *(-x for x in _E2M1)), device="cpu")
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        numbers = torch.ldexp(values[pairs.long()], exponents.unsqueeze(-1)).bfloat16()
        skipped = offset[-2] - first * _MX_BLOCK
        rows = numbers.flatten(-2).narrow(-1, skipped, shape[-2])
        return rows.transpose(-1, -2).contiguous()

    return read
