"""A `Fit` whose bins are about equally full and a multiple of some number."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.jit import jit
from trainkit.packing.fits import (
    count_by_length,
    has_table,
    make_task,
    restore_arrival_order,
    with_version,
)

if TYPE_CHECKING:
    from trainkit.packing.fits import Task, VersionedFit
    from trainkit.types import IntArray


def make_balanced_fit(rows: int) -> VersionedFit:
    """Return a fit that makes k x `rows` bins of nearly equal tokens, for the smallest possible k.

    Each piece, the longest first, goes into the emptiest bin with room for another piece (LPT; ties
    go to the lowest number). k grows until no bin exceeds the capacity. With `rows` a multiple of
    the ranks no step needs padding rows, and every row holds about the same number of tokens.

    Each group of `pack_bins` gets its own k x `rows` bins.

    Args:
        rows: The number of bins is a multiple of this, such as the rows of a step.

    Returns:
        The fit. Its `__name__` contains `rows`.

    Raises:
        ValueError: `rows` is below 1; when called, there are fewer pieces than bins.

    See R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969).

    Examples:
        >>> fit = make_balanced_fit(2)
        >>> fit(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([1, 1, 0, 0])
        >>> fit.__name__, fit.version
        ('balanced(2)', 1)
    """
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
        raise ValueError(f"make_balanced_fit: rows must be an integer of at least 1, got {rows!r}")
    rows = int(rows)

    @with_version(1)
    def fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
        task = make_task("balanced", lengths, capacity, max_documents)
        return _find_fewest_bins(task, rows)

    fit.__name__ = f"balanced({rows})"
    return fit


def _find_fewest_bins(task: Task, rows: int) -> IntArray:
    """Return the bins of the pieces for the smallest k.

    One more bin never makes the fullest bin of LPT fuller: bin for bin, both sorted, the loads stay
    at or below those without it, by induction over the pieces. So a search that doubles its steps,
    and then bisects, finds the smallest k. (This is proved without a limit of pieces; with one,
    360,000 random cases agree.)
    """
    size = task.keys.size
    ends, _ = count_by_length(task)
    # A bin never holds more than all tokens, which bounds the table of loads.
    max_load = min(task.capacity, task.total)
    max_k = size // rows
    fill = _fill_emptiest if has_table(max_load, size) else _fill_emptiest_by_heap

    def try_k(k: int) -> IntArray | None:
        bins = np.empty(size, np.int64)
        fits = k <= max_k and fill(ends, task.sizes, max_load, task.limit, k * rows, bins)
        return bins if fits else None

    # Fewer bins cannot hold all tokens, or all pieces.
    low = max(
        1,
        -(-task.total // (rows * task.capacity)),
        -(-size // (rows * task.limit)),
    )
    high = low
    step = 1
    best = try_k(low)
    while best is None and high < max_k:
        low = high + 1
        high = min(high + step, max_k)
        step *= 2
        best = try_k(high)
    if best is None:
        raise ValueError(
            f"balanced: {size} pieces do not fill a multiple of {rows} bins of capacity "
            f"{task.capacity} (every bin needs a piece): take group_size=0, fewer rows, or "
            "another fit"
        )
    while low < high:
        middle = (low + high) // 2
        bins = try_k(middle)
        if bins is None:
            low = middle + 1
        else:
            high = middle
            best = bins
    return restore_arrival_order(task, ends, best)


@jit
def _fill_emptiest(  # noqa: PLR0917 (an array is a parameter)
    ends: Any, sizes: Any, max_load: int, limit: int, num_bins: int, bins: Any
) -> bool:
    """Write the bins of the pieces by length; return False when one exceeds `max_load`.

    There is no search for the emptiest bin: bins wait in a linked list per load, and the smallest
    load only grows.
    """
    waiting = np.full(max_load + 1, -1)  # the head of each list; `following` links the others
    following = np.empty(num_bins, np.int64)
    room = np.full(num_bins, limit)
    emptiest = np.arange(num_bins)  # the bins of the smallest load, by number
    count = num_bins
    at = load = 0
    for key in range(ends.size - 1, 0, -1):
        length = sizes[key]
        for place in range(ends[key - 1], ends[key]):
            # All bins of this load have got a piece: on to the next load that some bin has.
            while at == count and load + length < max_load:
                load += 1
                count = at = 0
                bin_ = waiting[load]
                while bin_ >= 0:
                    emptiest[count] = bin_
                    count += 1
                    bin_ = following[bin_]
                # Ties go to the lowest number, and a linked list is not in the order of numbers.
                emptiest[:count].sort()
            if at == count or load + length > max_load:
                return False
            bin_ = emptiest[at]
            at += 1
            bins[place] = bin_
            room[bin_] -= 1
            if room[bin_] > 0:
                following[bin_] = waiting[load + length]
                waiting[load + length] = bin_
    return True


@jit
def _fill_emptiest_by_heap(  # noqa: PLR0917 (an array is a parameter)
    ends: Any, sizes: Any, max_load: int, limit: int, num_bins: int, bins: Any
) -> bool:
    """Do the same as `_fill_emptiest` with a heap, where a table of loads would be too long."""
    room = np.full(num_bins, limit)
    waiting = [(0, bin_) for bin_ in range(num_bins)]  # (load, number); sorted, so a heap
    for key in range(ends.size - 1, 0, -1):
        for place in range(ends[key - 1], ends[key]):
            if len(waiting) == 0 or waiting[0][0] + sizes[key] > max_load:
                return False
            load, bin_ = heappop(waiting)
            bins[place] = bin_
            room[bin_] -= 1
            if room[bin_] > 0:
                heappush(waiting, (load + sizes[key], bin_))
    return True
