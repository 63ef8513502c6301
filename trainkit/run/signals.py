"""Stopping in time: a signal sets a flag, and all ranks agree on the step after which they stop.

A scheduler that wants its machines back signals some of the processes and kills all of them half a
minute later. A rank that saved on its own would wait for the others, and they for it (measured:
a deadlock until the timeout, and no checkpoint). So nothing but a flag is set where the signal
arrives, every step ends with a vote, and all ranks save the same step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from trainkit.collectives import all_gather_objects
from trainkit.files import redirect_to_devnull
from trainkit.mesh import open_gloo_axis
from trainkit.run.errors import get_exit_code, last_words
from trainkit.run.peers import status_of
from trainkit.types import (
    Axis,
    CheckpointError,
    ConfigError,
    DataError,
    NumericsError,
    PeerError,
    PreemptedError,
    format_error,
)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ask a run to save and to end."""

_OWN_CODES = {
    kind.code
    for kind in (ConfigError, DataError, CheckpointError, NumericsError, PeerError, PreemptedError)
}
"""What a run ends with whether or not it was asked to stop: to start it again does not help."""

Asked = Callable[[], str | None]
"""`Asked() -> str | None`: why this process shall stop, "SIGTERM" say, or that it is orphaned and
whose death made it so; None to go on.
"""


# ------------------------------------------------------------------------------------ this process


@contextlib.contextmanager
def trap_signals() -> Iterator[Asked]:
    """Yield `asked()`, which tells why this process shall stop: a signal, or an orphan's fate.

    SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 set a flag and do nothing else. A second SIGINT leaves at
    once (exit code 76; the last checkpoint stands). Under torchrun a process whose launcher has
    died is orphaned, and names it: torchrun dies of signals that it was not told to handle, and its
    workers live on. SIGHUP is survived, but for workers of a torchrun that has lost its terminal,
    since it kills them half a minute later. Output whose reader has left, or does not read, goes
    nowhere and holds nothing up.

    `asked` may be called from any thread, as often as one likes. It knows of a signal as soon as it
    has arrived, also while the main thread is stuck in a collective and runs no Python: the
    interpreter's C handler sends the number through a socket to a thread that waits for it. In
    another thread than the main one no handler can be set; there `asked` only tells of orphans.

    Yields:
        `asked() -> str | None`, "SIGTERM" for example; it keeps to its first answer.

    Effects:
        Sets signal handlers, and puts back what was there, faulthandler's among them; starts a
        thread, and ends it.

    Examples:
        >>> with trap_signals() as asked:
        ...     before = asked()
        ...     signal.raise_signal(signal.SIGTERM)
        ...     before, asked()
        (None, 'SIGTERM')
    """
    reasons: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_readers_may_leave())
        in_main = threading.current_thread() is threading.main_thread()
        heard = stack.enter_context(_heard_signals()) if in_main else lambda: None
        orphaned_by = _bind_orphaned_by()

        def asked() -> str | None:
            reason = heard() or orphaned_by()
            if reason and not reasons:
                reasons.append(reason)
            return reasons[0] if reasons else None

        yield asked


def _bind_orphaned_by() -> Callable[[], str | None]:
    """Return a function that tells whether torchrun has died since (a shell may come and go)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return lambda: None
    parent = os.getppid()
    words = f"torchrun (process {parent} on {socket.gethostname()}) has died: orphaned"
    return lambda: words if os.getppid() != parent else None


@contextlib.contextmanager
def _heard_signals() -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the name of the first signal to stop that has arrived."""
    process = os.getpid()
    words = last_words(
        PreemptedError.code, "left at once, at a second SIGINT; the last checkpoint stands"
    )
    has_hung_up = _bind_has_hung_up()
    # The same signal comes twice, by the handler and through the socket: each counts for itself.
    handled: list[str] = []
    received: list[str] = []
    leaving = threading.Lock()

    def note(number: int, seen: list[str]) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in seen and leaving.acquire(blocking=False):
            _leave_at_once(words)  # by one of the two, so that it is said once
        if name not in seen:
            seen.append(name)

    def handle(number: int, _: object) -> None:
        if os.getpid() == process:
            note(number, handled)
        else:
            _end_as_a_child(number)

    handlers: dict[int, Any] = dict.fromkeys((*STOP_SIGNALS, signal.SIGHUP), handle)

    def receive(number: int) -> None:
        if number in handlers:
            note(number, received)

    def heard() -> str | None:
        names = (*received, *handled)
        return next((name for name in names if name != "SIGHUP" or has_hung_up()), None)

    with _wakeup(receive), _handlers({**handlers, signal.SIGPIPE: signal.SIG_IGN}):
        yield heard


def _end_as_a_child(number: int) -> None:
    """Do in a forked child what it would do without a trap; what a keyboard sends it lets pass."""
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _bind_has_hung_up() -> Callable[[], bool]:
    """Return a function that tells whether torchrun, our parent, has lost its terminal since."""
    parent = os.getppid()
    had_terminal = "TORCHELASTIC_RUN_ID" in os.environ and _has_terminal(parent)
    return lambda: had_terminal and not _has_terminal(parent)


_END = b"\0"  # no signal has this number


def _leave_at_once(words: bytes) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, words)
    os._exit(PreemptedError.code)


def _has_terminal(pid: int) -> bool:
    """Return whether a process has a controlling terminal."""
    status = status_of(pid)
    return bool(status) and status[4] != b"0"


@contextlib.contextmanager
def _wakeup(receive: Callable[[int], None]) -> Iterator[None]:
    """Have a thread call `receive(number)` for each signal that reaches this process."""
    process, credentials = os.getpid(), struct.Struct("3i")
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    # Forked children share the socket: only the kernel (Linux's) knows which process wrote.
    if hasattr(socket, "SO_PASSCRED"):
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    writer.setblocking(False)

    def listen() -> None:
        while True:
            data, notes, *_ = reader.recvmsg(1, socket.CMSG_SPACE(credentials.size))
            if not notes or credentials.unpack(notes[0][2])[0] == process:
                if data == _END:
                    return
                receive(data[0])

    with reader, writer:
        thread = threading.Thread(target=listen, name="trainkit signals", daemon=True)
        thread.start()
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.setblocking(True)
            writer.send(_END)
            thread.join()


@contextlib.contextmanager
def _handlers(table: Mapping[int, Any]) -> Iterator[None]:
    """Set handlers, and put back the old ones, those of C among them, which Python cannot name."""
    libc = ctypes.CDLL(None)
    before: list[tuple[int, Any, Any]] = []
    try:
        for number, handler in table.items():
            action = ctypes.create_string_buffer(1024)  # a struct sigaction takes 152 bytes
            libc.sigaction(number, None, action)
            before.append((number, action, signal.signal(number, handler)))
        yield
    finally:
        for number, action, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            libc.sigaction(number, action, None)


# ------------------------------------------------------------------------------------ its output


@contextlib.contextmanager
def _readers_may_leave() -> Iterator[None]:
    """Let nothing that is printed end or hold up the run: its reader or disk may be gone, or slow.

    What a pipe that nobody reads has no room for is lost, after the first seconds at once.
    """
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "__dict__")]
    names = ("write", "flush")
    before = [(s, name, vars(s).get(name)) for s in streams for name in names]
    for stream in streams:
        write = _never_failing(stream.write, stream)
        flush = _never_failing(stream.flush, stream)
        patient = _never_waiting(write, flush, stream) if _is_pipe(stream) else write
        vars(stream).update(write=patient, flush=flush)
    try:
        yield
    finally:
        for stream, name, method in before:
            if method is None:
                vars(stream).pop(name, None)
            else:
                setattr(stream, name, method)


def _never_failing(method: Callable[..., Any], stream: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except OSError as error:
            if error.errno in {errno.EPIPE, errno.EIO}:  # a pipe or a terminal without a reader
                redirect_to_devnull(stream)
            return len(args[0]) if args else None

    return call


_PATIENCE = 5.0  # seconds for the reader of a full pipe
_LETTERS = 1000  # that a pipe with any room takes at once: 4,096 bytes (PIPE_BUF of Linux)


def _never_waiting(
    write: Callable[[str], Any], flush: Callable[[], Any], stream: Any
) -> Callable[[str], int]:
    """Return a `write` to a pipe that gives up what the pipe has no room for."""
    patience = [_PATIENCE]
    one_at_a_time = threading.RLock()

    def has_room() -> bool:
        try:
            found = bool(select.select([], [stream], [], patience[0])[1])
        except (OSError, ValueError):  # a number too high for select, or a closed file
            return True
        patience[0] = _PATIENCE if found else 0.0
        return found

    def call(text: str) -> int:
        with one_at_a_time:
            for begin in range(0, len(text), _LETTERS):
                if not has_room():
                    break
                write(text[begin : begin + _LETTERS])
                flush()
        return len(text)

    return call


def _is_pipe(stream: Any) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    return False


# ------------------------------------------------------------------------------------ all ranks


@contextlib.contextmanager
def open_stop_vote(asked: Asked, axis: Axis) -> Iterator[Asked]:
    """Yield `stopping()`, which tells all ranks alike whether any of them was asked to stop.

    A vote of one byte is posted at the end of a step and read at the end of the next one, when it
    has long arrived: what a step pays is the posting. So a run ends at most two steps after the
    signal. Who asked is exchanged once, when somebody has.

    Args:
        asked: Why this process shall stop, or None: that of `trap_signals`, or one that also knows
            of a time limit.
        axis: The ranks that stop together, `ps.world`.

    Yields:
        `stopping() -> str | None`, "SIGTERM on rank 3" for example; every rank must call it once
        per step. Once it has told, it tells the same again without communicating.

    Raises:
        PreemptedError: In place of a disk's error or a bug's after ranks have agreed to stop: the
            run could not be saved. Errors that a new start would meet again (of the configuration,
            the data, a checkpoint or the numbers) and those of peers stay what they are.

    Effects:
        Communicates on a group of its own: one all-reduce of one byte per call.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> with open_stop_vote(lambda: "SIGTERM", solo_parallel().world) as stopping:
        ...     stopping()
        'SIGTERM on rank 0'
    """
    told: list[str] = []
    # A vote is no watchdog: rank 0 may have an hour's work of its own.
    patience = timedelta(hours=1)
    with _unsaved_is_told(told), open_gloo_axis(axis, name="stop", timeout=patience) as votes:
        if votes.count == 1:
            yield lambda: _told_once(told, _who([asked()]))
            return
        post = _bind_vote(votes)
        counts = [post(asked() is not None)]

        def stopping() -> str | None:
            if not told:
                if counts.pop()():
                    who = _who(all_gather_objects(asked(), votes))
                    return _told_once(told, who or "one of the ranks")
                counts.append(post(asked() is not None))
            return _told_once(told, None)

        yield stopping
        for wait in counts:
            wait()


def _told_once(told: list[str], who: str | None) -> str | None:
    """Return what has been told first, or keep and return what is told now."""
    if who and not told:
        told.append(who)
    return told[0] if told else None


@contextlib.contextmanager
def _unsaved_is_told(told: Sequence[str]) -> Iterator[None]:
    """Once ranks have agreed to stop, let all of them say that what was to be saved was not."""
    try:
        yield
    except Exception as error:
        if not told or get_exit_code(error) in _OWN_CODES:
            raise
        facts = {name: getattr(error, name, None) for name in ("where", "got", "want", "hint")}
        raise PreemptedError(
            f"open_stop_vote: asked to stop ({told[0]}), but could not save: "
            f"{type(error).__name__}: {format_error(error)}",
            **facts,
        ) from error


def _who(flags: Sequence[str | None]) -> str | None:
    """Return who asks all to stop, from what each rank was asked by, in rank order."""
    ranks: dict[str, list[str]] = {}
    for rank, flag in enumerate(flags):
        if flag is not None:
            ranks.setdefault(flag, []).append(str(rank))
    told = [f"{flag} on rank{'s' * (len(x) > 1)} {', '.join(x)}" for flag, x in ranks.items()]
    return "; ".join(told) or None


def _bind_vote(axis: Axis) -> Callable[[bool], Callable[[], bool]]:
    """Return a function that posts a vote, and returns what waits for whether anybody said yes.

    One vote is under way at a time, in one buffer for all: this costs half of what `all_reduce` of
    a new tensor does.
    """
    flags = np.zeros(1, np.uint8)
    buffer = [torch.from_numpy(flags)]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    assert axis.group is not None
    allreduce = axis.group.allreduce

    def post(vote: bool) -> Callable[[], bool]:
        flags[0] = vote
        work = allreduce(buffer, options)

        def wait() -> bool:
            work.wait()
            return bool(flags[0])

        return wait

    return post
