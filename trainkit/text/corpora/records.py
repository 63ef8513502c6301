"""Records, one per document, from text files and from the formats of `RECORD_FORMATS`."""

from __future__ import annotations

import hashlib
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.buckets.files import mount_files
from trainkit.text.corpora.formats import RECORD_FORMATS
from trainkit.text.corpora.text_files import (
    TEXT_SUFFIXES,
    check_readable,
    hash_open_file,
    list_files,
    open_file,
    read_text,
)
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Keep = Callable[[str], bool] | None
    Records = Iterator[tuple[str, dict[str, Any]]]


def read_records(
    path: str | os.PathLike[str],
    *,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    keep: Keep = None,
    sources: dict[str, str] | None = None,
) -> Records:
    """Return an iterator over the records at a path, which reads one at a time.

    Args:
        path: A text file (one record, `{"text": ...}`), or a directory of them (sorted by relative
            path); a `.jsonl`, `.parquet` or `.arrow` file (each line or row a record); or a
            directory of such files, all of one format.
        suffixes: The suffixes of text files.
        keep: Whether to take a record, by its name; in a directory of several formats it also
            selects among the files.
        sources: Receives the hash of each file, by its name, when the file is read.

    Returns:
        An iterator of (name, record). The name is the file's relative path, or the number of the
        line or row from 1, in decimal; in a directory of such files, `file:number`.

    Raises:
        DataError: The path is missing, unreadable or of an unknown format; or, during iteration, a
            file or a record is damaged. The message names it.
        DiskError: The disk fails.
        ConfigError: A parquet or arrow file, and pyarrow is missing.

    Effects:
        The iterator writes to `sources`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     list(read_records(folder))
        [('a.txt', {'text': 'hi'})]
    """
    path = mount_files(os.fspath(path))
    check_readable(path)
    names = list_document_files(path, suffixes=suffixes, keep=keep)
    # All names are of one format, so the first decides.
    if names[0].endswith(tuple(suffixes)):
        return _read_text_records(path if path.is_dir() else path.parent, names, keep, sources)
    if not path.is_dir():
        return _read_file_records(path, path.name, keep, sources)
    return chain.from_iterable(_read_shard(path, name, keep, sources) for name in names)


def list_document_files(root: Path, *, suffixes: Sequence[str], keep: Keep = None) -> list[str]:
    """List the files of a directory that hold documents: text or records, all of one format.

    Args:
        root: The directory, or a single file.
        suffixes: The suffixes of text files.
        keep: Selects by relative path if there are several formats; of one format all are returned.

    Returns:
        Relative paths, in order; at least one.

    Raises:
        DataError: There are none, or they are of two formats: otherwise a README next to the
            records would be the whole corpus.
    """
    # A single file was named by its user: no format is excluded.
    if not root.is_dir():
        return [root.name]
    all_names = list_files(root)
    text = tuple(suffixes)
    by_format = [[name for name in all_names if name.endswith(text)]]
    # A suffix may be of text and of records: as the caller names it, it is of text.
    by_format += [
        [name for name in all_names if name.endswith(suffix) and not name.endswith(text)]
        for suffix in RECORD_FORMATS
    ]
    by_format = [names for names in by_format if names]
    # Only then: `keep` may select records by their names, which are not those of files.
    if len(by_format) > 1 and keep is not None:
        by_format = [
            selected for names in by_format if (selected := [name for name in names if keep(name)])
        ]
    if len(by_format) == 1:
        return by_format[0]
    conflict = f"both {by_format[0][0]} and {by_format[1][0]}" if by_format else None
    raise DataError(
        f"{root}: there is {conflict or 'no file of text or records'}; give a directory of text "
        f"files ({', '.join(suffixes)}), or of files of one format of {', '.join(RECORD_FORMATS)}",
        where=root,
        hint="exclude one format with `keep`, or --exclude of prepare" if conflict else None,
    )


def describe_record(path: Path, name: str) -> str:
    """Return the file, and the line or row, of a record that `read_records` named; for messages.

    Examples:
        >>> describe_record(Path("a.jsonl"), "3")
        'a.jsonl: line 3'
    """
    if path.is_dir():
        file, _, number = name.rpartition(":")
        # A text file may have a colon in its name.
        is_in_shard = file.endswith(tuple(RECORD_FORMATS)) and number.isdecimal()
        return describe_record(path / file, number) if is_in_shard else f"{path / name}"
    if path.suffix not in RECORD_FORMATS:
        return f"{path}"
    return f"{path}: {RECORD_FORMATS[path.suffix].record} {name}"


def _read_text_records(
    root: Path, names: Sequence[str], keep: Keep, sources: dict[str, str] | None
) -> Records:
    for name in names:
        if keep is None or keep(name):
            # Hashed while it is read: a text file is read once.
            digest = hashlib.sha256()
            text = read_text(root / name, on_bytes=digest.update)
            if sources is not None:
                sources[name] = digest.hexdigest()[:16]
            yield name, {"text": text}


def _read_file_records(
    path: Path, source: str, keep: Keep, sources: dict[str, str] | None
) -> Records:
    """Return an iterator over (number, record) of one file; `source` is its key in `sources`."""
    if path.suffix not in RECORD_FORMATS:
        raise DataError(
            f"{path}: neither a directory, nor a file of {', '.join(RECORD_FORMATS)}, nor of text",
            where=path,
            hint=f"text has a name that ends in {', '.join(TEXT_SUFFIXES)}",
        )
    # Called here, not in the generator, so that a missing library is reported at once.
    records = RECORD_FORMATS[path.suffix].read(
        path, keep=None if keep is None else lambda number: keep(str(number))
    )

    def iterate() -> Records:
        # A pass of its own: the readers open the file themselves.
        if sources is not None:
            with open_file(path) as file:
                sources[source] = hash_open_file(file, path)[:16]
        for number, record in records:
            yield str(number), record

    return iterate()


def _read_shard(root: Path, name: str, keep: Keep, sources: dict[str, str] | None) -> Records:
    # Only when its turn comes: a directory may hold a million files.
    check_readable(root / name)
    records = _read_file_records(
        root / name,
        name,
        None if keep is None else lambda number: keep(f"{name}:{number}"),
        sources,
    )
    return ((f"{name}:{number}", record) for number, record in records)
