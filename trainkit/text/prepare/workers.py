"""Chunks become parts in other processes: those of anybody's `Executor`, or a pool of our own.

What they share is the folder of parts. Whoever is at a chunk has a file there that says so and is
touched every half second, so that a process that hangs or has died can be named.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import threading
import time
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trainkit.files import convert_disk_errors, hide_piped_script
from trainkit.text.prepare.chunks import chunk_place
from trainkit.text.prepare.parts import Tally, Work, WritePart, code_version, part_writer
from trainkit.types import DataError, TrainkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Executor, Future
    from multiprocessing.process import BaseProcess

    from trainkit.text.prepare.chunks import Chunk


def write_parts(
    work: Work,
    todo: Mapping[int, Chunk],
    executor: Executor,
    *,
    timeout: float,
    done: Callable[[int, Tally], None],
) -> None:
    """Write the parts of some chunks by an executor.

    Args:
        work: How chunks become parts.
        todo: Chunks by the numbers of their parts.
        executor: What calls a function elsewhere.
        timeout: Seconds after which those who are at a chunk and show no sign of life are taken to
            hang.
        done: Called with a part's number and the part, once it is written.

    Raises:
        DataError: A document is bad, or a process died or hangs. The message names it.
        DiskError: A part cannot be written.

    Effects:
        Writes parts.
    """
    # Dask takes a call with the same arguments for one that it has answered: each run has its own.
    job = _Job(secrets.token_hex(8), code_version(), work)
    futures: dict[Future[Tally], int] = {}
    try:
        with _interrupts_wait():
            for number, chunk in todo.items():
                there = attrs.evolve(chunk, path=chunk.path.absolute())
                futures[executor.submit(_write, job, number, there)] = number
        crew = active_children()
        for future in _as_ended(futures, work.folder, timeout):
            number = futures[future]
            try:
                part = future.result()
            except BrokenExecutor as error:
                raise _lost(crew, work.folder) from error
            except Exception as error:
                if isinstance(error, ValueError):  # TrainkitErrors among them
                    raise
                what = f"{type(error).__name__}: {error}, at chunk {number}"
                raise DataError(f"prepare: {what}: {chunk_place(todo[number])}") from error
            done(number, part)
    finally:
        for future in futures:
            future.cancel()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; a process that is started in it never sees one.

    It goes to all processes of a terminal, and one that is still importing modules would end with a
    traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_ended(
    futures: Iterable[Future[Tally]], folder: Path, timeout: float
) -> Iterator[Future[Tally]]:
    """Yield futures as they end; raise when chunks that were begun show no sign of life."""
    waiting, last = set(futures), time.monotonic()
    marks: dict[str, int] = {}
    while waiting:
        ended, waiting = wait(waiting, min(timeout, 5.0), return_when=FIRST_COMPLETED)
        yield from ended
        before, marks = marks, _marks(folder)
        silent = time.monotonic() - last
        if ended or marks != before or not marks:
            last = time.monotonic()
        elif silent > timeout:
            raise _ended(marks, f"has said nothing for {silent:.0f} s")


def _marks(folder: Path) -> dict[str, int]:
    """Return who is at which chunk, and when that was last said, in nanoseconds."""
    marks = {}
    for path in folder.glob(".at_*"):
        with suppress(FileNotFoundError):  # it has ended meanwhile
            marks[path.read_text()] = path.stat().st_mtime_ns
    return marks


def _lost(crew: Iterable[BaseProcess], folder: Path) -> DataError:
    """Return the error of processes of which one has died, and the others were told to end."""
    marks = _marks(folder)
    for process in crew:
        process.join(timeout=5)
        code = process.exitcode or 0
        if code not in {0, -signal.SIGTERM}:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            its = [mark for mark in marks if mark.startswith(f"process {process.pid} ")]
            return _ended(its or ["a process, before its first chunk,"], f"was ended {how}")
    return _ended(marks, "has ended")


def _ended(marks: Iterable[str], what: str) -> DataError:
    return DataError(
        f"prepare: {' or '.join(sorted(marks)) or 'a process'} {what}",
        hint="finished parts are kept: run the same again, with fewer workers if memory was short; "
        "a script that works with several processes does so under `if __name__ == '__main__':`",
    )


# ---------------------------------------------------------------------------- in the other process

_here = threading.local()  # an encoder counts, so no two threads may share one


@attrs.frozen
class _Job:
    """What travels with each chunk: which run asks, of which trainkit, for what."""

    name: str
    code: str
    work: Work


def _write(job: _Job, number: int, chunk: Chunk) -> Tally:
    """Write a part, with a mark that one is at it; what goes wrong can go through a pipe."""
    who = f"process {os.getpid()} on {socket.gethostname()}"
    mark = job.work.folder / f".at_{number} {who}"
    try:
        with convert_disk_errors(mark, by="prepare"):
            mark.write_text(f"{who}, at chunk {number}, {chunk_place(chunk)},")
        return _writer(job)(number, chunk, mark.touch)
    except Exception as error:  # noqa: BLE001 (raised below)
        found = error
    finally:
        mark.unlink(missing_ok=True)
    raise _portable(found)


def _portable(error: Exception) -> Exception:
    """Return an error that the parent can read: trainkit's own as it is, another in words.

    An error travels as the arguments of its class, and by some executors with what caused it. A
    class with arguments of its own, or one of the script that runs, cannot be made from them there.
    """
    if type(error).__module__ == TrainkitError.__module__ or type(error) is ValueError:
        error.__cause__ = error.__context__ = None
        with suppress(Exception):  # what was found need not go through a pipe
            pickle.dumps(error)  # never read: no file is unpickled here
            return error
    return DataError(f"{type(error).__name__}: {error}")


def _writer(job: _Job) -> WritePart:
    """Return what writes the parts, made once in each thread of a run."""
    if getattr(_here, "name", "") != job.name:
        if job.code != code_version():
            raise DataError(
                f"prepare: {socket.gethostname()} has another trainkit ({code_version()}) than the "
                f"process that asks ({job.code}); install the same everywhere"
            )
        _here.write, _here.name = part_writer(job.work), job.name
    return _here.write


# -------------------------------------------------------------------------------- a pool of our own


@contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """Yield a pool of processes that end with the block, at once if it fails, and with this one."""
    # Spawned: a fork would take over locks of threads (numpy's, arrow's) that nobody will release.
    hide_piped_script()
    others = {*active_children()}
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        for process in {*active_children()} - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
