"""The files of a checkpoint: read where they are plain, within bounds; written durably.

Anybody may have written what is read here. No torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from trainkit.files import who_else_can_write
from trainkit.types import CheckpointError

JSON_BYTES = 256 * 1024 * 1024
# An index has about 13 values for a tensor: these are 400,000 of them. As one table of as many keys
# they take 0.8 GB, the most; `save_checkpoint` writes no more than can be read.
JSON_VALUES = 5_000_000
_TOLD = 3  # of many that others can write
_CHUNK = 1 << 20  # bytes read at once


@contextmanager
def open_plain(path: Path) -> Iterator[FileIO]:
    """Open a file of a checkpoint to read: a regular one, which has no other name anywhere.

    A link, a device or a pipe is never followed, opened for its contents, or waited for.

    Raises:
        CheckpointError: It is none.
        OSError: The system would not open it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise CheckpointError(f"checkpoint: {path} is no regular file", where=path) from error
        raise
    facts = os.fstat(handle)
    what = None if stat.S_ISREG(facts.st_mode) else "is no regular file"
    if what is None and facts.st_nlink != 1:
        what = f"has {facts.st_nlink} names (hard links) and may change from elsewhere; copy it"
    if what is not None:
        os.close(handle)
        raise CheckpointError(f"checkpoint: {path} {what}", where=path)
    with FileIO(handle) as file:
        yield file


def hash_file(path: Path) -> dict[str, Any]:
    """Return {"size": bytes, "sha256": hex} of a regular file.

    Raises:
        CheckpointError: It is no regular file.
        OSError: It cannot be read.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     hash_file(Path(file.name))["size"]
        0
    """
    with open_plain(path) as file:
        digest, size, chunk = hashlib.sha256(), 0, bytearray(_CHUNK)
        while read := file.readinto(chunk):
            digest.update(memoryview(chunk)[:read])
            size += read
        return {"size": size, "sha256": digest.hexdigest()}


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(handle, memoryview(data))
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: memoryview) -> None:
    """Write all of some bytes, in as many calls as the system takes."""
    while data:
        data = data[os.write(handle, data) :]


def read_json(path: Path, *, most_bytes: int = JSON_BYTES, most_values: int = JSON_VALUES) -> Any:
    """Read a JSON file of a checkpoint: a regular file of a bounded size.

    Args:
        path: The file.
        most_bytes: Refuse a larger file before it is read.
        most_values: Refuse one with more commas and brackets before it is parsed: a value of a few
            bytes takes a hundred in memory.

    Raises:
        CheckpointError: It is missing, no regular file, too large, or not JSON.
    """
    return parse_json(path, read_bounded(path, most_bytes), most_values)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Read a plain file that is not larger than it may be.

    Raises:
        CheckpointError: It is missing, no regular file, or too large.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise CheckpointError(
                    f"checkpoint: {path} has {size} bytes; no such file has more than {most_bytes}",
                    where=path,
                    got=size,
                    want=most_bytes,
                )
            return file.read(most_bytes)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: {path} cannot be read: {error.strerror}", where=path
        ) from error


def check_values(path: Path, data: bytes, most_values: int = JSON_VALUES) -> None:
    """Refuse JSON with more commas and brackets than a file of a checkpoint may have.

    Raises:
        CheckpointError: It has.
    """
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > most_values:
        raise CheckpointError(
            f"checkpoint: {path} holds {values} values; no such file has more than {most_values}",
            where=path,
            got=values,
            want=most_values,
        )


def parse_json(path: Path, data: bytes, most_values: int) -> Any:
    """Return what the JSON of a file holds, if there is not too much of it.

    Raises:
        CheckpointError: There is, or it is not JSON.
    """
    check_values(path, data, most_values)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"checkpoint: {path} is not JSON: {error}", where=path) from error


def owner_problems(path: Path | str) -> list[str]:
    """Say whether others than this user can have written a directory or a file in it.

    A hash shows that bytes are whole, not who wrote them.

    Args:
        path: A checkpoint directory, or any other.

    Returns:
        The first few sentences, if there is something to say.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     owner_problems(folder)
        []
    """
    path = Path(path)
    found: list[str] = []
    for entry in (path, *sorted(entry for entry in path.iterdir() if not entry.is_symlink())):
        with suppress(FileNotFoundError):  # retention may delete what was listed
            found += who_else_can_write(entry)
    return found[:_TOLD]
