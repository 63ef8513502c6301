"""The files of a checkpoint: read where they are plain, within bounds; written durably.

Anybody may have written what is read here. No torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from trainkit.files import find_other_writers
from trainkit.types import CheckpointError, DiskError

JSON_BYTES = 256 * 1024 * 1024
# An index has about 13 values for a tensor: these are 400,000 of them. As one table of as many keys
# they take 0.8 GB, the most; `save_checkpoint` writes no more than can be read.
JSON_VALUES = 5_000_000
_TOLD = 3  # of many that others can write
_BLOCK = 512 * 1024  # read and hashed at once, out of the same cache: 4 MiB cost a third more


def refusal(path: Path | str, what: str) -> CheckpointError:
    """Return the error for a file that is not what a good one is."""
    return CheckpointError(f"checkpoint: {path} {what}", where=str(path))


@contextmanager
def open_plain(path: Path, *, shared: bool = False) -> Iterator[int]:
    """Open a file of a checkpoint to read: a regular one, which has no other name anywhere.

    A link, a device or a pipe is never followed, opened for its contents, or waited for.

    Args:
        path: The file.
        shared: It may have other names: it is of others, and not believed for its hash.

    Raises:
        CheckpointError: It is none, or cannot be read.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in {errno.ELOOP, errno.ENXIO}:
            raise refusal(path, "is no regular file") from error
        raise refusal(path, f"cannot be read: {error}") from error
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise refusal(path, "is no regular file")
        if facts.st_nlink != 1 and not shared:
            several = f"has {facts.st_nlink} names (hard links) and may change from elsewhere"
            raise refusal(path, f"{several}; copy it")
        yield handle
    finally:
        os.close(handle)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; refuse what is no regular file, links included."""
    with open_plain(path, shared=True) as file:
        return os.fstat(file).st_size


def fill(
    file: int,
    begin: int,
    into: memoryview,
    path: Path,
    feed: Callable[[memoryview], object] = lambda _: None,
) -> None:
    """Read as many bytes as `into` has, block by block, and feed each to a hash.

    Raises:
        CheckpointError: The file ends before, or cannot be read.
    """
    at = 0
    while at < len(into):
        block = into[at : at + _BLOCK]
        try:
            count = os.preadv(file, [block], begin + at)
        except OSError as error:
            raise refusal(path, f"cannot be read: {error}") from error
        if count == 0:
            raise refusal(path, f"ends after {begin + at} bytes, too early")
        feed(block[:count])
        at += count


def skim(file: int, begin: int, end: int, path: Path, feed: Callable[[memoryview], object]) -> None:
    """Read bytes only for their hash."""
    room = memoryview(bytearray(max(0, min(_BLOCK, end - begin))))
    for at in range(begin, end, _BLOCK):
        fill(file, at, room[: end - at], path, feed)


def read_exactly(file: int, begin: int, size: int, path: Path) -> bytearray:
    """Read bytes at a place of a file, all of them or an error."""
    data = bytearray(size)
    fill(file, begin, memoryview(data), path)
    return data


def hash_file(path: Path) -> dict[str, Any]:
    """Return {"size": bytes, "sha256": hex} of a regular file.

    Raises:
        CheckpointError: It is no regular file, or cannot be read.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     hash_file(Path(file.name))["size"]
        0
    """
    with open_plain(path) as file:
        digest, size = hashlib.sha256(), os.fstat(file).st_size
        skim(file, 0, size, path, digest.update)
        return {"size": size, "sha256": digest.hexdigest()}


def file_problem(path: Path, want: Mapping[str, Any], *, whole: bool = True) -> str | None:
    """Say what is wrong with a file that a manifest names.

    Args:
        path: The file.
        want: Its "size" and "sha256".
        whole: Hash every byte; else only the size is looked at.
    """
    try:
        found = size_of(path)
        if found != want["size"]:
            return f"{path.name} has {found} bytes, the manifest says {want['size']}"
        if whole and hash_file(path)["sha256"] != want["sha256"]:
            return f"{path.name} does not match its sha256"
    except CheckpointError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return f"{path.name} is missing" if missing else error.what
    return None


def refuse_no_room(what: str, path: Path | str, *, free: int, needed: int) -> None:
    """Refuse to begin with what the disk has no room for, before anything is written."""
    if free < needed:
        raise DiskError(
            f"{what} needs about {needed} bytes and {free} are free",
            where=str(path),
            got=free,
            want=needed,
            hint="free space or choose another place; nothing has been written",
        )


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, wait until it is on the disk, and return {"size", "sha256"} of it."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            digest.update(chunk)
            write_all(handle, memoryview(chunk))
            size += len(chunk)
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"size": size, "sha256": digest.hexdigest()}


def write_all(handle: int, data: memoryview) -> None:
    """Write all of some bytes, in as many calls as the system takes."""
    while data:
        data = data[os.write(handle, data) :]


# -------------------------------------------------------------------------------------------- JSON


def read_json(
    path: Path,
    *,
    most_bytes: int = JSON_BYTES,
    most_values: int = JSON_VALUES,
    want: Mapping[str, Any] | None = None,
) -> Any:
    """Read a JSON file of a checkpoint: a regular file of a bounded size.

    Args:
        path: The file.
        most_bytes: Refuse a larger file before it is read.
        most_values: See `parse_json`.
        want: Its "size" and "sha256", from the manifest.

    Raises:
        CheckpointError: It is missing, no regular file, too large, not what was written, or not
            JSON.
    """
    data = read_bounded(path, most_bytes)
    if want is not None and len(data) != want["size"]:
        raise refusal(path, f"has {len(data)} bytes, the manifest says {want['size']}")
    if want is not None and hashlib.sha256(data).hexdigest() != want["sha256"]:
        raise refusal(path, "does not match its sha256")
    return parse_json(path, data, most_values)


def read_bounded(path: Path, most_bytes: int, *, shared: bool = False) -> bytearray:
    """Read a plain file that is not larger than it may be; `shared` as for `open_plain`.

    Raises:
        CheckpointError: It is missing, no regular file, or too large.
    """
    with open_plain(path, shared=shared) as file:
        size = os.fstat(file).st_size
        if size > most_bytes:
            raise refusal(path, f"has {size} bytes; no such file has more than {most_bytes}")
        return read_exactly(file, 0, size, path)


def parse_json(path: Path, data: bytes | bytearray, most_values: int = JSON_VALUES) -> Any:
    """Return what the JSON of a file holds, if there is not too much of it.

    Args:
        path: The file.
        data: What it holds.
        most_values: Refuse more commas and brackets before they are parsed: a value of a few bytes
            takes a hundred in memory.

    Raises:
        CheckpointError: There is too much, or it is not JSON.
    """
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > most_values:
        raise refusal(path, f"holds {values} values; no such file has more than {most_values}")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise refusal(path, f"is no good JSON: {error}") from error


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
            found += find_other_writers(entry)
    return found[:_TOLD]
