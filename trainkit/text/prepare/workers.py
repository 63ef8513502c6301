"""Write parts in other processes: those of an `Executor`, or of a local pool.

The processes share the folder of parts. Each one that works on a chunk has a heartbeat file there,
which it touches every half second, so that a process that hangs or has died can be named.
"""

from __future__ import annotations

import math
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
from trainkit.text.prepare.chunks import describe_chunk
from trainkit.text.prepare.parts import Tally, Work, WritePart, code_version, make_part_writer
from trainkit.types import DataError, TrainkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from concurrent.futures import Executor, Future
    from multiprocessing.process import BaseProcess

    from trainkit.text.prepare.chunks import Chunk

# Before its first heartbeat a process imports the caller's script, and what that imports.
_MIN_START_SECONDS = 60.0
_EXIT_SECONDS = 10.0  # that a process has to end, once it should


def write_parts(
    work: Work,
    chunks: Mapping[int, Chunk],
    executor: Executor,
    *,
    starts_at_once: bool,
    timeout: float,
    on_part: Callable[[int, Tally], None],
) -> None:
    """Write the parts of chunks by an executor.

    Args:
        work: The settings of all parts.
        chunks: The chunks, by the indices of their parts.
        executor: Calls a function in another process.
        starts_at_once: Whether processes that start no chunk are taken to hang too. Those of a
            cluster may wait in its queue for any time.
        timeout: Seconds without a heartbeat after which processes are taken to hang.
        on_part: Called with a part's index and counts, once it is written.

    Raises:
        DataError: A document is bad, or a process died or hangs. The message names it.
        DiskError: A part cannot be written.

    Effects:
        Writes parts.
    """
    # Dask returns the old result for a call with the same arguments: each run has its own name.
    job = _Job(secrets.token_hex(8), code_version(), work)
    futures: dict[Future[Tally], int] = {}
    processes: set[BaseProcess] = set()
    try:
        with _delay_interrupts():
            for index, chunk in chunks.items():
                absolute = attrs.evolve(chunk, path=chunk.path.absolute())
                futures[executor.submit(_write, job, index, absolute)] = index
                # A pool starts its processes one by one, and the first may be dead before the last
                # chunk is submitted: then it is no longer among the active ones.
                processes.update(active_children())
        start_limit = max(timeout, _MIN_START_SECONDS) if starts_at_once else math.inf
        for future in _iterate_finished(futures, work.folder, timeout, start_limit):
            index = futures[future]
            try:
                part = future.result()
            except (ValueError, BrokenExecutor):  # every TrainkitError is a ValueError
                raise
            except Exception as error:
                raise DataError(
                    f"prepare: {type(error).__name__}: {error}, at chunk {index}: "
                    f"{describe_chunk(chunks[index])}"
                ) from error
            on_part(index, part)
    except BrokenExecutor as error:
        raise _find_dead_process(processes, work.folder) from error
    finally:
        for future in futures:
            future.cancel()


@contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes started in it never receive it."""
    # A terminal sends it to all processes, and one that is still importing would print a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _iterate_finished(
    futures: Iterable[Future[Tally]], folder: Path, timeout: float, start_limit: float
) -> Iterator[Future[Tally]]:
    """Yield futures as they finish; raise if no heartbeat file changes, or if there is none."""
    pending = set(futures)
    heartbeats: dict[str, int] = {}
    last_change = time.monotonic()
    while pending:
        finished, pending = wait(pending, min(timeout, 5.0), return_when=FIRST_COMPLETED)
        yield from finished
        before = heartbeats
        heartbeats = _read_heartbeats(folder)
        silent_seconds = time.monotonic() - last_change
        if finished or heartbeats != before:
            last_change = time.monotonic()
        elif silent_seconds > (timeout if heartbeats else start_limit):
            problem = "has sent no heartbeat" if heartbeats else "has started no chunk"
            raise _process_error(heartbeats, f"{problem} for {silent_seconds:.0f} s")


def _read_heartbeats(folder: Path) -> dict[str, int]:
    """Return the time of the last heartbeat, in nanoseconds, by process and chunk."""
    heartbeats = {}
    for path in folder.glob(".at_*"):
        with suppress(FileNotFoundError):  # the process has finished the chunk meanwhile
            heartbeats[path.read_text()] = path.stat().st_mtime_ns
    return heartbeats


def _find_dead_process(processes: Collection[BaseProcess], folder: Path) -> DataError:
    """Return the error for a pool in which one process died; the pool terminates the others."""
    heartbeats = _read_heartbeats(folder)
    deadline = time.monotonic() + _EXIT_SECONDS
    while True:
        codes = {process.pid: process.exitcode for process in processes}
        for pid, code in codes.items():
            if code is None or code in {0, -signal.SIGTERM}:
                continue
            cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            names = [name for name in heartbeats if name.startswith(f"process {pid} ")]
            names = names or ["a process, before its first chunk,"]
            return _process_error(names, f"was ended {cause}")
        # The pool's thread waits for its processes too. The exit code of one that it reaps is None
        # until it has stored it: asking the system again finds no such child.
        if None not in codes.values() or time.monotonic() > deadline:
            return _process_error(heartbeats, "has ended")
        time.sleep(0.05)


def _process_error(names: Iterable[str], problem: str) -> DataError:
    return DataError(
        f"prepare: {' or '.join(sorted(names)) or 'a process'} {problem}",
        hint="finished parts stay: run the same again, with fewer workers if memory was short; "
        "a script that works with several processes does so under `if __name__ == '__main__':`",
    )


# ---------------------------------------------------------------------------- in the other process

_thread_state = threading.local()  # an encoder has a counter, so no two threads may share one


@attrs.frozen
class _Job:
    """Sent with each chunk: the name of the run, the version of its code, and the settings."""

    name: str
    code: str
    work: Work


def _write(job: _Job, index: int, chunk: Chunk) -> Tally:
    """Write a part with a heartbeat file; errors are converted to ones that can be pickled."""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    heartbeat = job.work.folder / f".at_{index} {process}"
    try:
        with convert_disk_errors(heartbeat, by="prepare"):
            heartbeat.write_text(f"{process}, at chunk {index}, {describe_chunk(chunk)},")
        return _get_writer(job)(index, chunk, heartbeat.touch)
    except Exception as error:  # noqa: BLE001 (raised below)
        caught = error
    finally:
        heartbeat.unlink(missing_ok=True)
    raise _make_portable(caught)


def _make_portable(error: Exception) -> Exception:
    """Return an error that can be unpickled: trainkit's own, or a DataError with its text."""
    # An error is pickled as its class and arguments, by some executors with its cause. A class with
    # other arguments, or one of the user's script, cannot be made from them in the parent.
    if type(error).__module__ == TrainkitError.__module__ or type(error) is ValueError:
        error.__cause__ = error.__context__ = None
        with suppress(Exception):  # `got` may hold a value that cannot be pickled
            pickle.dumps(error)  # never read: no file is unpickled here
            return error
    return DataError(f"{type(error).__name__}: {error}")


def _get_writer(job: _Job) -> WritePart:
    """Return the writer of a run, made once in each thread."""
    if getattr(_thread_state, "name", "") != job.name:
        if job.code != code_version():
            raise DataError(
                f"prepare: {socket.gethostname()} has another trainkit ({code_version()}) than the "
                f"process that started the run ({job.code}); install the same everywhere"
            )
        _thread_state.write = make_part_writer(job.work)
        _thread_state.name = job.name
    return _thread_state.write


# -------------------------------------------------------------------------------------- local pool


@contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """Yield a process pool that ends with the block, at once if it fails, and with this process."""
    # Spawned: a forked process inherits locks of threads (numpy's, arrow's) that nobody releases.
    hide_piped_script()
    others = {*active_children()}
    pool = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_initialize_process,
    )
    try:
        yield pool
    except BaseException:
        for process in {*active_children()} - others:
            process.kill()
        raise
    finally:
        processes = {*active_children()} - others
        # Not `wait=True`: all parts may be written while another process still hangs at its start.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(timeout=_EXIT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _initialize_process() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        # A killed parent cannot shut its pool down, and workers would wait for chunks forever.
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
