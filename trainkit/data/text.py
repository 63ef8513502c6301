"""Text as documents: a directory of files, or a file of JSON lines. Nothing is skipped silently."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def directory_texts(
    root: Path, *, suffixes: Sequence[str], keep: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of each text file below a directory, sorted by relative path.

    Linked files are read, linked directories are not entered.

    Args:
        root: The directory.
        suffixes: How the names of text files end; other files are none.
        keep: Says by its relative path, with slashes, whether a text file is wanted.

    Raises:
        DataError: A file is unreadable, binary, no regular file, or a link that leads nowhere.
    """
    names = sorted(name for name in _walk(root) if name.endswith(tuple(suffixes)))
    for name in names:
        if keep is None or keep(name):
            yield name, read_text(root / name)


def jsonl_texts(
    path: Path, *, field: str, keep: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (line number, text) of each line of a file of JSON objects; empty lines are none.

    Args:
        path: The file.
        field: The field that holds the text.
        keep: Says by its line number, from 1 in decimal, whether a document is wanted.

    Raises:
        DataError: A line is no JSON object, or its field is missing or no string. The message names
            the line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and (keep is None or keep(str(number))):
                    yield str(number), _field_of(line, field, f"{path}: line {number}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", where=path) from error


def read_text(path: Path) -> str:
    """Return the text of one file of UTF-8, line ends as they are.

    Raises:
        DataError: The file is missing, unreadable, no regular file, or binary: it holds a NUL byte
            or invalid UTF-8. The message names the file and the byte.
    """
    check_readable(path)
    try:
        data = path.read_bytes()
        text = data.decode()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", where=path) from error
    except UnicodeDecodeError as error:
        raise _binary(path, f"invalid UTF-8 at byte {error.start}") from error
    if "\0" in text:
        raise _binary(path, f"a NUL byte at byte {data.index(0)}")
    return text


def check_readable(path: Path) -> None:
    """Refuse what is neither a regular file nor a directory: a pipe might never end.

    Raises:
        DataError: There is nothing at `path`, or something else.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        what = "a link that leads nowhere" if path.is_symlink() else error.strerror
        raise DataError(f"{path}: {what}", where=path) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(f"{path}: neither a regular file nor a directory", where=path)


def _walk(root: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}", where=error.filename) from error

    for folder, _, names in os.walk(root, onerror=refuse):
        prefix = Path(folder).relative_to(root).as_posix()
        yield from names if prefix == "." else (f"{prefix}/{name}" for name in names)


def _field_of(line: bytes, field: str, where: str) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: bad JSON: {error}", where=where) from error
    if not isinstance(record, dict) or field not in record:
        found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(
            f"{where}: there is no field {field!r}; found {found}", where=where, want=field
        )
    text = record[field]
    if not isinstance(text, str):
        got = type(text).__name__
        raise DataError(
            f"{where}: field {field!r} must be a string, got {got}", where=where, got=got
        )
    return text


def _binary(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: not a text file: {what}",
        where=path,
        hint="leave it out with `keep`, or convert it to UTF-8",
    )
