"""Boxes: the rectangular parts of a saved tensor; whether they tile it, and where two overlap.

An index comes from a file. Everything about it is checked before anything is read or allocated
because of it. This module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""The dtypes of a checkpoint: torch's name to safetensors' name and the bytes of an element."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that weights may have and be cast to."""

# "model/NAME", "optimizer/KEY/NAME" or "components/COMPONENT/KEY".
_TENSOR_NAME = re.compile("model/.+|optimizer/.*/.*|components/.+")
_MAX_DIMS = 16
_MAX_ELEMENTS = 2**53
_MAX_PROBLEMS = 10


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a checkpoint: torch's, without the module."""
    return str(dtype).removeprefix("torch.")


def overlap(
    offset: Sequence[int],
    shape: Sequence[int],
    local_offset: Sequence[int],
    local_shape: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of a saved box and a local box as slices into each; None if disjoint.

    Examples:
        >>> saved, local = overlap([2, 0], [2, 2], [1, 0], [2, 2])
        >>> saved[0], local[0]
        (slice(0, 1, None), slice(1, 2, None))
        >>> overlap([0], [2], [2], [5]) is None
        True
    """
    # A scalar has no dimension that could be disjoint: its overlap is ((), ()).
    in_saved: list[slice] = []
    in_local: list[slice] = []
    for start, length, local_start, local_length in zip(
        offset, shape, local_offset, local_shape, strict=True
    ):
        low = max(start, local_start)
        high = min(start + length, local_start + local_length)
        if low >= high:
            return None
        in_saved.append(slice(low - start, high - start))
        in_local.append(slice(low - local_start, high - local_start))
    return tuple(in_saved), tuple(in_local)


def find_index_problems(index: Any, files: Mapping[str, int]) -> list[str]:
    """Return the problems of a checkpoint's index, at most the first ten.

    Args:
        index: The parsed `index.json`.
        files: The bytes of every file in the manifest.

    Returns:
        One sentence for each tensor with a wrong description, or whose boxes do not cover every
            element exactly once, and for each file that is too small for its boxes. An empty list
            means that the index can be trusted.

    Examples:
        >>> box = {"file": "rank_00000.safetensors", "offset": [0], "shape": [2]}
        >>> entry = {"dtype": "float32", "shape": [3], "boxes": [box]}
        >>> find_index_problems({"tensors": {"model/a": entry}}, {"rank_00000.safetensors": 16})
        ['the boxes of model/a hold 2 of its 3 elements']
    """
    # Every value may be of any type: a hostile file must not raise a TypeError here.
    tensors = index.get("tensors") if isinstance(index, dict) else None
    if not isinstance(tensors, dict):
        return ["index.json is not an index"]
    problems: list[str] = []
    used = dict.fromkeys(files, 0)
    for name, entry in tensors.items():
        problem = find_entry_problem(name, entry, files)
        if problem is not None:  # its boxes cannot be trusted, so they do not count below
            problems.append(problem)
            if len(problems) == _MAX_PROBLEMS:
                return problems
            continue
        for box in entry["boxes"]:
            used[box["file"]] += math.prod(box["shape"]) * DTYPES[entry["dtype"]][1]
    # So no load allocates more memory than there are bytes on the disk.
    return problems + [
        f"{name} has {files[name]} bytes, too few for the {num_bytes} of its boxes"
        for name, num_bytes in used.items()
        if num_bytes > files[name]
    ]


def find_entry_problem(name: Any, entry: Any, files: Mapping[str, int]) -> str | None:
    """Return what is wrong with one entry of an index, or None.

    Examples:
        >>> find_entry_problem("../x", {}, {})
        "a tensor is named '../x'"
    """
    problem = find_description_problem(name, entry)
    if problem is not None:
        return problem
    if not isinstance(entry.get("boxes"), list):
        return f"{name} has no boxes"
    return _find_cover_problem(name, entry["shape"], entry["boxes"], files)


def _find_cover_problem(
    name: str,
    shape: list[int],
    boxes: list[Any],
    files: Mapping[str, int],
) -> str | None:
    """Return why boxes do not cover each element of a tensor exactly once, or None."""
    if not all(_is_box(box, shape, files) for box in boxes):
        return f"a box of {name} is not inside it, or names a file that the manifest does not"
    # The header of a file has one entry per name, so it cannot describe a second box.
    if len({box["file"] for box in boxes}) < len(boxes):
        return f"two boxes of {name} are in one file"
    if not _are_disjoint([(box["offset"], box["shape"]) for box in boxes]):
        return f"the boxes of {name} overlap"
    # Disjoint boxes inside the tensor cover it if and only if they have as many elements.
    covered = sum(math.prod(box["shape"]) for box in boxes)
    if covered != math.prod(shape):
        return f"the boxes of {name} hold {covered} of its {math.prod(shape)} elements"
    return None


def find_description_problem(name: Any, entry: Any) -> str | None:
    """Return what is wrong with the name, dtype or shape of a tensor, or None.

    Examples:
        >>> find_description_problem("model/a", {"dtype": "complex64", "shape": []})
        "model/a has the dtype 'complex64', which no checkpoint holds"
    """
    # Names appear in messages, so they must not contain control characters. None is used as a path.
    is_text = isinstance(name, str) and len(name) <= 1000 and name.isprintable()
    if not is_text or not _TENSOR_NAME.fullmatch(name):
        return f"a tensor is named {str(name)[:100]!r}"
    if not isinstance(entry, dict):
        return f"{name} is not described"
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"{name} has the dtype {str(dtype)[:100]!r}, which no checkpoint holds"
    return None if _are_sizes(entry.get("shape")) else f"{name} has no valid shape"


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return False
    # The product is bounded too: every later allocation is computed from it.
    are_ints = all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in value)
    return are_ints and math.prod(value) < _MAX_ELEMENTS


def _is_box(box: Any, shape: Sequence[int], files: Mapping[str, int]) -> bool:
    file = box.get("file") if isinstance(box, dict) else None
    if not isinstance(file, str) or file not in files:
        return False
    offset = box.get("offset")
    sizes = box.get("shape")
    if not isinstance(offset, list) or not _are_sizes(sizes):
        return False
    # Ranks do not write empty boxes, and `_are_disjoint` relies on that.
    if not len(offset) == len(sizes) == len(shape) or math.prod(sizes) == 0:
        return False
    return all(
        type(start) is int and start >= 0 and start + size <= length
        for start, size, length in zip(offset, sizes, shape, strict=True)
    )


_Boxes = list[tuple[list[int], list[int]]]


def _are_disjoint(boxes: _Boxes) -> bool:
    """Return whether axis-aligned cuts separate all boxes.

    Layouts split tensors by straight cuts, and sorting finds those in n log n. Comparing every pair
    would let a hostile index with many boxes take hours. Boxes that no straight cut separates count
    as overlapping, even if they do not.
    """
    groups = [boxes]  # a stack and no recursion: a hostile file may have any number of boxes
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        dims = range(len(group[0][0]))
        # The first dimension along which a cut separates any of them.
        parts = next((p for dim in dims if len(p := _split_along(group, dim)) > 1), None)
        if parts is None:
            return False
        groups += parts
    return True


def _split_along(boxes: _Boxes, dim: int) -> list[_Boxes]:
    """Split boxes along a dimension, wherever no box crosses the cut."""
    parts: list[_Boxes] = []
    end = -1
    # `end` is where the last of the boxes so far ends: one that starts there opens a new part.
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        if box[0][dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box[0][dim] + box[1][dim])
    return parts


def split_into_files(
    sizes: Mapping[str, int],
    *,
    max_bytes: int,
    max_names: int | None = None,
) -> list[list[str]]:
    """Split names into files, in order, and fill each file before the next one starts.

    Args:
        sizes: The bytes of each name.
        max_bytes: The bytes of a file; a single larger name gets a file alone.
        max_names: The names in a file; None for no limit.

    Examples:
        >>> split_into_files({"a": 2, "b": 2, "c": 9}, max_bytes=4)
        [['a', 'b'], ['c']]
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room or len(files[-1]) == max_names:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= size
    return files


def get_parameter_name(full: str) -> str:
    """Return the parameter that an entry of an index belongs to.

    Examples:
        >>> get_parameter_name("model/a.weight"), get_parameter_name("optimizer/exp_avg/a.weight")
        ('a.weight', 'a.weight')
    """
    kind, _, rest = full.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


def shorten(problems: Iterable[str], max_problems: int = _MAX_PROBLEMS) -> str:
    """Join the first problems into one line, and count the others.

    Examples:
        >>> shorten(["a", "b", "c"], max_problems=2)
        'a; b; and 1 more'
    """
    problems = list(problems)
    more = f"; and {len(problems) - max_problems} more" if len(problems) > max_problems else ""
    return "; ".join(problems[:max_problems]) + more
