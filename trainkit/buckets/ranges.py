"""Objects of a bucket as files and arrays that are read by ranges, through a cache of blocks.

A block is a file of the cache, complete or not there: it is renamed when it is written, and what
removes it leaves it to those who have it open. So readers need no lock, in any number of processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trainkit.buckets.store import Store, get_range, open_store
from trainkit.buckets.urls import cache_home
from trainkit.files import convert_disk_errors
from trainkit.types import ConfigError, DataError

BLOCK = 1 << 20
"""Bytes of a block: what one document costs that is not in the cache."""
_BOUND = 100 << 30  # bytes of the cache, where TRAINKIT_CACHE_BYTES does not say
_FILL = 0.95  # of the bound is left when blocks are removed, so that it happens seldom
_PARALLEL = 8  # requests at a time, as each waits for the network
_LOCKS = 64  # files of locks, which all blocks share
# Seconds for which a request is repeated: less than the prefetcher waits for a batch.
_PATIENCE = 60.0


@attrs.frozen
class RemoteObject:
    """An object of a bucket that does not change: one with another ETag is another one.

    Attributes:
        url: The folder of the object.
        key: Its key in the folder.
        size: Its bytes.
        etag: Its ETag, "" where the server has none.
    """

    url: str
    key: str
    size: int
    etag: str

    @property
    def folder(self) -> Path:
        """The folder of its blocks in the cache."""
        text = f"{self.url}\n{self.key}\n{self.size}\n{self.etag}"
        return cache_home() / "blocks" / hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, start: int, size: int) -> bytes:
        """Return bytes from a position on; fewer only at the end.

        Raises:
            DataError: The object has changed or is gone.
            DiskError: The server does not answer, or the cache cannot be written.
            ConfigError: See `check_store`.

        Effects:
            Fetches and caches the blocks that are missing.
        """
        end = min(start + size, self.size)
        if start >= end:
            return b""
        return b"".join(self.read_spans(np.array([start]), np.array([end - start])))

    def read_spans(
        self, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
    ) -> Iterator[bytes]:
        """Yield the bytes of spans, in pieces; raises as `read`.

        Args:
            starts: The first byte of each span, integers `[N]`.
            sizes: Their bytes `[N]`, none of which is beyond the end.
        """
        spans = [
            (start, start + size)
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
            if size
        ]
        needed = sorted(
            {x for start, end in spans for x in range(start // BLOCK, -(-end // BLOCK))}
        )
        missing = [x for x in needed if not self._path(x).exists()]
        # All at once, before the first is waited for; they stay in memory for this call, as another
        # process may need their room in the cache.
        fetched: dict[int, bytes] = {}
        if missing:
            with ThreadPoolExecutor(min(_PARALLEL, len(missing))) as pool:
                fetched = dict(zip(missing, pool.map(self._fetch, missing), strict=True))
        for start, end in spans:
            for block in range(start // BLOCK, -(-end // BLOCK)):
                first = max(start - block * BLOCK, 0)
                last = min(end - block * BLOCK, BLOCK)
                if block in fetched:
                    yield fetched[block][first:last]
                else:
                    yield self._read_block(block, first, last)

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:08d}"

    def _read_block(self, block: int, first: int, last: int) -> bytes:
        data = self._read_cached(block, first, last)
        return self._fetch(block)[first:last] if data is None else data

    def _read_cached(self, block: int, first: int, last: int) -> bytes | None:
        """Return bytes of a block; None if it is not in the cache, or no longer."""
        try:
            handle = os.open(self._path(block), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            os.utime(handle)  # what was used least recently is removed first
            data = os.pread(handle, last - first, first)
        finally:
            os.close(handle)
        if len(data) == last - first:
            return data
        self._path(block).unlink(missing_ok=True)  # cut, as by a disk that was full
        return None

    def _fetch(self, block: int) -> bytes:
        """Return a block after caching it, unless another process has done that meanwhile."""
        path = self._path(block)
        size = min(BLOCK, self.size - block * BLOCK)
        home = cache_home()
        number = int(hashlib.sha256(str(path).encode()).hexdigest(), 16) % _LOCKS
        with convert_disk_errors(path, by="read_range"), _lock(home / "locks" / f"{number}"):
            cached = self._read_cached(block, 0, size)
            if cached is not None:
                return cached
            store = _open_store(self.url, os.getpid())
            try:
                data = get_range(store, self.key, block * BLOCK, size, etag=self.etag)
            except FileNotFoundError:
                raise DataError(
                    f"read_range: {self.url}/{self.key} was deleted", where=f"{self.url}/{self.key}"
                ) from None
            # Nobody else writes this file, as its name is that of the lock.
            new = home / "blocks" / f"new-{number}"
            _add_block(home, path, data, new)
            return data


@lru_cache(maxsize=16)
def _open_store(url: str, process: int) -> Store:
    del process  # a client does not survive a fork
    return open_store(url, patience=_PATIENCE)


def _add_block(home: Path, path: Path, data: bytes, new: Path) -> None:
    """Write a block into the cache, and remove others if the bound requires it."""
    bound = read_bound()
    if len(data) > bound:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    with _lock(home / "locks" / "room"):
        # A number in a file, as listing 100,000 blocks would take longer than fetching one. It is
        # raised before a block is written, so after a kill it is too large, never too small.
        counter = home / "blocks" / "bytes"
        text = counter.read_text() if counter.exists() else ""
        used = int(text) if text.isdecimal() else bound
        if used + len(data) > bound:
            used = _remove_blocks(home / "blocks", min(int(_FILL * bound), bound - len(data)))
        counter.write_text(str(used + len(data)))
        new.rename(path)


def _remove_blocks(folder: Path, keep: int) -> int:
    """Remove what was used least recently until at most `keep` bytes are left; return the bytes."""
    blocks = []
    for path in folder.glob("*/*"):
        with suppress(FileNotFoundError):  # one that was cut has been removed
            stat = path.stat()
            blocks.append((stat.st_mtime_ns, stat.st_size, path))
    used = sum(size for _, size, _ in blocks)
    for _, size, path in sorted(blocks):
        if used <= keep:
            break
        path.unlink(missing_ok=True)
        used -= size
    return used


def read_bound() -> int:
    """Return the bytes that the cache may hold: TRAINKIT_CACHE_BYTES, or 100 GiB.

    Raises:
        ConfigError: It is no number.
    """
    text = os.environ.get("TRAINKIT_CACHE_BYTES", str(_BOUND))
    if not text.isdecimal():
        raise ConfigError(
            f"mount_files: TRAINKIT_CACHE_BYTES must be a number of bytes, got {text!r}",
            where="TRAINKIT_CACHE_BYTES",
        )
    return int(text)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one thread of all processes into the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class RangeFile(io.RawIOBase):
    """An object as a binary file that is read only; its position is that of one reader."""

    def __init__(self, remote: RemoteObject) -> None:
        super().__init__()
        self.remote = remote
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.remote.size}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer until it is full or the file has ended."""
        data = self.remote.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class RangeArray:
    """A part of an object as an array whose slices are read when they are taken.

    Args:
        remote: The object.
        start: The first byte of the array.
        count: Its length.
        dtype: Its dtype.
        inner: The shape of an element.
    """

    def __init__(
        self, remote: RemoteObject, start: int, count: int, dtype: Any, inner: tuple[int, ...] = ()
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = (count, *inner)
        self._remote = remote
        self._start = start
        self._width = self.dtype.itemsize * int(np.prod(inner, dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            return self.read_spans(np.array([start]), np.array([max(end - start, 0)]))[::step]
        index = range(len(self))[key]
        return self[index : index + 1][0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        del copy  # what is read is a copy
        return self[:].astype(dtype or self.dtype, copy=False)

    def read_spans(
        self, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Return several spans of elements, one after the other; raises as `RemoteObject.read`.

        Args:
            starts: The first element of each span, integers `[N]`.
            sizes: Their lengths `[N]`.
        """
        first = self._start + starts.astype(np.int64) * self._width
        pieces = self._remote.read_spans(first, sizes.astype(np.int64) * self._width)
        data = bytearray().join(pieces)
        return np.frombuffer(memoryview(data).toreadonly(), self.dtype).reshape(-1, *self.shape[1:])
