"""Records, one per document: text files, JSON lines, rows of parquet and arrow files."""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from trainkit.files import bad_file
from trainkit.text.corpora.text import (
    TEXT_SUFFIXES,
    blocks,
    check_readable,
    damaged,
    file_names,
    hash_of,
    opened,
    read_text,
)
from trainkit.types import needs_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Keep = Callable[[str], bool] | None
    Records = Iterator[tuple[str, dict[str, Any]]]

RECORD_SUFFIXES = (".jsonl", ".parquet", ".arrow")
_ROWS = 256  # rows that are turned into Python objects at a time


def read_records(
    path: str | os.PathLike[str],
    *,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    keep: Keep = None,
    sources: dict[str, str] | None = None,
) -> Records:
    """Return the records at a path, read one after the other, whatever their number.

    Args:
        path: A text file (one record, `{"text": ...}`), or a directory of them (sorted by relative
            path); a `.jsonl`, `.parquet` or `.arrow` file (each line or row a record); or a
            directory of such files, all of one kind.
        suffixes: How the names of text files end.
        keep: Says by its name whether a record is wanted; in a directory of several kinds of files
            it is asked about these first.
        sources: Gets the hash of each file, by its name, once the file has been read.

    Returns:
        An iterator of (name, record). The name is the file's relative path, or the number of the
        line or row from 1, in decimal; in a directory of such files, `file:number`.

    Raises:
        DataError: The path is missing, unreadable or of no known kind; or, while reading, a file
            or a record is damaged. The message names it.
        DiskError: The disk fails.
        ConfigError: A parquet or arrow file, and pyarrow is missing.

    Effects:
        Writes to `sources` while it is read.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     list(read_records(folder))
        [('a.txt', {'text': 'hi'})]
    """
    path = Path(path)
    check_readable(path)
    names = document_files(path, suffixes=suffixes, keep=keep)
    if names[0].endswith(tuple(suffixes)):
        return _text_records(path if path.is_dir() else path.parent, names, keep, sources)
    if not path.is_dir():
        return _file_records(path, path.name, keep, sources)
    return chain.from_iterable(_shard_records(path, name, keep, sources) for name in names)


def document_files(root: Path, *, suffixes: Sequence[str], keep: Keep = None) -> list[str]:
    """Return which files of a directory hold documents: text or records, but all of one kind.

    Args:
        root: The directory, or a file, which is the only one.
        suffixes: How the names of text files end.
        keep: Chooses by relative path among files of several kinds; of one kind all are returned.

    Returns:
        Relative paths, in order; at least one.

    Raises:
        DataError: There are none, or they are of two kinds: a README beside the records would
            otherwise be the whole corpus.
    """
    if not root.is_dir():
        return [root.name]
    names, text = file_names(root), tuple(suffixes)
    kinds = [[name for name in names if name.endswith(text)]]
    kinds += [
        [name for name in names if name.endswith(suffix) and not name.endswith(text)]
        for suffix in RECORD_SUFFIXES
    ]
    found = [kind for kind in kinds if kind]
    if len(found) > 1 and keep is not None:
        found = [kept for kind in found if (kept := [name for name in kind if keep(name)])]
    if len(found) != 1:
        what = f"both {found[0][0]} and {found[1][0]}" if found else "no file of text or records"
        text_files, records = f"text files ({', '.join(suffixes)})", ", ".join(RECORD_SUFFIXES)
        mend = f"give a directory of {text_files}, or of files of one kind of {records}"
        hint = "leave one kind out with `keep`, or --exclude of prepare" if found else None
        raise bad_file(root, f"there is {what}; {mend}", hint=hint)
    return found[0]


def record_place(path: Path, name: str) -> str:
    """Return where a record is, for a message: its file, and its line or row.

    Examples:
        >>> record_place(Path("a.jsonl"), "3")
        'a.jsonl: line 3'
    """
    if path.is_dir():
        file, _, number = name.rpartition(":")
        inside = file.endswith(RECORD_SUFFIXES) and number.isdecimal()
        return record_place(path / file, number) if inside else f"{path / name}"
    if path.suffix not in RECORD_SUFFIXES:
        return f"{path}"
    return f"{path}: {'line' if path.suffix == '.jsonl' else 'row'} {name}"


def _text_records(
    root: Path, names: Sequence[str], keep: Keep, sources: dict[str, str] | None
) -> Records:
    for name in names:
        if keep is None or keep(name):
            digest = hashlib.sha256()
            text = read_text(root / name, seen=digest.update)
            if sources is not None:
                sources[name] = digest.hexdigest()[:16]
            yield name, {"text": text}


def _file_records(path: Path, source: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    if path.suffix not in RECORD_SUFFIXES:
        what = f"neither a directory, nor a file of {', '.join(RECORD_SUFFIXES)}, nor of text"
        hint = f"text has a name that ends in {', '.join(TEXT_SUFFIXES)}"
        raise bad_file(path, what, hint=hint)
    if path.suffix == ".jsonl":
        return _json_records(path, source, keep, sources)
    _pyarrow()
    return _row_records(path, source, keep, sources)


def _shard_records(root: Path, name: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    check_readable(root / name)

    def wanted(number: str) -> bool:
        return keep is None or keep(f"{name}:{number}")

    records = _file_records(root / name, name, wanted, sources)
    return ((f"{name}:{number}", record) for number, record in records)


# ------------------------------------------------------------------------------------- JSON lines


def _json_records(path: Path, source: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    """Yield the records of a file of JSON objects; empty lines are none."""
    digest = hashlib.sha256()
    for number, (_, line) in enumerate(lines_of(path, seen=digest.update), start=1):
        if line.strip() and (keep is None or keep(str(number))):
            yield str(number), json_object(line, partial(record_place, path, str(number)))
    if sources is not None:
        sources[source] = digest.hexdigest()[:16]


def lines_of(
    path: Path,
    begin: int = 0,
    end: int | None = None,
    *,
    seen: Callable[[bytes], object] = bool,
) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, line without its end) of the lines that begin at a byte in [begin, end).

    Args:
        path: The file.
        begin: Where a line begins.
        end: Where another one does; None for the end of the file.
        seen: Called with all bytes that are read, in order.

    Raises:
        DataError: The file cannot be read, or a NUL byte stands in it.
        DiskError: The disk fails.
    """
    place, begun = begin, bytearray()
    with opened(path) as file:
        for block in blocks(file, path, begin):
            seen(block)
            *ended, last = block.split(b"\n")
            for tail in ended:
                line = bytes(begun) + tail
                begun.clear()
                yield place, line
                place += len(line) + 1
                if end is not None and place >= end:
                    return
            if b"\0" in last:  # else a file of them would be read whole, as one line
                raise bad_file(path, "bad JSON: a line with a NUL byte")
            begun += last
    if begun:
        yield place, bytes(begun)


def json_object(line: bytes, place: Callable[[], str]) -> dict[str, Any]:
    """Return the JSON object in a line.

    Raises:
        DataError: It is none; the message begins with `place()`.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise bad_file(place(), f"bad JSON: {error}") from error
    if not isinstance(record, dict):
        got = type(record).__name__
        raise bad_file(place(), f"must be a JSON object, got {got}", got=got)
    return record


# ------------------------------------------------------------------------------- parquet and arrow


def _row_records(path: Path, source: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    """Yield the rows of a file as dicts; nested ones are lists and dicts."""
    if sources is not None:
        with opened(path) as file:
            sources[source] = hash_of(file, path)[:16]
    for number, record in enumerate(rows_of(path), start=1):
        if keep is None or keep(str(number)):
            yield str(number), record


def rows_of(
    path: Path, begin: int = 0, end: int | None = None, columns: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `.parquet` file's row groups, or an `.arrow` file's record batches.

    Args:
        path: The file.
        begin: The first group or batch.
        end: The one after the last; None for all.
        columns: The columns to read where the file has all of them; otherwise it is read whole.

    Raises:
        DataError: The file is damaged. The message names it.
        ConfigError: pyarrow is missing.
    """
    with _reading(path):
        for batch in _batches(path, begin, end, columns):
            batch.validate(full=True)  # offsets of a damaged file may point anywhere
            for first in range(0, batch.num_rows, _ROWS):
                yield from batch.slice(first, _ROWS).to_pylist()


def group_sizes(path: Path) -> list[tuple[int, int]]:
    """Return (bytes, rows) of each row group or record batch; raises as `rows_of`."""
    with _reading(path):
        if path.suffix == ".arrow":
            return [(batch.nbytes, batch.num_rows) for batch in _arrow_batches(path)]
        with _parquet(path) as file:
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            return [(group.total_byte_size, group.num_rows) for group in groups]


def _batches(
    path: Path, begin: int, end: int | None, columns: Sequence[str] | None
) -> Iterator[Any]:
    """Yield record batches, with the wanted columns where the file has them all."""
    if path.suffix == ".arrow":
        for batch in islice(_arrow_batches(path), begin, end):
            has_all = columns is not None and {*columns} <= {*batch.schema.names}
            yield batch.select(columns) if has_all else batch
        return
    with _parquet(path) as file:
        has_all = columns is not None and {*columns} <= {*file.schema_arrow.names}
        yield from file.iter_batches(
            _ROWS,
            row_groups=range(file.num_row_groups)[begin:end],
            columns=columns if has_all else None,
            use_threads=False,
        )


def _parquet(path: Path) -> Any:
    import pyarrow.parquet  # noqa: PLC0415 (optional; _pyarrow has said so where it is missing)

    return pyarrow.parquet.ParquetFile(path)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of an IPC file or stream, as views of the mapped file."""
    pa = _pyarrow()
    with pa.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            yield from map(reader.get_batch, range(reader.num_record_batches))
            return
        file.seek(0)  # the stream format, in which Hugging Face's datasets are kept
        yield from pa.ipc.open_stream(file)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file of what pyarrow finds wrong with it."""
    pa = _pyarrow()
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged(path, path.suffix, error) from error


def _pyarrow() -> Any:
    with needs_extra("data"):
        import pyarrow as pa  # noqa: PLC0415 (optional)
        import pyarrow.ipc  # noqa: PLC0415 (optional)
    return pa
