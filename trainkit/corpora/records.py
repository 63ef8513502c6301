"""Records, one per document: text files, JSON lines, rows of parquet and arrow files."""

from __future__ import annotations

import hashlib
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from trainkit.corpora.text import (
    TEXT_SUFFIXES,
    blocks,
    check_readable,
    file_names,
    hash_of,
    opened,
    texts_of,
)
from trainkit.types import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Keep = Callable[[str], bool] | None
    Records = Iterator[tuple[str, dict[str, Any]]]

RECORD_SUFFIXES = (".jsonl", ".parquet", ".arrow")


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
        root = path if path.is_dir() else path.parent
        texts = texts_of(root, names, keep=keep, sources=sources)
        return ((name, {"text": text}) for name, text in texts)
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
        raise DataError(
            f"read_records: {root}: there is {what}; give a directory of text files "
            f"({', '.join(suffixes)}), or of files of one kind of {', '.join(RECORD_SUFFIXES)}",
            where=root,
            hint="leave one kind out with `keep`, or --exclude of prepare" if found else None,
        )
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


def _file_records(path: Path, source: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    readers = {".jsonl": _json_lines, ".parquet": _parquet_rows, ".arrow": _arrow_rows}
    reader = readers.get(path.suffix)
    if reader is None:
        raise DataError(
            f"read_records: {path}: neither a directory, nor a file of "
            f"{', '.join(RECORD_SUFFIXES)}, nor of text",
            where=path,
            hint=f"text has a name that ends in {', '.join(TEXT_SUFFIXES)}",
        )
    if path.suffix != ".jsonl":
        _pyarrow()
    return reader(path, source, keep, sources)


def _shard_records(root: Path, name: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    check_readable(root / name)

    def wanted(number: str) -> bool:
        return keep is None or keep(f"{name}:{number}")

    records = _file_records(root / name, name, wanted, sources)
    return ((f"{name}:{number}", record) for number, record in records)


# ------------------------------------------------------------------------------------- JSON lines


def _json_lines(path: Path, source: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    """Yield the records of a file of JSON objects; empty lines are none."""
    for number, line in enumerate(_lines(path, source, sources), start=1):
        if line.strip() and (keep is None or keep(str(number))):
            yield str(number), _json_object(line, f"{path}: line {number}")


def _lines(path: Path, source: str, sources: dict[str, str] | None) -> Iterator[bytes]:
    digest, begun = hashlib.sha256(), bytearray()
    with opened(path) as file:
        for block in blocks(file, path):
            digest.update(block)
            *ended, last = block.split(b"\n")
            for line in ended:
                yield bytes(begun) + line
                begun.clear()
            if b"\0" in last:  # else a file of them would be read whole, as one line
                raise DataError(f"{path}: bad JSON: a line with a NUL byte", where=path)
            begun += last
    if begun:
        yield bytes(begun)
    if sources is not None:
        sources[source] = digest.hexdigest()[:16]


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: bad JSON: {error}", where=where) from error
    if not isinstance(record, dict):
        got = type(record).__name__
        raise DataError(f"{where}: must be a JSON object, got {got}", where=where, got=got)
    return record


# ------------------------------------------------------------------------------- parquet and arrow


def _parquet_rows(path: Path, source: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    import pyarrow.parquet  # noqa: PLC0415 (optional; _pyarrow has said so where it is missing)

    def batches(file: BinaryIO) -> Iterator[Any]:
        yield from pyarrow.parquet.ParquetFile(file).iter_batches(1024)

    return _rows(path, source, keep, sources, batches)


def _arrow_rows(path: Path, source: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    from pyarrow import ipc  # noqa: PLC0415 (optional; _pyarrow has said so where it is missing)

    def batches(file: BinaryIO) -> Iterator[Any]:
        magic = file.read(6)
        file.seek(0)
        if magic != b"ARROW1":  # the stream format, in which Hugging Face's datasets are kept
            yield from ipc.open_stream(file)
            return
        reader = ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)

    return _rows(path, source, keep, sources, batches)


def _rows(
    path: Path,
    source: str,
    keep: Keep,
    sources: dict[str, str] | None,
    batches: Callable[[BinaryIO], Iterator[Any]],
) -> Records:
    """Yield the rows of a file's record batches as dicts; nested ones are lists and dicts."""
    number = 0
    with opened(path) as file:
        try:
            if sources is not None:
                sources[source] = hash_of(file, path)[:16]
            for batch in batches(file):
                batch.validate(full=True)  # offsets of a damaged file may point anywhere
                for record in batch.to_pylist():
                    number += 1
                    if keep is None or keep(str(number)):
                        yield str(number), record
        except (OSError, _pyarrow().ArrowException) as error:
            raise DataError(
                f"{path}: no {path.suffix} file, or a damaged one, after row {number}: "
                f"{str(error).splitlines()[0]}",
                where=path,
            ) from error


def _pyarrow() -> Any:
    try:
        import pyarrow as pa  # noqa: PLC0415 (optional)
    except ImportError as error:
        command = 'pip install "trainkit-lm[data]"'
        raise ConfigError(
            f"pyarrow is missing: {command}", where="pyarrow", hint=command
        ) from error
    return pa
