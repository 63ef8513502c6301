"""Faults of a rank's process: it raises, exits, is killed, stops, hangs or is slow."""

from __future__ import annotations

import os
import signal
import time

from trainkit.tools.testing.faults.steps import At, Injector, Ranks, act_after, act_at
from trainkit.types import TrainState


def fail_at(at: At, *, rank: Ranks = None, error: BaseException | None = None) -> Injector:
    """Return an injector that raises in place of a step.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        rank: The ranks; all by default.
        error: The exception; by default a RuntimeError.

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
    """Return an injector that exits the process normally, so that a rank leaves its peers.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        rank: The ranks; all by default.
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
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        rank: The ranks; all by default.
        signum: The signal. Schedulers stop a job by SIGTERM.
        times: How often to send it.
        after: Send it after the step, before it returns, and not before the step.

    Examples:
        >>> before = signal.signal(signal.SIGUSR1, lambda *_: print("stopping"))
        >>> step = signal_at(1, signum=signal.SIGUSR1)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        stopping
        >>> _ = signal.signal(signal.SIGUSR1, before)
    """

    def send(_: TrainState) -> None:
        for _i in range(times):
            # To the process, as a scheduler's signal; signal.raise_signal would be to this thread.
            os.kill(os.getpid(), signum)

    return (act_after if after else act_at)(at, send, rank=rank)


def kill_at(at: At, *, rank: Ranks = None, after: bool = False) -> Injector:
    """Return an injector that kills the process by SIGKILL, which runs no handler.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        rank: The ranks; all by default.
        after: Kill it after the step, before it returns, and not before the step.

    Examples:
        >>> step = kill_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """
    return signal_at(at, rank=rank, signum=signal.SIGKILL, after=after)


def stop_at(at: At, *, rank: Ranks = None) -> Injector:
    """Return an injector that stops the process (SIGSTOP) until it is continued or killed.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        rank: The ranks; all by default.

    Examples:
        >>> step = stop_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """
    return signal_at(at, rank=rank, signum=signal.SIGSTOP)


def hang_at(at: At, *, rank: Ranks = None) -> Injector:
    """Return an injector that hangs forever, while the process and its threads live.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        rank: The ranks; all by default.

    Examples:
        >>> step = hang_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """

    def hang(_: TrainState) -> None:
        while True:  # asleep, so that a hung rank takes no core from its peers
            time.sleep(3600)

    return act_at(at, hang, rank=rank)


def slow_at(at: At, *, rank: Ranks = None, seconds: float) -> Injector:
    """Return an injector that sleeps before a step, as a straggler.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        rank: The ranks; all by default.
        seconds: The time to sleep.

    Examples:
        >>> start = time.monotonic()
        >>> step = slow_at(1, seconds=0.02)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> time.monotonic() - start >= 0.02
        True
    """
    return act_at(at, lambda _: time.sleep(seconds), rank=rank)
