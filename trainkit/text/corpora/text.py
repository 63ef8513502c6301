"""Text as documents: a file, or a directory of them. Nothing is skipped silently."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from trainkit.files import bad_file
from trainkit.types import DataError, DiskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
BLOCK = 1 << 20
WAITS = (0.1, 0.2, 0.4)
"""Seconds before a read that failed is tried again."""


def file_names(root: Path) -> list[str]:
    """Return the relative path, with slashes, of each file below a directory, sorted.

    Raises:
        DataError: A directory cannot be read.
    """
    return sorted(_walk(root))


def linked_folders(root: Path) -> list[str]:
    """Return the relative path of each link to a directory below a directory; none is entered."""
    return sorted(
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, folders, _ in os.walk(root)
        for name in folders
        if (Path(folder) / name).is_symlink()
    )


def read_text(path: Path, *, seen: Callable[[bytearray], object] = bool) -> str:
    """Return the text of one file of UTF-8, line ends as they are.

    Args:
        path: The file.
        seen: Called with its bytes.

    Raises:
        DataError: The file is missing, unreadable, no regular file, or binary: it holds a NUL byte
            or invalid UTF-8. The message names the file and the byte.
        DiskError: The disk fails.
    """
    data = _read_bytes(path)
    seen(data)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _binary(path, f"invalid UTF-8 at byte {error.start}") from error


def check_readable(path: Path) -> None:
    """Refuse what is neither a regular file nor a directory: a pipe might never end.

    Raises:
        DataError: There is nothing at `path`, or something else, or its name is no UTF-8.
        DiskError: The disk fails.
    """
    check_name(path)
    try:
        mode = retried(path.stat, path).st_mode
    except DataError as error:
        if path.is_symlink() and isinstance(error.__cause__, FileNotFoundError):
            raise bad_file(path, "a link that leads nowhere") from error
        raise
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise bad_file(path, f"neither a regular file nor a directory, but {_kind_of(mode)}")


def wrong_size(path: Path, got: int, want: int) -> DataError:
    """Return the error of a file that was cut or grew."""
    hint = "it was cut, or written by halves: copy or write it again"
    what = f"the file has {got} bytes instead of {want}"
    return bad_file(path, what, got=got, want=want, hint=hint)


def damaged(path: Path, kind: str, error: Exception) -> DataError:
    """Return the error of a file that is not of the kind that it was read as, by what read it."""
    what = str(error).splitlines()[0]
    return bad_file(path, f"no {kind} file, or a damaged one: {what}")


def check_name(path: Path) -> None:
    """Refuse a name that is no UTF-8: it can stand neither in a message nor in a checkpoint.

    Raises:
        DataError: It is none.
    """
    name = str(path)
    if not name.isascii() and name.encode(errors="replace").decode() != name:
        shown = name.encode(errors="backslashreplace").decode()
        raise bad_file(shown, "the name is no UTF-8: rename it, or leave it out")


def opened(path: Path) -> BinaryIO:
    """Open a file to read its bytes.

    Raises:
        DataError: It is missing, a directory, or must not be read.
        DiskError: The disk fails.
    """
    return retried(lambda: path.open("rb"), path)


def retried(read: Callable[[], T], path: Path) -> T:
    """Return what `read` returns; try again when a disk or a network file system fails for once.

    Args:
        read: Opens or reads a file, from its beginning or from a place of its own.
        path: The file, for the message.

    Raises:
        DiskError: It failed four times, over 0.7 s.
        DataError: It failed in a way that waiting does not mend.
    """
    waits = iter(WAITS)
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno not in {errno.EIO, errno.ESTALE}:
                raise bad_file(path, error.strerror) from error
            wait = next(waits, None)
            if wait is None:
                what = f"cannot be read: {error.strerror}, {len(WAITS) + 1} times in a row"
                hint = "look at the disk, or mount the network file system again"
                raise DiskError(f"{path}: {what}", where=path, hint=hint) from error
        time.sleep(wait)


def blocks(file: BinaryIO, path: Path, place: int = 0) -> Iterator[bytes]:
    """Yield the bytes of an open file from byte `place` on, 1 MiB at a time.

    Raises:
        DiskError: The disk fails.
    """
    while block := read_at(file, path, place, BLOCK):
        yield block
        place += len(block)


def read_at(file: BinaryIO, path: Path, place: int, size: int) -> bytes:
    """Return up to `size` bytes of an open file from byte `place` on; fewer at its end alone.

    Raises:
        DiskError: The disk fails.
    """
    data = retried(partial(os.pread, file.fileno(), size, place), path)
    while len(data) < size:  # the system may give fewer than there are
        more = retried(partial(os.pread, file.fileno(), size - len(data), place + len(data)), path)
        if not more:
            break
        data += more
    return data


def hash_of(file: BinaryIO, path: Path) -> str:
    """Return the SHA-256 of an open file, in hex."""
    digest = hashlib.sha256()
    for block in blocks(file, path):
        digest.update(block)
    return digest.hexdigest()


def _read_bytes(path: Path) -> bytearray:
    """Read a file up to its end, or to its first NUL byte, however much may follow."""
    check_readable(path)
    data = bytearray()
    with opened(path) as file:
        for block in blocks(file, path):
            if b"\0" in block:
                raise _binary(path, f"a NUL byte at byte {len(data) + block.index(0)}")
            data += block
    return data


def _walk(root: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise bad_file(error.filename, error.strerror) from error

    top = len(str(root))
    for folder, _, names in os.walk(root, onerror=refuse):
        prefix = folder[top:].lstrip("/")
        yield from (f"{prefix}/{name}" for name in names) if prefix else names


def _kind_of(mode: int) -> str:
    kinds = {
        "a pipe": stat.S_ISFIFO,
        "a socket": stat.S_ISSOCK,
        "a character device": stat.S_ISCHR,
        "a block device": stat.S_ISBLK,
    }
    return next((name for name, test in kinds.items() if test(mode)), "something else")


def _binary(path: Path, what: str) -> DataError:
    hint = "leave it out with `keep`, or convert it to UTF-8"
    return bad_file(path, f"not a text file: {what}", hint=hint)
