"""Files of documents on a disk: list them, open them, read them, and retry what fails once."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from trainkit.buckets.files import find_object
from trainkit.buckets.ranges import RangeArray, RangeFile, RemoteObject
from trainkit.data.memory_map import map_file
from trainkit.types import DataError, DiskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import DTypeLike

    from trainkit.data.memory_map import MappedFile

T = TypeVar("T")

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
BLOCK = 1 << 20
WAITS = (0.1, 0.2, 0.4)
"""Seconds to wait before each retry of a failed read."""
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def list_files(root: Path) -> list[str]:
    """List all files below a directory: relative paths with slashes, sorted.

    Raises:
        DataError: A directory cannot be read.
    """

    def raise_error(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}", where=error.filename) from error

    names: list[str] = []
    # Strings instead of `Path.relative_to`, which is slow for directories of a million files.
    start = len(str(root))
    # Without `onerror`, `os.walk` skips a directory that it cannot read, silently.
    for folder, _, files in os.walk(root, onerror=raise_error):
        prefix = folder[start:].lstrip("/")
        names.extend(f"{prefix}/{name}" if prefix else name for name in files)
    return sorted(names)


def list_linked_folders(root: Path) -> list[str]:
    """List the links to directories below a directory; `list_files` does not follow them."""
    return sorted(
        # `os.walk` lists a link to a folder among the folders, and does not enter it.
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, folders, _ in os.walk(root)
        for name in folders
        if (Path(folder) / name).is_symlink()
    )


def read_text(path: Path, *, on_bytes: Callable[[bytearray], object] = bool) -> str:
    """Read a UTF-8 file, with line ends unchanged.

    Args:
        path: The file.
        on_bytes: Called with the bytes of the file.

    Raises:
        DataError: The file is missing, unreadable, no regular file, or binary: it holds a NUL byte
            or invalid UTF-8. The message names the file and the byte.
        DiskError: The disk fails.
    """
    check_readable(path)
    # Not `path.read_text`: it would translate line ends.
    data = bytearray()
    with open_file(path) as file:
        for block in read_blocks(file, path):
            # A binary file may be huge: stop at its first NUL byte instead of reading it all.
            if b"\0" in block:
                raise _not_text(path, f"a NUL byte at byte {len(data) + block.index(0)}")
            data += block
    # Before decoding: a caller hashes the bytes, not the text.
    on_bytes(data)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_text(path, f"invalid UTF-8 at byte {error.start}") from error


def check_readable(path: Path) -> None:
    """Raise DataError unless the path is a regular file or a directory; reading a pipe may hang.

    Raises:
        DataError: There is nothing at `path`, or something else, or its name is not UTF-8.
        DiskError: The disk fails.
    """
    check_name(path)
    try:
        mode = retry_read(path.stat, path).st_mode
    except DataError as error:
        if path.is_symlink() and isinstance(error.__cause__, FileNotFoundError):
            raise DataError(f"{path}: a link that leads nowhere", where=path) from error
        raise
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise DataError(f"{path}: neither a regular file nor a directory, but {kind}", where=path)


def check_name(path: Path) -> None:
    """Raise DataError if a path is not UTF-8: neither messages nor checkpoints can hold it.

    Raises:
        DataError: The name is not UTF-8.
    """
    name = str(path)
    # In a `str`, bytes that are not UTF-8 are lone surrogates, which `encode` replaces.
    if not name.isascii() and name.encode(errors="replace").decode() != name:
        escaped = name.encode(errors="backslashreplace").decode()
        raise DataError(
            f"{escaped}: the name is no UTF-8: rename it, or leave it out",
            where=escaped,
        )


def open_file(path: Path) -> BinaryIO:
    """Open a file to read its bytes; one of `mount_files` is read by ranges.

    Raises:
        DataError: It is missing, a directory, or not readable.
        DiskError: The disk fails.
    """
    remote = find_object(path)
    if remote is not None:
        file: Any = RangeFile(remote)
        return file
    return retry_read(lambda: path.open("rb"), path)


def measure_file(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return file.remote.size if isinstance(file, RangeFile) else os.fstat(file.fileno()).st_size


def map_content(file: BinaryIO, path: Path) -> tuple[Any, MappedFile | None]:
    """Map an open file; of one that is read by ranges return the object, for `view_section`.

    Raises:
        DataError: The system refuses to map the file.
    """
    return (file.remote, None) if isinstance(file, RangeFile) else map_file(file, path)


def view_section(
    content: Any, start: int, count: int, dtype: DTypeLike, inner: tuple[int, ...] = ()
) -> Any:
    """Return a part of the content of a file as an array, or as one that is read by ranges.

    Args:
        content: From `map_content`.
        start: The first byte.
        count: The length of the array.
        dtype: Its dtype.
        inner: The shape of an element.
    """
    if isinstance(content, RemoteObject):
        return RangeArray(content, start, count, dtype, inner)
    size = np.dtype(dtype).itemsize * count * math.prod(inner)
    return content[start : start + size].view(dtype).reshape(-1, *inner)


def retry_read(read: Callable[[], T], path: Path) -> T:
    """Call `read`, and retry it when a disk or a network file system fails temporarily.

    Args:
        read: Opens a file, or reads it from a fixed position.
        path: The file, for the message.

    Raises:
        DiskError: It failed four times, over 0.7 s.
        DataError: It failed in a way that a retry cannot fix.
    """
    waits = iter(WAITS)
    while True:
        try:
            return read()
        except OSError as error:
            # These two are what a busy disk and a restarted NFS server return for a while.
            if error.errno not in {errno.EIO, errno.ESTALE}:
                raise DataError(f"{path}: {error.strerror}", where=path) from error
            wait = next(waits, None)
            if wait is None:
                raise DiskError(
                    f"{path}: cannot be read: {error.strerror}, {len(WAITS) + 1} times in a row",
                    where=path,
                    hint="check the disk, or mount the network file system again",
                ) from error
        time.sleep(wait)


def read_blocks(file: BinaryIO, path: Path, position: int = 0) -> Iterator[bytes]:
    """Yield the bytes of an open file from a position on, 1 MiB at a time.

    Raises:
        DiskError: The disk fails.
    """
    while block := read_at(file, path, position, BLOCK):
        yield block
        position += len(block)


def read_at(file: BinaryIO, path: Path, position: int, size: int) -> bytes:
    """Read `size` bytes of an open file from a position on; fewer only at the end of the file.

    Raises:
        DiskError: The disk fails.
    """
    if isinstance(file, RangeFile):
        return file.remote.read(position, size)
    data = b""
    while len(data) < size:  # pread may return fewer bytes than there are
        remaining = size - len(data)
        # `pread` has no file position that a failed attempt could leave behind, so a retry is safe.
        more = retry_read(partial(os.pread, file.fileno(), remaining, position + len(data)), path)
        if not more:
            break
        data += more
    return data


def hash_open_file(file: BinaryIO, path: Path) -> str:
    """Return the SHA-256 of an open file, in hex."""
    digest = hashlib.sha256()
    for block in read_blocks(file, path):
        digest.update(block)
    return digest.hexdigest()


def split_runs(sizes: Sequence[int], min_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, size) of runs of items that have at least `min_size` together.

    Examples:
        >>> list(split_runs([3, 1, 2, 1], 4))
        [(0, 2, 4), (2, 4, 3)]
    """
    start = 0
    run_size = 0
    for end, size in enumerate(sizes, start=1):
        run_size += size
        if run_size >= min_size or end == len(sizes):
            yield start, end, run_size
            start = end
            run_size = 0


# ------------------------------------------------------------------------------------------- errors


def wrong_size(path: Path, actual: int, expected: int) -> DataError:
    """Return the error for a file that was truncated or extended."""
    return DataError(
        f"{path}: the file has {actual} bytes instead of {expected}",
        where=path,
        got=actual,
        want=expected,
        hint="it was truncated, or not written completely: copy or write it again",
    )


def make_damaged_error(path: Path, kind: str, error: Exception) -> DataError:
    """Return the error for a file that its parser rejected."""
    return DataError(
        f"{path}: no {kind} file, or a damaged one: {str(error).splitlines()[0]}", where=path
    )


def _not_text(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: not a text file: {reason}",
        where=path,
        hint="leave it out with `keep`, or convert it to UTF-8",
    )
