"""`cached_bins`: the bins of a corpus, packed once, mapped by every rank and every later run."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.collectives import together
from trainkit.data.plan_files import (
    Plan,
    UnusablePlanError,
    difference,
    folder_of,
    keep_plan,
    open_plan,
    plan_of,
)
from trainkit.packing import best_fit, pack_bins
from trainkit.packing.bins import checked_lengths
from trainkit.types import SOLO, DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from trainkit.packing.bins import Overlong
    from trainkit.types import Axis, Bins, Fit

    Pack = Callable[[], Plan]
    Tell = Callable[[str], object]

TABLE = 1
"""The version of what `pack_bins` does around a fit, part of the key: whoever changes its answers
raises it.
"""
_MANY = 10_000_000  # documents; packing them takes half a second
_TRIES = 5


def cached_bins(
    cache_dir: Path | str | None,
    lengths: ArrayLike,
    capacity: int,
    *,
    content: str,
    axis: Axis = SOLO,
    tell: Callable[[str], object] | None = None,
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
        tell: Called with one sentence about each thing worth knowing: a plan that was kept, that
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
        DataError: A plan's key.json is whole and names another plan than its directory does, or
            ranks ask for different plans or got different ones.
        DiskError: The disk is full. What was half written is removed.

    Effects:
        Writes below `cache_dir` when the plan is not there; replaces a damaged one, and removes
        what killed processes left. Communicates on `axis`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for _ in range(2):
        ...         bins = cached_bins(folder, [5, 3, 2, 6], 8, content="c0ffee", tell=print)
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
    key = _agreed_key(partial(_key_of, lengths, capacity, content, arguments, kept=kept), axis)
    folder = None if cache_dir is None else folder_of(Path(cache_dir), key)

    def pack() -> Plan:
        return plan_of(pack_bins(lengths, capacity, **arguments))

    return _shared_bins(folder, key, pack, axis, tell or (lambda _: None))


def _shared_bins(
    folder: Path | None, key: dict[str, Any], pack: Pack, axis: Axis, tell: Tell
) -> Bins:
    """Let rank 0 go first, then the others; refuse bins that differ."""
    mine: list[Plan] = []

    def lead() -> bool:
        if axis.index == 0:
            mine.append(_opened_or_packed(folder, key, pack, tell))
        return axis.index == 0 and mine[0].mapped

    mapped = together(lead, axis)[0]

    def follow() -> str:
        if axis.index > 0:
            mine.append(_opened_as_rank_0(folder if mapped else None, key, pack, tell))
        return mine[0].sha256

    hashes = together(follow, axis)
    for rank, found in enumerate(hashes):
        if found != hashes[0]:
            raise DataError(
                f"cached_bins: rank {rank} has other bins than rank 0 for the same lengths; the "
                f"fit {key['fit']} must be a function of its arguments alone",
                got=found,
                want=hashes[0],
            )
    return mine[0].bins


def _opened_or_packed(folder: Path | None, key: dict[str, Any], pack: Pack, tell: Tell) -> Plan:
    """Return the plan in `folder`; if there is no whole one, pack it and keep it."""
    damage = None
    try:
        if folder is not None and (plan := open_plan(folder, key)):
            return plan
    except UnusablePlanError as error:
        damage = str(error)
    if key["documents"] >= _MANY:
        tell(f"packing {key['documents']} documents")
    plan = pack()
    if folder is None:
        return plan
    try:
        kept = _kept(folder, key, plan)
    except (OSError, UnusablePlanError) as error:
        tell(f"packed in memory, since no plan can be kept in {folder}: {error}")
        return plan
    rows = len(kept.bins)
    tell(
        f"rebuilt the plan of {rows} rows in {folder}, which was damaged: {damage}"
        if damage
        else f"plan of {rows} rows kept in {folder}"
    )
    return kept


def _kept(folder: Path, key: dict[str, Any], plan: Plan) -> Plan:
    """Keep a plan and open it; again where another process, replacing a broken one, took it."""
    for _ in range(_TRIES):
        keep_plan(folder, key, plan)
        with suppress(UnusablePlanError):
            if kept := open_plan(folder, key):
                return kept
    raise UnusablePlanError("what was written there cannot be read")


def _opened_as_rank_0(folder: Path | None, key: dict[str, Any], pack: Pack, tell: Tell) -> Plan:
    """Return the plan that rank 0 left in `folder`; None: it packed in memory."""
    if folder is None:
        return pack()
    reason = "there is none"
    try:
        if plan := open_plan(folder, key):
            return plan
    except UnusablePlanError as error:
        reason = str(error)
    tell(f"packed in memory, since this rank does not see rank 0's plan in {folder}: {reason}")
    return pack()


# --------------------------------------------------------------------------------------------- key


def _agreed_key(key_of: Callable[[], dict[str, Any]], axis: Axis) -> dict[str, Any]:
    keys = together(key_of, axis)
    for rank, key in enumerate(keys):
        if part := difference(key, keys[0]):
            raise DataError(f"cached_bins: rank {rank} asks for another plan than rank 0: {part}")
    return keys[0]


def _key_of(
    lengths: ArrayLike, capacity: int, content: str, arguments: dict[str, Any], *, kept: bool
) -> dict[str, Any]:
    """Return the parts of the key, once `pack_bins` has looked at the arguments."""
    fit = arguments["fit"]
    name, version = getattr(fit, "__name__", repr(fit)), getattr(fit, "version", None)
    if kept and not isinstance(version, int | str):
        raise ValueError(
            f"cached_bins: the fit {name} has no attribute `version` that is an int or a str, so "
            "its plan could not be told from its next version's: give it one, or keep no plan "
            "(cache_dir=None)"
        )
    whole = checked_lengths(lengths)
    pack_bins(whole[:0], capacity, **arguments)
    parts = arguments | {
        "fit": f"{getattr(fit, '__module__', None)}.{name}",
        "fit_version": version,
        "table_version": TABLE,
        "capacity": capacity,
        "content": content,
        "documents": len(whole),
        "lengths_sha256": hashlib.sha256(np.ascontiguousarray(whole, "<i8").data).hexdigest(),
    }
    return {part: int(x) if isinstance(x, np.integer) else x for part, x in parts.items()}
