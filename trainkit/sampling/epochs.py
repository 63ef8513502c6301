"""Epochs: the shuffled rows of each step, the number of steps, and the epoch of a step.

All epochs form one endless stream of rows. A step takes the next `rows_per_step` of them, in every
layout. A batch may span two epochs, so that no rows remain at the end of one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from trainkit.sampling.permutation import check_batch, draw_rows
from trainkit.types import check_range

if TYPE_CHECKING:
    from trainkit.types import IntArray, RowsAt


def shuffle_epochs(num_rows: int, *, rows_per_step: int, seed: int) -> RowsAt:
    """Return rows_at(batch), which visits all rows once per epoch, in a new order each time.

    A batch may span two epochs: no row is dropped to make them even.

    Args:
        num_rows: Rows in the corpus.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.
        seed: The run's seed; the order of an epoch follows from it and the epoch's number.

    Returns:
        A function from the number of a global batch, from 0, to its rows: int64
        `[rows_per_step]`, each in [0, num_rows).

    Raises:
        ValueError: A number of rows is below 1; from rows_at, a batch number below 0.

    Examples:
        >>> rows_at = shuffle_epochs(4, rows_per_step=3, seed=0)
        >>> [rows_at(batch).tolist() for batch in range(4)]
        [[3, 0, 2], [1, 0, 2], [1, 3, 2], [0, 3, 1]]
    """
    if num_rows == 0:
        raise ValueError(
            "shuffle_epochs: there is no row to train on; use more documents, or longer rows if "
            "all documents were too long"
        )
    check_range("shuffle_epochs", at_least=1, num_rows=num_rows, rows_per_step=rows_per_step)

    def rows_at(batch: int) -> IntArray:
        check_batch(batch)
        # A batch may end one epoch and begin the next: the draws are one endless stream.
        return draw_rows(batch * rows_per_step, rows_per_step, num_rows, seed, "epoch")

    return rows_at


def count_steps(
    *,
    num_rows: int | None,
    rows_per_step: int,
    epochs: float | None = None,
    max_steps: int | None = None,
) -> int:
    """Return the number of optimizer steps that fit into some epochs, at most `max_steps`.

    A step that would go beyond the last epoch is not taken. So no row comes more than
    `ceil(epochs)` times, and fewer than `rows_per_step` rows come one time less.

    Args:
        num_rows: Rows in the corpus; None for a stream of unknown length, which has no epochs.
        rows_per_step: Rows in the global batch, over all ranks and microbatches: with b rows in a
            microbatch, a microbatches and r ranks that read different rows, b * a * r.
        epochs: The number of passes over the corpus, possibly a fraction; None sets no limit.
        max_steps: The maximum number of steps; None sets no limit.

    Returns:
        The number of steps, at least 1.

    Raises:
        ValueError: Nothing sets a limit, the epochs are shorter than a step, epochs are given for a
            stream of unknown length, or a number is out of range.

    Examples:
        >>> count_steps(num_rows=100, rows_per_step=8, epochs=2)
        25
        >>> count_steps(num_rows=100, rows_per_step=8, epochs=0.5, max_steps=1000)
        6

    xorl, d9d and KempnerForge multiply the steps of one epoch by the epochs instead, which drops
    the remaining rows of every epoch.
    """
    check_range("count_steps", at_least=1, num_rows=num_rows, rows_per_step=rows_per_step)
    check_range("count_steps", at_least=1, max_steps=max_steps)
    if epochs is None:
        if max_steps is None:
            raise ValueError("count_steps: nothing ends the run; give epochs, max_steps or both")
        return max_steps
    if num_rows is None:
        raise ValueError(
            f"count_steps: {epochs} epochs of a stream of unknown length; give max_steps instead"
        )
    if not (math.isfinite(epochs) and epochs > 0):
        raise ValueError(f"count_steps: epochs must be above 0 (or None), got {epochs}")
    # str(0.1) is "0.1", so the fraction is 1/10, as meant, and not the nearest binary one.
    rows = math.floor(Fraction(str(epochs)) * num_rows)
    if rows < rows_per_step:
        raise ValueError(
            f"count_steps: {epochs} epochs of {num_rows} rows hold no step of {rows_per_step} "
            "rows; lower rows_per_step, or raise epochs"
        )
    steps = rows // rows_per_step
    return steps if max_steps is None else min(steps, max_steps)


def count_epochs(step: int, *, num_rows: int, rows_per_step: int) -> float:
    """Return the number of epochs of a corpus that have been read after `step` steps.

    A resumed run has no counter of epochs: it follows from the step. In a mixture each corpus has
    its own epochs, which this does not count.

    Args:
        step: The number of steps taken, `TrainState.step`.
        num_rows: Rows in the corpus.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.

    Returns:
        Epochs. The integer part is the number of the epoch that the next step begins in (exact up
        to 2^53 rows).

    Raises:
        ValueError: `step` is below 0, or a number of rows below 1.

    Examples:
        >>> [count_epochs(step, num_rows=100, rows_per_step=8) for step in (0, 5, 25)]
        [0.0, 0.4, 2.0]
        >>> [int(count_epochs(step, num_rows=4, rows_per_step=3)) for step in range(5)]
        [0, 0, 1, 2, 3]
    """
    check_range("count_epochs", at_least=1, num_rows=num_rows, rows_per_step=rows_per_step)
    check_range("count_epochs", at_least=0, step=step)
    return step * rows_per_step / num_rows
