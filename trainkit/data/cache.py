"""A cache of packings: bins are packed once, and memory-mapped by all ranks and later runs.

A packing is one file, `CACHE/KEY.bins`; KEY is 16 hex digits of a hash of everything that affects
the bins. Its first line is JSON: the fields of the key, the sizes, and the SHA-256 of the arrays.
The arrays of `Bins` follow as little-endian int64: offsets, documents, starts, lengths. Every byte
is compared or hashed before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from trainkit.collectives import run_on_all_ranks
from trainkit.files import atomic_write, convert_disk_errors, open_regular, remove_stale_files
from trainkit.packing import best_fit, pack_bins
from trainkit.packing.bins import check_lengths
from trainkit.types import SOLO, Bins, DataError, Log, log_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from trainkit.packing.bins import Overlong
    from trainkit.types import Axis, Fit

    _Key = dict[str, Any]
    _Plan = tuple[Bins, str]  # with the SHA-256 of its arrays
    _MakePlan = Callable[[], _Plan]

FORMAT = 2
"""The version of the file format and of the results of `pack_bins`, without those of fits.

It is part of the key: increase it with every change, so that older files are not found.
"""
_MAX_HEADER = 1 << 16  # bytes of the first line, which has about 700
_UNUSABLE = (OSError, ValueError, TypeError, AttributeError)  # the last two from a forged header
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
    """Pack documents as `pack_bins` does, or load the bins from a cache on disk.

    Rank 0 of the axis loads the bins, or packs and writes them. Then all ranks map the same file
    read-only, so that the ranks of a machine share its memory. Ranks that do not see the file pack
    in memory, and so do all ranks if nothing can be written. All ranks return equal bins.

    Args:
        cache_dir: The directory of the cache, created if necessary. None uses no cache.
        lengths: Tokens of each document, integers `[N]`; 0 for held-out documents.
        capacity: Tokens per row.
        content: A hash of the corpus, such as `fingerprint(corpus)`.
        axis: The ranks that call this together, with equal arguments.
        log: Called with a sentence when bins are written, are damaged, or cannot be written.
        fit: As for `pack_bins`. Your own fit needs an attribute `version`, an int or a str, which
            changes with its results.
        group_size: As for `pack_bins`, like all arguments that follow.
        overlong: The policy for documents longer than the capacity.
        multiple_of: Pieces are padded to a multiple of this many tokens.
        max_documents: The maximum number of pieces in a row.
        seed: The seed of the packing.

    Returns:
        The `Bins`, read-only if they are mapped.

    Raises:
        ValueError: An argument is wrong for `pack_bins`, or the fit has no version.
        DataError: Ranks have different arguments, or got different bins.
        DiskError: The disk is full. The incomplete file is removed.

    Effects:
        Writes to `cache_dir` when the bins are not there; replaces damaged files and files of
        another key, and removes files that killed processes left. Communicates on `axis`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for _ in range(2):
        ...         bins = load_or_pack_bins(folder, [5, 3, 2, 6], 8, content="c0ffee", log=print)
        wrote the packing of 2 rows to ...
        >>> bins[0]
        [(2, 0, 2), (3, 0, 6)]
    """
    pack = partial(
        pack_bins,
        capacity=capacity,
        fit=fit,
        group_size=group_size,
        overlong=overlong,
        multiple_of=multiple_of,
        max_documents=max_documents,
        seed=seed,
    )
    is_cached = cache_dir is not None
    keys = run_on_all_ranks(lambda: _make_key(lengths, content, pack, is_cached=is_cached), axis)
    key = keys[0]
    for rank, other in enumerate(keys):
        if difference := _find_difference(other, key):
            raise DataError(
                f"load_or_pack_bins: rank {rank} asks for another packing than rank 0: {difference}"
            )
    path = None
    if cache_dir is not None:
        name = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()
        path = Path(cache_dir) / f"{name[:16]}.bins"

    def make_plan() -> _Plan:
        bins = pack(lengths)
        # Ranks compare this hash, and the file stores it.
        digest = hashlib.sha256()
        for array in _get_arrays(bins):
            digest.update(array.data)
        return bins, digest.hexdigest()

    return _load_on_all_ranks(path, key, make_plan, axis, log)


def _make_key(lengths: ArrayLike, content: str, pack: partial[Bins], *, is_cached: bool) -> _Key:
    """Return the fields that identify a packing, after a check of all arguments."""
    options = pack.keywords
    fit_name = getattr(options["fit"], "__name__", repr(options["fit"]))
    version = getattr(options["fit"], "version", None)
    if is_cached and not isinstance(version, int | str):
        raise ValueError(
            f"load_or_pack_bins: the fit {fit_name} has no attribute `version` that is an int or a "
            "str, so a cached packing could be that of another version: add one, or use no cache "
            "(cache_dir=None)"
        )
    array = check_lengths(lengths)
    pack(array[:0])  # without documents: it only checks
    fields = {
        **options,
        "fit": f"{getattr(options['fit'], '__module__', None)}.{fit_name}",
        "fit_version": version,
        "format": FORMAT,
        "content": content,
        "documents": len(array),
        "lengths_sha256": hashlib.sha256(np.ascontiguousarray(array, "<i8").data).hexdigest(),
    }
    # np.int64(32) and 32 are one key.
    return {name: int(x) if isinstance(x, np.integer) else x for name, x in fields.items()}


def _load_on_all_ranks(
    path: Path | None, key: _Key, make_plan: _MakePlan, axis: Axis, log: Log
) -> Bins:
    """Load or pack on rank 0, then on the others; raise DataError if bins differ."""
    # Filled on every rank, while only hashes travel between ranks.
    local_bins: list[Bins] = []

    def lead() -> tuple[str, bool] | None:
        if axis.index > 0:
            return None
        (bins, sha256), is_written = (
            _load_or_write(path, key, make_plan, log) if path else (make_plan(), False)
        )
        local_bins.append(bins)
        return sha256, is_written

    want, is_written = run_on_all_ranks(lead, axis)[0]

    # A second round, so that the others map the file only when rank 0 has written it.
    def follow() -> str:
        if axis.index == 0:
            return want
        if path and is_written:
            try:
                bins, sha256 = _open(path, key)
            except _UNUSABLE as error:
                log(
                    "packed in memory, since this rank does not see rank 0's packing in "
                    f"{path}: {error}"
                )
                bins, sha256 = make_plan()
        else:
            bins, sha256 = make_plan()
        local_bins.append(bins)
        return sha256

    # A fit that depends on more than its arguments would train every rank on other rows.
    for rank, got in enumerate(run_on_all_ranks(follow, axis)):
        if got != want:
            raise DataError(
                f"load_or_pack_bins: rank {rank} has other bins than rank 0 for the same lengths; "
                f"the fit {key['fit']} must be a function of its arguments alone",
                got=got,
                want=want,
            )
    return local_bins[0]


def _load_or_write(path: Path, key: _Key, make_plan: _MakePlan, log: Log) -> tuple[_Plan, bool]:
    """Return the bins of a path, packed and written if necessary, and whether they are on disk."""
    damage = ""
    try:
        return _open(path, key), True
    except FileNotFoundError:
        pass
    except _UNUSABLE as error:
        damage = str(error)
    # Packed first: a failure to write then costs nothing but the cache.
    plan = make_plan()
    num_rows = len(plan[0])
    try:
        _write(path, key, *plan)
        # Read back: rank 0 maps the file as the others do, and every byte is checked.
        opened = _open(path, key)
    except _UNUSABLE as error:
        # A full disk ends the run: it would fail at its first checkpoint.
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
            raise
        log(f"packed in memory, since no packing can be written to {path}: {error}")
        return plan, False
    if damage:
        log(f"rebuilt the packing of {num_rows} rows in {path}, which was damaged: {damage}")
    else:
        log(f"wrote the packing of {num_rows} rows to {path}")
    return opened, True


# -------------------------------------------------------------------------------------- the file


def _write(path: Path, key: _Key, bins: Bins, sha256: str) -> None:
    """Write bins atomically; remove files that killed processes left."""
    header = orjson.dumps(
        {"key": key, "rows": len(bins), "pieces": len(bins.documents), "sha256": sha256}
    )
    # The arrays begin at a multiple of 64 bytes.
    header = header.ljust(-(-(len(header) + 1) // 64) * 64 - 1) + b"\n"
    arrays = _get_arrays(bins)
    needed = len(header) + sum(array.nbytes for array in arrays)
    with convert_disk_errors(path, by="load_or_pack_bins", needed=needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_files(path.parent.glob(".*.bins.staging-*"))
    with (
        atomic_write(path, by="load_or_pack_bins") as file,
        convert_disk_errors(path, by="load_or_pack_bins", needed=needed),
    ):
        file.write(header)
        # Not through a memory map, where a full disk kills the process with SIGBUS.
        for array in arrays:
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path, key: _Key) -> _Plan:
    """Map bins read-only after checking every byte; raise one of _UNUSABLE if anything differs."""
    with open_regular(path) as file:
        header = orjson.loads(file.readline(_MAX_HEADER))
        if not isinstance(header, dict) or header.keys() != {"key", "rows", "pieces", "sha256"}:
            raise ValueError(f"its first line is not the header of a packing: {str(header)[:99]}")
        if difference := _find_difference(header["key"], key):
            raise ValueError(f"it is the packing of another key: {difference}")
        start = file.tell()
        rows = header["rows"]
        pieces = header["pieces"]
        size = os.fstat(file.fileno()).st_size
        expected = start + 8 * (rows + 1 + 3 * pieces)
        # A truncated file, or a forged number of rows, is found before anything of that size is
        # read.
        if size != expected:
            raise ValueError(f"it has {size} bytes instead of {expected}")
        if hashlib.file_digest(file, "sha256").hexdigest() != header["sha256"]:
            raise ValueError("its arrays do not match their sha256")
        data = np.asarray(np.memmap(file, "<i8", mode="r", offset=start))
    arrays = np.split(data, np.cumsum([rows + 1, pieces, pieces]))
    offsets = arrays[0]
    has_ends = offsets[0] == 0 and offsets[-1] == pieces
    if not has_ends or (np.diff(offsets) < 0).any():
        raise ValueError(f"its offsets do not rise from 0 to {pieces}")
    bins = Bins(*arrays, capacity=key["capacity"], multiple_of=key["multiple_of"])
    return bins, header["sha256"]


def _get_arrays(bins: Bins) -> list[np.ndarray[Any, Any]]:
    arrays = (bins.offsets, bins.documents, bins.starts, bins.lengths)
    return [np.ascontiguousarray(array, "<i8") for array in arrays]


# --------------------------------------------------------------------------------------- the key


def _find_difference(got: _Key, want: _Key) -> str | None:
    """Describe the first field in which two keys differ."""
    for name in sorted({*got, *want}):
        actual = got.get(name, "nothing")
        expected = want.get(name, "nothing")
        if actual != expected:
            return f"{name} is {actual!r} instead of {expected!r}"
    return None
