"""Python's garbage collection between steps, on all ranks at the same time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from trainkit.phases import measure_phase


class Collect(Protocol):
    """Count a step, and collect if it is time; `idle`: no rank waits for this one."""

    def __call__(self, *, idle: bool = False) -> None: ...


@contextmanager
def collect_manually(*, every: int = 100) -> Iterator[Collect]:
    """Yield `collect()`, to be called after each step; garbage is collected only there.

    Python collects after a number of allocations, on each rank in another step, and all ranks wait
    for the one that does. Here all collect after the same step: the young generations every
    `every` steps, and all of them when a rank is idle after at least as many. Reference cycles live
    until then; a step of a recipe leaves none. The seconds of every collection on this thread, also
    of one that other code calls for, count for the phase "garbage" (`phases.measure_phase`).

    Args:
        every: The number of steps between two collections.

    Effects:
        Switches automatic collection off, and on again when the block is left, if it was on. Adds
        to `gc.callbacks` meanwhile.

    Examples:
        >>> with collect_manually() as collect:
        ...     collect()
        ...     gc.isenabled()
        False

    References:
        torchtitan's `GarbageCollection`, with a period of 50 steps.
    """
    was_enabled = gc.isenabled()
    steps = 0
    last_full = 0

    def collect(*, idle: bool = False) -> None:
        nonlocal steps, last_full
        steps += 1
        # A full collection walks over every object of the process, so it waits for an idle moment.
        if idle and steps - last_full >= every:
            last_full = steps
            gc.collect()
        elif steps % every == 0:
            # Generations 0 and 1 alone: young objects, which are few.
            gc.collect(1)

    thread = threading.get_ident()
    pause = ExitStack()

    def measure(phase: str, _: object) -> None:
        if threading.get_ident() != thread:
            return
        if phase == "start":
            pause.enter_context(measure_phase("garbage"))
        else:
            pause.close()

    gc.disable()
    gc.callbacks.append(measure)
    try:
        yield collect
    finally:
        gc.callbacks.remove(measure)
        if was_enabled:
            gc.enable()
