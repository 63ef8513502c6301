"""How a run ends: its exit code and its last words.

A recipe puts its body under `report_errors`. Whatever goes wrong then ends in one line for a person
and one for a program, with an exit code that says who can mend it. `run_main` ends the process.
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

from trainkit.files import flush, redirect_to_devnull, say_on_stderr
from trainkit.run.stacks import read_stack
from trainkit.types import TrainkitError, format_error

EXIT_SAVED = 75
"""The exit code of a run that was told to stop and is saved: start the same command again."""

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
# Gloo and the stores raise plain RuntimeErrors too (torch from 2.11 on).
_PEER_WORDS = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|timeout|gloo/transport|watchdog",
    re.IGNORECASE,
)
_MEMORY_WORDS = re.compile(r"(can't|cannot|unable to) allocate memory|out of memory", re.IGNORECASE)
_MEMORY_HINT = (
    "send fewer rows through the model at once (--microbatch), compute more again in the backward "
    "pass (--recompute), or use more ranks; python -m trainkit plan says what a layout needs"
)
_FILES_WORDS = re.compile(r"too many open files", re.IGNORECASE)
_FILES_HINT = "let the process open more files (ulimit -n 65536), and run the same command again"
_THREAD_WORDS = re.compile(r"can't start new thread", re.IGNORECASE)
_THREAD_HINT = (
    "let the user start more threads and processes (ulimit -u), or start fewer of them "
    "(OMP_NUM_THREADS, --workers), and run the same command again"
)
_LONGEST = 2000  # characters of another library's error
_LONGEST_FACT = 8000  # of anything else that is told
_LONGEST_TRACEBACK = 1_000_000
_HINTS = {
    _PEER: "another rank ended or is stuck: its own report says why; run the same command again",
    _BUG: "this is a bug in trainkit or in the recipe; the traceback says where",
    _DISK: "make room or mend the permissions, then run the same command again",
    _INTERRUPTED: "run the same command again to go on from the last checkpoint",
    EXIT_SAVED: "run the same command again to go on from the last checkpoint",
}


@contextlib.contextmanager
def report_errors(run_dir: str | Path | None = None) -> Iterator[None]:
    """End the process with the exit code of what goes wrong inside, after saying what it was.

    The exit codes are those of `get_exit_code`. On stderr stand one readable line and then, last
    and unless it is a terminal, `TRAINKIT_ERROR {json}` with code, what, where, rank, step, got,
    want and hint; every rank writes its own. The traceback is appended to `errors/rank_00000.txt`
    in the run directory; without one it goes to stderr, but for errors of the user, which need
    none.

    Args:
        run_dir: The run directory, once it is known. Contexts may be nested: the inner one reports.

    Raises:
        SystemExit: With the code, in place of the exception. Where the reader of stdout has left
            (`--help | head`) it is 141, without a word, as other programs die of SIGPIPE.

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
        facts = _facts_of(error, run_dir)
        place = _keep_traceback(error, run_dir, facts)
        flush(sys.stdout)
        say_on_stderr(_words_of(facts, *([f"traceback: {place}"] if place else [])))
        raise SystemExit(facts["code"]) from None


def last_words(code: int, what: str) -> bytes:
    """Return what `report_errors` would say, for a process that must end where it stands.

    Examples:
        >>> print(last_words(76, "left at once").decode().splitlines()[0])
        error: left at once
    """
    names = ("code", "what", "where", "rank", "step", "got", "want", "hint")
    facts = dict.fromkeys(names) | {"code": code, "what": what, "rank": _rank()}
    return _words_of(facts | {"hint": _HINTS.get(code)}).encode() + b"\n"


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
    words = last_words(code, text)
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


def _words_of(facts: dict[str, Any], *further: str) -> str:
    hint = [f"hint: {facts['hint']}"] if facts["hint"] else []
    line = [f"TRAINKIT_ERROR {orjson.dumps(facts, default=str).decode()}"]
    line = [] if _is_terminal(sys.stderr) else line  # people need not read it twice
    return "\n".join([f"error: {facts['what']}", *hint, *further, *line])


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):  # closed, or none at all
        return False


def _has_no_reader(stream: Any) -> bool:
    """Return whether what is printed reaches nobody any more; let the rest go nowhere then."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        asked = select.poll()
        asked.register(stream.fileno(), select.POLLOUT)
        if any(found & select.POLLERR for _, found in asked.poll(0)):
            redirect_to_devnull(stream)
            return True
    return False


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a recipe's `main`, and end the process with its exit code, whatever may be stuck.

    What goes wrong in it is told as `report_errors` does, also before a run directory is known.
    An interpreter that ends waits for its threads, and torch's destructors for peers, which may be
    dead: a process that has failed could stay for as long as the timeout of its collectives. This
    one flushes its output (5 s at most), stops the children that multiprocessing has started, and
    is gone; functions of `atexit` are not called. A crash of the process itself, an abort or a bus
    error for a file that was cut short while it was mapped, leaves the stacks of its threads on
    stderr.

    Args:
        main: Returns the exit code, None for 0, or raises SystemExit with it.

    Effects:
        Ends the process.

    Examples:
        >>> import subprocess
        >>> script = "from trainkit.run.errors import *; run_main(lambda: EXIT_SAVED)"
        >>> subprocess.run([sys.executable, "-c", script]).returncode
        75
    """
    _open_standard_files()
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # no stderr
        faulthandler.enable()
    try:
        with report_errors():
            code = main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001 -- there is nobody further out to catch it
        traceback.print_exc()
        code = get_exit_code(error)
    if isinstance(code, str):
        print(code, file=sys.stderr)  # noqa: T201 -- as the interpreter does with sys.exit(text)
        code = 1
    _ignore_signals()
    _within(5.0, lambda: (flush(sys.stdout), flush(sys.stderr)))
    _within(5.0, _end_children)
    os._exit(code or 0)


def _open_standard_files() -> None:
    """Let no file that is opened get the number of a standard one that was closed at the start.

    Python has None for such a one, which libraries that print do not expect.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (until the process ends)


def _ignore_signals() -> None:
    """Let nobody change the exit code: torchrun signals the workers that leave after the first."""
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _within(seconds: float, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started any more
        thread.start()
        thread.join(seconds)


def _end_children() -> None:
    """Stop the daemonic children of this process, as multiprocessing would at its exit."""
    processes = sys.modules.get("multiprocessing.process")
    for child in processes.active_children() if processes else ():
        if child.daemon:
            child.kill()


def get_exit_code(error: BaseException) -> int:
    """Return the exit code of a recipe that `error` ends.

    Returns:
        64 configuration, environment (no file or thread left) or a bad argument, 65 data, 66
        checkpoint, 67 numerics, 68 a peer lost or a timeout, 70 a bug or no memory left, 74 disk,
        76 interrupted.

    Examples:
        >>> get_exit_code(ValueError("x")), get_exit_code(OSError(28, "No space left on device"))
        (64, 74)
    """
    if _limit_hint(error):
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
    """Return whether a host or a device had no memory left.

    Examples:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("out of range"))
        (True, False)
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # torch's own is known by name, since whoever reports need not have loaded torch.
    if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _MEMORY_WORDS.search(format_error(error)) is not None


def _limit_hint(error: BaseException) -> str | None:
    """Return what to do where an error came of a limit of the system on files or threads.

    Such an error may have become another one, a peer that cannot be reached for instance.
    """
    seen = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        number = getattr(cause, "errno", None)
        is_plain = isinstance(cause, OSError | RuntimeError | ImportError)
        text = format_error(cause) if is_plain else ""
        if number in {errno.EMFILE, errno.ENFILE} or _FILES_WORDS.search(text):
            return _FILES_HINT
        # A process that cannot be forked; as the cause of another error it is a lock that is held.
        is_fork = cause is error and isinstance(error, BlockingIOError)
        if is_fork or _THREAD_WORDS.search(text):
            return _THREAD_HINT
        cause = cause.__cause__
    return None


def bytes_asked(error: BaseException) -> str | None:
    """Return how much memory was asked for, as an allocator's message has it; None: who knows.

    Examples:
        >>> bytes_asked(RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 ..."))
        '20.00 GiB'
        >>> bytes_asked(MemoryError())
    """
    found = re.search(r"allocate ([0-9.]+ (?:bytes|[KMGT]i?B))", format_error(error))
    return found[1] if found else None


def _is_peer_loss(error: BaseException) -> bool:
    # By name, since whoever reports need not have loaded torch.
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    # A broken pipe is a reader of our output who left (`--help | head`), never a peer.
    return (
        isinstance(error, RuntimeError | ConnectionError | TimeoutError)
        and not isinstance(error, BrokenPipeError)
        and _PEER_WORDS.search(format_error(error)) is not None
    )


def _facts_of(error: BaseException, run_dir: str | Path | None) -> dict[str, Any]:
    code, no_memory = get_exit_code(error), is_out_of_memory(error)
    limit, hint = _limit_hint(error), _MEMORY_HINT if no_memory else _HINTS.get(code)
    facts = {
        "code": code,
        "what": _what(error),
        "where": _where(error),
        "rank": _rank(),
        "step": None if run_dir is None else last_step(Path(run_dir) / "metrics.jsonl"),
        "got": getattr(error, "got", None) or (bytes_asked(error) if no_memory else None),
        "want": getattr(error, "want", None),
        "hint": limit or getattr(error, "hint", None) or hint,
    }
    # A whole line of JSON whatever the error carries: a tensor or a set has a repr.
    plain = (str, int, float, bool, type(None))
    shown = {k: v if isinstance(v, plain) else repr(v) for k, v in facts.items()}
    return {k: v[:_LONGEST_FACT] if isinstance(v, str) else v for k, v in shown.items()}


def _what(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the last checkpoint stands"
    text = " ".join(format_error(error, most=_LONGEST_FACT - 100, hint=False).split())
    is_plain = isinstance(error, TrainkitError | ValueError)
    if is_plain and text:
        return text
    # A compiler's output is in the traceback; a line of 50 kB is read by nobody.
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return f"{type(error).__name__}: {text}"


def _where(error: BaseException) -> str | None:
    place = getattr(error, "where", None) or getattr(error, "filename", None)
    if place is not None:
        return str(place)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _rank() -> int:
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(text) if text.isdecimal() else 0


def last_step(metrics: Path) -> int | None:
    """Return the last step that a metrics file tells of, from its last 64 KiB."""
    if not metrics.is_file():  # a pipe would be waited for
        return None
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 65536))
            steps = re.findall(rb'^\{"step":([0-9]+),.*\}$', file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(steps[-1]) if steps else None


def _keep_traceback(
    error: BaseException, run_dir: str | Path | None, facts: dict[str, Any]
) -> Path | None:
    """Append the traceback to the rank's file and return its path, or print it if that fails."""
    text = "".join(traceback.format_exception(error))[:_LONGEST_TRACEBACK]
    if run_dir is not None:
        path = Path(run_dir) / "errors" / f"rank_{facts['rank']:05d}.txt"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}\n{text}\n")
            return path
    if facts["code"] in {_PEER, _BUG}:
        say_on_stderr(text)
    return None
