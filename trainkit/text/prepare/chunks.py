"""Split a source of documents into chunks that any process can read independently.

The boundaries depend on the files alone, so the same source gives the same chunks on any machine. A
chunk is a run of a directory's text files, or a range of a file of records: of bytes of a `.jsonl`
file, of row groups of a `.parquet` file, of record batches of an `.arrow` file. The documents of
all chunks, in order, are those of `read_records`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.buckets.files import find_object
from trainkit.text.corpora.formats import RECORD_FORMATS
from trainkit.text.corpora.records import describe_record, list_document_files
from trainkit.text.corpora.text_files import check_readable, read_text, split_runs
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Stats = tuple[str, int, int]
"""A file's name, its size in bytes, and the time of its last write, in nanoseconds."""


@attrs.frozen
class Chunk:
    """A range of the documents of a source.

    Attributes:
        path: The directory or the file.
        files: The metadata of each file in the chunk when the source was split; names are relative
            to the directory.
        start: The first byte, row group or record batch; 0 in a directory.
        end: One after the last; in a directory the number of files.
        bytes: The size of the chunk in the source.
    """

    path: Path
    files: tuple[Stats, ...]
    start: int
    end: int
    bytes: int


def split_source(
    path: Path,
    *,
    suffixes: Sequence[str],
    chunk_bytes: int,
    keep: Callable[[str], bool] | None = None,
) -> list[Chunk]:
    r"""Split a source into chunks of at least `chunk_bytes`, except for the last.

    Args:
        path: A text file or a directory of them; a `.jsonl`, `.parquet` or `.arrow` file; or a
            directory of such files.
        suffixes: The suffixes of text files.
        chunk_bytes: The minimum size of a chunk.
        keep: Whether to take a file of a directory, by its relative path.

    Raises:
        DataError: The path is missing, unreadable, damaged, or of an unknown format.
        ValueError: `keep` was given for a file.
        ConfigError: pyarrow is missing: `pip install "trainkit-lm[data]"`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.jsonl"
        ...     _ = path.write_text('{"text": "one"}\n{"text": "two"}\n')
        ...     chunks = split_source(path, suffixes=[".txt"], chunk_bytes=4)
        ...     [(chunk.start, chunk.end) for chunk in chunks]
        [(0, 16), (16, 32)]
    """
    check_readable(path)
    if path.is_dir():
        names = list_document_files(path, suffixes=suffixes, keep=keep)
        # `keep` is applied even to files of one format, as `list_document_files` returns all of
        # them.
        selected = [name for name in names if keep is None or keep(name)]
        if names[0].endswith(tuple(suffixes)):
            return _split_text_files(path, selected, chunk_bytes)
        return [chunk for name in selected for chunk in _split_file(path / name, chunk_bytes)]
    if keep is not None:
        raise ValueError(f"prepare: {path}: only files of a directory can be left out by name")
    # One text file is a directory of one.
    if path.name.endswith(tuple(suffixes)):
        return _split_text_files(path.parent, [path.name], chunk_bytes)
    if path.suffix not in RECORD_FORMATS:
        raise DataError(
            f"{path}: neither a directory, nor a file of {', '.join((*RECORD_FORMATS, *suffixes))}",
            where=path,
        )
    return _split_file(path, chunk_bytes)


def read_chunk(chunk: Chunk, *, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a chunk in order; `describe_document` names them.

    Args:
        chunk: A chunk from `split_source`.
        columns: The columns to read of a `.parquet` or `.arrow` file, if it has all of them; all
            by default.

    Raises:
        DataError: A file changed after the source was split, a document cannot be read, or a line
            is no JSON object. The message names it.
    """
    # Before and after: otherwise a part could mix two versions of a file.
    _check_unchanged(chunk)
    if chunk.path.is_dir():
        for name, _, _ in chunk.files:
            yield {"text": read_text(chunk.path / name)}
    else:
        read = RECORD_FORMATS[chunk.path.suffix].read
        for _, record in read(chunk.path, chunk.start, chunk.end, columns=columns):
            yield record
    _check_unchanged(chunk)


def describe_document(chunk: Chunk, index: int) -> str:
    """Return the file and the line or row (from 1) of document `index` of a chunk, for messages.

    It may read all of the file that comes before the document.
    """
    # A file of text is one document.
    if chunk.path.is_dir():
        return str(chunk.path / chunk.files[index][0])
    locate = RECORD_FORMATS[chunk.path.suffix].locate
    return describe_record(chunk.path, str(locate(chunk.path, chunk.start, index)))


def describe_chunk(chunk: Chunk) -> str:
    """Return the part of the source that a chunk is, for a message."""
    if chunk.path.is_dir():
        return f"{chunk.path}, files {chunk.files[0][0]} to {chunk.files[-1][0]}"
    # Not by line: counting those would mean reading all of the file before the chunk.
    unit = RECORD_FORMATS[chunk.path.suffix].range_unit
    return f"{unit} {chunk.start} to {chunk.end} of {chunk.path}"


def _split_text_files(root: Path, names: Sequence[str], min_bytes: int) -> list[Chunk]:
    stats = [_read_stats(root / name, name) for name in names]
    # An empty file is a document too: count a few bytes for each.
    runs = split_runs([size + 64 for _, size, _ in stats], min_bytes)
    return [
        Chunk(
            path=root,
            files=tuple(stats[start:end]),
            start=0,
            end=end - start,
            bytes=sum(size for _, size, _ in stats[start:end]),
        )
        for start, end, _ in runs
    ]


def _split_file(path: Path, min_bytes: int) -> list[Chunk]:
    # Before the file is read: a later change is found by `_check_unchanged`.
    stats = (_read_stats(path, path.name),)
    ranges = RECORD_FORMATS[path.suffix].split(path, min_bytes)
    return [Chunk(path, stats, start, end, num_bytes) for start, end, num_bytes in ranges]


def _read_stats(path: Path, name: str) -> Stats:
    check_readable(path)
    stat, remote = path.stat(), find_object(path)
    return name, stat.st_size if remote is None else remote.size, stat.st_mtime_ns


def _check_unchanged(chunk: Chunk) -> None:
    for name, size, modified in chunk.files:
        path = chunk.path / name if chunk.path.is_dir() else chunk.path
        if _read_stats(path, name) != (name, size, modified):
            raise DataError(
                f"{path}: it was written to while it was read; start again once it no longer "
                "changes",
                where=path,
            )
