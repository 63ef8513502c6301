"""One save from its copy to its commit, and how the ranks agree on its progress.

A save is a generator that yields wherever training may continue, so it reads top to bottom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as all_threads
from typing import Any

import attrs
import torch

from trainkit.collectives import all_max, get_comm_device, run_on_all_ranks
from trainkit.types import Axis
from trainkit.weights.checkpoint.snapshot import Snapshot
from trainkit.weights.checkpoint.write import Destination, commit, remove_staging, write_rank

_PATIENCE = 20.0  # seconds that an exception waits for a commit in progress

SAVE_THREAD = "trainkit-save"
"""The name of the thread that writes a save."""


def list_save_threads() -> list[Thread]:
    """Return the threads of this process that write saves.

    Examples:
        >>> list_save_threads()
        []
    """
    return [thread for thread in all_threads() if thread.name == SAVE_THREAD]


StartWork = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs some work and returns its future: `run_now` or `run_in_thread`."""


@attrs.frozen
class SaveResult:
    """The result of a save: a checkpoint at `path`, or an `error`.

    `seconds` is how long the first rank took to copy, write and commit, `blocked` how long the copy
    stopped training on this rank. `messages` are the first rank's. `time` is when the first rank
    committed, or when this rank failed, in seconds since 1970; training may collect the result much
    later.
    """

    step: int
    path: Path | None
    seconds: float
    blocked: float
    error: Exception | None = None
    messages: tuple[str, ...] = ()
    time: float = attrs.field(factory=time.time)


PendingSave = Generator[None, bool, SaveResult]
"""A save in progress. Sending True waits for the current phase, sending False only polls it."""


def run_now(work: Callable[[], Any]) -> Future[Any]:
    """Run some work, and return its result or its exception as a finished future."""
    future: Future[Any] = Future()
    try:  # not BaseException: Ctrl-C must end the process at once
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 (raised again on all ranks)
        future.set_exception(error)
    return future


def run_in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Start some work in a thread, and return the future of its result.

    Effects:
        Starts a daemon thread: a disk that never answers must not keep the process alive.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 (raised again on all ranks)
            future.set_exception(error)
        except BaseException as error:  # noqa: BLE001 (it would vanish with the thread)
            future.set_exception(RuntimeError(f"the thread of a save was ended by {error!r}"))

    try:
        Thread(target=run, name=SAVE_THREAD, daemon=True).start()
    except RuntimeError as error:  # the system cannot start another thread
        future.set_exception(error)
    return future


def start_save(
    take: Callable[[], Snapshot],
    target: Destination,
    axis: Axis,
    *,
    step: int,
    start: StartWork,
    after: Callable[[Path], list[str]],
) -> PendingSave:
    """Copy a state, write it, and commit it once all ranks have written their files.

    Between two yields the ranks exchange their progress. What a rank does next depends on that
    alone, so all ranks take the same branch.

    Args:
        take: Takes the snapshot.
        target: Where the checkpoint goes.
        axis: The ranks, with a process group that nothing else uses at the same time.
        step: The step of the state.
        start: `run_now` or `run_in_thread`.
        after: Called on the first rank with a committed checkpoint. Returns messages for the user
            and must not raise.

    Returns:
        The result, the same on all ranks.

    Effects:
        Writes to disk; communicates on `axis`. Closing the generator early waits a while for a
        commit in progress, and abandons any other save.
    """
    began = time.perf_counter()
    snapshot = run_now(take)
    blocked = time.perf_counter() - began
    # An error of the copy is in the future as well: it must travel to the other ranks like one of a
    # write.
    work = _Work(snapshot, target, axis.index, after, blocked)
    written = start(work.write)
    # A single rank has nobody to wait for, so it commits without waiting for the next step.
    committed = start(partial(work.commit, written)) if axis.count == 1 else None
    try:
        failed = yield from _wait_on_all(written, axis)
        if not failed:
            if committed is None and axis.index == 0:
                committed = start(partial(work.commit, written))
            committed = committed or run_now(dict)
            failed = yield from _wait_on_all(committed, axis)
        if failed:
            # The threads of this rank must have closed their files before these are removed.
            work.stopped.set()
            wait([future for future in (written, committed) if future is not None])
        last = written if written.exception() else committed or written
        result, error = _share_result(last, axis)
    except BaseException:
        if committed is None:  # other ranks may not have written, and may have exited
            work.stopped.set()
        wait([x for x in (written, committed) if x is not None], timeout=_PATIENCE)
        # Only a committed checkpoint has left the staging directory.
        if axis.index == 0 and not (committed and committed.done() and not committed.exception()):
            remove_staging(target.staging)
        raise
    if error is not None and axis.index == 0:
        remove_staging(target.staging)
    return SaveResult(
        step=step,
        path=Path(result["path"]) if error is None else None,
        seconds=result.get("seconds", time.perf_counter() - began),
        blocked=blocked,
        error=error,
        messages=() if axis.index else tuple(result.get("messages", ())),
        time=result.get("time") or work.write_ended or time.time(),
    )


@attrs.define(eq=False)
class _Work:
    """The parts of a save that may run in a thread."""

    snapshot: Future[Snapshot]
    target: Destination
    rank: int
    after: Callable[[Path], list[str]]
    blocked: float
    stopped: Event = attrs.field(factory=Event)
    write_ended: float | None = None

    def write(self) -> float:
        """Write this rank's files, and return the seconds that it took."""
        began = time.perf_counter()
        try:
            write_rank(self.snapshot.result(), self.target, self.rank, self.stopped)
        finally:
            self.write_ended = time.time()
        return time.perf_counter() - began

    def commit(self, written: Future[float]) -> dict[str, Any]:
        """Commit the checkpoint once this rank's files are written."""
        write_seconds = written.result()
        began = time.perf_counter()
        path = commit(self.snapshot.result(), self.target)
        result: dict[str, Any] = {"path": str(path), "time": time.time()}
        result["seconds"] = self.blocked + write_seconds + time.perf_counter() - began
        result["messages"] = self.after(path)
        return result


def _wait_on_all(future: Future[Any], axis: Axis) -> Generator[None, bool, bool]:
    """Yield until a future is done on all ranks or has failed on one; return whether one has."""
    device = get_comm_device(axis)
    while True:
        is_waiting = yield
        if is_waiting:
            wait([future])
        failed = future.done() and future.exception() is not None
        # The only communication of a save: two bytes a step, and none when no save is pending.
        flags = torch.tensor([not future.done(), failed], dtype=torch.uint8, device=device)
        running, failed = all_max(flags, axis).tolist()
        if failed or not running:
            return bool(failed)


def _share_result(future: Future[Any], axis: Axis) -> tuple[Mapping[str, Any], Exception | None]:
    """Return the first rank's result, or the error of a rank that failed, on all ranks."""
    try:
        return run_on_all_ranks(future.result, axis)[0], None
    except Exception as error:  # noqa: BLE001 (the caller returns it in `SaveResult.error`)
        return {}, error
