"""The endless stream of epochs: its rows, how many steps a run takes, how far a step has come.

A step takes the next `rows_per_step` rows of the stream, however they are dealt to microbatches and
ranks, and a batch may straddle two epochs: no rows are left over at the end of one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from trainkit.sampling.permutation import check_batch, draws
from trainkit.types import check_range

if TYPE_CHECKING:
    from trainkit.types import IntArray, RowsAt


def shuffle_epochs(num_rows: int, *, rows_per_step: int, seed: int) -> RowsAt:
    """Return rows_at(batch), which goes through all rows once per epoch.

    Each epoch is shuffled anew. A batch may straddle epochs: no row is left out to make them even.

    Args:
        num_rows: Rows in the corpus.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.
        seed: The run's seed; each epoch's order is made from it and the epoch's number.

    Returns:
        A function from the number of a global batch, from 0, to its rows: int64
        `[rows_per_step]`, each in [0, num_rows).

    Raises:
        ValueError: A number of rows is below 1; from rows_at, a number of a batch below 0.

    Examples:
        >>> rows_at = shuffle_epochs(4, rows_per_step=3, seed=0)
        >>> [rows_at(batch).tolist() for batch in range(4)]
        [[3, 0, 2], [1, 0, 2], [1, 3, 2], [0, 3, 1]]
    """
    if num_rows == 0:
        mend = "bring more documents, or longer rows if these were too long for them"
        raise ValueError(f"shuffle_epochs: there is no row to train on; {mend}")
    check_range("shuffle_epochs", at_least=1, num_rows=num_rows, rows_per_step=rows_per_step)

    def rows_at(batch: int) -> IntArray:
        check_batch(batch)
        return draws(batch * rows_per_step, rows_per_step, num_rows, seed, "epoch")

    return rows_at


def count_steps(
    *,
    num_rows: int | None,
    rows_per_step: int,
    epochs: float | None = None,
    max_steps: int | None = None,
) -> int:
    """Return how many optimizer steps a run takes: what fits into its epochs, or fewer.

    A step that would go beyond the last epoch is not taken, so no row comes more than
    `ceil(epochs)` times, and fewer than `rows_per_step` rows do not come that often.

    Args:
        num_rows: Rows in the corpus; None for a stream of unknown length, which has no epochs.
        rows_per_step: Rows in the global batch, over all ranks and microbatches: with b rows in a
            microbatch, a microbatches and r ranks that read different rows, b * a * r.
        epochs: How often to go through the corpus, perhaps a fraction; None sets no limit.
        max_steps: The most steps; None sets no limit.

    Returns:
        The number of steps, at least 1.

    Raises:
        ValueError: Nothing sets a limit, the epochs hold no whole step, epochs are asked of a
            stream of unknown length, or a number is out of its range.

    Examples:
        >>> count_steps(num_rows=100, rows_per_step=8, epochs=2)
        25
        >>> count_steps(num_rows=100, rows_per_step=8, epochs=0.5, max_steps=1000)
        6

    In place of the steps of one epoch times the epochs, as xorl, d9d and KempnerForge count them,
    which drops what is left over of every epoch.
    """
    check_range("count_steps", at_least=1, num_rows=num_rows, rows_per_step=rows_per_step)
    check_range("count_steps", at_least=1, max_steps=max_steps)
    if epochs is None:
        if max_steps is None:
            raise ValueError("count_steps: nothing ends the run; give epochs, max_steps or both")
        return max_steps
    if num_rows is None:
        what = f"{epochs} epochs of a stream of unknown length; give max_steps instead"
        raise ValueError(f"count_steps: {what}")
    if not (math.isfinite(epochs) and epochs > 0):
        raise ValueError(f"count_steps: epochs must be above 0 (or None), got {epochs}")
    # The text of a float is the shortest decimal fraction that is it: 0.1 is meant as 1/10.
    rows = math.floor(Fraction(str(epochs)) * num_rows)
    if rows < rows_per_step:
        what = f"{epochs} epochs of {num_rows} rows hold no step of {rows_per_step} rows"
        raise ValueError(f"count_steps: {what}; lower rows_per_step, or raise epochs")
    steps = rows // rows_per_step
    return steps if max_steps is None else min(steps, max_steps)


def count_epochs(step: int, *, num_rows: int, rows_per_step: int) -> float:
    """Return how many epochs of a corpus have been read when `step` steps are done.

    A resumed run needs no epoch of its own: it follows from the step. In a mixture each corpus has
    epochs of its own, which this does not count.

    Args:
        step: Steps done, as `TrainState.step`, from 0.
        num_rows: Rows in the corpus.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.

    Returns:
        Epochs; the whole part is the number of the epoch that the next step's first row is in (up
        to 2^53 rows read).

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
