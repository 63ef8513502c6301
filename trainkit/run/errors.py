"""How a run ends: its exit code and its error report.

A recipe puts its body under `report_errors`. Every error then becomes one line for people and one
for programs, and an exit code that says what kind it is. `run_main` ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import orjson

from trainkit.files import flush, print_to_stderr, redirect_to_devnull
from trainkit.run.stacks import read_stack
from trainkit.types import TrainkitError, format_error

EXIT_SAVED = 75
"""The exit code of a run that was stopped and is saved: the same command resumes it."""

_USAGE, _PEER, _BUG, _DISK, _INTERRUPTED = 64, 68, 70, 74, 76
_PIPE = 141  # 128 + SIGPIPE
_WAIT_FOR_DISK = 5.0  # seconds that last words may take
_DISK_ERRORS = {
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EROFS",
        "EACCES",
        "EPERM",
        "EDQUOT",
        "EIO",
        "EFBIG",
        "ENOTDIR",
        "EISDIR",
        "EPIPE",
    )
}
# Gloo and the stores also raise plain RuntimeErrors (from torch 2.11 on).
_PEER_PATTERN = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|timeout|gloo/transport|watchdog",
    re.IGNORECASE,
)
_MEMORY_PATTERN = re.compile(
    r"(can't|cannot|unable to) allocate memory|out of memory", re.IGNORECASE
)
_MEMORY_HINT = (
    "send fewer rows through the model at once (--microbatch), compute more again in the backward "
    "pass (--recompute), or use more ranks; python -m trainkit plan says what a layout needs"
)
_FILES_PATTERN = re.compile(r"too many open files", re.IGNORECASE)
_FILES_HINT = "let the process open more files (ulimit -n 65536), and run the same command again"
_THREAD_PATTERN = re.compile(r"can't start new thread", re.IGNORECASE)
_THREAD_HINT = (
    "let the user start more threads and processes (ulimit -u), or start fewer of them "
    "(OMP_NUM_THREADS, --workers), and run the same command again"
)
_MAX_FOREIGN = 2000  # characters of another library's error
_MAX_FIELD = 8000  # characters of any other field of the report
_MAX_TRACEBACK = 1_000_000
_HINTS = {
    _PEER: "another rank ended or hangs: its own report says why; run the same command again",
    _BUG: "this is a bug in trainkit or in the recipe; the traceback says where",
    _DISK: "make room or fix the permissions, then run the same command again",
    _INTERRUPTED: "run the same command again to resume from the last checkpoint",
    EXIT_SAVED: "run the same command again to resume from the last checkpoint",
}


_OWN_PROCESS = threading.Event()  # set by `run_main`, for good: it ends the process


def owns_process() -> bool:
    """Return whether this process is the recipe's own, which it is inside `run_main`.

    Any other process is somebody else's: a notebook, a worker of Ray, a service. `open_run` traps
    no signals there, changes no settings, and raises errors as they are: `get_exit_code` has the
    exit code that a process of its own would end with.

    Examples:
        >>> owns_process()
        False
    """
    return _OWN_PROCESS.is_set()


@contextlib.contextmanager
def record_errors(run_dir: str | Path) -> Iterator[None]:
    """Append the traceback of an error of the block to the rank's file in `run_dir`, and raise it.

    It is what `report_errors` does in a process of somebody else, who gets the error itself.

    Effects:
        On an error writes `errors/rank_00000.txt` under `run_dir`, if it can.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        _append_traceback(error, Path(run_dir))
        raise


@contextlib.contextmanager
def report_errors(run_dir: str | Path | None = None) -> Iterator[None]:
    """Report an error of the block, and raise SystemExit with its exit code.

    The exit codes are those of `get_exit_code`. stderr gets one readable line and then, as its last
    line and unless it is a terminal, `TRAINKIT_ERROR {json}` with code, what, where, rank, step,
    got, want and hint; every rank writes its own. The step is that of the error, or else the last
    one with metrics. The traceback is appended to `errors/rank_00000.txt` in the run directory;
    without one it goes to stderr, except for errors of the user, which need none.

    Args:
        run_dir: The run directory, once it is known. Contexts may be nested: the inner one reports.

    Raises:
        SystemExit: With the code, in place of the exception. If the reader of stdout has gone
            (`--help | head`) it is 141, without a report, as other programs die of SIGPIPE.

    Effects:
        On an error writes to stderr and under `run_dir`.

    Examples:
        >>> import contextlib, io
        >>> stderr = io.StringIO()
        >>> try:
        ...     with contextlib.redirect_stderr(stderr), report_errors():
        ...         raise ValueError("pack_bins: capacity must be at least 1, got 0")
        ... except SystemExit as end:
        ...     print(end.code, stderr.getvalue().splitlines()[0])
        64 error: pack_bins: capacity must be at least 1, got 0
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 -- all of them end here
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            raise SystemExit(_PIPE) from None
        fields = _collect_fields(error, run_dir)
        path = _write_traceback(error, run_dir, fields)
        flush(sys.stdout)
        print_to_stderr(_format_report(fields, *([f"traceback: {path}"] if path else [])))
        raise SystemExit(fields["code"]) from None


def format_last_words(code: int, what: str) -> bytes:
    """Return the report of `report_errors`, for a process that must end without an exception.

    Examples:
        >>> print(format_last_words(76, "left at once").decode().splitlines()[0])
        error: left at once
    """
    fields = {
        "code": code,
        "what": what,
        "where": None,
        "rank": _read_rank(),
        "step": None,
        "got": None,
        "want": None,
        "hint": _HINTS.get(code),
    }
    return _format_report(fields).encode() + b"\n"


def end_process(error: TrainkitError, *, run_dir: Path, rank: int) -> NoReturn:
    """End this process where it stands, after its last words (5 s at most, and 1 s without a disk).

    Effects:
        Writes the stacks of all threads to `errors` of the run directory, reports the error as
        `report_errors` does, and ends the process with the error's code.
    """
    with contextlib.suppress(Exception):  # no thread can be started any more, for instance
        words = threading.Thread(target=_write_last_words, args=(error, run_dir, rank), daemon=True)
        words.start()
        words.join(_WAIT_FOR_DISK)
        if words.is_alive():  # the disk does not take the traceback
            end_without_disk(error.code, str(error))
    os._exit(error.code)


def end_without_disk(code: int, text: str) -> NoReturn:
    """End this process after last words that touch no file (1 s at most: a pipe may be full).

    Effects:
        Writes to stderr, and ends the process.
    """
    words = format_last_words(code, text)
    writer = threading.Thread(target=os.write, args=(2, words), daemon=True)
    writer.start()
    writer.join(1.0)
    os._exit(code)


def _write_last_words(error: TrainkitError, run_dir: Path, rank: int) -> None:
    with contextlib.suppress(OSError):
        path = run_dir / "errors" / f"rank_{rank:05d}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            for thread in threading.enumerate():
                file.write(f"Thread {thread.name} (most recent call first):\n")
                for source, function, line in read_stack(thread.ident or 0):
                    file.write(f"  {source}:{line} in {function}\n")
    with contextlib.suppress(SystemExit), report_errors(run_dir):
        raise error


def _format_report(fields: dict[str, Any], *extra: str) -> str:
    lines = [f"error: {fields['what']}"]
    if fields["hint"]:
        lines.append(f"hint: {fields['hint']}")
    lines += extra
    is_terminal = False
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no stream at all
        is_terminal = sys.stderr.isatty()
    if not is_terminal:  # people at a terminal need not read it twice
        lines.append(f"TRAINKIT_ERROR {orjson.dumps(fields, default=str).decode()}")
    return "\n".join(lines)


def _has_no_reader(stream: Any) -> bool:
    """Return whether a stream's reader has gone; if so, redirect it to the null device."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            redirect_to_devnull(stream)
            return True
    return False


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a recipe's `main`, and end the process with its exit code, even if threads hang.

    Errors are reported as in `report_errors`, also before a run directory is known. An interpreter
    that ends waits for its threads, and torch's destructors wait for peers, which may be dead: a
    process that has failed could live for as long as the timeout of its collectives. This one
    flushes its output (5 s at most), stops the children of multiprocessing, and exits; functions of
    `atexit` are not called. A crash of the process itself, such as an abort, or a bus error where a
    mapped file was truncated, leaves the stacks of its threads on stderr.

    Args:
        main: Returns the exit code, None for 0, or raises SystemExit with it.

    Effects:
        Makes the process the recipe's own (`owns_process`), and ends it.

    Examples:
        >>> import subprocess
        >>> script = "from trainkit.run.errors import *; run_main(lambda: EXIT_SAVED)"
        >>> subprocess.run([sys.executable, "-c", script]).returncode
        75
    """
    _OWN_PROCESS.set()
    open_standard_streams()
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # no stderr
        faulthandler.enable()
    try:
        with report_errors():
            code = main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001 -- the outermost frame
        traceback.print_exc()
        code = get_exit_code(error)
    if isinstance(code, str):
        print(code, file=sys.stderr)  # noqa: T201 -- as the interpreter does with sys.exit(text)
        code = 1
    # torchrun signals the other workers when one has ended: that must not change the exit code.
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        with contextlib.suppress(ValueError):  # only the main thread may set a handler
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _run_with_timeout(5.0, lambda: (flush(sys.stdout), flush(sys.stderr)))
    _run_with_timeout(5.0, _kill_children)
    os._exit(code or 0)


def open_standard_streams() -> None:
    """Open the null device for standard streams that were closed when the process started.

    Otherwise the next file to be opened gets the number of a standard stream, and Python has None
    in place of the stream, which libraries that print do not expect.

    Effects:
        Opens files that stay open, and sets `sys.stdout` and `sys.stderr` where they are None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (until the process ends)


def _run_with_timeout(seconds: float, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started any more
        thread.start()
        thread.join(seconds)


def _kill_children() -> None:
    """Kill the daemonic children of this process, as multiprocessing would at exit."""
    processes = sys.modules.get("multiprocessing.process")
    for child in processes.active_children() if processes else ():
        if child.daemon:
            child.kill()


def get_exit_code(error: BaseException) -> int:
    """Return the exit code for an error that ends a recipe.

    Returns:
        64 configuration, environment (no more files or threads) or a bad argument, 65 data, 66
        checkpoint, 67 numerics, 68 a lost peer or a timeout, 70 a bug or out of memory, 74 disk, 76
        interrupted.

    Examples:
        >>> get_exit_code(ValueError("x")), get_exit_code(OSError(28, "No space left on device"))
        (64, 74)
    """
    if _find_limit_hint(error):
        return _USAGE
    if isinstance(error, TrainkitError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if _is_peer_loss(error) and not is_out_of_memory(error):
        return _PEER
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return _DISK
    return _USAGE if isinstance(error, ValueError) else _BUG


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a host or a device was out of memory.

    Examples:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("out of range"))
        (True, False)
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # torch's exception is recognized by name, since the process may not have loaded torch.
    if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return True
    return (
        isinstance(error, RuntimeError) and _MEMORY_PATTERN.search(format_error(error)) is not None
    )


def _find_limit_hint(error: BaseException) -> str | None:
    """Return a hint if the system's limit on files or threads caused an error, or None.

    The cause may be hidden behind another error, such as a peer that cannot be reached.
    """
    visited: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in visited:
        visited.append(cause)
        number = getattr(cause, "errno", None)
        is_plain = isinstance(cause, OSError | RuntimeError | ImportError)
        text = format_error(cause) if is_plain else ""
        if number in {errno.EMFILE, errno.ENFILE} or _FILES_PATTERN.search(text):
            return _FILES_HINT
        # From os.fork; as the cause of another error it would mean a file that is locked.
        is_fork = cause is error and isinstance(error, BlockingIOError)
        if is_fork or _THREAD_PATTERN.search(text):
            return _THREAD_HINT
        cause = cause.__cause__
    return None


def parse_requested_memory(error: BaseException) -> str | None:
    """Return the amount of memory in an allocator's message, or None.

    Examples:
        >>> message = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 ..."
        >>> parse_requested_memory(RuntimeError(message))
        '20.00 GiB'
        >>> parse_requested_memory(MemoryError())
    """
    match = re.search(r"allocate ([0-9.]+ (?:bytes|[KMGT]i?B))", format_error(error))
    return match[1] if match else None


def _is_peer_loss(error: BaseException) -> bool:
    # By name, since the process may not have loaded torch.
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    # A broken pipe is a reader of our output that has gone (`--help | head`), never a peer.
    return (
        isinstance(error, RuntimeError | ConnectionError | TimeoutError)
        and not isinstance(error, BrokenPipeError)
        and _PEER_PATTERN.search(format_error(error)) is not None
    )


def _collect_fields(error: BaseException, run_dir: str | Path | None) -> dict[str, Any]:
    code = get_exit_code(error)
    got = getattr(error, "got", None)
    default_hint = _HINTS.get(code)
    if is_out_of_memory(error):
        got = got or parse_requested_memory(error)
        default_hint = _MEMORY_HINT
    where = getattr(error, "where", None) or getattr(error, "filename", None)
    if where is None and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
    step = getattr(error, "step", None)
    if step is None and run_dir is not None:
        step = read_last_step(Path(run_dir) / "metrics.jsonl")
    fields = {
        "code": code,
        "what": _format_what(error),
        "where": None if where is None else str(where),
        "rank": _read_rank(),
        "step": step,
        "got": got,
        "want": getattr(error, "want", None),
        "hint": _find_limit_hint(error) or getattr(error, "hint", None) or default_hint,
    }
    # The last line must be valid JSON whatever the error contains; a tensor or a set has a repr.
    plain = (str, int, float, bool, type(None))
    shown = {k: v if isinstance(v, plain) else repr(v) for k, v in fields.items()}
    return {k: v[:_MAX_FIELD] if isinstance(v, str) else v for k, v in shown.items()}


def _format_what(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the last checkpoint stands"
    text = " ".join(format_error(error, most=_MAX_FIELD - 100, hint=False).split())
    is_plain = isinstance(error, TrainkitError | ValueError)
    if is_plain and text:
        return text
    # The traceback has all of it; nobody reads a line of 50 kB, such as a compiler's output.
    text = text if len(text) <= _MAX_FOREIGN else f"{text[:_MAX_FOREIGN]} ..."
    return f"{type(error).__name__}: {text}"


def _read_rank() -> int:
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(text) if text.isdecimal() else 0


def read_last_step(metrics: Path) -> int | None:
    """Return the last step of a metrics file, from its last 64 KiB."""
    if not metrics.is_file():  # opening a pipe would block
        return None
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 65536))
            steps = re.findall(rb'^\{"step":([0-9]+),.*\}$', file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(steps[-1]) if steps else None


def _write_traceback(
    error: BaseException, run_dir: str | Path | None, fields: dict[str, Any]
) -> Path | None:
    """Append the traceback to the rank's file and return its path, or print it if that fails."""
    path = None if run_dir is None else _append_traceback(error, Path(run_dir))
    if path is None and fields["code"] in {_PEER, _BUG}:
        print_to_stderr(_format_traceback(error))
    return path


def _append_traceback(error: BaseException, run_dir: Path) -> Path | None:
    """Append the traceback to the rank's file; return its path, or None if that fails."""
    path = run_dir / "errors" / f"rank_{_read_rank():05d}.txt"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            file.write(f"{now}\n{_format_traceback(error)}\n")
        return path
    return None


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[:_MAX_TRACEBACK]
