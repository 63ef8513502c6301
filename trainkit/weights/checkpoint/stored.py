"""Tensors as they lie in files: which bytes of which file hold which box. Reading checks them.

Checkpoints, exported folders, safetensors files and others' formats are all described by the same
records, so one function reads them and one writes them. No torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson

from trainkit.weights.checkpoint.boxes import DTYPES, entry_problem
from trainkit.weights.checkpoint.safe_files import (
    open_plain,
    parse_json,
    read_exactly,
    refusal,
    size_of,
    skim,
)

_FROM_SAFETENSORS = {name: dtype for dtype, (name, _) in DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,499}")
_MOST_HEADER = 40 * 1024 * 1024  # of about 300,000 tensors
_MOST_NUMBER = 1 << 60


@attrs.frozen
class Extent:
    """One box of a tensor in a file.

    `start` and `size` say, in bytes, where the storage lies; the box begins `skip` elements into
    it and has `stride`. `crc` is what the bytes of the storage must add up to, None when the file
    does not say.
    """

    path: Path
    start: int
    size: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    skip: int = 0
    crc: int | None = None


@attrs.frozen
class Stored:
    """A whole tensor: its dtype in torch's name, its shape, and the extents that hold it."""

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def plain_tensor_name(name: Any) -> bool:
    """Say whether a tensor's name from a file is one that a model would have.

    Examples:
        >>> plain_tensor_name("model/layers.0.weight"), plain_tensor_name("../../etc/x")
        (True, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and ".." not in name


def sizes_of(values: Any, path: Path | str) -> tuple[int, ...]:
    """Return a shape or offset from a file as integers, or refuse it."""
    listed: list[Any] = [*values] if type(values) in (list, tuple) and len(values) <= 16 else [None]
    if not all(type(value) is int and 0 <= value < _MOST_NUMBER for value in listed):
        raise refusal(path, "holds a shape or an offset that no tensor has")
    return tuple(listed)


def sane_table(data: bytes | bytearray, path: Path) -> dict[str, Any]:
    """Parse a table of JSON from others, but none that would need far more memory than itself.

    A key that stands there twice is refused: readers do not agree on which of the values stands.
    """
    # A header has 8 bytes and more for each value, and 15 for each key.
    most = len(data) // 7 if len(data) > 1 << 20 else len(data)
    crowded = data.count(b":") * 12 > len(data) > 1 << 20
    if not isinstance(parse_json(path, data, 0 if crowded else most), dict):
        raise refusal(path, "holds JSON that is no table")
    try:
        return json.loads(data, object_pairs_hook=_table)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"is no good JSON: {error}") from error


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:100]!r} stands there twice")
    return table


# ----------------------------------------------------------------------------------- safetensors


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor in row-major order.

    Examples:
        >>> contiguous_stride((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def safetensors_header(
    tensors: Mapping[str, Stored], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the beginning of a safetensors file: its length in 8 bytes, and padded JSON.

    Args:
        tensors: What follows, in this order; the wider elements first, so that all are aligned.
        metadata: What else it says.

    Examples:
        >>> len(safetensors_header({"a": Stored("float32", (2,), ())}))
        64
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, stored in tensors.items():
        begin, end = end, end + stored.nbytes
        dtype = DTYPES[stored.dtype][0]
        entries[name] = {"dtype": dtype, "shape": stored.shape, "data_offsets": (begin, end)}
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_file(path: Path) -> dict[str, Stored]:
    """Describe the tensors of one safetensors file: names, sizes and places checked, no data read.

    Raises:
        CheckpointError: It is no regular file, or its header is not a good one: a length or shape
            that the file cannot hold, bytes that two tensors or none have, an odd name.

    Examples:
        >>> safetensors_file(Path("/does/not/exist"))
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: checkpoint: /does/not/exist cannot be read: [Errno 2] No ...
    """
    with open_plain(path, shared=True) as file:
        _, found = read_header(file, path, os.fstat(file).st_size)
    for name in found:
        if not plain_tensor_name(name):
            raise refusal(path, f"holds a tensor of the odd name {name[:100]!r}")
    return found


def without_twins(parts: Iterable[Mapping[str, Stored]], folder: Path) -> dict[str, Stored]:
    """Join what the files of a folder hold; refuse a tensor that is in two of them."""
    found: dict[str, Stored] = {}
    for part in parts:
        for name in found.keys() & part.keys():
            raise refusal(folder, f"holds {name} in two files")
        found |= part
    return found


def read_header(
    file: int, path: Path, total: int, *, most: int = _MOST_HEADER
) -> tuple[bytearray, dict[str, Stored]]:
    """Read the header of an open safetensors file, and believe nothing that the file cannot hold.

    Names are not looked at.

    Args:
        file: The file, open for reading.
        path: Its path, for errors.
        total: How many bytes it has.
        most: How many bytes the header may have.

    Returns:
        The bytes before the first tensor, and every tensor by name, in one extent each.

    Raises:
        CheckpointError: The header is longer than it may be, or no JSON of tensors that lie one
            after another to the file's end.
    """
    if total < 8:
        raise refusal(path, f"has {total} bytes, which is no safetensors file")
    length = int.from_bytes(read_exactly(file, 0, 8, path), "little")
    if length > min(total - 8, most):
        raise refusal(path, f"claims a header of {length} bytes and has {total}")
    data = read_exactly(file, 0, 8 + length, path)
    header = sane_table(data[8:], path)
    header.pop("__metadata__", None)
    found = {name: _in_safetensors(path, name, entry, len(data)) for name, entry in header.items()}
    end = len(data)
    for extent in sorted((s.extents[0] for s in found.values()), key=lambda p: (p.start, p.size)):
        if extent.start != end:
            raise refusal(path, "has bytes that belong to no tensor, or to two")
        end += extent.size
    if end != total:
        raise refusal(path, f"has {total} bytes, its tensors end after {end}")
    return data, found


def _in_safetensors(path: Path, name: str, entry: Any, base: int) -> Stored:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise refusal(path, f"says nothing of {name}")
    dtype = _FROM_SAFETENSORS.get(str(entry["dtype"]))
    if dtype is None:
        raise refusal(path, f"holds {name} of the unknown dtype {str(entry['dtype'])[:20]!r}")
    shape = sizes_of(entry["shape"], path)
    places = sizes_of(entry["data_offsets"], path)
    size = math.prod(shape) * DTYPES[dtype][1]
    if len(places) != 2 or places[1] - places[0] != size:
        raise refusal(path, f"gives {name} {list(places)}, its shape needs {size} bytes")
    zeros = (0,) * len(shape)
    extent = Extent(path, base + places[0], size, zeros, shape, contiguous_stride(shape))
    return Stored(dtype, shape, (extent,))


def extent_of(path: Path, name: str, entry: Any, box: Any, held: Mapping[str, Stored]) -> Extent:
    """Return where a box of an index lies, if its file says the same of it as the index.

    Args:
        path: The file that the index names.
        name: The tensor.
        entry: What the index says of the tensor.
        box: What it says of the box.
        held: What the header of the file says.

    Raises:
        CheckpointError: They do not agree.
    """
    found, want = held.get(name), (entry["dtype"], tuple(box["shape"]))
    if found is None or (found.dtype, found.shape) != want:
        said = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
        raise refusal(path, f"has {name[:100]} as {said}, the index as {want[0]}{list(want[1])}")
    return attrs.evolve(found.extents[0], offset=tuple(box["offset"]))


# ----------------------------------------------------------------------------------------- boxes


def check_boxes(name: str, stored: Stored, path: Path | str) -> None:
    """Refuse extents that do not cover a tensor exactly once, or that their file cannot hold.

    Raises:
        CheckpointError: A box is outside the tensor, two overlap, or elements are missing.
    """
    boxes = [extent for extent in stored.extents if math.prod(extent.shape)]
    entry = {
        "dtype": "uint8",
        "shape": list(stored.shape),
        "boxes": [
            {"file": str(i), "offset": list(extent.offset), "shape": list(extent.shape)}
            for i, extent in enumerate(boxes)
        ],
    }
    problem = entry_problem(
        "model/it", entry, {str(i): extent.size for i, extent in enumerate(boxes)}
    )
    if problem is not None:
        raise refusal(path, f"does not hold {name} once and whole: {problem}")
    for extent in boxes:
        _check_extent(name, extent, stored, path)


def _check_extent(name: str, extent: Extent, stored: Stored, path: Path | str) -> None:
    if len(extent.stride) != len(extent.shape):
        raise refusal(path, f"has a box of {name} with other strides than dimensions")
    steps = zip(extent.shape, extent.stride, strict=True)
    last = extent.skip + sum((length - 1) * step for length, step in steps)
    # A stride of 0 claims more elements than there are bytes: so few bytes could fill a memory.
    needed = max(last + 1, math.prod(extent.shape)) * DTYPES[stored.dtype][1]
    if needed > extent.size:
        raise refusal(path, f"has {extent.size} bytes of {name}, its box needs {needed}")
    if extent.start + extent.size > size_of(extent.path):
        raise refusal(extent.path, f"is too short for {name}")


def check_crc(extent: Extent) -> None:
    """Refuse a extent whose bytes do not add up to its CRC-32; torch does not look at it."""
    if extent.crc is None:
        return
    crc = 0

    def feed(block: memoryview) -> None:
        nonlocal crc
        crc = zlib.crc32(block, crc)

    with open_plain(extent.path, shared=True) as file:
        skim(file, extent.start, extent.start + extent.size, extent.path, feed)
    if crc != extent.crc:
        raise refusal(extent.path, f"has damaged bytes at {extent.start}: their CRC-32 differs")
