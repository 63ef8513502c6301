"""Memory-mapped files that need no open descriptor, and the check that none was changed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import numpy as np

from trainkit.types import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from trainkit.types import Corpus

_FAILED = ctypes.c_void_p(-1).value


@attrs.frozen
class MappedFile:
    """The metadata of a mapped file at the time it was opened.

    Attributes:
        path: The absolute path.
        size: The size in bytes.
        identity: Device and inode, which differ for a file that replaces this one.
        modified: The time of the last write, in nanoseconds.
    """

    path: str
    size: int
    identity: tuple[int, int]
    modified: int


def map_file(file: BinaryIO, path: Path) -> tuple[np.ndarray[Any, Any], MappedFile]:
    """Map an open file into a read-only uint8 array that outlives the descriptor.

    Raises:
        DataError: The system refuses to map the file.
    """
    # Before 3.13, Python's own `mmap` keeps a descriptor for each file, and a corpus of 10,000
    # shards has more files than a process may have open. So this calls the C function.
    stat = os.fstat(file.fileno())
    metadata = MappedFile(
        os.path.abspath(path),  # noqa: PTH100 (Path.absolute leaves `..` in, 10 times slower)
        stat.st_size,
        (stat.st_dev, stat.st_ino),
        stat.st_mtime_ns,
    )
    if not stat.st_size:
        return np.empty(0, np.uint8), metadata
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # Shared: the pages are those of the page cache, once for all processes of a machine.
    address = system.mmap(None, stat.st_size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise DataError(
            f"{path}: cannot be mapped: {os.strerror(code)}",
            where=path,
            hint="a process maps some 65,000 files (vm.max_map_count): merge small shards"
            if code == errno.ENOMEM
            else None,
        )
    # Unmapped when the last array that views this object is gone.
    memory = (ctypes.c_uint8 * stat.st_size).from_address(address)
    unmap: Any = weakref.finalize(memory, system.munmap, address, stat.st_size)
    unmap.atexit = False  # other exit handlers may still read the array
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8), metadata


def check_unchanged(corpus: Corpus) -> None:
    """Raise DataError if a file of a corpus has changed since it was opened.

    Reading past the end of a truncated file kills the process (SIGBUS), so call this before each
    batch; it takes about 2 us a file. Replacing a file by a rename is safe: the old one stays
    mapped.

    Args:
        corpus: Any corpus; one that is not mapped from a file always passes.

    Raises:
        DataError: A file was changed. The message names it.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> check_unchanged(make_corpus([[1, 2]]))
    """
    for part in getattr(corpus, "parts", (corpus,)):
        file = getattr(part, "file", None)
        if file is None:
            continue
        try:
            stat = os.stat(file.path)  # noqa: PTH116 (half the time of Path.stat)
        except OSError:
            continue  # moved or deleted: the mapping stays valid
        if (stat.st_dev, stat.st_ino) != file.identity:
            continue  # replaced by a rename
        if stat.st_size != file.size:
            raise DataError(
                f"{file.path}: the file has {stat.st_size} bytes, but had {file.size} when it was "
                "opened",
                where=file.path,
                got=stat.st_size,
                want=file.size,
                hint="replace a file by a rename instead of changing it while it is read",
            )
        if stat.st_mtime_ns != file.modified:
            raise DataError(
                f"{file.path}: the file was written to while it was open, so its content may have "
                "changed",
                where=file.path,
                got=stat.st_mtime_ns,
                want=file.modified,
                hint="start again, which checks the content; write a new file and rename it "
                "instead",
            )
