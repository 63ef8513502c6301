"""Where the time of a step goes: seconds by phase, as the host sees them.

Functions of the library name what they do by `measure_phase`; `record_phases` adds up the seconds.
Without a recorder a phase costs a fifth of a microsecond, so that functions stay usable alone.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import attrs

P = ParamSpec("P")
T = TypeVar("T")

OTHER = "other"
"""The phase of everything that no function has named."""

BETWEEN_STEPS = ("evaluate", "sample")
"""Phases that are no part of a step, with many more operations than one: for each token of a sample
those of a forward pass."""

_NOTHING: AbstractContextManager[None] = nullcontext()


@attrs.define(eq=False)
class PhaseTimes:
    """Seconds by phase since they were read last. Phases do not overlap, so they add up to all."""

    wait: Callable[[], None] | None = None
    """Called at the end of every phase, to wait for the device; None lets the host run ahead."""

    mark: Callable[[str | None], None] | None = None
    """Called with the name of a phase that begins, and with None where one ends, by a profiler."""

    _seconds: dict[str, float] = attrs.field(factory=dict)
    _phases: list[str] = attrs.field(factory=lambda: [OTHER])  # from the outermost to the current
    _since: float = attrs.field(init=False)
    _thread: int = attrs.field(factory=threading.get_ident)

    def __attrs_post_init__(self) -> None:
        self._since = time.perf_counter()

    def is_between_steps(self) -> bool:
        """Return whether the current phase, or one around it, is one of `BETWEEN_STEPS`.

        Examples:
            >>> with record_phases() as times, measure_phase("sample"), measure_phase("forward"):
            ...     times.is_between_steps()
            True
        """
        return any(name in BETWEEN_STEPS for name in self._phases)

    def read(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, and start from 0.

        Examples:
            >>> times = PhaseTimes()
            >>> list(times.read()), list(times.read())
            (['other'], ['other'])
        """
        self._add()
        seconds = self._seconds
        self._seconds = {}
        return seconds

    def enter(self, name: str) -> None:
        """Count the seconds from now on for a phase, and no longer for the one around it."""
        self._add()
        self._phases.append(name)
        if self.mark is not None:
            self.mark(name)

    def leave(self) -> None:
        """Count the seconds from now on for the phase around the current one."""
        if self.wait is not None:
            self.wait()
        if self.mark is not None:
            self.mark(None)
        self._add()
        self._phases.pop()

    def is_between_phases(self) -> bool:
        """Return whether this thread is the one that is measured, and in no named phase."""
        return len(self._phases) == 1 and threading.get_ident() == self._thread

    def _add(self) -> None:
        now = time.perf_counter()
        name = self._phases[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


class _Phase:
    """One phase of a recorder. A class, since a generator takes four times as long to enter."""

    __slots__ = ("name", "times")

    def __init__(self, times: PhaseTimes, name: str) -> None:
        self.times = times
        self.name = name

    def __enter__(self) -> None:
        self.times.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.times.leave()


_recorder: PhaseTimes | None = None


def measure_phase(name: str) -> AbstractContextManager[None]:
    """Count the seconds of a block for a phase; without a recorder it does nothing.

    Only the main thread of a run may call it. Phases may be nested: the seconds of the inner one do
    not count for the outer one.

    Args:
        name: The phase: "data", "forward", "backward", "reduce", "step", or a name of your own.

    Examples:
        >>> with record_phases() as times:
        ...     with measure_phase("evaluate"), measure_phase("forward"):
        ...         pass
        >>> sorted(times.read())
        ['evaluate', 'forward', 'other']
    """
    return _NOTHING if _recorder is None else _Phase(_recorder, name)


def measure_wait() -> AbstractContextManager[None]:
    """Count the seconds of a collective for "wait" where no phase is named, and nothing elsewhere.

    Ranks meet in the first collective of a step: whoever is early waits there for the others. In a
    phase, as "reduce", collectives are a part of it. Unlike `measure_phase`, any thread may call
    it.

    Examples:
        >>> with record_phases() as times:
        ...     with measure_wait():
        ...         pass
        ...     with measure_phase("reduce"), measure_wait():
        ...         pass
        >>> sorted(times.read())
        ['other', 'reduce', 'wait']
    """
    if _recorder is None or not _recorder.is_between_phases():
        return _NOTHING
    return _Phase(_recorder, "wait")


def as_phase(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that counts the calls of a function as a phase; see `measure_phase`.

    Examples:
        >>> @as_phase("reduce")
        ... def reduce():
        ...     return 1
        >>> reduce()
        1
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            with measure_phase(name):
                return function(*args, **kwargs)

        return measured

    return decorate


def get_phase_times() -> PhaseTimes | None:
    """Return the recorder of the process, or None.

    Examples:
        >>> with record_phases() as times:
        ...     get_phase_times() is times
        True
    """
    return _recorder


@contextmanager
def record_phases(wait: Callable[[], None] | None = None) -> Iterator[PhaseTimes]:
    """Yield the seconds by phase of the block, which `PhaseTimes.read` returns.

    The clock is the host's. A GPU works behind it, so "forward" and "backward" are then the time to
    launch kernels, and the time to compute them appears where the host waits, in "device".

    Args:
        wait: Waits for the device at the end of each phase, as `torch.cuda.synchronize` does. Then
            the seconds are those of the device, and the run is slower.

    Effects:
        Sets the recorder of the process for the block; the one before it counts nothing meanwhile.

    Examples:
        >>> with record_phases() as times:
        ...     with measure_phase("forward"):
        ...         time.sleep(0.01)
        ...     times.read()["forward"] >= 0.01
        True
    """
    global _recorder  # noqa: PLW0603 (one for a process, as there is one main thread)
    before = _recorder
    _recorder = PhaseTimes(wait)
    try:
        yield _recorder
    finally:
        _recorder = before
