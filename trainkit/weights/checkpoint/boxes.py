"""Boxes: the parts that a tensor was cut into; whether they are the whole, and where two meet.

An index comes from a file, so everything about it is checked before anything is read or allocated
by its word. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

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
"""The dtypes that a checkpoint may hold, in torch's name: safetensors' name of it, and bytes."""

_MOST_DIMS = 16
_MOST_ELEMENTS = 2**53
_TOLD = 10


def overlap(
    offset: Sequence[int],
    shape: Sequence[int],
    own_offset: Sequence[int],
    own_shape: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where a box that was saved meets one that is wanted: slices into each; or None.

    Examples:
        >>> saved, wanted = overlap([2, 0], [2, 2], [1, 0], [2, 2])
        >>> saved[0], wanted[0]
        (slice(0, 1, None), slice(1, 2, None))
        >>> overlap([0], [2], [2], [5]) is None
        True
    """
    in_saved: list[slice] = []
    in_wanted: list[slice] = []
    for start, length, own_start, own_length in zip(
        offset, shape, own_offset, own_shape, strict=True
    ):
        low, high = max(start, own_start), min(start + length, own_start + own_length)
        if low >= high:
            return None
        in_saved.append(slice(low - start, high - start))
        in_wanted.append(slice(low - own_start, high - own_start))
    return tuple(in_saved), tuple(in_wanted)


def box_bytes(entry: Mapping[str, Any], box: Mapping[str, Any]) -> int:
    """Return how many bytes a box of a tensor has.

    Examples:
        >>> box_bytes({"dtype": "bfloat16"}, {"shape": [2, 3]})
        12
    """
    return math.prod(box["shape"]) * DTYPES[entry["dtype"]][1]


def index_problems(index: Any, files: Mapping[str, int]) -> list[str]:
    """Say what is wrong with the index of a checkpoint; of many problems the first ones.

    Args:
        index: What `index.json` holds.
        files: The bytes of every file that the manifest names.

    Returns:
        One sentence for each tensor that is described wrongly, or whose boxes are not the whole of
            it, each element once; and for each file that is too small for its boxes. Empty when
            the index may be believed.

    Examples:
        >>> box = {"file": "rank_00000.safetensors", "offset": [0], "shape": [2]}
        >>> entry = {"dtype": "float32", "shape": [3], "boxes": [box]}
        >>> index_problems({"tensors": {"model/a": entry}}, {"rank_00000.safetensors": 16})
        ['the boxes of model/a hold 2 of its 3 elements']
    """
    tensors = index.get("tensors") if isinstance(index, dict) else None
    if not isinstance(tensors, dict):
        return ["index.json is not an index"]
    problems: list[str] = []
    used = dict.fromkeys(files, 0)
    for name, entry in tensors.items():
        found = entry_problem(name, entry, files)
        if found is not None:
            problems.append(found)
            if len(problems) == _TOLD:
                return problems
            continue
        for box in entry["boxes"]:
            used[box["file"]] += box_bytes(entry, box)
    return problems + [
        f"{name} has {files[name]} bytes, too few for the {bytes_} of its boxes"
        for name, bytes_ in used.items()
        if bytes_ > files[name]
    ]


def entry_problem(name: Any, entry: Any, files: Mapping[str, int]) -> str | None:
    """Say what is wrong with one entry of an index.

    Examples:
        >>> entry_problem("../x", {}, {})
        "a tensor is named '../x'"
    """
    found = description_problem(name, entry)
    if found is not None:
        return found
    if not isinstance(entry.get("boxes"), list):
        return f"{name} has no boxes"
    return _cover_problem(name, entry["shape"], entry["boxes"], files)


def description_problem(name: Any, entry: Any) -> str | None:
    """Say what is wrong with the name, the dtype or the shape of a tensor.

    Examples:
        >>> description_problem("model/a", {"dtype": "complex64", "shape": []})
        "model/a has the dtype 'complex64', which no checkpoint holds"
    """
    if not _is_tensor_name(name):
        return f"a tensor is named {str(name)[:100]!r}"
    if not isinstance(entry, dict):
        return f"{name} is not described"
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"{name} has the dtype {str(dtype)[:100]!r}, which no checkpoint holds"
    return None if _are_sizes(entry.get("shape")) else f"{name} has no sane shape"


def _cover_problem(
    name: str, shape: list[int], boxes: list[Any], files: Mapping[str, int]
) -> str | None:
    if not all(_is_box(box, shape, files) for box in boxes):
        return f"a box of {name} is not inside it, or names a file that the manifest does not"
    if len({box["file"] for box in boxes}) < len(boxes):
        return f"two boxes of {name} are in one file"
    if not _are_disjoint([(box["offset"], box["shape"]) for box in boxes]):
        return f"the boxes of {name} overlap"
    held = sum(math.prod(box["shape"]) for box in boxes)
    if held != math.prod(shape):
        return f"the boxes of {name} hold {held} of its {math.prod(shape)} elements"
    return None


def _is_tensor_name(name: Any) -> bool:
    """Say whether a name has the form that saving gives: it is only ever a key, never a path."""
    if not isinstance(name, str) or len(name) > 1000 or not name.isprintable():
        return False
    kind, _, rest = name.partition("/")
    return bool(rest) and (kind == "model" or (kind == "optimizer" and "/" in rest))


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        return False
    whole = all(type(n) is int and 0 <= n < _MOST_ELEMENTS for n in value)
    return whole and math.prod(value) < _MOST_ELEMENTS


def _is_box(box: Any, shape: Sequence[int], files: Mapping[str, int]) -> bool:
    file = box.get("file") if isinstance(box, dict) else None
    if not isinstance(file, str) or file not in files:
        return False
    offset, sizes = box.get("offset"), box.get("shape")
    if not isinstance(offset, list) or not _are_sizes(sizes):
        return False
    if not len(offset) == len(sizes) == len(shape) or math.prod(sizes) == 0:
        return False
    return all(
        type(start) is int and start >= 0 and start + size <= whole
        for start, size, whole in zip(offset, sizes, shape, strict=True)
    )


_Boxes = list[tuple[list[int], list[int]]]


def _are_disjoint(boxes: _Boxes) -> bool:
    """Say whether no two boxes overlap, of boxes that straight cuts through all of them made.

    Layouts cut in straight lines, and then sorting finds the cuts: n log n for n boxes, where
    comparing every two would let a hostile index of many boxes take hours. What no straight cut
    takes apart counts as overlapping.
    """
    rest = [boxes]
    while rest:
        group = rest.pop()
        if len(group) < 2:
            continue
        parts = next((p for d in range(len(group[0][0])) if len(p := _cut(group, d)) > 1), None)
        if parts is None:
            return False
        rest += parts
    return True


def _cut(boxes: _Boxes, dim: int) -> list[_Boxes]:
    """Cut boxes apart along a dimension, wherever no box crosses the cut."""
    parts: list[_Boxes] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        if box[0][dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box[0][dim] + box[1][dim])
    return parts


def shared_out(
    sizes: Mapping[str, int], *, most_bytes: int, most_names: int | None = None
) -> list[list[str]]:
    """Share names out over files in their order, each file full; a name alone may be larger.

    Args:
        sizes: The bytes of each name.
        most_bytes: Of a file.
        most_names: In a file; None for any number.

    Examples:
        >>> shared_out({"a": 2, "b": 2, "c": 9}, most_bytes=4)
        [['a', 'b'], ['c']]
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room or len(files[-1]) == most_names:
            files.append([])
            room = most_bytes
        files[-1].append(name)
        room -= size
    return files


def parameter_of(full: str) -> str:
    """Return whose tensor it is that an index names.

    Examples:
        >>> parameter_of("model/a.weight"), parameter_of("optimizer/exp_avg/a.weight")
        ('a.weight', 'a.weight')
    """
    kind, _, rest = full.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


def shortened(problems: Iterable[str], most: int = _TOLD) -> str:
    """Join problems into one line: the first ones, and how many more there are.

    Examples:
        >>> shortened(["a", "b", "c"], most=2)
        'a; b; and 1 more'
    """
    problems = list(problems)
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
