"""Files and folders of a bucket as files of this machine, in a cache of a bounded size."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import orjson

from trainkit.buckets.store import get_file, list_objects, open_store
from trainkit.buckets.urls import cache_home, find_url
from trainkit.files import atomic_write, convert_disk_errors
from trainkit.types import ConfigError, DataError, Log, log_info

_GIB = 1 << 30
_BYTES = 100 * _GIB  # of the cache, where TRAINKIT_CACHE_BYTES does not say
_ENTRY = ".entry.json"
# What this process reads: an entry that is locked is not removed for another one.
_HELD: dict[str, int] = {}


def fetch_files(path: str | Path, *, log: Log = log_info) -> Path:
    """Return a local copy of a file or a folder of a bucket, of the same name.

    The copy is made by ranges, several at a time, and is used again as long as the bucket lists the
    same objects: their names, sizes and ETags. The cache holds at most TRAINKIT_CACHE_BYTES bytes
    (100 GiB): what was used least recently is removed, but nothing that a process reads.

    Args:
        path: A URL; or a path, which is returned as it is.
        log: Called with what is copied.

    Raises:
        DataError: There is nothing at the URL.
        ConfigError: It does not fit into the cache; or the bucket cannot be used.
        DiskError: The server does not answer, or the disk is full.

    Effects:
        Writes and deletes in the cache, one process of a machine at a time; holds a descriptor for
        each URL until the process ends.

    Examples:
        >>> fetch_files("web.tokens")
        PosixPath('web.tokens')
    """
    url = find_url(path)
    if url is None:
        return Path(path)
    root, _, name = url.rpartition("/")
    store = open_store(root)
    objects = list_objects(store, name)
    if not objects:
        raise DataError(f"fetch_files: there is nothing at {url}", where=url)
    cache = cache_home() / "files"
    record = orjson.dumps({"url": url, "objects": objects}, option=orjson.OPT_SORT_KEYS)
    # Other objects at the URL are another entry: a process may still read the old ones.
    entry = cache / hashlib.sha256(record).hexdigest()[:16]
    local = entry / name
    with convert_disk_errors(entry, by="fetch_files"):
        cache.mkdir(parents=True, exist_ok=True)
        _hold(entry)
    if (entry / _ENTRY).exists():
        return local
    with lock_folder(cache, by="fetch_files"):
        if not (entry / _ENTRY).exists():  # else another process has fetched it meanwhile
            size = sum(size for size, _ in objects.values())
            shutil.rmtree(entry, ignore_errors=True)  # of a killed process
            _make_room(cache, size, url)
            log(f"fetching {url}, {size / 2**20:.1f} MiB, into {local}")
            for key in objects:
                (entry / key).parent.mkdir(parents=True, exist_ok=True)
                get_file(store, key, entry / key)
            with atomic_write(entry / _ENTRY, by="fetch_files") as file:
                file.write(record)
    return local


@contextlib.contextmanager
def lock_folder(folder: Path, *, by: str) -> Iterator[None]:
    """Let one process of a machine, or of all that share the disk, fetch into a folder at a time.

    Args:
        folder: The folder, which is created.
        by: The function that fetches, for the message.

    Raises:
        DiskError: The folder cannot be written.

    Effects:
        Creates a file in the folder, `.fetch`; waits for the process that holds its lock.
    """
    with convert_disk_errors(folder, by=by):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".fetch", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _hold(entry: Path) -> None:
    """Keep an entry from being removed until this process ends, and note that it was used."""
    if str(entry) not in _HELD:
        _HELD[str(entry)] = os.open(f"{entry}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    # Shared: the other ranks of the machine hold it too.
    fcntl.flock(_HELD[str(entry)], fcntl.LOCK_SH)
    os.utime(f"{entry}.lock")


def _make_room(cache: Path, size: int, url: str) -> None:
    """Remove what was used least recently, until `size` bytes fit."""
    text = os.environ.get("TRAINKIT_CACHE_BYTES", str(_BYTES))
    if not text.isdecimal():
        raise ConfigError(
            f"fetch_files: TRAINKIT_CACHE_BYTES must be a number of bytes, got {text!r}",
            where="TRAINKIT_CACHE_BYTES",
        )
    locks = sorted(cache.glob("*.lock"), key=lambda lock: lock.stat().st_mtime)
    sizes = {lock: _measure(lock.with_suffix("")) for lock in locks}
    for lock in locks:
        if sum(sizes.values()) + size <= int(text):
            return
        if sizes[lock]:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.with_suffix(""))
                sizes[lock] = 0
            except BlockingIOError:  # somebody reads it
                continue
            finally:
                os.close(handle)
    used = sum(sizes.values())
    if used + size > int(text):
        raise ConfigError(
            f"fetch_files: {url} has {size} bytes; the cache may hold {text}, and {used} of it are "
            "in use",
            where=url,
            got=size,
            want=int(text) - used,
            hint="raise TRAINKIT_CACHE_BYTES, or mount the bucket and name a path",
        )


def _measure(entry: Path) -> int:
    return sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
