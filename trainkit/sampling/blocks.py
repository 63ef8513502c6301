"""Rows in shuffled blocks of similar cost, so that the ranks of a step have equal work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainkit.noise.hashing import make_key
from trainkit.sampling.integers import integers
from trainkit.sampling.permutation import check_batch, permute, split_by_epoch
from trainkit.types import check_range

if TYPE_CHECKING:
    from trainkit.types import IntArray, RowsAt


def shuffle_blocks(order: IntArray, *, block: int, rows_per_step: int, seed: int) -> RowsAt:
    """Return rows_at(batch), which shuffles blocks of consecutive rows of `order` in each epoch.

    Sort `order` by cost, with the number of ranks (or a multiple) as the size of a block. Then
    every rank gets one row of each block, and all have the same work, even in a step of few rows;
    `assign_rows` does this. The rows of a step do not depend on the ranks. The price: the rows of a
    block always come in the same step.

    Every row comes once per epoch. If `block` divides `rows_per_step`, blocks end where steps end,
    in all epochs: the few rows that fill no block are the first of `order`, and an epoch begins and
    ends with them.

    Args:
        order: All rows, int64 `[num_rows]`, for instance `np.argsort(row_costs(bins))`.
        block: Rows in a block.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.
        seed: The run's seed, from which the order of blocks in each epoch follows.

    Returns:
        A function from the number of a global batch, from 0, to its rows: int64
        `[rows_per_step]`, elements of `order`.

    Raises:
        ValueError: `rows_per_step` or `block` is below 1, or `order` is not a non-empty array of
            integers in one dimension; from rows_at, a batch number below 0.

    Examples:
        >>> order = np.argsort([9, 1, 8, 2, 7, 3])
        >>> rows_at = shuffle_blocks(order, block=2, rows_per_step=4, seed=0)
        >>> [rows_at(batch).tolist() for batch in range(3)]
        [[5, 4, 1, 3], [2, 0, 2, 0], [1, 3, 5, 4]]

    Sequence bucketing makes batches of samples of similar length (Khomenko et al., "Accelerating
    recurrent neural network training using sequence bucketing", 2017); here the cost is similar.
    """
    check_range("shuffle_blocks", at_least=1, rows_per_step=rows_per_step, block=block)
    order = integers("shuffle_blocks", "order", order)
    if order.ndim != 1 or order.size == 0:
        raise ValueError(
            "shuffle_blocks: order must be at least one integer in one dimension, got "
            f"{order.dtype} {order.shape}"
        )

    def rows_at(batch: int) -> IntArray:
        check_batch(batch)
        positions = []
        for epoch, index in split_by_epoch(batch * rows_per_step, rows_per_step, order.size):
            # The first draws fill the block that the previous epoch began.
            head = min(-epoch * order.size % block, order.size)
            num_blocks = (order.size - head) // block
            num_left = order.size - num_blocks * block
            number, member = np.divmod(index - head, block)
            is_in_block = (number >= 0) & (number < num_blocks)
            rows = np.where(index < head, index, index - num_blocks * block)
            if is_in_block.any():
                blocks = permute(number[is_in_block], num_blocks, make_key(seed, "block", epoch))
                rows[is_in_block] = num_left + blocks * block + member[is_in_block]
            positions.append(rows)
        return order[np.concatenate(positions)]

    return rows_at
