"""Files mapped into memory without keeping a descriptor, and how to see that one was changed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import numpy as np

from trainkit.files import bad_file

if TYPE_CHECKING:
    from pathlib import Path

    from trainkit.types import Corpus

_FAILED = ctypes.c_void_p(-1).value


@attrs.frozen
class MappedFile:
    """What a mapped file was when it was opened.

    Attributes:
        path: Where it lay, absolute.
        size: Its bytes.
        identity: Its device and inode: a file that is put in its place has others.
        modified: When it was last written to, in nanoseconds.
    """

    path: str
    size: int
    identity: tuple[int, int]
    modified: int


def map_file(file: BinaryIO, path: Path) -> tuple[np.ndarray[Any, Any], MappedFile]:
    """Map an open file; the array, uint8, read-only, outlives the descriptor.

    Python's own `mmap` keeps a descriptor per file (before 3.13), and a corpus of 10,000 shards has
    more files than a process may keep open.

    Raises:
        DataError: The system maps no more files.
    """
    facts = os.fstat(file.fileno())
    told = MappedFile(
        os.path.abspath(path),  # noqa: PTH100 (Path.absolute leaves `..` in, 10 times slower)
        facts.st_size,
        (facts.st_dev, facts.st_ino),
        facts.st_mtime_ns,
    )
    if not facts.st_size:
        return np.empty(0, np.uint8), told
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = system.mmap(None, facts.st_size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        hint = "a process maps some 65,000 files (vm.max_map_count): join small shards"
        hint = hint if code == errno.ENOMEM else None
        raise bad_file(path, f"cannot be mapped: {os.strerror(code)}", hint=hint)
    memory = (ctypes.c_uint8 * facts.st_size).from_address(address)
    unmap: Any = weakref.finalize(memory, system.munmap, address, facts.st_size)
    unmap.atexit = False  # arrays may be read while the interpreter ends
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8), told


def check_unchanged(corpus: Corpus) -> None:
    """Refuse a corpus of which a file was cut, grown or written to since it was opened.

    To read what a file no longer holds ends the process (SIGBUS), so ask before a batch is made: it
    takes about 2 us per file. A file that another was put in the place of is safe, as the old one
    stays mapped.

    Args:
        corpus: Any; what was not mapped from a file cannot change.

    Raises:
        DataError: A file is not what it was. The message names it.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> check_unchanged(make_corpus([[1, 2]]))
    """
    for part in getattr(corpus, "parts", (corpus,)):
        file = getattr(part, "file", None)
        if file is not None:
            _check_file(file)


def _check_file(file: MappedFile) -> None:
    try:
        facts = os.stat(file.path)  # noqa: PTH116 (half the time of Path.stat)
    except OSError:
        return  # moved or deleted: the map holds on to it
    if (facts.st_dev, facts.st_ino) != file.identity:
        return
    if facts.st_size != file.size:
        what = f"the file has {facts.st_size} bytes, it had {file.size} when it was opened"
        hint = "put a new file in its place instead of changing it while it is read"
        raise bad_file(file.path, what, got=facts.st_size, want=file.size, hint=hint)
    if facts.st_mtime_ns != file.modified:
        what = "the file was written to while it was open, so its content may have changed"
        hint = "start again, which checks the content; write beside a file and rename instead"
        raise bad_file(file.path, what, got=facts.st_mtime_ns, want=file.modified, hint=hint)
