"""Read folders whose matrices are quantized: dequantized box by box, to fp32.

A `QuantizationMethod` knows one way to store a matrix as codes and scales, in tensors of its own.
To add one, write its two functions and list it in `METHODS`: a folder is then checked and read as
if it had the matrices in place of these tensors.
"""

from __future__ import annotations

import functools
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

FP8_BLOCK = 128
NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
"""The rows and columns that share a scale in fp8, and the columns in nvfp4 and in MXFP4."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7 in e2m1; 8 to 15 are their negatives."""

_FP8 = "float8_e4m3fn"
_ROWS = 256  # that are multiplied by their scales at a time
_ACTIVATION_SCALES = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale")


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
        "quantization_config: quant_method is 'gptq'; only fp8 in blocks, MXFP4, and fp8 and ..."
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
    return None if _is_block(table.get("weight_block_size")) else "weight_block_size"


def _is_block(value: Any) -> bool:
    sizes = value if isinstance(value, list) and len(value) == 2 else [0]
    return all(type(size) is int and size > 0 for size in sizes)


def _find_fp8(
    tensors: Mapping[str, Stored], name: str, _: Shape, table: Mapping[str, Any]
) -> QuantizedTensor | str | None:
    if name not in tensors or tensors[name].dtype != _FP8:
        return None
    return find_blocks(tensors, name, f"{name}_scale_inv", table["weight_block_size"])


def find_blocks(
    tensors: Mapping[str, Stored],
    name: str,
    scales_name: str,
    block: Sequence[int],
    ignored: tuple[str, ...] = (),
) -> QuantizedTensor | str:
    """Return a matrix in fp8 with a scale for each block, or a message if its scales do not fit.

    Args:
        tensors: The stored tensors; `name` is among them.
        name: The name of the matrix.
        scales_name: The name of its scales, which multiply it.
        block: The rows and columns of a block.
        ignored: As in `QuantizedTensor`.
    """
    full_shape = tensors[name].shape
    # Rounded up: the last block along a side may be smaller.
    grid_shape = tuple(-(-size // side) for size, side in zip(full_shape, block, strict=False))
    if len(full_shape) != 2 or not _is_float(tensors, scales_name, grid_shape):
        return (
            f"{name} is in fp8, but there is no {scales_name} of shape {[*grid_shape]} in floating "
            "point"
        )

    def read(weights: Weights, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        values = weights(name, shape, offset).float()  # fp8 has no arithmetic of its own
        read_scales = functools.partial(weights, scales_name)
        return multiply_blocks(values, read_scales, offset=offset, block=block)

    return QuantizedTensor(full_shape, (name, scales_name), read, ignored)


def multiply_blocks(
    values: Tensor,
    read_scales: Callable[[Sequence[int], Sequence[int]], Tensor],
    *,
    offset: Sequence[int],
    block: Sequence[int],
) -> Tensor:
    """Multiply a box of a matrix, in place, by the scales of the blocks of the full matrix.

    Only the scales of blocks that the box touches are read.

    Args:
        values: The box, `[R, C]` in fp32.
        read_scales: `read_scales(shape, offset)` reads a box of the scales, one for each block.
        offset: The offset of the box in the full matrix.
        block: The rows and columns of a block.

    Examples:
        >>> from trainkit.parallel.materialize import narrow_to_box
        >>> scales = torch.tensor([[2.0], [5.0]])
        >>> read = lambda shape, offset: narrow_to_box(scales, shape, offset)
        >>> multiply_blocks(torch.ones(2, 1), read, offset=(1, 0), block=(2, 2)).tolist()
        [[2.0], [5.0]]
    """
    if not values.numel():
        return values
    sides = [*zip(offset, values.shape, block, strict=True)]
    first = [start // side for start, _, side in sides]
    ends = [-(-(start + size) // side) for start, size, side in sides]
    counts = [end - start for start, end in zip(first, ends, strict=True)]
    grid = read_scales(counts, first).float()
    # The block of each row and column of the box, which may start inside a block.
    rows, columns = (
        torch.arange(start, start + size) // side - start // side for start, size, side in sides
    )
    # Some rows at a time: a scale for each element would take as much memory as the box.
    for part, blocks in zip(values.split(_ROWS), rows.split(_ROWS), strict=True):
        part.mul_(grid[blocks][:, columns])
    return values


# ------------------------------------------------------------- compressed-tensors and modelopt
# What vLLM's llm-compressor and NVIDIA's Model Optimizer write. In nvfp4 two codes of four bits are
# in a byte, the first in the lower half; each 16 of a row have a scale in e4m3, and the matrix one
# in fp32, which compressed-tensors divides by and modelopt multiplies with. In fp8 a matrix, its
# rows or its blocks have a scale.


def unpack_e2m1(codes: Tensor) -> Tensor:
    """Return the values of codes in e2m1, fp32 `[..., 2 C]` for uint8 `[..., C]`.

    Args:
        codes: Two codes in a byte, the first in the lower half.

    Examples:
        >>> unpack_e2m1(torch.tensor([0x21, 0xF7], dtype=torch.uint8))
        tensor([ 0.5000,  1.0000,  6.0000, -6.0000])
    """
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    # The upper of four bits is the sign. int32 is the least that can be an index.
    halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return values[halves.int()]


def _find_compressed_problem(table: Mapping[str, Any]) -> str | None:
    if table.get("format") not in ("float-quantized", "nvfp4-pack-quantized", "mixed-precision"):
        return "format"
    if table.get("quantization_status") not in (None, "compressed"):
        return "quantization_status"
    # Rotations of the weights: the stored numbers stand for others.
    if table.get("transform_config") not in (None, {}, {"config_groups": {}}):
        return "transform_config"
    sparsity = table.get("sparsity_config")
    if sparsity and _get_entry(sparsity, "format") != "dense":
        return "sparsity_config"
    groups = _list_weights(table)
    is_known = groups and all(
        _get_entry(x, "type") == "float"
        and _get_entry(x, "num_bits") in (4, 8)
        and (_get_entry(x, "block_structure") is None or _is_block(x["block_structure"]))
        for x in groups
    )
    return None if is_known else "config_groups"


def _list_weights(table: Mapping[str, Any]) -> list[Any]:
    groups = table.get("config_groups")
    return (
        [_get_entry(x, "weights") for x in groups.values()] if isinstance(groups, Mapping) else []
    )


def _get_entry(value: Any, key: str) -> Any:
    """Return an entry of what should be a table; None if it is none."""
    return value.get(key) if isinstance(value, Mapping) else None


def _find_compressed(
    tensors: Mapping[str, Stored], name: str, shape: Shape, table: Mapping[str, Any]
) -> QuantizedTensor | str | None:
    if f"{name}_packed" in tensors:
        codes = f"{name}_packed"
        return _find_nvfp4(tensors, codes, name, shape, f"{name}_global_scale", is_divisor=True)
    blocks = [group.get("block_structure") for group in _list_weights(table)]
    return _find_scaled_fp8(tensors, name, next(filter(None, blocks), [FP8_BLOCK, FP8_BLOCK]))


def _find_modelopt_problem(table: Mapping[str, Any]) -> str | None:
    return None if table.get("quant_algo") in ("NVFP4", "FP8") else "quant_algo"


def _find_modelopt(
    tensors: Mapping[str, Stored], name: str, shape: Shape, _: Mapping[str, Any]
) -> QuantizedTensor | str | None:
    if name in tensors and tensors[name].dtype == "uint8":
        return _find_nvfp4(tensors, name, name, shape, f"{name}_scale_2", is_divisor=False)
    return _find_scaled_fp8(tensors, name, [FP8_BLOCK, FP8_BLOCK])


def _find_scaled_fp8(
    tensors: Mapping[str, Stored], name: str, block: Sequence[int]
) -> QuantizedTensor | str | None:
    if name not in tensors or tensors[name].dtype != _FP8:
        return None
    scales_name = f"{name}_scale"
    full_shape = tensors[name].shape
    ignored = _find_ignored(tensors, name)
    if scales_name in tensors and len(full_shape) == 2:
        scales_shape = tensors[scales_name].shape
        if scales_shape in ((), (1,)) and _is_float(tensors, scales_name, scales_shape):

            def read(weights: Weights, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
                scale = weights(scales_name, scales_shape, (0,) * len(scales_shape))
                return weights(name, shape, offset).float() * scale.float()

            return QuantizedTensor(full_shape, (name, scales_name), read, ignored)
        if scales_shape == (full_shape[0], 1):
            block = [1, full_shape[1]]
    return find_blocks(tensors, name, scales_name, block, ignored)


def _find_nvfp4(
    tensors: Mapping[str, Stored],
    codes_name: str,
    name: str,
    full_shape: Shape,
    level_name: str,
    *,
    is_divisor: bool,
) -> QuantizedTensor | str:
    """Return a matrix in nvfp4, whose level is the factor of all scales, or its inverse."""
    scales_name = f"{name}_scale"
    codes, scales = (tensors.get(each) for each in (codes_name, scales_name))
    level_shape = tensors[level_name].shape if level_name in tensors else (0,)
    columns = full_shape[-1]
    if (
        codes is None
        or scales is None
        or len(full_shape) != 2
        or columns % NVFP4_BLOCK
        or (codes.dtype, codes.shape) != ("uint8", (full_shape[0], columns // 2))
        or (scales.dtype, scales.shape) != (_FP8, (full_shape[0], columns // NVFP4_BLOCK))
        or level_shape not in ((), (1,))
        or not _is_float(tensors, level_name, level_shape)
    ):
        return (
            f"{name} of shape {[*full_shape]} is in four bits, but there are no {codes_name} in "
            f"uint8 with half as many columns, {scales_name} in e4m3 with a sixteenth, and one "
            f"number {level_name}"
        )

    def read(weights: Weights, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        level = weights(level_name, level_shape, (0,) * len(level_shape)).float()

        def read_scales(counts: Sequence[int], first: Sequence[int]) -> Tensor:
            block_scales = weights(scales_name, counts, first).float()
            return block_scales / level if is_divisor else block_scales * level

        # Whole bytes, of which the first and the last may have a column that is not in the box.
        start, end = offset[1], offset[1] + shape[1]
        bytes_box = (shape[0], -(-end // 2) - start // 2)
        values = unpack_e2m1(weights(codes_name, bytes_box, (offset[0], start // 2)))
        values = values[:, start % 2 : start % 2 + shape[1]]
        return multiply_blocks(values, read_scales, offset=offset, block=(1, NVFP4_BLOCK))

    return QuantizedTensor(
        full_shape, (codes_name, scales_name, level_name), read, _find_ignored(tensors, name)
    )


def _find_ignored(tensors: Mapping[str, Stored], name: str) -> tuple[str, ...]:
    """Return the scales of a layer's inputs, and of its keys and values in a cache."""
    layer = name.rpartition(".")[0]
    names = (f"{layer}.{each}" for each in _ACTIVATION_SCALES)
    return tuple(each for each in names if each in tensors)


def _is_float(tensors: Mapping[str, Stored], name: str, shape: Shape) -> bool:
    stored = tensors.get(name)
    return (
        stored is not None
        and stored.shape == shape
        and getattr(torch, stored.dtype).is_floating_point
    )


# ------------------------------------------------------------------------------------------- MXFP4
# Open Compute Project, "OCP microscaling formats (MX) specification" (2023), as in gpt-oss: the
# matrices of experts `X`, `[E, in, out]`, are `X_blocks`, uint8 `[E, out, in / 32, 16]` with two
# codes in a byte, and `X_scales`, uint8 `[E, out, in / 32]`, exponents of 2, plus 127.


def _find_mxfp4(
    tensors: Mapping[str, Stored], name: str, full_shape: Shape, _: Mapping[str, Any]
) -> QuantizedTensor | str | None:
    parts = (f"{name}_blocks", f"{name}_scales")
    if name in tensors or not tensors.keys() & {*parts}:
        return None
    *lead, columns, rows = full_shape
    blocks = (*lead, rows, columns // MXFP4_BLOCK)
    wanted = ((*blocks, MXFP4_BLOCK // 2), blocks)
    stored = [tensors.get(part) for part in parts]
    found = tuple(None if x is None else x.shape for x in stored if x is None or x.dtype == "uint8")
    if found != wanted or columns % MXFP4_BLOCK:
        return (
            f"{name} of shape {[*full_shape]} is in MXFP4, but there are no {parts[0]} of shape "
            f"{[*wanted[0]]} and {parts[1]} of shape {[*wanted[1]]}, both in uint8, for "
            f"{columns} columns in whole blocks of {MXFP4_BLOCK}"
        )

    def read(weights: Weights, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        # Stored the other way round; its first and last blocks may be in the box in part.
        *lead_offset, start, first_row = offset
        *lead_shape, size, row_count = shape
        first = start // MXFP4_BLOCK
        count = -(-(start + size) // MXFP4_BLOCK) - first
        box = (*lead_shape, row_count, count)
        box_offset = (*lead_offset, first_row, first)
        codes = weights(parts[0], (*box, MXFP4_BLOCK // 2), (*box_offset, 0))
        exponents = weights(parts[1], box, box_offset).int() - 127
        values = torch.ldexp(unpack_e2m1(codes), exponents.unsqueeze(-1)).flatten(-2)
        return values.narrow(-1, start - first * MXFP4_BLOCK, size).transpose(-1, -2)

    return QuantizedTensor(full_shape, parts, read)


METHODS: Mapping[str, QuantizationMethod] = {
    "fp8": QuantizationMethod(_find_fp8_problem, _find_fp8),
    "compressed-tensors": QuantizationMethod(_find_compressed_problem, _find_compressed),
    "modelopt": QuantizationMethod(_find_modelopt_problem, _find_modelopt),
    "mxfp4": QuantizationMethod(lambda _: None, _find_mxfp4),
}
"""The supported methods, by the `quant_method` of a `quantization_config`."""

_SUPPORTED = (
    "only fp8 in blocks, MXFP4, and fp8 and nvfp4 of compressed-tensors and of modelopt, are "
    "supported"
)
