"""A rank whose process goes wrong: it raises, leaves, is killed, stops, hangs or is slow."""

from __future__ import annotations

import os
import signal
import time

from trainkit.tools.testing.faults.steps import At, Injector, Ranks, act_after, act_at
from trainkit.types import TrainState


def fail_at(at: At, *, rank: Ranks = None, error: BaseException | None = None) -> Injector:
    """Return an injector that raises instead of taking a step.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        rank: Where; by default on all ranks.
        error: What is raised, by default a RuntimeError that says so: a bug, memory, a bad sample.

    Examples:
        >>> step = fail_at(1, error=MemoryError("planned"))(lambda state, batch: (state, {}))
        >>> step(TrainState(), None)
        Traceback (most recent call last):
        ...
        MemoryError: planned
    """

    def fail(state: TrainState) -> None:
        raise error or RuntimeError(f"fail_at: a planned failure in step {state.step + 1}")

    return act_at(at, fail, rank=rank)


def exit_at(at: At, *, rank: Ranks = None, code: int = 0) -> Injector:
    """Return an injector that ends the process in good order: a rank that leaves its peers.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        rank: Where; by default on all ranks.
        code: The exit code.

    Examples:
        >>> step = exit_at(1)(lambda state, batch: (state, {}))
        >>> step(TrainState(), None)
        Traceback (most recent call last):
        ...
        SystemExit: 0
    """
    return fail_at(at, rank=rank, error=SystemExit(code))


def signal_at(
    at: At,
    *,
    rank: Ranks = None,
    signum: int = signal.SIGTERM,
    times: int = 1,
    after: bool = False,
) -> Injector:
    """Return an injector that sends a signal to the rank's own process.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        rank: Where; by default on all ranks.
        signum: The signal; SIGTERM is how schedulers ask a job to stop.
        times: How often it is sent.
        after: Send it after the step, before the caller hears of it, and not before the step.

    Examples:
        >>> before = signal.signal(signal.SIGUSR1, lambda *_: print("stopping"))
        >>> step = signal_at(1, signum=signal.SIGUSR1)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        stopping
        >>> _ = signal.signal(signal.SIGUSR1, before)
    """

    def send(_: TrainState) -> None:
        for _i in range(times):
            os.kill(os.getpid(), signum)

    return (act_after if after else act_at)(at, send, rank=rank)


def kill_at(at: At, *, rank: Ranks = None, after: bool = False) -> Injector:
    """Return an injector that ends the process at once, by SIGKILL: no handler, no last words.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        rank: Where; by default on all ranks.
        after: Between the step's update and the caller's counters, and not before the step.

    Examples:
        >>> step = kill_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """
    return signal_at(at, rank=rank, signum=signal.SIGKILL, after=after)


def stop_at(at: At, *, rank: Ranks = None) -> Injector:
    """Return an injector that stops the process until somebody continues or kills it (SIGSTOP).

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        rank: Where; by default on all ranks.

    Examples:
        >>> step = stop_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """
    return signal_at(at, rank=rank, signum=signal.SIGSTOP)


def hang_at(at: At, *, rank: Ranks = None) -> Injector:
    """Return an injector that never comes back, though its process lives and has its threads.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        rank: Where; by default on all ranks.

    Examples:
        >>> step = hang_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """

    def hang(_: TrainState) -> None:
        while True:
            time.sleep(3600)

    return act_at(at, hang, rank=rank)


def slow_at(at: At, *, rank: Ranks = None, seconds: float) -> Injector:
    """Return an injector that waits before a step: a straggler.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        rank: Where; by default on all ranks.
        seconds: How long.

    Examples:
        >>> begin = time.monotonic()
        >>> step = slow_at(1, seconds=0.02)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> time.monotonic() - begin >= 0.02
        True
    """
    return act_at(at, lambda _: time.sleep(seconds), rank=rank)
