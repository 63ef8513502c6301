"""Read boxes of tensors out of files; of a checkpoint, every byte that is loaded has been hashed.

The files of a checkpoint are dealt to the ranks. A rank hashes its share while the bytes that it
needs go straight to where they belong; of the other files it reads only what it needs.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from trainkit.parallel.names import Box
from trainkit.types import CheckpointError, Share
from trainkit.weights.checkpoint.boxes import overlap
from trainkit.weights.checkpoint.safe_files import fill, open_plain, refusal, skim
from trainkit.weights.checkpoint.stored import (
    Extent,
    Stored,
    contiguous_stride,
    extent_of,
    read_header,
)

_AT_ONCE = 512 * 1024  # bytes of rows that are read to take a part of each
_FILES_AT_ONCE = 4
_ENTRY_BYTES = 300  # of a safetensors header, or of one box in an index, beside the name


@attrs.frozen(eq=False)
class Target:
    """A tensor to be loaded: the name it was saved under, and this rank's box of it.

    `out` is where the box is read to: on the CPU, of the saved dtype. By default it is the box.
    """

    saved: str
    tensor: Tensor
    box: Box
    out: Tensor = attrs.field(default=attrs.Factory(lambda self: self.box.local, takes_self=True))


def read_box(stored: Stored, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Read one box of a tensor, with the memory of the box and of the rows it is read from.

    Args:
        stored: The tensor, whose extents have been checked.
        shape: The shape of the box, which lies inside of the tensor.
        offset: Where it begins in the whole tensor.

    Returns:
        A new tensor on the CPU, of the dtype of the file.

    Raises:
        CheckpointError: A file has been cut since it was checked.

    Examples:
        >>> read_box(Stored("float32", (0, 2), ()), (0, 2), (0, 0)).shape
        torch.Size([0, 2])
    """
    out = torch.empty(tuple(shape), dtype=getattr(torch, stored.dtype))
    for extent in stored.extents:
        fetches = list(_fetches(extent, offset, out))
        if fetches:
            with open_plain(extent.path, shared=True) as file:
                for fetch in fetches:
                    _fetch(file, fetch, fetch.begin, extent.path, _ignore)
    return out


def reader(tensors: Mapping[str, Stored]) -> Callable[[str, Sequence[int], Sequence[int]], Tensor]:
    """Return a `Weights` function that reads described tensors by name."""

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in tensors:
            some = ", ".join(sorted(tensors)[:3])
            raise CheckpointError(f"weights: there is no {name}; there are {some}", where=name)
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


def read_tensors(
    path: Path,
    files: Mapping[str, Mapping[str, Any]],
    index: Mapping[str, Any],
    wanted: Sequence[Target],
    share: Share,
) -> list[str]:
    """Fill the wanted boxes from a checkpoint, and verify this rank's share of its files.

    Args:
        path: The checkpoint's directory.
        files: Of every file of tensors its "size" and "sha256", from the manifest.
        index: The entries of its index by name, which have been checked.
        wanted: What this rank wants; their `out` is written.
        share: This rank's part of the work of verifying.

    Returns:
        One sentence for each file that is not what was written: then `out` must not be used. Only
            what all ranks find together tells of all files.

    Effects:
        Writes every `out`; reads each file of the share once, in threads that end.
    """
    mine = set(sorted(files)[share.index :: share.count])
    by_file: dict[str, list[Target]] = {name: [] for name in files}
    held: dict[str, dict[str, Any]] = {name: {} for name in files}
    most = 4096 + sum(2 * len(name.encode()) + _ENTRY_BYTES for name in index)  # of a header
    for name, entry in index.items():
        for box in entry["boxes"]:
            held[box["file"]][name] = entry, box
    for want in wanted:
        for box in index[want.saved]["boxes"]:
            by_file[box["file"]].append(want)

    def read(name: str) -> list[str]:
        said = (files[name], held[name], by_file[name])
        try:
            _read_file(path / name, *said, most=most, hashed=name in mine)
        except CheckpointError as error:
            return [error.what]
        return []

    names = [name for name in sorted(files) if name in mine or by_file[name]]
    if not names:
        return []
    with ThreadPoolExecutor(min(len(names), _FILES_AT_ONCE)) as pool:
        return [problem for problems in pool.map(read, names) for problem in problems]


def _read_file(
    path: Path,
    want: Mapping[str, Any],
    held: Mapping[str, Any],
    wanted: Sequence[Target],
    *,
    most: int,
    hashed: bool,
) -> None:
    digest = hashlib.sha256()
    feed = digest.update if hashed else _ignore
    with open_plain(path) as file:
        size = os.fstat(file).st_size
        if size != want["size"]:
            raise refusal(path, f"has {size} bytes, the manifest says {want['size']}")
        header, stored = read_header(file, path, size, most=most)
        feed(memoryview(header))
        # Other boxes may be there too: a rank outside a tensor's mesh writes what another has.
        extents = {name: extent_of(path, name, e, box, stored) for name, (e, box) in held.items()}
        fetches = [
            fetch
            for wish in wanted
            for fetch in _fetches(extents[wish.saved], wish.box.offset, wish.out)
        ]
        at = len(header)
        for fetch in sorted(fetches, key=lambda fetch: fetch.begin):
            if hashed:
                skim(file, at, fetch.begin, path, feed)
            at = _fetch(file, fetch, at, path, feed)
        if hashed:
            skim(file, at, size, path, feed)
    if hashed:
        _must_match(path, digest.hexdigest(), want)


def _must_match(path: Path, found: str, want: Mapping[str, Any]) -> None:
    if found != want["sha256"]:
        raise refusal(path, "does not match its sha256")


def _ignore(_: memoryview) -> None:
    pass


# ------------------------------------------------------------------------------------------- bytes


@attrs.frozen(eq=False)
class _Fetch:
    """Bytes of a file, and where they go: straight into `into`, or a part of them (`taken`).

    A part is taken out of the elements that the bytes are, seen with `shape` and `stride`.
    """

    begin: int
    end: int
    into: Tensor
    taken: tuple[slice, ...] | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    skip: int = 0


def _fetch(
    file: int, fetch: _Fetch, at: int, path: Path, feed: Callable[[memoryview], object]
) -> int:
    """Read what a fetch says; `at` is where the hash has come to. Return where it has come to."""
    count = (fetch.end - fetch.begin) // fetch.into.element_size()
    room = fetch.into if fetch.taken is None else fetch.into.new_empty(count)
    data = room.reshape(-1).view(torch.uint8).numpy().data
    known = max(0, min(at, fetch.end) - fetch.begin)  # a tied copy's bytes have been hashed before
    fill(file, fetch.begin, data[:known], path)
    fill(file, fetch.begin + known, data[known:], path, feed)
    if fetch.taken is not None:
        fetch.into.copy_(room.as_strided(fetch.shape, fetch.stride, fetch.skip)[fetch.taken])
    return max(at, fetch.end)


def _fetches(extent: Extent, offset: Sequence[int], out: Tensor) -> Iterator[_Fetch]:
    """Say which bytes of an extent a wanted box needs.

    Rows that both hold whole are read in place; of others, whole rows are read, some at a time.
    Storage that is not in the order of its rows is read whole.
    """
    found = overlap(extent.offset, extent.shape, offset, out.shape)
    if found is None:
        return
    saved, into = found[0], out[found[1]]
    shape, item = extent.shape, out.element_size()
    if extent.stride != contiguous_stride(shape):
        layout = (shape, extent.stride, extent.skip)
        yield _Fetch(extent.start, extent.start + extent.size, into, saved, *layout)
        return
    start = extent.start + extent.skip * item
    if not shape:
        yield _Fetch(start, start + item, into)
        return
    row = math.prod(shape[1:]) * item
    first, last = saved[0].start, saved[0].stop
    if into.shape[1:] == shape[1:] and into.is_contiguous():
        yield _Fetch(start + first * row, start + last * row, into)
        return
    many = max(1, _AT_ONCE // row)
    for low in range(first, last, many):
        high = min(low + many, last)
        part = into[low - first : high - first]
        rows = (high - low, *shape[1:])
        taken = (slice(None), *saved[1:])
        yield _Fetch(
            start + low * row, start + high * row, part, taken, rows, contiguous_stride(rows)
        )
