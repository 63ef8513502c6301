"""Read files of untrusted origin: regular ones, of a bounded size; write files durably.

Without torch.
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

_JSON_BYTES = 256 * 1024 * 1024
# An index has about 13 values per tensor, so this allows 400,000 tensors. The worst case, one table
# with that many keys, takes 0.8 GB. `save_checkpoint` writes no more than can be read.
_JSON_VALUES = 5_000_000
_MAX_OWNER_PROBLEMS = 3
# Read and hashed at once, so that the hash finds the bytes in the cache: 4 MiB took a third longer.
_BLOCK = 512 * 1024


def refusal(path: Path | str, what: str) -> CheckpointError:
    """Return the error for a file that is damaged or malicious."""
    return CheckpointError(f"checkpoint: {path} {what}", where=str(path))


@contextmanager
def open_plain(path: Path, *, shared: bool = False) -> Iterator[int]:
    """Open a regular file for reading, which must have no other hard link.

    Links are not followed, and devices and pipes are not read or waited for.

    Args:
        path: The file.
        shared: Allow other hard links, for files that are not trusted because of their hash.

    Raises:
        CheckpointError: It is not such a file, or cannot be read.
    """
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would otherwise wait forever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags)
    except (OSError, ValueError) as error:
        # ELOOP: it is a link. ENXIO: a socket, or a device that does not exist.
        if isinstance(error, OSError) and error.errno in {errno.ELOOP, errno.ENXIO}:
            raise refusal(path, "is no regular file") from error
        raise refusal(path, f"cannot be read: {error}") from error
    try:
        # Of the open file, since the path may name another one by now.
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise refusal(path, "is no regular file")
        if info.st_nlink != 1 and not shared:
            raise refusal(
                path,
                f"has {info.st_nlink} names (hard links) and may change from elsewhere; copy it",
            )
        yield handle
    finally:
        os.close(handle)


def get_file_size(path: Path) -> int:
    """Return the bytes of a regular file; raise CheckpointError for anything else, even a link."""
    with open_plain(path, shared=True) as file:
        return os.fstat(file).st_size


def fill(
    file: int,
    start: int,
    into: memoryview,
    path: Path,
    feed: Callable[[memoryview], object] = lambda _: None,
) -> None:
    """Fill a buffer from a file, block by block, and pass each block to a hash.

    Raises:
        CheckpointError: The file is too short, or cannot be read.
    """
    position = 0
    while position < len(into):
        block = into[position : position + _BLOCK]
        try:
            count = os.preadv(file, [block], start + position)  # may read less than the block
        except OSError as error:
            raise refusal(path, f"cannot be read: {error}") from error
        if count == 0:
            raise refusal(path, f"ends after {start + position} bytes, too early")
        feed(block[:count])
        position += count


def skim(file: int, start: int, end: int, path: Path, feed: Callable[[memoryview], object]) -> None:
    """Pass the bytes between two offsets to a hash, and discard them."""
    buffer = memoryview(bytearray(max(0, min(_BLOCK, end - start))))
    for position in range(start, end, _BLOCK):
        fill(file, position, buffer[: end - position], path, feed)


def read_exactly(file: int, start: int, size: int, path: Path) -> bytearray:
    """Read `size` bytes of a file from an offset; raise CheckpointError if it has fewer."""
    data = bytearray(size)
    fill(file, start, memoryview(data), path)
    return data


def hash_file(path: Path) -> dict[str, Any]:
    """Return {"size": bytes, "sha256": hex} of a regular file.

    Raises:
        CheckpointError: It is not a regular file, or cannot be read.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     hash_file(Path(file.name))["size"]
        0
    """
    with open_plain(path) as file:
        size = os.fstat(file).st_size
        digest = hashlib.sha256()
        skim(file, 0, size, path, digest.update)
        return {"size": size, "sha256": digest.hexdigest()}


def find_file_problem(
    path: Path, want: Mapping[str, Any], *, check_hash: bool = True
) -> str | None:
    """Compare a file with its entry in a manifest; return the problem, or None.

    Args:
        path: The file.
        want: Its "size" and "sha256".
        check_hash: Hash every byte; otherwise only the size is compared.
    """
    try:
        size = get_file_size(path)
        if size != want["size"]:
            return f"{path.name} has {size} bytes, the manifest says {want['size']}"
        if check_hash and hash_file(path)["sha256"] != want["sha256"]:
            return f"{path.name} does not match its sha256"
    except CheckpointError as error:
        is_missing = isinstance(error.__cause__, FileNotFoundError)
        return f"{path.name} is missing" if is_missing else error.what
    return None


def check_free_space(what: str, path: Path | str, *, free: int, needed: int) -> None:
    """Raise DiskError, before anything is written, if the disk does not have enough free space."""
    if free < needed:
        raise DiskError(
            f"{what} needs about {needed} bytes and {free} are free",
            where=str(path),
            got=free,
            want=needed,
            hint="free space or choose another place; nothing has been written",
        )


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, wait until it is on the disk, and return its {"size", "sha256"}."""
    digest = hashlib.sha256()
    size = 0
    # O_EXCL: a file or a link that somebody else has put there is an error.
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
    """Write all bytes of a buffer."""
    while data:  # one call may write only a part
        data = data[os.write(handle, data) :]


# -------------------------------------------------------------------------------------------- JSON


def read_json(
    path: Path,
    *,
    max_bytes: int = _JSON_BYTES,
    max_values: int = _JSON_VALUES,
    want: Mapping[str, Any] | None = None,
) -> Any:
    """Read a JSON file of a checkpoint: a regular file of a bounded size.

    Args:
        path: The file.
        max_bytes: Larger files are rejected before they are read.
        max_values: See `parse_json`.
        want: Its "size" and "sha256", from the manifest.

    Raises:
        CheckpointError: It is missing, not a regular file, too large, different from the manifest,
            or not JSON.
    """
    data = read_bounded(path, max_bytes)
    if want is not None and len(data) != want["size"]:
        raise refusal(path, f"has {len(data)} bytes, the manifest says {want['size']}")
    if want is not None and hashlib.sha256(data).hexdigest() != want["sha256"]:
        raise refusal(path, "does not match its sha256")
    return parse_json(path, data, max_values)


def read_bounded(path: Path, max_bytes: int, *, shared: bool = False) -> bytearray:
    """Read a regular file of at most `max_bytes`; `shared` as for `open_plain`.

    Raises:
        CheckpointError: It is missing, not a regular file, or too large.
    """
    with open_plain(path, shared=shared) as file:
        size = os.fstat(file).st_size
        if size > max_bytes:
            raise refusal(path, f"has {size} bytes; no such file has more than {max_bytes}")
        return read_exactly(file, 0, size, path)


def parse_json(path: Path, data: bytes | bytearray, max_values: int = _JSON_VALUES) -> Any:
    """Parse the JSON of a file that has a bounded number of values.

    Args:
        path: The file, for messages.
        data: Its contents.
        max_values: The maximum number of values.

    Raises:
        CheckpointError: There are too many, or it is not JSON.
    """
    # Counted before parsing: a value of a few bytes takes a hundred in memory.
    # A list or table of n values has n - 1 commas and its bracket; those in texts only add to it.
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > max_values:
        raise refusal(path, f"holds {values} values; no such file has more than {max_values}")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise refusal(path, f"is no good JSON: {error}") from error


def find_owner_problems(path: Path | str) -> list[str]:
    """List how other users could have written a directory or its files.

    A hash shows that bytes are intact, not who wrote them.

    Args:
        path: A checkpoint directory, or any other.

    Returns:
        The first three problems.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     find_owner_problems(folder)
        []
    """
    path = Path(path)
    problems: list[str] = []
    for entry in (path, *sorted(entry for entry in path.iterdir() if not entry.is_symlink())):
        with suppress(FileNotFoundError):  # retention may delete a file after it was listed
            problems += find_other_writers(entry)
    return problems[:_MAX_OWNER_PROBLEMS]
