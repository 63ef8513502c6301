"""Read and verify in one pass: every byte that is loaded is one that has been hashed.

The files of a checkpoint are dealt to the ranks. A rank hashes its share while the bytes that it
needs go straight to where they belong; of the other files it reads only what it needs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch
from torch import Tensor

from trainkit.checkpoint.boxes import box_bytes, overlap
from trainkit.checkpoint.plain import open_plain
from trainkit.checkpoint.stored import Stored, read_exactly, read_header
from trainkit.types import CheckpointError, Share

_BLOCK = 512 * 1024  # read and hashed at once, out of the same cache: 4 MiB cost a third more
_FILES_AT_ONCE = 4
_ENTRY_BYTES = 300  # of a safetensors header, or of one box in an index, beside the name


@attrs.frozen(eq=False)
class Wanted:
    """A box that a rank wants to read: its name in the index, where it begins, and where it goes.

    `out` is on the CPU, of the saved dtype, and has the box's shape.
    """

    name: str
    offset: tuple[int, ...]
    out: Tensor


def read_small(path: Path, want: Mapping[str, Any], *, most: int) -> Any:
    """Return what a JSON file of a checkpoint holds, after its hash has been checked.

    Python's objects take up to 21 bytes for a byte of JSON, so what will become objects is counted
    before.

    Args:
        path: The file.
        want: Its "size" and "sha256", from the manifest.
        most: How many values it may hold.

    Raises:
        CheckpointError: It is not what was written, or larger than it may be.
    """
    if want["size"] > 64 * most + 65536:
        raise CheckpointError(f"{path.name} has {want['size']} bytes, too many", where=path)
    with _opened(path, want) as file:
        data = read_exactly(file, 0, want["size"], path)
    _must_match(path, hashlib.sha256(data).hexdigest(), want)
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > 2 * most + 65536:
        raise CheckpointError(f"{path.name} holds more than {most} values", where=path)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}", where=path) from error


@contextmanager
def _opened(path: Path, want: Mapping[str, Any]) -> Iterator[int]:
    """Open a plain file of the size that the manifest says."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != want["size"]:
                raise CheckpointError(
                    f"{path.name} has {size} bytes, the manifest says {want['size']}", where=path
                )
            yield file.fileno()
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error.strerror}", where=path
        ) from error


def _must_match(path: Path, found: str, want: Mapping[str, Any]) -> None:
    if found != want["sha256"].lower():
        raise CheckpointError(f"{path.name} does not match its sha256", where=path)


def _fill(
    file: int, begin: int, into: memoryview, path: Path, feed: Callable[[memoryview], None]
) -> None:
    """Read as many bytes as `into` has, block by block, and feed each to the hash."""
    at = 0
    while at < len(into):
        block = into[at : at + _BLOCK]
        count = os.preadv(file, [block], begin + at)
        if count == 0:
            raise CheckpointError(f"{path.name} ends after {begin + at} bytes", where=path)
        feed(block[:count])
        at += count


# ----------------------------------------------------------------------------------------- tensors


@attrs.frozen(eq=False)
class _Piece:
    """Bytes of a file, and where they go: straight into `into`, or a part of them (`taken`)."""

    begin: int
    end: int
    into: Tensor
    shape: tuple[int, ...] = ()
    taken: tuple[slice, ...] | None = None


def read_tensors(
    path: Path,
    files: Mapping[str, Mapping[str, Any]],
    index: Mapping[str, Any],
    wanted: Sequence[Wanted],
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
    by_file: dict[str, list[tuple[Wanted, Mapping[str, Any]]]] = {name: [] for name in files}
    held: dict[str, dict[str, Any]] = {name: {} for name in files}
    most = _most_header(index)
    for name, entry in index.items():
        for box in entry["boxes"]:
            held[box["file"]][name] = entry, box
    for want in wanted:
        for box in index[want.name]["boxes"]:
            by_file[box["file"]].append((want, box))

    def read(name: str) -> list[str]:
        try:
            _read_file(
                path / name, files[name], held[name], by_file[name], most=most, hashed=name in mine
            )
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
    wanted: Sequence[tuple[Wanted, Mapping[str, Any]]],
    *,
    most: int,
    hashed: bool,
) -> None:
    digest = hashlib.sha256()
    feed = digest.update if hashed else _ignore
    with _opened(path, want) as file:
        header, stored = read_header(file, path, want["size"], most=most)
        feed(memoryview(header))
        starts = _starts(path, stored, held)
        pieces = [
            piece
            for wish, box in wanted
            for piece in _pieces_of(wish, held[wish.name][0], box, starts[wish.name])
        ]
        at = len(header)
        for piece in sorted(pieces, key=lambda piece: piece.begin):
            if hashed:
                _skim(file, at, piece.begin, path, feed)
            at = _read_piece(file, piece, at, path, feed)
        if hashed:
            _skim(file, at, want["size"], path, feed)
    if hashed:
        _must_match(path, digest.hexdigest(), want)


def _ignore(_: memoryview) -> None:
    pass


def _skim(file: int, begin: int, end: int, path: Path, feed: Callable[[memoryview], None]) -> None:
    """Read bytes only for their hash."""
    room = memoryview(bytearray(max(0, min(_BLOCK, end - begin))))
    while begin < end:
        block = room[: end - begin]
        _fill(file, begin, block, path, feed)
        begin += len(block)


def _read_piece(
    file: int, piece: _Piece, at: int, path: Path, feed: Callable[[memoryview], None]
) -> int:
    """Read one piece; `at` is where the hash has come to. Return where it has come to now."""
    room = piece.into if piece.taken is None else piece.into.new_empty(piece.shape)
    data = room.reshape(-1).view(torch.uint8).numpy().data
    known = max(0, min(at, piece.end) - piece.begin)  # a tied copy's bytes have been hashed before
    _fill(file, piece.begin, data[:known], path, _ignore)
    _fill(file, piece.begin + known, data[known:], path, feed)
    if piece.taken is not None:
        piece.into.copy_(room[piece.taken])
    return max(at, piece.end)


def _pieces_of(
    want: Wanted, entry: Mapping[str, Any], box: Mapping[str, Any], start: int
) -> Iterator[_Piece]:
    """Say which bytes of a saved box a wanted one needs.

    Rows that both hold whole are read in place; of others, whole rows are read, some at a time.
    """
    if not box["shape"]:
        yield _Piece(start, start + box_bytes(entry, box), want.out)
        return
    found = overlap(box["offset"], box["shape"], want.offset, want.out.shape)
    if found is None:
        return
    row = box_bytes(entry, box) // box["shape"][0]
    first, last = found.saved[0].start, found.saved[0].stop
    into = want.out[found.wanted]
    inner = tuple(part.stop - part.start for part in found.saved[1:])
    if inner == tuple(box["shape"][1:]) and into.is_contiguous():
        yield _Piece(start + first * row, start + last * row, into)
        return
    many = max(1, _BLOCK // row)
    for low in range(first, last, many):
        high = min(low + many, last)
        yield _Piece(
            start + low * row,
            start + high * row,
            into[low - first : high - first],
            shape=(high - low, *box["shape"][1:]),
            taken=(slice(None), *found.saved[1:]),
        )


def _most_header(index: Mapping[str, Any]) -> int:
    """Return how long a header can be in which any of the tensors may stand."""
    return 4096 + sum(2 * len(name.encode()) + _ENTRY_BYTES for name in index)


def _starts(path: Path, stored: Mapping[str, Stored], held: Mapping[str, Any]) -> dict[str, int]:
    """Return where each box begins in the file, if they are there as the index says.

    Others may be there too: a rank outside a tensor's mesh writes a box that another has written.
    """
    for name, (entry, box) in held.items():
        found, want = stored.get(name), (entry["dtype"], tuple(box["shape"]))
        if found is None or (found.dtype, found.shape) != want:
            said = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
            raise CheckpointError(
                f"{path.name} has {name} as {said}, the index as {want[0]}{list(want[1])}",
                where=path,
            )
    return {name: stored[name].extents[0].start for name in held}
