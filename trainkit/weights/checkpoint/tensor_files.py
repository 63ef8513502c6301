"""Describe tensors in files: which bytes of which file contain which box.

Checkpoints, exported folders, safetensors files and foreign formats share these records, so one
function reads all of them and one writes them. Headers are checked before they are used. Without
torch.
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

from trainkit.weights.checkpoint.boxes import DTYPES, find_entry_problem
from trainkit.weights.checkpoint.safe_files import (
    get_file_size,
    open_plain,
    parse_json,
    read_exactly,
    refusal,
    skim,
)

_FROM_SAFETENSORS = {name: dtype for dtype, (name, _) in DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,499}")
_MAX_HEADER = 40 * 1024 * 1024  # bytes, of about 300,000 tensors
_MAX_NUMBER = 1 << 60


@attrs.frozen
class Extent:
    """One box of a tensor in a file.

    `start` and `size` locate its storage, in bytes. The box begins `skip` elements into the storage
    and has `stride`. `crc` is the CRC-32 of the storage, or None if the file has none.
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
    """A full tensor: torch's name of its dtype, its shape, and the extents that contain it."""

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def is_plain_tensor_name(name: Any) -> bool:
    """Return whether a tensor's name from a file could be a name in a model.

    Examples:
        >>> is_plain_tensor_name("model/layers.0.weight"), is_plain_tensor_name("../../etc/x")
        (True, False)
    """
    # Names become keys and messages only, but others may use them as paths.
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and ".." not in name


def parse_sizes(values: Any, path: Path | str) -> tuple[int, ...]:
    """Return a shape or offset from a file as a tuple; raise CheckpointError if it is not one."""
    if (
        type(values) not in (list, tuple)
        or len(values) > 16
        or not all(type(value) is int and 0 <= value < _MAX_NUMBER for value in values)
    ):
        raise refusal(path, "holds a shape or an offset that no tensor has")
    return tuple(values)


def parse_untrusted_table(data: bytes | bytearray, path: Path) -> dict[str, Any]:
    """Parse an untrusted JSON object whose memory stays in proportion to its bytes.

    Duplicate keys are an error, because readers do not agree on which value counts.
    """
    # A header has at least 8 bytes for each value, and 15 for each key.
    max_values = len(data) // 7 if len(data) > 1 << 20 else len(data)
    has_too_many_keys = data.count(b":") * 12 > len(data) > 1 << 20
    # With 0 values allowed it is rejected before it is parsed.
    if not isinstance(parse_json(path, data, 0 if has_too_many_keys else max_values), dict):
        raise refusal(path, "holds JSON that is no table")

    def make_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {duplicate[:100]!r} stands there twice")
        return table

    try:
        # orjson has no hook for pairs, and would silently take the last value of a key.
        return json.loads(data, object_pairs_hook=make_table)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"is no good JSON: {error}") from error


# ----------------------------------------------------------------------------------- safetensors


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor in row-major order.

    Examples:
        >>> contiguous_stride((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def make_safetensors_header(
    tensors: Mapping[str, Stored], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, and padded JSON.

    Args:
        tensors: The tensors that follow, in this order. With the widest elements first all are
            aligned.
        metadata: The "__metadata__" of the header.

    Examples:
        >>> len(make_safetensors_header({"a": Stored("float32", (2,), ())}))
        64
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, stored in tensors.items():
        start = end
        end = start + stored.nbytes
        dtype = DTYPES[stored.dtype][0]
        entries[name] = {"dtype": dtype, "shape": stored.shape, "data_offsets": (start, end)}
    text = orjson.dumps(entries)
    # The tensors that follow must be aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_file(path: Path) -> dict[str, Stored]:
    """Describe the tensors of one safetensors file from its checked header, without reading data.

    Raises:
        CheckpointError: It is not a regular file, or its header is wrong: a length or shape that
            does not fit into the file, bytes of two tensors or of none, an odd name.

    Examples:
        >>> safetensors_file(Path("/does/not/exist"))
        Traceback (most recent call last):
        ...
        trainkit.types.CheckpointError: checkpoint: /does/not/exist cannot be read: [Errno 2] No ...
    """
    with open_plain(path, shared=True) as file:
        _, tensors = read_header(file, path, os.fstat(file).st_size)
    for name in tensors:
        if not is_plain_tensor_name(name):
            raise refusal(path, f"holds a tensor of the odd name {name[:100]!r}")
    return tensors


def merge_tensors(parts: Iterable[Mapping[str, Stored]], folder: Path) -> dict[str, Stored]:
    """Merge the tensors of a folder's files; raise CheckpointError if one is in two files."""
    tensors: dict[str, Stored] = {}
    for part in parts:
        # Which of two would be read depends on the reader.
        for name in tensors.keys() & part.keys():
            raise refusal(folder, f"holds {name} in two files")
        tensors |= part
    return tensors


def read_header(
    file: int, path: Path, total: int, *, max_bytes: int = _MAX_HEADER
) -> tuple[bytearray, dict[str, Stored]]:
    """Read and check the header of an open safetensors file, except for the names.

    Args:
        file: The file, open for reading.
        path: Its path, for errors.
        total: Its bytes.
        max_bytes: The maximum bytes of the header.

    Returns:
        The bytes before the first tensor, and every tensor by name, in one extent each.

    Raises:
        CheckpointError: The header is too long, or is not JSON that describes tensors which fill
            the rest of the file without gaps.
    """
    if total < 8:
        raise refusal(path, f"has {total} bytes, which is no safetensors file")
    length = int.from_bytes(read_exactly(file, 0, 8, path), "little")
    # Checked before it is read: the 8 bytes of the length may claim any size.
    if length > min(total - 8, max_bytes):
        raise refusal(path, f"claims a header of {length} bytes and has {total}")
    data = read_exactly(file, 0, 8 + length, path)
    header = parse_untrusted_table(data[8:], path)
    header.pop("__metadata__", None)  # texts for people; nothing depends on them
    tensors = {name: _parse_entry(path, name, entry, len(data)) for name, entry in header.items()}
    end = len(data)
    extents = [stored.extents[0] for stored in tensors.values()]
    for extent in sorted(extents, key=lambda extent: (extent.start, extent.size)):
        # A gap could hide data, and an overlap would make a change of one tensor change another.
        if extent.start != end:
            raise refusal(path, "has bytes that belong to no tensor, or to two")
        end += extent.size
    if end != total:
        raise refusal(path, f"has {total} bytes, its tensors end after {end}")
    return data, tensors


def _parse_entry(path: Path, name: str, entry: Any, base: int) -> Stored:
    """Return the tensor of one entry of a header; offsets count from `base`."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise refusal(path, f"says nothing of {name}")
    dtype = _FROM_SAFETENSORS.get(str(entry["dtype"]))
    if dtype is None:
        raise refusal(path, f"holds {name} of the unknown dtype {str(entry['dtype'])[:20]!r}")
    shape = parse_sizes(entry["shape"], path)
    offsets = parse_sizes(entry["data_offsets"], path)
    size = math.prod(shape) * DTYPES[dtype][1]
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise refusal(path, f"gives {name} {list(offsets)}, its shape needs {size} bytes")
    extent = Extent(
        path=path,
        start=base + offsets[0],
        size=size,
        offset=(0,) * len(shape),
        shape=shape,
        stride=contiguous_stride(shape),
    )
    return Stored(dtype, shape, (extent,))


def find_extent(
    path: Path, name: str, entry: Any, box: Any, header: Mapping[str, Stored]
) -> Extent:
    """Return the extent of an index's box in its file, after comparing both.

    Args:
        path: The file that the index names.
        name: The tensor.
        entry: The tensor's entry in the index.
        box: The box in that entry.
        header: The tensors in the header of the file.

    Raises:
        CheckpointError: The index and the file disagree.
    """
    stored = header.get(name)
    dtype = entry["dtype"]
    shape = tuple(box["shape"])
    if stored is None or (stored.dtype, stored.shape) != (dtype, shape):
        actual = "nothing" if stored is None else f"{stored.dtype}{list(stored.shape)}"
        raise refusal(path, f"has {name[:100]} as {actual}, the index as {dtype}{list(shape)}")
    # In its file the box is a tensor of its own, at offset 0.
    return attrs.evolve(stored.extents[0], offset=tuple(box["offset"]))


# ----------------------------------------------------------------------------------------- boxes


def check_boxes(name: str, stored: Stored, path: Path | str) -> None:
    """Check that extents cover a tensor exactly once, and fit into their files.

    Raises:
        CheckpointError: A box is outside the tensor, two overlap, elements are missing, or a file
            is too short.
    """
    # The same check as for an index of ours, with the extents in place of files.
    boxes = [extent for extent in stored.extents if math.prod(extent.shape)]
    entry = {
        # Any name and dtype will do: only the boxes are checked here.
        "dtype": "uint8",
        "shape": list(stored.shape),
        "boxes": [
            {"file": str(i), "offset": list(extent.offset), "shape": list(extent.shape)}
            for i, extent in enumerate(boxes)
        ],
    }
    problem = find_entry_problem(
        "model/it", entry, {str(i): extent.size for i, extent in enumerate(boxes)}
    )
    if problem is not None:
        raise refusal(path, f"does not hold {name} once and whole: {problem}")
    for extent in boxes:
        if len(extent.stride) != len(extent.shape):
            raise refusal(path, f"has a box of {name} with other strides than dimensions")
        # The index of the box's last element in the storage.
        last = extent.skip + sum(
            (length - 1) * step for length, step in zip(extent.shape, extent.stride, strict=True)
        )
        # With a stride of 0 a few bytes could expand to a tensor that fills the memory.
        needed = max(last + 1, math.prod(extent.shape)) * DTYPES[stored.dtype][1]
        if needed > extent.size:
            raise refusal(path, f"has {extent.size} bytes of {name}, its box needs {needed}")
        if extent.start + extent.size > get_file_size(extent.path):
            raise refusal(extent.path, f"is too short for {name}")


def check_crc(extent: Extent) -> None:
    """Raise CheckpointError if the bytes of an extent do not match its CRC-32.

    torch.load does not check it.
    """
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
