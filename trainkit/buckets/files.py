"""Files and folders of a bucket under names of this machine; their bytes are read by ranges."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import orjson

from trainkit.buckets.ranges import RemoteObject, read_bound
from trainkit.buckets.store import get_file, list_objects, open_store
from trainkit.buckets.urls import cache_home, find_url
from trainkit.files import convert_disk_errors
from trainkit.types import DataError, Log, log_info

_RECORD = ".objects.json"
# Tokenizers, and the sidecars of token files: libraries read them by their names.
_COPIED = ".json"


def mount_files(path: str | Path, *, log: Log = log_info) -> Path:
    """Return a path of this machine that stands for a file or a folder of a bucket.

    Nothing is copied but files that end in `.json`. The others are small texts that say where their
    bytes are: `find_object` finds these, and functions that open corpora read them by ranges. The
    same objects (by name, size and ETag) have the same path.

    Args:
        path: A URL; or a path, which is returned as it is.
        log: Called with the URL when it is read for the first time on this machine.

    Raises:
        DataError: There is nothing at the URL.
        ConfigError: The bucket cannot be used; or TRAINKIT_CACHE_BYTES is no number.
        DiskError: The server does not answer, or the disk is full.

    Effects:
        Writes into the cache; any number of processes may do so at a time.

    Examples:
        >>> mount_files("web.tokens")
        PosixPath('web.tokens')
    """
    url = find_url(path)
    if url is None:
        return Path(path)
    read_bound()  # before the first block is fetched
    root, _, name = url.rpartition("/")
    store = open_store(root)
    objects = list_objects(store, name)
    if not objects:
        raise DataError(f"mount_files: there is nothing at {url}", where=url)
    record = orjson.dumps({"url": root, "objects": objects}, option=orjson.OPT_SORT_KEYS)
    home = _mounts()
    # Other objects at the URL get another folder: a process may still read the old ones.
    folder = home / hashlib.sha256(record).hexdigest()[:16]
    if folder.exists():
        return folder / name
    total = sum(size for size, _ in objects.values())
    log(f"reading {url} by ranges: {total / 2**20:.1f} MiB in {len(objects)} objects")
    with convert_disk_errors(folder, by="mount_files"):
        home.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=home, prefix=".staging-"))
        for key in objects:
            file = staging / key
            file.parent.mkdir(parents=True, exist_ok=True)
            if key.endswith(_COPIED):
                get_file(store, key, file)
            else:
                file.write_text(f"The bytes of this file are in {root}/{key}.\n")
        (staging / _RECORD).write_bytes(record)
        try:
            staging.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(staging)
            if not folder.exists():
                raise
    return folder / name


def find_object(path: Path) -> RemoteObject | None:
    """Return the object that a path of `mount_files` stands for; None for any other file.

    Examples:
        >>> find_object(Path("web.tokens")) is None
        True
    """
    home = str(_mounts())
    if path.suffix == _COPIED or not str(path).startswith(f"{home}/"):
        return None
    folder, _, key = str(path)[len(home) + 1 :].partition("/")
    root, objects = _read_record(f"{home}/{folder}")
    return RemoteObject(root, key, *objects[key]) if key in objects else None


@lru_cache(maxsize=16)
def _read_record(folder: str) -> tuple[str, dict[str, tuple[int, str]]]:
    record = orjson.loads(Path(folder, _RECORD).read_bytes())
    return record["url"], record["objects"]


def _mounts() -> Path:
    return cache_home() / "mounts"


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
