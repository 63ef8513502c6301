"""Plans on disk: bins in a directory that is there completely or not at all.

A plan is a directory `CACHE/KEY`; KEY is 16 hex digits of a hash of everything that shapes the
bins. `bins.i64` holds the four arrays of `Bins` one after the other, as little-endian int64:
offsets, documents, starts, lengths. `key.json` holds the parts of the key in clear, the sizes, the
SHA-256 of the arrays, and its own. A plan is written beside its place and takes it in one rename
once it is on the disk; every byte is hashed before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import orjson

from trainkit.files import read_bounded, sync_folder
from trainkit.types import Bins, DataError, DiskError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = 1
"""The version of this layout. A plan of another one is unusable, so it is packed anew."""
_DATA, _KEY = "bins.i64", "key.json"
_MOST_KEY = 1 << 20  # bytes of key.json, which has about a thousand
_BESIDE = re.compile(r"\.plan-([0-9]{1,9})-[0-9a-f]{8}-(.+)")  # the writer's process and host
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


class UnusablePlanError(Exception):
    """What lies in a plan's place is damaged; the message says how."""


@attrs.frozen(eq=False)
class Plan:
    """Bins, the SHA-256 of their arrays, and whether they are mapped from the disk."""

    bins: Bins
    sha256: str
    mapped: bool


def plan_of(bins: Bins) -> Plan:
    """Return bins in memory as a plan."""
    digest = hashlib.sha256()
    for array in _arrays(bins):
        digest.update(array.data)
    return Plan(bins, digest.hexdigest(), mapped=False)


def folder_of(cache_dir: Path, key: Mapping[str, Any]) -> Path:
    """Return where the plan of a key lies: all of the key shapes its name."""
    return cache_dir / _hash_of(key)[:16]


def difference(got: Mapping[str, Any], want: Mapping[str, Any]) -> str | None:
    """Name the first part in which two keys differ."""
    for part in sorted({*got, *want}):
        if got.get(part) != want.get(part):
            return f"{part} is {got.get(part)!r} instead of {want.get(part)!r}"
    return None


def _hash_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(dict(record), option=orjson.OPT_SORT_KEYS)).hexdigest()


def _arrays(bins: Bins) -> list[np.ndarray[Any, Any]]:
    """Return what `bins.i64` holds, in order."""
    arrays = (bins.offsets, bins.documents, bins.starts, bins.lengths)
    return [np.ascontiguousarray(array, "<i8") for array in arrays]


# -------------------------------------------------------------------------------------------- open


def open_plan(folder: Path, key: dict[str, Any]) -> Plan | None:
    """Map a plan read-only, once every byte of it is seen to be as it was written.

    Returns:
        The plan, or None where nothing is.

    Raises:
        UnusablePlanError: It is damaged, cannot be read, or has another format.
        DataError: It is whole, and the plan of another key than `folder` is named after.
    """
    if not os.path.lexists(folder):
        return None
    try:
        record = _read_record(folder / _KEY, key)
        data = _read_data(folder / _DATA, record)
    except OSError as error:
        raise UnusablePlanError(f"{error.filename}: {error.strerror}") from error
    rows, pieces = record["rows"], record["pieces"]
    parts = np.split(data, np.cumsum([rows + 1, pieces, pieces]))
    if parts[0][0] != 0 or parts[0][-1] != pieces or (np.diff(parts[0]) < 0).any():
        raise UnusablePlanError(f"{_DATA} has offsets that do not rise from 0 to {pieces}")
    bins = Bins(*parts, capacity=key["capacity"], multiple_of=key["multiple_of"])
    return Plan(bins, record["bins_sha256"], mapped=True)


def _read_record(path: Path, key: dict[str, Any]) -> dict[str, Any]:
    """Return what `key.json` says, which must be that this is the plan of `key`."""
    try:
        record = orjson.loads(read_bounded(path, most=_MOST_KEY))
    except orjson.JSONDecodeError as error:
        raise UnusablePlanError(f"{_KEY} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise UnusablePlanError(f"{_KEY} has format {found!r}; this trainkit keeps {FORMAT}")
    told = record.get("key")
    part = difference(told, key) if isinstance(told, dict) else "there is no key in it"
    body = {name: x for name, x in record.items() if name != "sha256"}
    if record.get("sha256") != _hash_of(body):
        where = f": {part}" if part else ""
        raise UnusablePlanError(f"{_KEY} was changed after it was written{where}")
    if part:
        raise DataError(
            f"{path}: this is the plan of another key: {part}",
            where=path,
            got=told,
            want=key,
            hint=f"remove {path.parent}: a plan must lie under the name that it was given",
        )
    return record


def _read_data(path: Path, record: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Map `bins.i64`, once its size and its hash are seen to be right."""
    _check_regular(path)
    want = 8 * (record["rows"] + 1 + 3 * record["pieces"])
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != want:
            raise UnusablePlanError(f"{_DATA} has {size} bytes instead of {want}")
        if hashlib.file_digest(file, "sha256").hexdigest() != record["bins_sha256"]:
            raise UnusablePlanError(f"{_DATA} does not match its sha256")
        return np.asarray(np.memmap(file, "<i8", mode="r"))


def _check_regular(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would never end
        raise UnusablePlanError(f"{path.name} is no regular file")


# -------------------------------------------------------------------------------------------- keep


def keep_plan(folder: Path, key: dict[str, Any], plan: Plan) -> None:
    """Write a plan and give it its place; a whole one that has come there meanwhile stays.

    Raises:
        DiskError: The disk is full.
        OSError: Nothing can be written there.

    Effects:
        Writes below `folder.parent`, durably; removes what is broken in `folder`, and beside it
        what killed processes left. On failure nothing is left.
    """
    arrays = _arrays(plan.bins)
    pieces = len(plan.bins.documents)
    body = {"format": FORMAT, "key": key, "rows": len(plan.bins), "pieces": pieces}
    body |= {"bins_sha256": plan.sha256}
    text = orjson.dumps(body | {"sha256": _hash_of(body)}, option=orjson.OPT_INDENT_2)
    beside = _free_name(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        beside.mkdir()
        _write(beside / _DATA, arrays)
        _write(beside / _KEY, [text])
        sync_folder(beside)
        _take_place(beside, folder, key)
        sync_folder(folder.parent)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        needed = sum(array.nbytes for array in arrays) + len(text)
        raise _disk_error(folder, error, needed) from error
    finally:
        _remove(beside)


def _take_place(beside: Path, folder: Path, key: dict[str, Any]) -> None:
    """Rename `beside` to `folder`, moving out of the way what is broken there."""
    while True:
        try:
            beside.rename(folder)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        else:
            return
        with suppress(UnusablePlanError):
            if open_plan(folder, key):
                return  # another process was faster
        broken = _free_name(folder)
        with suppress(FileNotFoundError):
            folder.rename(broken)
        _remove(broken)


def _free_name(folder: Path) -> Path:
    """Return a name beside `folder` that says whose it is, should this process be killed."""
    lot = secrets.token_hex(4)
    return folder.with_name(f".plan-{os.getpid()}-{lot}-{os.uname().nodename}")


def _remove_leftovers(cache_dir: Path) -> None:
    """Remove what processes of this host left that are no more."""
    for path in cache_dir.iterdir():
        match = _BESIDE.fullmatch(path.name)
        if match and match[2] == os.uname().nodename and not _is_alive(int(match[1])):
            _remove(path)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _write(path: Path, parts: Sequence[Any]) -> None:
    """Write a file through its handle: on a full disk a mapping would end the process."""
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _disk_error(folder: Path, error: OSError, needed: int) -> DiskError:
    free = shutil.disk_usage(next(path for path in folder.parents if path.exists())).free
    return DiskError(
        f"cached_bins: cannot write {folder}: {error.strerror}; it needs {needed} bytes, "
        f"{free} are free",
        where=folder,
        got=free,
        want=needed,
        hint="make room, name another cache, or keep no plan (cache_dir=None)",
    )
