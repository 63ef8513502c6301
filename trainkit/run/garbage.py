"""Python's garbage collection at chosen steps, and not in the middle of any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Collect(Protocol):
    """Count a step, and collect when it is time; `idle` says that nobody waits for this rank."""

    def __call__(self, *, idle: bool = False) -> None: ...


@contextmanager
def collect_manually(*, every: int = 100) -> Iterator[Collect]:
    """Yield `collect()`, for the end of a step, and collect no garbage else.

    Python collects when it has made so many objects, on each rank in another step, and all ranks
    wait for the one that does. Here all collect after the same step: what is new every `every`
    steps, and everything when a rank is idle after at least as many. What only holds itself is
    garbage until then; a step of a recipe leaves none.

    Args:
        every: How many steps lie between two collections.

    Effects:
        Switches automatic collection off, and on again when the block is left, if it was on.

    Examples:
        >>> with collect_manually() as collect:
        ...     collect()
        ...     gc.isenabled()
        False

    References:
        torchtitan does as much (`GarbageCollection`, with a period of 50 steps).
    """
    was_enabled, steps, last_full = gc.isenabled(), 0, 0

    def collect(*, idle: bool = False) -> None:
        nonlocal steps, last_full
        steps += 1
        if idle and steps - last_full >= every:
            last_full = steps
            gc.collect()
        elif steps % every == 0:
            gc.collect(1)

    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
