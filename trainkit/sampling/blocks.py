"""Rows drawn in blocks of neighbours, so that what a step deals to its ranks is of like cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainkit.noise.hashing import make_key
from trainkit.sampling.integers import integers
from trainkit.sampling.permutation import check_batch, in_epochs, permute
from trainkit.types import check_range

if TYPE_CHECKING:
    from trainkit.types import IntArray, RowsAt


def shuffle_blocks(order: IntArray, *, block: int, rows_per_step: int, seed: int) -> RowsAt:
    """Return rows_at(batch), as `shuffle_epochs` does, but rows are drawn block by block.

    A block is so many rows that follow one another in `order`. With rows in the order of their cost
    and as many in a block as there are ranks, or a multiple, every rank gets one row of each block,
    and all have the same work, though a step has few rows; `assign_rows` deals them. What a step
    holds does not depend on the ranks. The price: rows of one block always meet in one step.

    Every row comes once per epoch. Blocks end where steps do, if `block` divides `rows_per_step`,
    in all epochs: the few rows that fill no block are the first of `order`, and an epoch begins and
    ends with them.

    Args:
        order: All rows, int64 `[num_rows]`, for instance `np.argsort(row_costs(bins))`.
        block: Rows in a block.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.
        seed: The run's seed; the order of blocks in each epoch is made from it.

    Returns:
        A function from the number of a global batch, from 0, to its rows: int64
        `[rows_per_step]`, elements of `order`.

    Raises:
        ValueError: `rows_per_step` or `block` is below 1, or `order` is no integers in one
            dimension, or empty; from rows_at, a number of a batch below 0.

    Examples:
        >>> order = np.argsort([9, 1, 8, 2, 7, 3])
        >>> rows_at = shuffle_blocks(order, block=2, rows_per_step=4, seed=0)
        >>> [rows_at(batch).tolist() for batch in range(3)]
        [[5, 4, 1, 3], [2, 0, 2, 0], [1, 3, 5, 4]]

    Batches of samples of like length are an old habit (Khomenko et al., "Accelerating recurrent
    neural network training using sequence bucketing", 2017); here they are rows of like cost.
    """
    check_range("shuffle_blocks", at_least=1, rows_per_step=rows_per_step, block=block)
    order = integers("shuffle_blocks", "order", order)
    if order.ndim != 1 or order.size == 0:
        must = "order must be at least one integer in one dimension"
        raise ValueError(f"shuffle_blocks: {must}, got {order.dtype} {order.shape}")

    def rows_at(batch: int) -> IntArray:
        check_batch(batch)
        parts = in_epochs(batch * rows_per_step, rows_per_step, order.size)
        places = [_places(index, order.size, block, epoch, seed) for epoch, index in parts]
        return order[np.concatenate(places)]

    return rows_at


def _places(index: IntArray, count: int, block: int, epoch: int, seed: int) -> IntArray:
    """Return which places of the order an epoch's draws with these numbers take."""
    head = min(-epoch * count % block, count)  # they fill the block that the last epoch began
    full = (count - head) // block
    few = count - full * block
    number, member = np.divmod(index - head, block)
    in_blocks = (number >= 0) & (number < full)
    places = np.where(index < head, index, index - full * block)
    if in_blocks.any():
        blocks = permute(number[in_blocks], full, make_key(seed, "block", epoch))
        places[in_blocks] = few + blocks * block + member[in_blocks]
    return places
