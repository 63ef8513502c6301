"""Processes that turn chunks into parts: dealt one at a time, watched, ended all at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import attrs

from trainkit.prepare.parts import Job, Tally, Work, ready, write_part
from trainkit.types import DataError, TrainkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.context import SpawnProcess

    from trainkit.prepare.chunks import Chunk

    Sign = Callable[[int, Tally, bool], None]


@attrs.frozen(eq=False)
class _Worker:
    name: str
    process: SpawnProcess
    pipe: Connection


@attrs.define(eq=False)
class _Task:
    """What a worker is at, and when it last said so."""

    worker: _Worker
    number: int
    heard: float


def write_parts(
    job: Job, todo: Mapping[int, Chunk], *, workers: int, timeout: float, sign: Sign
) -> None:
    """Write the parts of some chunks, in this process or in several.

    Args:
        job: How chunks become parts.
        todo: Chunks by the numbers of their parts.
        workers: How many processes; 1 works in this one.
        timeout: Seconds after which a worker that says nothing is taken to hang.
        sign: Called with a part's number, what there is of it, and whether it is finished.

    Raises:
        DataError: A document is bad, or a worker died or hangs. The message names it.
        DiskError: A part cannot be written.

    Effects:
        Writes parts. No process is left when it returns or raises.
    """
    if workers > 1:
        _deal(job, todo, workers, timeout, sign)
        return
    work = ready(job)
    for number, chunk in todo.items():
        tally = write_part(work, number, chunk, lambda x, n=number: sign(n, x, False))
        sign(number, tally, True)


def _deal(job: Job, todo: Mapping[int, Chunk], workers: int, timeout: float, sign: Sign) -> None:
    waiting = deque(todo.items())
    with _workers(job, workers) as crew:
        tasks: dict[Connection, _Task] = {}
        for worker in crew:
            _give(worker, waiting, tasks)
        while tasks:
            for pipe in wait(list(tasks), timeout=min(timeout, 5.0)):
                assert isinstance(pipe, Connection)
                task = tasks[pipe]
                tally, done = _heard(task, todo[task.number])
                task.heard = time.monotonic()
                sign(task.number, tally, done)
                if done:
                    del tasks[pipe]
                    _give(task.worker, waiting, tasks)
            _check_alive(tasks.values(), todo, timeout)


def _give(
    worker: _Worker, waiting: deque[tuple[int, Chunk]], tasks: dict[Connection, _Task]
) -> None:
    """Give the next chunk to a worker, if there is one."""
    if waiting:
        number, chunk = waiting.popleft()
        tasks[worker.pipe] = _Task(worker, number, time.monotonic())
        with suppress(OSError):  # it is dead: found when it is heard
            worker.pipe.send((number, chunk))


def _heard(task: _Task, chunk: Chunk) -> tuple[Tally, bool]:
    """Return what a worker says; raise what it raised, or that it died."""
    try:
        said = task.worker.pipe.recv()
    except (EOFError, OSError) as error:
        task.worker.process.join(timeout=5)
        raise _lost(task, chunk, _how_it_ended(task.worker.process.exitcode)) from error
    if isinstance(said, BaseException):
        raise said
    return said


def _check_alive(tasks: Any, todo: Mapping[int, Chunk], timeout: float) -> None:
    for task in tasks:
        silent = time.monotonic() - task.heard
        if silent > timeout:
            raise _lost(task, todo[task.number], f"has said nothing for {silent:.0f} s")


def _lost(task: _Task, chunk: Chunk, what: str) -> DataError:
    name = f"{task.worker.name} (process {task.worker.process.pid})"
    part = f"bytes {chunk.begin} to {chunk.end} of {chunk.path}"
    if chunk.path.is_dir():
        part = f"{chunk.path}, files {chunk.files[0][0]} to {chunk.files[-1][0]}"
    elif chunk.path.suffix != ".jsonl":
        part = f"row groups {chunk.begin} to {chunk.end} of {chunk.path}"
    return DataError(
        f"prepare: {name} {what}, at chunk {task.number}: {part}",
        where=chunk.path,
        hint="finished parts are kept: run the same again, with fewer workers if memory was short",
    )


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return (
        f"ended with exit code {code} (a script that prepares data in several processes does so "
        "under `if __name__ == '__main__':`)"
    )


@contextmanager
def _workers(job: Job, count: int) -> Iterator[list[_Worker]]:
    """Start processes; end them with the block, whatever they are at."""
    # Spawned: a fork would take over locks of threads (numpy's, arrow's) that nobody will release.
    context = multiprocessing.get_context("spawn")
    crew: list[_Worker] = []
    try:
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, job), daemon=True)
            crew.append(_Worker(f"worker {index}", process, ours))
            with _interrupts_wait():
                process.start()
            theirs.close()
        yield crew
    finally:
        for worker in crew:
            if worker.process.pid is not None:
                worker.process.kill()
                worker.process.join()
            worker.process.close()
            worker.pipe.close()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; a process that is started in it never sees one.

    It goes to all processes of a terminal, and one that is still importing modules would end with a
    traceback.
    """
    resource_tracker.ensure_running()  # or the first start does it, and lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, job: Job) -> None:
    """Work off chunks as they come in, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with suppress(EOFError, OSError):  # the parent is gone
        try:
            work = ready(job)
        except Exception as error:  # noqa: BLE001 (the parent raises it)
            pipe.send(_portable(error))
            return
        while True:
            pipe.send(_answer(pipe, work))


def _answer(pipe: Connection, work: Work) -> Any:
    """Write the part that is asked for; return what to say of it."""
    number, chunk = pipe.recv()
    try:
        tally = write_part(work, number, chunk, lambda x: pipe.send((x, False)))
    except Exception as error:  # noqa: BLE001 (the parent raises it)
        return _portable(error)
    return tally, True


def _portable(error: Exception) -> Exception:
    """Return an error that the parent can read: trainkit's own as it is, another in words.

    An error travels as the arguments of its class, and a class with arguments of its own, or one of
    the script that runs, cannot be made from them there.
    """
    if type(error).__module__ == TrainkitError.__module__ or type(error) is ValueError:
        with suppress(Exception):  # what was found need not go through a pipe
            ForkingPickler.dumps(error)
            return error
    return DataError(f"{type(error).__name__}: {error}")
