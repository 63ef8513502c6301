"""A source of documents cut into chunks that can be read each on its own, in any process.

Where the cuts lie follows from the files alone, so that the same source gives the same chunks on
any machine. A chunk is a run of a directory's text files, a range of bytes of a `.jsonl` file, a
run of row groups of a `.parquet` file, or of record batches of an `.arrow` file. The documents of
all chunks, in order, are those of `read_records`.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.files import bad_file
from trainkit.text.corpora.records import (
    RECORD_SUFFIXES,
    document_files,
    group_sizes,
    json_object,
    lines_of,
    record_place,
    rows_of,
)
from trainkit.text.corpora.text import check_readable, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Stats = tuple[str, int, int]
"""A file's name, its size in bytes, and when it was written to, in nanoseconds."""


@attrs.frozen
class Chunk:
    """Some documents of a source, one after the other.

    Attributes:
        path: The directory or the file.
        files: Each file that it reads, by its path relative to the directory, as it was when it was
            cut.
        begin: The first byte, row group or record batch; 0 in a directory.
        end: The one after the last; in a directory the number of files.
        bytes: What it takes of the source.
    """

    path: Path
    files: tuple[Stats, ...]
    begin: int
    end: int
    bytes: int


def cut_source(
    path: Path,
    *,
    suffixes: Sequence[str],
    chunk_bytes: int,
    keep: Callable[[str], bool] | None = None,
) -> list[Chunk]:
    r"""Cut a source into chunks of at least `chunk_bytes`, the last excepted.

    Args:
        path: A text file or a directory of them; a `.jsonl`, `.parquet` or `.arrow` file; or a
            directory of such files.
        suffixes: How the names of a directory's text files end.
        chunk_bytes: The least size of a chunk.
        keep: Says by its relative path whether a file of a directory is wanted.

    Raises:
        DataError: The path is missing, unreadable, damaged, or of none of these kinds.
        ValueError: `keep` was given for a file.
        ConfigError: pyarrow is missing: `pip install "trainkit-lm[data]"`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.jsonl"
        ...     _ = path.write_text('{"text": "one"}\n{"text": "two"}\n')
        ...     chunks = cut_source(path, suffixes=[".txt"], chunk_bytes=4)
        ...     [(chunk.begin, chunk.end) for chunk in chunks]
        [(0, 16), (16, 32)]
    """
    check_readable(path)
    if path.is_dir():
        names = document_files(path, suffixes=suffixes, keep=keep)
        if names[0].endswith(tuple(suffixes)):
            return _runs_of_files(path, names, chunk_bytes, keep)
        shards = (path / name for name in names if not keep or keep(name))
        return [chunk for shard in shards for chunk in _parts_of_file(shard, chunk_bytes)]
    if keep is not None:
        raise ValueError(f"prepare: {path}: only files of a directory can be left out by name")
    if path.name.endswith(tuple(suffixes)):
        return _runs_of_files(path.parent, [path.name], chunk_bytes, None)
    if path.suffix not in RECORD_SUFFIXES:
        kinds = ", ".join((*RECORD_SUFFIXES, *suffixes))
        raise bad_file(path, f"neither a directory, nor a file of {kinds}")
    return _parts_of_file(path, chunk_bytes)


def read_chunk(chunk: Chunk, *, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a chunk in order; `document_name` names them.

    Args:
        chunk: One of `cut_source`.
        columns: The columns to read of a `.parquet` or `.arrow` file, those of them that it has;
            all by default.

    Raises:
        DataError: A file changed since it was cut, a document cannot be read, or a line is no JSON
            object. The message names it.
    """
    _check_unchanged(chunk)
    if chunk.path.is_dir():
        for name, _, _ in chunk.files:
            yield {"text": read_text(chunk.path / name)}
    elif chunk.path.suffix == ".jsonl":
        for index, (_, _, line) in enumerate(_numbered(chunk)):
            yield json_object(line, partial(document_name, chunk, index))
    else:
        yield from rows_of(chunk.path, chunk.begin, chunk.end, columns)
    _check_unchanged(chunk)


def document_name(chunk: Chunk, index: int) -> str:
    """Return the file and the line or row (from 1) of document `index` of a chunk.

    It reads all of the file before it: this is for messages.
    """
    if chunk.path.is_dir():
        return str(chunk.path / chunk.files[index][0])
    if chunk.path.suffix == ".jsonl":
        whole = attrs.evolve(chunk, begin=0, end=chunk.files[0][1])
        wanted = (n for begin, n, _ in _numbered(whole) if begin >= chunk.begin)
        return record_place(chunk.path, str(next(islice(wanted, index, None))))
    before = sum(rows for _, rows in group_sizes(chunk.path)[: chunk.begin])
    return record_place(chunk.path, str(before + index + 1))


def chunk_place(chunk: Chunk) -> str:
    """Return which part of the source a chunk is, for a message."""
    if chunk.path.is_dir():
        return f"{chunk.path}, files {chunk.files[0][0]} to {chunk.files[-1][0]}"
    unit = "bytes" if chunk.path.suffix == ".jsonl" else "row groups"
    return f"{unit} {chunk.begin} to {chunk.end} of {chunk.path}"


# -------------------------------------------------------------------------------------------- cuts


def _runs(sizes: Sequence[int], least: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, size) of runs of parts that have at least the size `least`."""
    begin = size = 0
    for end, part in enumerate(sizes, start=1):
        size += part
        if size >= least or end == len(sizes):
            yield begin, end, size
            begin, size = end, 0


def _runs_of_files(
    root: Path, names: Sequence[str], least: int, keep: Callable[[str], bool] | None
) -> list[Chunk]:
    stats = [_stats(root / name, name) for name in names if keep is None or keep(name)]
    # An empty file is a document too: count a few bytes for each.
    runs = _runs([size + 64 for _, size, _ in stats], least)
    return [
        Chunk(root, tuple(stats[a:b]), 0, b - a, sum(size for _, size, _ in stats[a:b]))
        for a, b, _ in runs
    ]


def _parts_of_file(path: Path, least: int) -> list[Chunk]:
    stats = (_stats(path, path.name),)
    if path.suffix == ".jsonl":
        cuts = _line_cuts(path, least)
    else:
        cuts = _runs([size for size, _ in group_sizes(path)], least)
    return [Chunk(path, stats, *cut) for cut in cuts]


def _stats(path: Path, name: str) -> Stats:
    check_readable(path)
    facts = path.stat()
    return name, facts.st_size, facts.st_mtime_ns


def _check_unchanged(chunk: Chunk) -> None:
    for name, size, modified in chunk.files:
        path = chunk.path / name if chunk.path.is_dir() else chunk.path
        if _stats(path, name) != (name, size, modified):
            what = "it was written to while it was read; start again once it stays as it is"
            raise bad_file(path, what)


def _line_cuts(path: Path, least: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, size) of ranges of whole lines."""
    begin, size = 0, path.stat().st_size
    while begin < size:
        # From the byte before it: a cut that falls on the end of a line stays there.
        last = min(begin + least, size) - 1
        end = last + len(next(lines_of(path, last))[1]) + 1
        yield begin, min(end, size), min(end, size) - begin
        begin = end


def _numbered(chunk: Chunk) -> Iterator[tuple[int, int, bytes]]:
    """Yield (first byte, number from 1 within the chunk, line) of lines that are not blank."""
    lines = lines_of(chunk.path, chunk.begin, chunk.end)
    return ((begin, n, line) for n, (begin, line) in enumerate(lines, start=1) if line.strip())
