"""`make_balanced_fit`: a `Fit` with a multiple of some number of bins, all about equally full."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.jit import jit
from trainkit.packing.fits import by_length, has_table, in_arrival_order, task_of, with_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.packing.fits import Task, VersionedFit
    from trainkit.types import IntArray


def make_balanced_fit(rows: int) -> VersionedFit:
    """Return a fit that makes k x `rows` bins of near-equal tokens, for the smallest k that works.

    Each piece, the longest first, goes into the emptiest bin that may take another one (LPT; ties:
    the lowest number). k grows until no bin comes out over capacity. With `rows` a multiple of the
    ranks no step needs a blank row, and every row holds about the same number of tokens.

    Each group of `pack_bins` gets k x `rows` bins of its own.

    Args:
        rows: What the number of bins is to be a multiple of, such as the rows of a step.

    Returns:
        The fit. Its `__name__` holds `rows`.

    Raises:
        ValueError: `rows` is below 1; when called, there are too few pieces to give each bin one.

    See R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969).

    Examples:
        >>> fit = make_balanced_fit(2)
        >>> fit(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([1, 1, 0, 0])
        >>> fit.__name__, fit.version
        ('balanced(2)', 1)
    """
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
        raise ValueError(f"balanced: rows must be an integer of at least 1, got {rows!r}")
    rows = int(rows)

    @with_version(1)
    def fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
        task = task_of("balanced", lengths, capacity, max_documents)
        return _smallest(task, rows)

    fit.__name__ = f"balanced({rows})"
    return fit


def _smallest(task: Task, rows: int) -> IntArray:
    """Return the answer with the fewest bins.

    One more bin never makes the fullest of LPT fuller: bin for bin, both sorted, the loads stay at
    or below those without it, by induction over the pieces. So k can be searched in steps that
    double. (That is proved without a limit of pieces; with one, 360,000 random cases agree.)
    """
    size = task.keys.size
    ends, _ = by_length(task)
    tokens, pieces = -(-task.total // (rows * task.capacity)), -(-size // (rows * task.limit))
    most = size // rows

    def answer(k: int) -> IntArray | None:
        bins, top = np.empty(size, np.int64), min(task.capacity, task.total)
        deal = _emptiest if has_table(top, size) else _emptiest_by_heap
        fits = k <= most and deal(ends, task.sizes, top, task.limit, k * rows, bins)
        return bins if fits else None

    low = max(1, tokens, pieces)  # the fewest that may work
    high, step, best = low, 1, answer(low)
    while best is None and high < most:
        low, high, step = high + 1, min(high + step, most), 2 * step
        best = answer(high)
    if best is None:
        raise ValueError(
            f"balanced: {size} pieces do not fill a multiple of {rows} bins of capacity "
            f"{task.capacity} (every bin needs a piece): take group_size=0, fewer rows, or "
            "another fit"
        )
    return in_arrival_order(task, ends, _bisected(answer, low, high, best))


def _bisected(
    answer: Callable[[int], IntArray | None], low: int, high: int, best: IntArray
) -> IntArray:
    """Return the first answer in [low, high], where `best` is that of `high`."""
    while low < high:
        middle = (low + high) // 2
        found = answer(middle)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    return best


@jit
def _emptiest(  # noqa: PLR0917 (an array is a parameter)
    ends: Any, sizes: Any, top: int, limit: int, num_bins: int, bins: Any
) -> bool:
    """Write the bins of the pieces by length; return False when one goes over `top`.

    The longest goes first, into the emptiest bin, without a search for it: bins wait filed under
    their load, and the smallest load only grows.
    """
    waiting = np.full(top + 1, -1)  # by load: the bin filed last; `earlier` leads to the others
    earlier = np.empty(num_bins, np.int64)
    room = np.full(num_bins, limit)
    emptiest = np.arange(num_bins)  # the bins of the present load, by number
    count, at, load = num_bins, 0, 0
    for key in range(ends.size - 1, 0, -1):
        length = sizes[key]
        for place in range(ends[key - 1], ends[key]):
            while at == count and load + length < top:
                load += 1
                count = at = 0
                bin_ = waiting[load]
                while bin_ >= 0:
                    emptiest[count] = bin_
                    count += 1
                    bin_ = earlier[bin_]
                emptiest[:count].sort()
            if at == count or load + length > top:
                return False
            bin_ = emptiest[at]
            at += 1
            bins[place] = bin_
            room[bin_] -= 1
            if room[bin_] > 0:
                earlier[bin_] = waiting[load + length]
                waiting[load + length] = bin_
    return True


@jit
def _emptiest_by_heap(  # noqa: PLR0917 (an array is a parameter)
    ends: Any, sizes: Any, top: int, limit: int, num_bins: int, bins: Any
) -> bool:
    """Do what `_emptiest` does, where a table of all loads would be far longer than the pieces."""
    room = np.full(num_bins, limit)
    waiting = [(0, bin_) for bin_ in range(num_bins)]  # in order, so a heap: the load, the number
    for key in range(ends.size - 1, 0, -1):
        for place in range(ends[key - 1], ends[key]):
            if len(waiting) == 0 or waiting[0][0] + sizes[key] > top:
                return False
            load, bin_ = heappop(waiting)
            bins[place] = bin_
            room[bin_] -= 1
            if room[bin_] > 0:
                heappush(waiting, (load + sizes[key], bin_))
    return True
