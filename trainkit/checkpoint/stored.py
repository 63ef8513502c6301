"""Tensors as they lie in files: which bytes of which file hold which box. Reading checks them.

Checkpoints, exported folders, safetensors files and others' formats are all described by the same
records, so one function reads them and one writes them. Describing needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from trainkit.checkpoint.boxes import DTYPES, entry_problem, overlap
from trainkit.types import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FROM_SAFETENSORS = {name: dtype for dtype, (name, _) in DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,499}")
_MOST_HEADER = 40 * 1024 * 1024  # of about 300,000 tensors
_MOST_NUMBER = 1 << 60
_CHUNK = 16 * 1024 * 1024


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


# -------------------------------------------------------------------------------------- refusing


def refusal(path: Path | str, what: str) -> CheckpointError:
    """Return the error for a file that is not what a good one is."""
    return CheckpointError(f"checkpoint: {path} {what}", where=str(path))


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


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes; refuse what is no regular file, links included."""
    try:
        facts = path.lstat()
    except (OSError, ValueError) as error:
        raise refusal(path, f"cannot be read: {error}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise refusal(path, "is no regular file")
    return facts.st_size


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading, never through a link in its last part."""
    regular_size(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise refusal(path, f"cannot be read: {error}") from error
    try:
        yield handle
    finally:
        os.close(handle)


def read_exactly(handle: int, start: int, size: int, path: Path) -> bytearray:
    """Read bytes at a place of a file, all of them or an error."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = os.preadv(handle, [view[done : done + _CHUNK]], start + done)
        if not got:
            raise refusal(path, f"ends after {start + done} bytes, {start + size} were expected")
        done += got
    return data


def sane_json(data: bytes | bytearray, path: Path | str, most: int = _MOST_HEADER) -> Any:
    """Parse JSON that a file holds, but none that would need far more memory than itself.

    A table with a key twice is refused: readers do not agree on which of the values stands.
    """
    values = sum(map(data.count, (b",", b"[", b"{")))
    # A header has 8 bytes and more for each value, and 15 for each key.
    crowded = len(data) > 1 << 20 and max(values * 7, data.count(b":") * 12) > len(data)
    if len(data) > most or crowded:
        raise refusal(path, f"holds {len(data)} bytes of JSON with {values} values; too many")
    try:
        found = orjson.loads(data)
        # Every key has a colon: where there are no more of them, no key stands there twice.
        if data.count(b":") != _keys_in(found):
            json.loads(data, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"holds no good JSON: {error}") from error
    return found


def _keys_in(value: Any) -> int:
    count, rest = 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            count += len(one)
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return count


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    with opened(path) as handle:
        _, found = read_header(handle, path, os.fstat(handle).st_size)
    for name in found:
        if not plain_tensor_name(name):
            raise refusal(path, f"holds a tensor of the odd name {name[:100]!r}")
    return found


def read_header(
    handle: int, path: Path, total: int, *, most: int = _MOST_HEADER
) -> tuple[bytearray, dict[str, Stored]]:
    """Read the header of an open safetensors file, and believe nothing that the file cannot hold.

    Names are not looked at.

    Args:
        handle: The file, open for reading.
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
    length = int.from_bytes(read_exactly(handle, 0, 8, path), "little")
    if length > min(total - 8, most):
        raise refusal(path, f"claims a header of {length} bytes and has {total}")
    data = read_exactly(handle, 0, 8 + length, path)
    header = sane_json(data[8:], path, most)
    if not isinstance(header, dict):
        raise refusal(path, "has a header that is no table")
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
    if extent.start + extent.size > regular_size(extent.path):
        raise refusal(extent.path, f"is too short for {name}")


def check_crc(extent: Extent) -> None:
    """Refuse a extent whose bytes do not add up to its CRC-32; torch does not look at it."""
    if extent.crc is None:
        return
    crc = 0
    with opened(extent.path) as handle:
        for start in range(0, extent.size, _CHUNK):
            size = min(_CHUNK, extent.size - start)
            crc = zlib.crc32(read_exactly(handle, extent.start + start, size, extent.path), crc)
    if crc != extent.crc:
        raise refusal(extent.path, f"has damaged bytes at {extent.start}: their CRC-32 differs")


def read_box(stored: Stored, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Read one box of a tensor, with the memory of the box and of the rows it is read from.

    Args:
        stored: The tensor, whose extents have been checked.
        shape: The shape of the box.
        offset: Where it begins in the whole tensor.

    Returns:
        A new tensor on the CPU, of the dtype of the file.

    Raises:
        ValueError: The box is not inside of the tensor.
        CheckpointError: A file has been cut since it was checked.

    Examples:
        >>> read_box(Stored("float32", (0, 2), ()), (0, 2), (0, 0)).shape
        torch.Size([0, 2])
    """
    import torch  # noqa: PLC0415 - describing tensors needs none of it

    dims = [*zip(offset, shape, strict=True)]
    if len(dims) != len(stored.shape) or any(
        start < 0 or length < 0 or start + length > whole
        for (start, length), whole in zip(dims, stored.shape, strict=True)
    ):
        raise ValueError(f"read_box: {dims} is not inside of a tensor of shape {stored.shape}")
    out = torch.empty(tuple(shape), dtype=getattr(torch, stored.dtype))
    if out.numel() == 0:
        return out
    for extent in stored.extents:
        found = overlap(extent.offset, extent.shape, offset, shape)
        if found is not None:
            out[found.wanted] = _read_part(extent, found.saved, out.dtype)
    return out


def _read_part(extent: Extent, part: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    """Read a part of a extent: its rows alone where they lie together, else all of its storage."""
    import torch  # noqa: PLC0415 - describing tensors needs none of it

    lined_up = part and extent.stride == contiguous_stride(extent.shape)
    row = extent.stride[0] if lined_up else 0
    first = extent.skip + part[0].start * row if lined_up else 0
    count = (part[0].stop - part[0].start) * row if lined_up else extent.size // dtype.itemsize
    with opened(extent.path) as handle:
        place = extent.start + first * dtype.itemsize
        data = read_exactly(handle, place, count * dtype.itemsize, extent.path)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    if lined_up:
        return flat.view(-1, *extent.shape[1:])[(slice(None), *part[1:])]
    return flat.as_strided(extent.shape, extent.stride, extent.skip)[part]


def reader(tensors: Mapping[str, Stored]) -> Callable[[str, Sequence[int], Sequence[int]], Tensor]:
    """Return a `Weights` function that reads described tensors by name."""

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in tensors:
            raise CheckpointError(
                f"weights: there is no {name}; there are {_some(tensors)}", where=name
            )
        stored = tensors[name]
        if len(shape) != len(stored.shape) or any(
            start + length > whole
            for start, length, whole in zip(offset, shape, stored.shape, strict=True)
        ):
            raise CheckpointError(
                f"weights: {name} has the shape {list(stored.shape)}; a box of {list(shape)} at "
                f"{list(offset)} was asked for",
                where=name,
            )
        return read_box(stored, shape, offset)

    return read


def _some(names: Iterable[str], most: int = 3) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
