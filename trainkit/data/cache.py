"""`load_or_pack_bins`: the bins of a corpus, packed once, mapped by every rank and every later run.

A plan of rows is one file, `CACHE/KEY.bins`; KEY is 16 hex digits of a hash of everything that
shapes the bins. Its first line is JSON: the parts of the key in clear, the sizes, and the SHA-256
of the rest. The rest are the four arrays of `Bins` as little-endian int64: offsets, documents,
starts, lengths. Every byte is compared or hashed before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from trainkit.collectives import run_on_all_ranks
from trainkit.files import atomic_write, convert_disk_errors, open_regular, remove_stale_files
from trainkit.packing import best_fit, pack_bins
from trainkit.packing.bins import checked_lengths
from trainkit.types import SOLO, Bins, DataError, Log, log_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from trainkit.packing.bins import Overlong
    from trainkit.types import Axis, Fit

    _Key = dict[str, Any]
    _Found = tuple[Bins, str]  # and the SHA-256 of its arrays
    _Pack = Callable[[], _Found]

FORMAT = 2
"""The version of a plan's file, and of what `pack_bins` does around a fit. It is part of the key:
whoever changes either raises it, and older plans are not found.
"""
_MOST_HEADER = 1 << 16  # bytes of the first line, which has about 700
_UNUSABLE = (OSError, ValueError, TypeError, AttributeError)  # the last two: a forged header
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def load_or_pack_bins(
    cache_dir: Path | str | None,
    lengths: ArrayLike,
    capacity: int,
    *,
    content: str,
    axis: Axis = SOLO,
    log: Log = log_info,
    fit: Fit = best_fit,
    group_size: int = 100_000,
    overlong: Overlong = "split",
    multiple_of: int = 1,
    max_documents: int | None = None,
    seed: int | None = None,
) -> Bins:
    """Return what `pack_bins` returns, from a cache on disk if it was packed before.

    Rank 0 of the axis packs and keeps the plan, or opens the kept one; then all map the same file
    read-only, so that the ranks of a machine share its memory. A rank that does not see the file,
    and all of them where nothing can be written, pack in memory. All ranks end with equal bins.

    Args:
        cache_dir: Where plans are kept; it is made if need be. None keeps none.
        lengths: Tokens of each document, integers `[N]`; 0 for those that are held out.
        capacity: Tokens per row.
        content: A hash of the corpus, such as `fingerprint(corpus)`.
        axis: The ranks that call this together, with equal arguments.
        log: Called with one sentence about each thing worth knowing: a plan that was kept, that
            was damaged, or that cannot be kept.
        fit: As for `pack_bins`. One of your own needs an attribute `version`, an int or a str, to
            be changed with whatever the fit does.
        group_size: As for `pack_bins`, like all that follow.
        overlong: What becomes of a document longer than the capacity.
        multiple_of: A piece takes the next multiple of this many tokens.
        max_documents: The most pieces a row may hold.
        seed: The seed of the packing.

    Returns:
        The `Bins`; mapped ones cannot be written.

    Raises:
        ValueError: An argument that `pack_bins` refuses, or a fit without a version.
        DataError: Ranks ask for different plans or got different ones.
        DiskError: The disk is full. What was half written is removed.

    Effects:
        Writes below `cache_dir` when the plan is not there; replaces one that is damaged or
        another's, and removes what killed processes left. Communicates on `axis`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for _ in range(2):
        ...         bins = load_or_pack_bins(folder, [5, 3, 2, 6], 8, content="c0ffee", log=print)
        plan of 2 rows kept in ...
        >>> bins[0]
        [(2, 0, 2), (3, 0, 6)]
    """
    arguments: dict[str, Any] = {
        "fit": fit,
        "group_size": group_size,
        "overlong": overlong,
        "multiple_of": multiple_of,
        "max_documents": max_documents,
        "seed": seed,
    }
    kept = cache_dir is not None
    keys = run_on_all_ranks(lambda: _key_of(lengths, capacity, content, arguments, kept=kept), axis)
    for rank, key in enumerate(keys):
        if part := _difference(key, keys[0]):
            raise DataError(
                f"load_or_pack_bins: rank {rank} asks for another plan than rank 0: {part}"
            )
    key = keys[0]
    path = Path(cache_dir) / f"{_hash_of(key)[:16]}.bins" if cache_dir is not None else None

    def pack() -> _Found:
        bins = pack_bins(lengths, capacity, **arguments)
        return bins, _sha256(bins)

    return _shared(path, key, pack, axis, log)


def _shared(path: Path | None, key: _Key, pack: _Pack, axis: Axis, log: Log) -> Bins:
    """Let rank 0 go first, then the others; refuse bins that differ."""
    mine: list[Bins] = []

    def lead() -> tuple[str, bool] | None:
        if axis.index > 0:
            return None
        (bins, sha256), is_kept = _led(path, key, pack, log) if path else (pack(), False)
        mine.append(bins)
        return sha256, is_kept

    want, is_kept = run_on_all_ranks(lead, axis)[0]

    def follow() -> str:
        if axis.index == 0:
            return want
        bins, sha256 = _followed(path, key, pack, log) if path and is_kept else pack()
        mine.append(bins)
        return sha256

    for rank, got in enumerate(run_on_all_ranks(follow, axis)):
        if got != want:
            what = f"rank {rank} has other bins than rank 0 for the same lengths"
            must = f"the fit {key['fit']} must be a function of its arguments alone"
            raise DataError(f"load_or_pack_bins: {what}; {must}", got=got, want=want)
    return mine[0]


def _led(path: Path, key: _Key, pack: _Pack, log: Log) -> tuple[_Found, bool]:
    """Return the plan of a path, which is packed if there is no whole one, and if it is kept."""
    damage = ""
    try:
        return _open(path, key), True
    except FileNotFoundError:
        pass
    except _UNUSABLE as error:
        damage = str(error)
    plan = pack()
    rows = len(plan[0])
    try:
        _keep(path, key, *plan)
        kept = _open(path, key)
    except _UNUSABLE as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
            raise
        log(f"packed in memory, since no plan can be kept in {path}: {error}")
        return plan, False
    done = f"rebuilt the plan of {rows} rows in {path}, which was damaged: {damage}"
    log(done if damage else f"plan of {rows} rows kept in {path}")
    return kept, True


def _followed(path: Path, key: _Key, pack: _Pack, log: Log) -> _Found:
    """Return the plan that rank 0 has kept, or packs in memory where this rank does not see it."""
    try:
        return _open(path, key)
    except _UNUSABLE as error:
        why = f"this rank does not see rank 0's plan in {path}: {error}"
        log(f"packed in memory, since {why}")
        return pack()


# -------------------------------------------------------------------------------------- the file


def _keep(path: Path, key: _Key, bins: Bins, sha256: str) -> None:
    """Write a plan, and give it its place; what processes that were killed left beside it goes."""
    sizes = {"rows": len(bins), "pieces": len(bins.documents)}
    header = orjson.dumps({"key": key, **sizes, "sha256": sha256})
    header = header.ljust(-(-(len(header) + 1) // 64) * 64 - 1) + b"\n"
    arrays = _arrays(bins)
    needed = len(header) + sum(array.nbytes for array in arrays)
    with convert_disk_errors(path, by="load_or_pack_bins", needed=needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_files(path.parent.glob(".*.bins.staging-*"))
    with (
        atomic_write(path, by="load_or_pack_bins") as file,
        convert_disk_errors(path, by="load_or_pack_bins", needed=needed),
    ):
        file.write(header)
        for array in arrays:  # through its handle: on a full disk a mapping ends all
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path, key: _Key) -> _Found:
    """Map a plan read-only, once every byte of it is seen to be what was written for this key.

    Raises what is in _UNUSABLE.
    """
    with open_regular(path) as file:
        header = orjson.loads(file.readline(_MOST_HEADER))
        if not isinstance(header, dict) or header.keys() != {"key", "rows", "pieces", "sha256"}:
            raise ValueError(f"its first line is no header of a plan: {str(header)[:99]}")
        if part := _difference(header["key"], key):
            raise ValueError(f"it is the plan of another key: {part}")
        begin, rows, pieces = file.tell(), header["rows"], header["pieces"]
        size, want = os.fstat(file.fileno()).st_size, begin + 8 * (rows + 1 + 3 * pieces)
        if size != want:
            raise ValueError(f"it has {size} bytes instead of {want}")
        if hashlib.file_digest(file, "sha256").hexdigest() != header["sha256"]:
            raise ValueError("its arrays do not match their sha256")
        data = np.asarray(np.memmap(file, "<i8", mode="r", offset=begin))
    arrays = np.split(data, np.cumsum([rows + 1, pieces, pieces]))
    offsets = arrays[0]
    if offsets[0] != 0 or offsets[-1] != pieces or (np.diff(offsets) < 0).any():
        raise ValueError(f"its offsets do not rise from 0 to {pieces}")
    bins = Bins(*arrays, capacity=key["capacity"], multiple_of=key["multiple_of"])
    return bins, header["sha256"]


def _arrays(bins: Bins) -> list[np.ndarray[Any, Any]]:
    arrays = (bins.offsets, bins.documents, bins.starts, bins.lengths)
    return [np.ascontiguousarray(array, "<i8") for array in arrays]


def _sha256(bins: Bins) -> str:
    digest = hashlib.sha256()
    for array in _arrays(bins):
        digest.update(array.data)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- the key


def _key_of(
    lengths: ArrayLike, capacity: int, content: str, arguments: dict[str, Any], *, kept: bool
) -> _Key:
    """Return the parts of the key, once `pack_bins` has looked at the arguments."""
    fit = arguments["fit"]
    name, version = getattr(fit, "__name__", repr(fit)), getattr(fit, "version", None)
    if kept and not isinstance(version, int | str):
        what = f"the fit {name} has no attribute `version` that is an int or a str"
        why = "its plan could not be told from its next version's"
        mend = "give it one, or keep no plan (cache_dir=None)"
        raise ValueError(f"load_or_pack_bins: {what}, so {why}: {mend}")
    whole = checked_lengths(lengths)
    pack_bins(whole[:0], capacity, **arguments)
    parts = arguments | {
        "fit": f"{getattr(fit, '__module__', None)}.{name}",
        "fit_version": version,
        "format": FORMAT,
        "capacity": capacity,
        "content": content,
        "documents": len(whole),
        "lengths_sha256": hashlib.sha256(np.ascontiguousarray(whole, "<i8").data).hexdigest(),
    }
    return {part: int(x) if isinstance(x, np.integer) else x for part, x in parts.items()}


def _hash_of(key: _Key) -> str:
    return hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _difference(got: _Key, want: _Key) -> str | None:
    """Name the first part in which two keys differ."""
    for part in sorted({*got, *want}):
        one, other = got.get(part, "nothing"), want.get(part, "nothing")
        if one != other:
            return f"{part} is {one!r} instead of {other!r}"
    return None
