"""Read boxes of tensors from files, and verify a checkpoint's files while they are read.

The files of a checkpoint are shared among the ranks for verification. A rank hashes its files while
the bytes that it needs go straight to their tensors. From other files it reads only those bytes.
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

from trainkit.parallel.parameters import Box
from trainkit.types import CheckpointError, Share
from trainkit.weights.checkpoint.boxes import overlap
from trainkit.weights.checkpoint.safe_files import fill, open_plain, refusal, skim
from trainkit.weights.checkpoint.tensor_files import (
    Extent,
    Stored,
    contiguous_stride,
    find_extent,
    read_header,
)

_ROWS_BYTES = 512 * 1024  # of full rows read at once, where only a part of each is needed
_FILES_AT_ONCE = 4
_ENTRY_BYTES = 300  # of an entry in a safetensors header without its name, at most


@attrs.frozen(eq=False)
class Target:
    """A tensor to load: the name that it was saved under, and this rank's box of it.

    The box is read into `out`, on the CPU and of the saved dtype. By default `out` is the box.
    """

    saved: str
    tensor: Tensor
    box: Box
    out: Tensor = attrs.field(default=attrs.Factory(lambda self: self.box.local, takes_self=True))


def read_box(stored: Stored, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Read one box of a tensor; only the box and the rows it lies in are in memory.

    Args:
        stored: The tensor, whose extents have been checked.
        shape: The shape of the box, which lies inside the tensor.
        offset: The offset of the box in the full tensor.

    Returns:
        A new tensor on the CPU, of the dtype of the file.

    Raises:
        CheckpointError: A file has been truncated since it was checked.

    Examples:
        >>> read_box(Stored("float32", (0, 2), ()), (0, 2), (0, 0)).shape
        torch.Size([0, 2])
    """
    # Extents cover a tensor exactly once, so every element of `out` is written below.
    out = torch.empty(tuple(shape), dtype=getattr(torch, stored.dtype))
    for extent in stored.extents:
        fetches = list(_plan_fetches(extent, offset, out))
        if fetches:
            with open_plain(extent.path, shared=True) as file:
                for fetch in fetches:
                    _read_bytes(file, fetch, fetch.start, extent.path, _ignore)
    return out


def make_weights_reader(
    tensors: Mapping[str, Stored],
) -> Callable[[str, Sequence[int], Sequence[int]], Tensor]:
    """Return a `Weights` function that reads boxes of tensors by name."""

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        if name not in tensors:
            some = ", ".join(sorted(tensors)[:3])
            raise CheckpointError(f"weights: there is no {name}; there are {some}", where=name)
        stored = tensors[name]
        if len(shape) != len(stored.shape) or any(
            start + length > size
            for start, length, size in zip(offset, shape, stored.shape, strict=True)
        ):
            raise CheckpointError(
                f"weights: {name} has the shape {list(stored.shape)}; a box of {list(shape)} at "
                f"{list(offset)} was requested",
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
    """Read this rank's boxes from a checkpoint, and verify this rank's share of its files.

    Args:
        path: The checkpoint's directory.
        files: "size" and "sha256" of every file of tensors, from the manifest.
        index: The entries of its index by name, which have been checked.
        wanted: This rank's targets; their `out` is written.
        share: This rank's share of the files to verify.

    Returns:
        One sentence for each file that differs from the manifest; then `out` must not be used. A
            file is verified by one rank, so only the lists of all ranks cover all files.

    Effects:
        Writes every `out`; reads each file of the share once, in threads that end.
    """
    # Sorted, because all ranks must assign the files in the same way.
    to_verify = set(sorted(files)[share.index :: share.count])
    targets: dict[str, list[Target]] = {name: [] for name in files}
    entries: dict[str, dict[str, Any]] = {name: {} for name in files}
    # The index bounds the header, so a hostile header cannot fill the memory.
    max_header = 4096 + sum(2 * len(name.encode()) + _ENTRY_BYTES for name in index)
    for name, entry in index.items():
        for box in entry["boxes"]:
            # A file has at most one box of a tensor, as `find_index_problems` has checked.
            entries[box["file"]][name] = entry, box
    for target in wanted:
        for box in index[target.saved]["boxes"]:
            targets[box["file"]].append(target)

    def read(name: str) -> list[str]:
        try:
            _read_file(
                path / name,
                files[name],
                entries[name],
                targets[name],
                max_header=max_header,
                is_hashed=name in to_verify,
            )
        except CheckpointError as error:
            return [error.what]
        return []

    # All ranks together verify every file; of another rank's files only the boxes are read.
    names = [name for name in sorted(files) if name in to_verify or targets[name]]
    if not names:
        return []
    with ThreadPoolExecutor(min(len(names), _FILES_AT_ONCE)) as pool:
        return [problem for problems in pool.map(read, names) for problem in problems]


def _read_file(
    path: Path,
    expected: Mapping[str, Any],
    entries: Mapping[str, Any],
    targets: Sequence[Target],
    *,
    max_header: int,
    is_hashed: bool,
) -> None:
    """Read the boxes of one file, in the order of the file, and hash all of it if `is_hashed`."""
    digest = hashlib.sha256()
    feed = digest.update if is_hashed else _ignore
    with open_plain(path) as file:
        size = os.fstat(file).st_size
        if size != expected["size"]:
            raise refusal(path, f"has {size} bytes, the manifest says {expected['size']}")
        header, stored = read_header(file, path, size, max_bytes=max_header)
        feed(memoryview(header))
        # The file may have other boxes too: a rank outside a tensor's mesh writes a duplicate.
        extents = {
            name: find_extent(path, name, entry, box, stored)
            for name, (entry, box) in entries.items()
        }
        fetches = [
            fetch
            for target in targets
            for fetch in _plan_fetches(extents[target.saved], target.box.offset, target.out)
        ]
        # All bytes before this offset have been hashed.
        position = len(header)
        # In the order of the file, so that one pass both hashes and copies.
        for fetch in sorted(fetches, key=lambda fetch: fetch.start):
            if is_hashed:
                skim(file, position, fetch.start, path, feed)
            position = _read_bytes(file, fetch, position, path, feed)
        if is_hashed:
            skim(file, position, size, path, feed)
    if is_hashed:
        _check_sha256(path, digest.hexdigest(), expected)


# A function of its own, because tests of damaged files replace it to see what else notices.
def _check_sha256(path: Path, actual: str, expected: Mapping[str, Any]) -> None:
    if actual != expected["sha256"]:
        raise refusal(path, "does not match its sha256")


def _ignore(_: memoryview) -> None:
    """Take the place of a hash's `update`."""


# ------------------------------------------------------------------------------------------- bytes


@attrs.frozen(eq=False)
class _Fetch:
    """The bytes from `start` to `end` of a file, which fill `into`.

    With `slices` only a part of them is copied: the bytes are viewed as elements with `shape` and
    `stride`, starting at element `skip`, and sliced.
    """

    start: int
    end: int
    into: Tensor
    slices: tuple[slice, ...] | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    skip: int = 0


def _read_bytes(
    file: int,
    fetch: _Fetch,
    hashed_to: int,
    path: Path,
    feed: Callable[[memoryview], object],
) -> int:
    """Read the bytes of a fetch, hash those after `hashed_to`, and return the new `hashed_to`."""
    count = (fetch.end - fetch.start) // fetch.into.element_size()
    # Without slices the file is read into the tensor itself.
    buffer = fetch.into if fetch.slices is None else fetch.into.new_empty(count)
    # A view of its memory: `buffer` is contiguous, so `reshape` copies nothing.
    data = buffer.reshape(-1).view(torch.uint8).numpy().data
    # Two targets may need the same bytes, a tied copy for instance. They are hashed only once.
    hashed = max(0, min(hashed_to, fetch.end) - fetch.start)
    fill(file, fetch.start, data[:hashed], path)
    fill(file, fetch.start + hashed, data[hashed:], path, feed)
    if fetch.slices is not None:
        elements = buffer.as_strided(fetch.shape, fetch.stride, fetch.skip)
        fetch.into.copy_(elements[fetch.slices])
    return max(hashed_to, fetch.end)


def _plan_fetches(extent: Extent, offset: Sequence[int], out: Tensor) -> Iterator[_Fetch]:
    """Yield the bytes of an extent that a box needs.

    Full rows are read in place. For parts of rows, full rows are read in small groups and sliced.
    Storage that is not row-major is read completely.
    """
    slices = overlap(extent.offset, extent.shape, offset, out.shape)
    if slices is None:
        return
    in_extent, in_out = slices
    into = out[in_out]  # a view
    shape = extent.shape
    item = out.element_size()
    if extent.stride != contiguous_stride(shape):
        yield _Fetch(
            start=extent.start,
            end=extent.start + extent.size,
            into=into,
            slices=in_extent,
            shape=shape,
            stride=extent.stride,
            skip=extent.skip,
        )
        return
    start = extent.start + extent.skip * item
    if not shape:
        yield _Fetch(start, start + item, into)
        return
    row_bytes = math.prod(shape[1:]) * item
    first, last = in_extent[0].start, in_extent[0].stop
    # Rows of the box are rows of the file: the bytes between the first and the last are the box.
    if into.shape[1:] == shape[1:] and into.is_contiguous():
        yield _Fetch(start + first * row_bytes, start + last * row_bytes, into)
        return
    rows_per_fetch = max(1, _ROWS_BYTES // row_bytes)
    for low in range(first, last, rows_per_fetch):
        high = min(low + rows_per_fetch, last)
        # Rows are chosen by what is read; slices choose among the other dimensions.
        rows_shape = (high - low, *shape[1:])
        yield _Fetch(
            start=start + low * row_bytes,
            end=start + high * row_bytes,
            into=into[low - first : high - first],
            slices=(slice(None), *in_extent[1:]),
            shape=rows_shape,
            stride=contiguous_stride(rows_shape),
        )
