"""JSON lines as records: one object per line."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from trainkit.text.corpora.text_files import measure_file, open_file, read_blocks
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


def read_json_lines(
    path: Path,
    start: int = 0,
    end: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    keep: Callable[[int], bool] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) of the lines that begin at a byte in [start, end).

    Args:
        path: The file.
        start: The first byte of a line.
        end: The first byte of a later line; None for the end of the file.
        columns: Not used: a line is parsed as a whole.
        keep: Whether to parse a line, by its number; all by default.

    Returns:
        An iterator. Numbers count lines from 1 at `start`; blank lines are counted and skipped.

    Raises:
        DataError: The file cannot be read, or a line is no JSON object.
        DiskError: The disk fails.
    """
    del columns
    for number, (_, line) in enumerate(_read_lines(path, start, end), start=1):
        if not line.strip() or (keep is not None and not keep(number)):
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            origin = _describe_line(path, start, number)
            raise DataError(f"{origin}: bad JSON: {error}", where=origin) from error
        if not isinstance(record, dict):
            origin = _describe_line(path, start, number)
            got = type(record).__name__
            raise DataError(f"{origin}: must be a JSON object, got {got}", where=origin, got=got)
        yield number, record


def _describe_line(path: Path, start: int, number: int) -> str:
    """Return "file: line N" for line `number` of the range from `start` on, for a message."""
    # The lines before a range are counted only for an error: it may begin late in a large file.
    lines_before = sum(1 for _ in _read_lines(path, 0, start)) if start else 0
    return f"{path}: line {lines_before + number}"


def split_json_lines(path: Path, min_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Split a file into ranges of lines of at least `min_bytes`: (start, end, bytes) of each."""
    # Without reading the file: each boundary is searched from where it should be.
    with open_file(path) as file:
        size = measure_file(file)
    start = 0
    while start < size:
        # Search from the byte before the boundary: one that is the end of a line stays there.
        last = min(start + min_bytes, size) - 1
        end = min(last + len(next(_read_lines(path, last))[1]) + 1, size)
        yield start, end, end - start
        start = end


def locate_json_line(path: Path, start: int, index: int) -> int:
    """Return the line number, from 1, of record `index` of the range that begins at `start`."""
    numbers = (
        number
        for number, (position, line) in enumerate(_read_lines(path), start=1)
        if position >= start and line.strip()
    )
    return next(islice(numbers, index, None))


def _read_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, line without its end) of the lines that begin at a byte in [start, end).

    Args:
        path: The file.
        start: The first byte of a line.
        end: The first byte of a later line; None for the end of the file.

    Raises:
        DataError: The file cannot be read, or it holds a NUL byte.
        DiskError: The disk fails.
    """
    position = start
    unfinished = bytearray()
    with open_file(path) as file:
        for block in read_blocks(file, path, start):
            # Split as bytes: in UTF-8 a newline byte is never a part of another character.
            *finished, last = block.split(b"\n")
            for tail in finished:
                # A line may begin in an earlier block.
                line = bytes(unfinished) + tail
                unfinished.clear()
                yield position, line
                position += len(line) + 1
                if end is not None and position >= end:
                    return
            # A file of NUL bytes would be one line, and would be read whole before it fails.
            if b"\0" in last:
                raise DataError(f"{path}: bad JSON: a line with a NUL byte", where=path)
            unfinished += last
    if unfinished:
        yield position, bytes(unfinished)
