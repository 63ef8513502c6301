"""Assign the rows of a step to ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.jit import jit
from trainkit.sampling.integers import integers
from trainkit.types import check_range

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.types import Share


def assign_rows(
    num_rows: int, share: Share, *, rows_per_microbatch: int, costs: ArrayLike | None = None
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the rows of a global batch that one rank computes, split into microbatches.

    By default ranks get contiguous runs of rows whose sizes differ by at most one. Padding rows
    fill up the shorter ones, so that every rank has the same number of microbatches, and the fewest
    possible.

    With costs each rank gets as many rows as without, and nearly equal work. The most expensive
    rows form the first microbatch of all ranks, the next the second, so that ranks that synchronize
    in every microbatch wait little. Inside a microbatch each row goes to the rank with the least
    work so far that has room (Graham, "Bounds on multiprocessing timing anomalies", 1969). Then the
    rank with the most work swaps rows with others while that helps. The result is never worse than
    contiguous runs. Rows of 4,096 tokens, 16 to each of 8 ranks: on average 0.1 % above the mean
    instead of 25 %, in 30 us.

    Args:
        num_rows: Rows in the global batch.
        share: The rank and the number of ranks that read different rows.
        rows_per_microbatch: Rows in a microbatch, at most `num_rows`.
        costs: The cost of the row at each position of the global batch, integers `[num_rows]` of at
            least 0, as from `packing.row_costs`; equal on all ranks.

    Returns:
        Positions in the global batch, int64 `[microbatches, rows_per_microbatch]`; -1 is a padding
        row. Over all ranks every position occurs once.

    Raises:
        ValueError: There are more ranks than rows, `rows_per_microbatch` is below 1, or costs are
            not as above.

    Examples:
        >>> from trainkit.types import Share
        >>> [assign_rows(3, Share(rank, 2), rows_per_microbatch=1).tolist() for rank in (0, 1)]
        [[[0], [1]], [[2], [-1]]]
        >>> for rank in (0, 1):
        ...     assign_rows(4, Share(rank, 2), rows_per_microbatch=2, costs=[9, 8, 2, 1]).tolist()
        [[0, 3]]
        [[1, 2]]
    """
    check_range("assign_rows", at_least=1, rows_per_microbatch=rows_per_microbatch)
    if share.count > num_rows:
        raise ValueError(
            f"assign_rows: more ranks than rows: {share.count} ranks that read different rows, "
            f"{num_rows} rows in the global batch; raise the rows per step, or lower the "
            "data-parallel degree"
        )
    rows_per_microbatch = min(rows_per_microbatch, num_rows)
    num_microbatches = -(-num_rows // (share.count * rows_per_microbatch))
    size = num_microbatches * rows_per_microbatch
    # The rows of rank r are bounds[r]:bounds[r + 1], whose sizes differ by at most one.
    bounds = -(-num_rows * np.arange(share.count + 1) // share.count)
    positions = bounds[:-1, None] + np.arange(size)
    table = np.where(positions < bounds[1:, None], positions, -1)  # [ranks, size]
    if costs is not None:
        costs = integers("assign_rows", "costs", costs)
        if costs.shape != (num_rows,) or costs.min() < 0:
            minimum = f" from {costs.min()} on" if costs.shape == (num_rows,) else ""
            raise ValueError(
                f"assign_rows: costs must be [{num_rows}] integers of at least 0, one per row of "
                f"the global batch, got {costs.dtype} {costs.shape}{minimum}"
            )
        balanced = np.full_like(table, -1)
        order = np.argsort(-costs, kind="stable")
        totals = _assign_greedily(balanced, np.diff(bounds), order, costs, rows_per_microbatch)
        _swap_rows(balanced, totals, costs, rows_per_microbatch)
        # Greedy assignment can, rarely, be worse than contiguous runs.
        if totals.max() < np.add.reduceat(costs, bounds[:-1]).max():
            table = balanced
    return table[share.index].reshape(num_microbatches, rows_per_microbatch)


@jit
def _assign_greedily(table: Any, room: Any, order: Any, costs: Any, width: int) -> Any:
    """Fill the table a microbatch at a time; return the cost of each rank, `[ranks]`."""
    num_ranks = len(table)
    totals = np.zeros(num_ranks, np.int64)
    num_rows = np.zeros(num_ranks, np.int64)
    end = 0
    for row in order:
        # The rank with the least work that has room in this microbatch; without one, the next
        # microbatch begins.
        chosen = -1
        while chosen < 0:
            for rank in range(num_ranks):
                has_room = num_rows[rank] < min(end, room[rank])
                if has_room and (chosen < 0 or totals[rank] < totals[chosen]):
                    chosen = rank
            if chosen < 0:
                end += width
        table[chosen, num_rows[chosen]] = row
        totals[chosen] += costs[row]
        num_rows[chosen] += 1
    return totals


@jit
def _swap_rows(table: Any, totals: Any, costs: Any, width: int) -> None:
    """Swap rows of a microbatch between ranks until the most work is within 0.1 % of the mean."""
    num_ranks, size = table.shape
    for _ in range(costs.size):
        high = totals.argmax()
        # In integers: the largest total is at most 0.1 % above the mean.
        if (totals[high] * num_ranks - totals.sum()) * 1000 <= totals.sum():
            return
        gain = 0
        other = 0
        i_best = 0
        j_best = 0
        for low in range(num_ranks):
            gap = totals[high] - totals[low]
            for i in range(size):
                if gap <= gain or table[high, i] < 0:
                    continue
                for j in range(i // width * width, (i // width + 1) * width):
                    if table[low, j] >= 0:
                        # A swap moves `less` work from high to low. The larger of their totals
                        # falls by min(less, gap - less), which is best at half the gap.
                        less = costs[table[high, i]] - costs[table[low, j]]
                        if min(less, gap - less) > gain:
                            gain = min(less, gap - less)
                            other = low
                            i_best = i
                            j_best = j
        if gain == 0:
            return
        less = costs[table[high, i_best]] - costs[table[other, j_best]]
        totals[high] -= less
        totals[other] += less
        row = table[high, i_best]
        table[high, i_best] = table[other, j_best]
        table[other, j_best] = row
