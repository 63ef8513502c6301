"""Faults of what makes batches: a loader that becomes slow."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainkit.tools.testing.faults.steps import Ranks, is_this_rank
from trainkit.types import Cursor, StepBatch

MakeBatch = Callable[[Cursor], StepBatch | None]
"""`MakeBatch(cursor) -> batch`: what `prefetch_batches` calls in its thread."""


def slow_batches(
    start: int, *, seconds: float, rank: Ranks = None
) -> Callable[[MakeBatch], MakeBatch]:
    """Return an injector that makes batches slowly, from one on, as a disk does that falls behind.

    It is put around `make_batch`, not around a step: `slow_batches(7, seconds=0.2)(make_batch)`.

    Args:
        start: The first slow batch, counted from 1 as steps are. A prefetcher makes it early: it
            is late only once the batches that were ready have been used up.
        seconds: The time to sleep before each batch.
        rank: The ranks; all by default.

    Examples:
        >>> make_batch = slow_batches(2, seconds=0.02)(lambda cursor: StepBatch([], cursor))
        >>> began = time.monotonic()
        >>> _ = make_batch(Cursor(batch=1))  # the second
        >>> time.monotonic() - began >= 0.02
        True
    """

    def wrap(make_batch: MakeBatch) -> MakeBatch:
        def slow(cursor: Cursor) -> StepBatch | None:
            # The cursor counts the batches before this one.
            if cursor.batch + 1 >= start and is_this_rank(rank):
                time.sleep(seconds)
            return make_batch(cursor)

        return slow

    return wrap
