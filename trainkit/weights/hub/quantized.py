"""Read folders whose matrices are quantized: dequantized box by box, to fp32.

A `QuantizationMethod` knows one way to store a matrix as codes and scales, in tensors of its own.
To add one, write its two functions and list it in `METHODS`: a folder is then checked and read as
if it had the matrices in place of these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from trainkit.weights.checkpoint.tensor_files import Stored
from trainkit.weights.hub.ropes import short_repr

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.types import Weights

Shape = tuple[int, ...]

_FP8 = "float8_e4m3fn"


@attrs.frozen(eq=False)
class QuantizedTensor:
    """A tensor that a folder stores as other tensors: codes, and their scales.

    Attributes:
        shape: The shape of the tensor.
        parts: The names of the stored tensors that it is made of.
        ignored: The names of stored tensors that belong to it and are not needed, such as the
            scales of its inputs.
        read: `read(weights, shape, offset)` returns a box of the tensor in fp32; `weights` reads
            boxes of the stored tensors. Any part of a tensor equals that part of the whole.
    """

    shape: Shape
    parts: tuple[str, ...]
    read: Callable[[Weights, Sequence[int], Sequence[int]], Tensor]
    ignored: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class QuantizationMethod:
    """A way in which folders store quantized matrices.

    Attributes:
        find_problem: `find_problem(quantization_config)` returns the key whose value is not
            supported, or None.
        find: `find(tensors, name, shape, quantization_config)` returns the tensor `name` of the
            model, None if it is not quantized, or a message if its parts are missing or do not fit.
    """

    find_problem: Callable[[Mapping[str, Any]], str | None]
    find: Callable[
        [Mapping[str, Stored], str, Shape, Mapping[str, Any]], QuantizedTensor | str | None
    ]


def find_quantization_problem(value: Any) -> str | None:
    """Return why the weights of a `quantization_config` cannot be read, or None.

    Examples:
        >>> find_quantization_problem({"quant_method": "fp8", "weight_block_size": [128, 128]})
        >>> find_quantization_problem({"quant_method": "gptq"})
        "quantization_config: quant_method is 'gptq'; only fp8 in blocks is supported"
    """
    table = value if isinstance(value, Mapping) else {}
    method = METHODS.get(str(table.get("quant_method")))
    key = "quant_method" if method is None else method.find_problem(table)
    if key is None:
        return None
    return f"quantization_config: {key} is {short_repr(table.get(key))}; {_SUPPORTED}"


def find_quantized(
    tensors: Mapping[str, Stored], shapes: Mapping[str, Shape], table: Mapping[str, Any] | None
) -> tuple[dict[str, QuantizedTensor], dict[str, Stored], list[str]]:
    """Return the quantized tensors of a model, and a folder's tensors as if none were quantized.

    Args:
        tensors: The stored tensors.
        shapes: The shapes of the model's tensors, dequantized.
        table: The `quantization_config`, None if there is none.

    Returns:
        The quantized tensors by name; the stored tensors, with the quantized tensors in place of
        their parts; a message for each tensor whose parts are missing or do not fit.

    Examples:
        >>> tensors = {"a": Stored("float8_e4m3fn", (3, 2), ())}
        >>> fp8 = {"quant_method": "fp8", "weight_block_size": [2, 2]}
        >>> find_quantized(tensors, {"a": (3, 2)}, fp8)[2]
        ['a is in fp8, but there is no a_scale_inv of shape [2, 1] in floating point']
    """
    found: dict[str, QuantizedTensor] = {}
    problems: list[str] = []
    if not table:
        return found, dict(tensors), problems
    method = METHODS[table["quant_method"]]
    for name, shape in shapes.items():
        each = method.find(tensors, name, shape, table)
        if isinstance(each, str):
            problems.append(each)
        elif each is not None:
            found[name] = each
    used = {part for each in found.values() for part in (*each.parts, *each.ignored)}
    plain = {name: x for name, x in tensors.items() if name not in used}
    plain |= {name: Stored("float32", each.shape, ()) for name, each in found.items()}
    return found, plain, problems


def dequantize_weights(weights: Weights, quantized: Mapping[str, QuantizedTensor]) -> Weights:
    """Return a `Weights` function that dequantizes some tensors, box by box.

    Args:
        weights: Reads the stored tensors.
        quantized: The quantized tensors by name, from `find_quantized`.

    Examples:
        >>> from trainkit.parallel.materialize import narrow_to_box
        >>> stored = {"a": torch.ones(3, 2), "a_scale_inv": torch.tensor([[2.0], [5.0]])}
        >>> tensors = {
        ...     "a": Stored("float8_e4m3fn", (3, 2), ()),
        ...     "a_scale_inv": Stored("float32", (2, 1), ()),
        ... }
        >>> fp8 = {"quant_method": "fp8", "weight_block_size": [2, 2]}
        >>> quantized, _, _ = find_quantized(tensors, {"a": (3, 2)}, fp8)
        >>> read = lambda name, shape, offset: narrow_to_box(stored[name], shape, offset)
        >>> dequantize_weights(read, quantized)("a", (2, 2), (1, 0))
        tensor([[2., 2.],
                [5., 5.]])
    """

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in quantized:
            return weights(name, shape, offset)
        return quantized[name].read(weights, shape, offset)

    return read


# ---------------------------------------------------------------------------------- fp8 in blocks
# DeepSeek-AI, "DeepSeek-V3" (2024), section 3.3: a matrix `X.weight` in e4m3 is multiplied, block
# by block (usually of 128 x 128), by the elements of `X.weight_scale_inv`.


def _find_fp8_problem(table: Mapping[str, Any]) -> str | None:
    # None stands for a missing key.
    supported = {"fmt": (None, "e4m3"), "expert_dtype": (None, "fp8")}
    for key, allowed in supported.items():
        if table.get(key) not in allowed:
            return key
    block = table.get("weight_block_size")
    # A wrong form becomes a size of 0, which is an error.
    sizes = block if isinstance(block, list) and len(block) == 2 else [0]
    is_wrong = any(type(size) is not int or size < 1 for size in sizes)
    return "weight_block_size" if is_wrong else None


def _find_fp8(
    tensors: Mapping[str, Stored], name: str, _: Shape, table: Mapping[str, Any]
) -> QuantizedTensor | str | None:
    if name not in tensors or tensors[name].dtype != _FP8:
        return None
    return find_blocks(tensors, name, f"{name}_scale_inv", table["weight_block_size"])


def find_blocks(
    tensors: Mapping[str, Stored], name: str, scales_name: str, block: Sequence[int]
) -> QuantizedTensor | str:
    """Return a matrix in fp8 with a scale for each block, or a message if its scales do not fit.

    Args:
        tensors: The stored tensors; `name` is among them.
        name: The name of the matrix.
        scales_name: The name of its scales, which multiply it.
        block: The rows and columns of a block.
    """
    full_shape = tensors[name].shape
    # Rounded up: the last block along a side may be smaller.
    grid_shape = [-(-size // side) for size, side in zip(full_shape, block, strict=False)]
    scales = tensors.get(scales_name)
    if (
        scales is None
        or [*scales.shape] != grid_shape
        or len(full_shape) != 2
        or not getattr(torch, scales.dtype).is_floating_point
    ):
        return (
            f"{name} is in fp8, but there is no {scales_name} of shape {grid_shape} in floating "
            "point"
        )

    def read(weights: Weights, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        values = weights(name, shape, offset).float()  # fp8 has no arithmetic of its own
        return multiply_blocks(values, weights, scales_name, offset=offset, block=block)

    return QuantizedTensor(full_shape, (name, scales_name), read)


def multiply_blocks(
    values: Tensor,
    weights: Weights,
    scales_name: str,
    *,
    offset: Sequence[int],
    block: Sequence[int],
) -> Tensor:
    """Multiply a box of a matrix, in place, by the scales of the blocks of the full matrix.

    Only the scales of blocks that the box touches are read, a few bytes for each.

    Args:
        values: The box, `[R, C]` in fp32.
        weights: Reads the scales.
        scales_name: Their name.
        offset: The offset of the box in the full matrix.
        block: The rows and columns of a block.
    """
    if not values.numel():
        return values
    sides = [*zip(offset, values.shape, block, strict=True)]
    first = [start // side for start, _, side in sides]
    ends = [-(-(start + size) // side) for start, size, side in sides]
    counts = [end - start for start, end in zip(first, ends, strict=True)]
    grid = weights(scales_name, counts, first).float()
    # The column of `grid` for each column of the box, which may start inside a block.
    indices = torch.arange(offset[1], offset[1] + values.shape[1])
    columns = indices // block[1] - first[1]
    for i, scales in enumerate(grid[:, columns]):
        # The block's first row, seen from the box: negative where the box begins inside the block.
        start = (first[0] + i) * block[0] - offset[0]
        values[max(start, 0) : start + block[0]] *= scales
    return values


METHODS: Mapping[str, QuantizationMethod] = {
    "fp8": QuantizationMethod(_find_fp8_problem, _find_fp8),
}
"""The supported methods, by the `quant_method` of a `quantization_config`."""

_SUPPORTED = "only fp8 in blocks is supported"
