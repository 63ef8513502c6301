"""Run a function on several ranks of one machine, for tests.

Ranks are forked from a server that has loaded torch (multiprocessing's forkserver), so they start
in a tenth of a second and inherit no threads. A failure is reported with its first cause and the
traceback, a hang with the stack of each rank. No process and no file is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import (
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import attrs
import torch
import torch.distributed as dist

from trainkit.files import hide_piped_script
from trainkit.types import ConfigError, check_choice

T = TypeVar("T")

# A rank that fails closes its sockets, and its peers fail too, with these words: an echo, which may
# arrive before its cause.
_ECHO = re.compile(r"connection (closed|reset|refused)|broken pipe|gloo/transport", re.IGNORECASE)
_ECHO_GRACE = 1.0  # seconds in which the cause behind an echo may still arrive
_LOOK_EVERY = 0.2  # seconds between two looks at how far the ranks are
_EXIT_GRACE = 5.0  # seconds a rank has to leave after its function has returned


class RankError(RuntimeError):
    """A function failed on a rank: `rank` is the first that failed, `text` its traceback."""

    def __init__(self, message: str, *, rank: int, text: str = "") -> None:
        super().__init__(f"{message}\n{text}" if text else message)
        self.rank = rank
        self.text = text


@attrs.frozen
class _Returned:
    value: bytes


@attrs.frozen
class _Failed:
    when: float
    summary: str
    text: str = ""

    @property
    def is_echo(self) -> bool:
        return _ECHO.search(self.summary) is not None


@attrs.frozen
class _Work:
    """The work of a rank; `sources` are (module, file) of modules that must be loaded by path."""

    call: bytes
    sources: tuple[tuple[str, str], ...]
    world: int
    folder: Path
    timeout: float
    threads: int
    device: str
    environ: dict[str, str]


@attrs.frozen(eq=False)
class _Child:
    index: int
    process: ForkServerProcess | SpawnProcess
    pipe: Connection


def run_ranks(
    fn: Callable[..., T],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    threads: int = 1,
    device: str = "cpu",
    meanwhile: Callable[[], bool] | None = None,
) -> list[T]:
    """Run a function on several ranks, each in its own process, and return the results by rank.

    When `fn` starts, the default process group is initialized (gloo, over a file), and RANK,
    LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set. On "cpu" ranks see no GPU. On "cuda" each
    rank has one GPU, and the group sends CUDA tensors by NCCL. Arguments and results are copied.

    Args:
        fn: A function of a module, or `functools.partial` of one; its file need not be importable.
        world: The number of ranks.
        *args: Arguments of `fn` on every rank. Functions among them, or in attrs records among
            them, must be like `fn`.
        timeout: Seconds after which ranks that still run are stopped, and their stacks shown.
        threads: Threads per rank inside torch's operators.
        device: "cpu", or "cuda" for one rank on each GPU.
        meanwhile: Called in this process a few times a second while ranks run, to report progress.
            A true result means progress, and restarts `timeout`.

    Returns:
        The results of `fn`, by rank.

    Raises:
        RankError: A rank raised, died or hung. All others are stopped at once; the error has the
            first cause, not the broken connections that follow from it.
        ValueError: `world` is below 1, or `fn` or `args` cannot be sent to another process.
        ConfigError: This machine has fewer GPUs than ranks on "cuda".

    Effects:
        Starts multiprocessing's forkserver at the first call (5 s, once), then `world` processes.
        When it returns or raises, these have ended and their files are deleted. On "cuda" processes
        are spawned, at 10 s each, because CUDA does not survive a fork.

    Examples:
        >>> import torch.distributed
        >>> run_ranks(torch.distributed.get_rank, 2)
        [0, 1]
    """
    if world < 1:
        raise ValueError(f"run_ranks: world must be at least 1, got {world}")
    check_devices("run_ranks", world, device)
    with tempfile.TemporaryDirectory(prefix="trainkit_ranks_") as folder:
        try:
            call = _pack((fn, args))
        except Exception as error:
            raise ValueError(
                f"run_ranks: {fn} and its arguments must be sendable to another process: functions"
                f" at the top level of a module, plain values, tensors; {error}"
            ) from error
        work = _Work(
            call=call,
            sources=_list_sources((fn, *args)),
            world=world,
            folder=Path(folder),
            timeout=timeout,
            threads=threads,
            device=device,
            environ=dict(os.environ),
        )
        with _start_ranks(work) as ranks:
            reports = _gather_reports(ranks, timeout, meanwhile)
            returned = {i: x.value for i, x in reports.items() if isinstance(x, _Returned)}
            failed = {i: x for i, x in reports.items() if isinstance(x, _Failed)}
            if failed:
                rank = min(failed, key=lambda i: (failed[i].is_echo, failed[i].when, i))
                raise RankError(
                    f"run_ranks: rank {rank} of {world}: {failed[rank].summary}",
                    rank=rank,
                    text=failed[rank].text,
                )
            if len(returned) < world:
                _raise_hang([rank for rank in ranks if rank.index not in returned], work)
            _release(ranks)
        return [_unpack(returned[index]) for index in range(world)]


def check_devices(function: str, world: int, device: str) -> None:
    """Raise ConfigError if there are more ranks on "cuda" than GPUs on this machine.

    Raises:
        ConfigError: The machine has fewer GPUs.
        ValueError: `device` is neither "cpu" nor "cuda".

    Examples:
        >>> check_devices("f", 8, "cpu")
    """
    check_choice(("cpu", "cuda"), function, device=device)
    count = torch.cuda.device_count() if device == "cuda" else world
    if count < world:
        raise ConfigError(
            f"{function}: device='cuda' needs a GPU for each of {world} ranks, and torch "
            f"{torch.__version__} finds {count} on this machine; take at most as many ranks, or "
            "device='cpu', which needs none",
            where="device",
            got=count,
            want=world,
        )


# ------------------------------------------------------------------------------------ the parent


@contextlib.contextmanager
def _start_ranks(work: _Work) -> Iterator[list[_Child]]:
    hide_piped_script()
    context: ForkServerContext | SpawnContext = (
        SpawnContext() if work.device == "cuda" else multiprocessing.get_context("forkserver")
    )
    # A model of transformers costs each rank 4 s to import; preload it if this process uses it.
    used = [name for name in ("transformers.modeling_utils",) if name in sys.modules]
    context.set_forkserver_preload(
        ["pytest", "hypothesis", "trainkit.tools.testing.preload", *used]
    )
    ranks: list[_Child] = []
    try:
        for index in range(work.world):
            pipe, rank_pipe = context.Pipe()
            process = context.Process(target=_rank_main, args=(index, work, rank_pipe))
            ranks.append(_Child(index, process, pipe))
            try:
                process.start()
            except ConnectionError as error:
                raise RankError(
                    f"run_ranks: rank {index} of {work.world} could not start: see above what the "
                    "forkserver printed; a script needs `if __name__ == '__main__'` around what it "
                    "runs, because ranks import it",
                    rank=index,
                ) from error
            rank_pipe.close()  # the rank has the other copy; if it dies, recv raises EOFError
        yield ranks
    finally:
        for rank in ranks:
            rank.pipe.close()
            if rank.process.pid is not None:
                rank.process.kill()
                rank.process.join()
                rank.process.close()


def _gather_reports(
    ranks: Sequence[_Child], timeout: float, meanwhile: Callable[[], bool] | None
) -> dict[int, _Returned | _Failed]:
    """Return the reports by rank: all of them, or those until a failure or `timeout`."""
    deadline = time.monotonic() + timeout
    # Without a function to call there is no reason to wake up before a rank reports.
    patience = timeout if meanwhile is None else _LOOK_EVERY
    reports: dict[int, _Returned | _Failed] = {}
    while len(reports) < len(ranks):
        failures = [report for report in reports.values() if isinstance(report, _Failed)]
        if not all(failure.is_echo for failure in failures):
            break
        if failures:  # echoes only: their cause may still arrive
            deadline = min(deadline, failures[0].when + _ECHO_GRACE)
        pipes = [rank.pipe for rank in ranks if rank.index not in reports]
        ready = wait(pipes, min(patience, max(0.0, deadline - time.monotonic())))
        if meanwhile is not None and meanwhile() and not failures:
            deadline = time.monotonic() + timeout
        if not ready and time.monotonic() >= deadline:
            break
        for rank in ranks:
            if rank.pipe not in ready:
                continue
            try:
                reports[rank.index] = rank.pipe.recv()
            except (EOFError, ConnectionError):
                rank.process.join()
                summary = f"{_describe_exit(rank)} before it returned"
                reports[rank.index] = _Failed(time.monotonic(), summary)
    return reports


def _describe_exit(rank: _Child) -> str:
    code = rank.process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _raise_hang(ranks: Sequence[_Child], work: _Work) -> NoReturn:
    for rank in ranks:
        assert rank.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended just now
            os.kill(rank.process.pid, signal.SIGUSR1)  # it writes its stack, see _rank_main
    time.sleep(0.2)  # a signal handler gives no sign when it has written
    stacks = [f"rank {r.index}: {_stack_file(work, r.index).read_text()}" for r in ranks]
    names = ", ".join(str(rank.index) for rank in ranks)
    raise RankError(
        f"run_ranks: after {work.timeout:g} s still running: rank {names} of {work.world}",
        rank=ranks[0].index,
        text="\n".join(stacks),
    )


def _release(ranks: Sequence[_Child]) -> None:
    """Release ranks after all have returned, so that none closes a socket that another reads."""
    for rank in ranks:
        rank.pipe.send("all have returned")
    deadline = time.monotonic() + _EXIT_GRACE
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode != 0:
            exited = "did not exit" if rank.process.exitcode is None else _describe_exit(rank)
            raise RankError(f"run_ranks: rank {rank.index} returned, but {exited}", rank=rank.index)


def _list_sources(values: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return (module, file) of functions whose module another process may be unable to import.

    The functions are those among the values, and in the fields of attrs records among these.
    """
    sources: dict[str, str] = {}
    records = [value for value in values if attrs.has(type(value))]
    fields = [field for record in records for field in attrs.astuple(record, recurse=False)]
    for value in (*values, *fields):
        fn = value
        while isinstance(fn, partial):
            fn = fn.func
        name = getattr(fn, "__module__", None) or "builtins"
        top = sys.modules.get(name.partition(".")[0])
        file = getattr(sys.modules.get(name), "__file__", None)
        # Test files and scripts belong to no package that a rank could import.
        is_packaged = "." in name and getattr(top, "__file__", None) is not None
        if callable(fn) and file is not None and not is_packaged:
            sources[name] = file
    return tuple(sources.items())


def _stack_file(work: _Work, index: int) -> Path:
    return work.folder / f"stack_{index}.txt"


# torch makes multiprocessing's pickler share memory; `torch.save` makes plain copies instead. The
# bytes come from this process or one that it started, so loading them runs no foreign code.
def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


# ------------------------------------------------------------------------------------ the ranks


def _rank_main(index: int, work: _Work, pipe: Connection) -> None:
    with _stack_file(work, index).open("w") as stack:
        # Written by a signal handler in C, which works while Python hangs in a call.
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            _set_up(index, work)
            fn, args = _unpack(work.call)
            report = _Returned(_pack(fn(*args)))
        except BaseException as error:  # noqa: BLE001 -- the parent reports whatever ends a rank
            when = time.monotonic()  # one clock for all processes of a machine
            summary = f"{type(error).__name__}: {error}"
            report = _Failed(when, summary, traceback.format_exc())
        pipe.send(report)
        with contextlib.suppress(EOFError):
            pipe.recv()  # the others have returned too
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


def _set_up(index: int, work: _Work) -> None:
    os.environ.clear()  # the forkserver's is as old as the first call
    os.environ.update(work.environ)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(index)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(work.world)
    torch.set_num_threads(work.threads)
    if work.device == "cuda":
        torch.cuda.set_device(index)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks on CPUs may outnumber the GPUs
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if work.device == "cuda" else "gloo",
        init_method=f"file://{work.folder / 'store'}",
        rank=index,
        world_size=work.world,
        timeout=timedelta(seconds=work.timeout),
    )
    # A rank whose own connections stand may run on and close them while another still connects.
    dist.barrier()
    for name, file in work.sources:
        if name not in sys.modules:
            _load_module(name, file)


def _load_module(name: str, file: str) -> None:
    """Load a file under a dotted name, with stand-ins for parents that cannot be imported."""
    folder, parent = Path(file).parent, name.rpartition(".")[0]
    while parent:
        package = ModuleType(parent)
        package.__path__ = [str(folder)]
        sys.modules.setdefault(parent, package)
        folder, parent = folder.parent, parent.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
