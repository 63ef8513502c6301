"""One save under way: what runs beside the training, and where ranks tell each other how far it is.

It is a generator that yields wherever training may go on, so that a save reads from top to bottom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
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

_PATIENCE = 20.0  # seconds for a commit that is under way when an exception ends the run

SAVE_THREAD = "trainkit-save"
"""The name of the thread that writes a save."""


def save_threads() -> list[Thread]:
    """Return the threads of this process that write saves.

    Examples:
        >>> save_threads()
        []
    """
    return [thread for thread in all_threads() if thread.name == SAVE_THREAD]


Start = Callable[[Callable[[], Any]], "Future[Any]"]
"""How work is done: `at_once`, or `in_thread`."""


@attrs.frozen
class SaveResult:
    """How a save has ended: with a checkpoint at `path`, or with an `error`.

    `seconds` is the time that the first rank needed to copy, write and commit, `blocked` how long
    the training stood still on this rank for the copy. `told` is what the first rank has to say.
    `time` is when the first rank committed it, or this rank's work failed, in seconds since 1970:
    training may ask for it much later.
    """

    step: int
    path: Path | None
    seconds: float
    blocked: float
    error: Exception | None = None
    told: tuple[str, ...] = ()
    time: float = attrs.field(factory=time.time)


Flight = Generator[None, bool, SaveResult]


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """Return the result of some work, or its failure, as a future that is done."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 (told to all ranks)
        future.set_exception(error)
    return future


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Begin some work in a thread, and return the future of its result.

    Effects:
        Starts a daemon thread: a disk that never answers must not keep a process that wants to end.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 (told to all ranks)
            future.set_exception(error)
        except BaseException as error:  # noqa: BLE001 (nobody would see how a thread ends)
            future.set_exception(RuntimeError(f"the thread of a save was ended by {error!r}"))

    try:
        Thread(target=run, name=SAVE_THREAD, daemon=True).start()
    except RuntimeError as error:  # the system has no thread left
        future.set_exception(error)
    return future


def fly(
    take: Callable[[], Snapshot],
    target: Destination,
    axis: Axis,
    *,
    step: int,
    start: Start,
    after: Callable[[Path], list[str]],
) -> Flight:
    """Save once: copy, write, and when all ranks have written, commit.

    How far each rank has come is told to all between two yields, and what a rank does next follows
    from that alone, so that all do the same. What is sent says whether to wait.

    Args:
        take: Takes the snapshot.
        target: Where it goes.
        axis: The ranks, and a group on which nothing else is under way.
        step: The step of the state.
        start: `at_once` or `in_thread`.
        after: Called on the first rank with the checkpoint, where it was committed; returns what is
            to be told of it, and raises nothing.

    Returns:
        How it has ended, the same on all ranks.

    Effects:
        Writes to disk; communicates on `axis`. When it is closed before its end, a commit under way
        is waited for, for a while, and any other save given up.
    """
    began = time.perf_counter()
    stopped = Event()
    shot = at_once(take)
    blocked = time.perf_counter() - began

    ends: list[float] = []

    def write() -> float:
        begin = time.perf_counter()
        try:
            write_rank(shot.result(), target, axis.index, stopped)
        finally:
            ends.append(time.time())
        return time.perf_counter() - begin

    def finish() -> dict[str, Any]:
        wrote, begin = written.result(), time.perf_counter()
        path = commit(shot.result(), target)
        known = {"path": str(path), "time": time.time()}
        seconds = blocked + wrote + time.perf_counter() - begin
        return known | {"told": after(path), "seconds": seconds}

    written = start(write)
    # A rank alone has nobody to ask, and commits without waiting for the next step.
    committed = start(finish) if axis.count == 1 else None
    try:
        failed = yield from _ended(written, axis)
        if not failed:
            if committed is None:
                committed = start(finish) if axis.index == 0 else at_once(dict)
            failed = yield from _ended(committed, axis)
        if failed:
            stopped.set()
            wait([future for future in (written, committed) if future is not None])
        found, error = _outcome(written if written.exception() else committed or written, axis)
    except BaseException:
        _give_up(written, committed, stopped)
        if axis.index == 0 and not (committed and committed.done() and not committed.exception()):
            remove_staging(target.staging)
        raise
    if error is not None and axis.index == 0:
        remove_staging(target.staging)
    path = Path(found["path"]) if error is None else None
    seconds = found.get("seconds", time.perf_counter() - began)
    told = () if axis.index else tuple(found.get("told", ()))
    ended = found.get("time") or max(ends, default=time.time())
    return SaveResult(step, path, seconds, blocked, error, told, ended)


def _ended(future: Future[Any], axis: Axis) -> Generator[None, bool, bool]:
    """Yield until a future is done on all ranks, or has failed on one; return whether one has."""
    device = get_comm_device(axis)
    while True:
        patient = yield
        if patient:
            wait([future])
        failed = future.done() and future.exception() is not None
        told = torch.tensor([not future.done(), failed], dtype=torch.uint8, device=device)
        running, failed = all_max(told, axis).tolist()
        if failed or not running:
            return bool(failed)


def _outcome(future: Future[Any], axis: Axis) -> tuple[Mapping[str, Any], Exception | None]:
    """Return what the first rank gave, or what a rank failed with, on all ranks."""
    try:
        return run_on_all_ranks(future.result, axis)[0], None
    except Exception as error:  # noqa: BLE001 (that a rank has failed is known by now)
        return {}, error


def _give_up(written: Future[Any], committed: Future[Any] | None, stopped: Event) -> None:
    if committed is None:  # others may not have written, and may be gone
        stopped.set()
    wait([future for future in (written, committed) if future is not None], timeout=_PATIENCE)
