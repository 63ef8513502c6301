"""Stopping in time: a signal sets a flag, and all ranks agree on the step after which they stop.

A scheduler that needs its machines signals some of the processes and kills all of them half a
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from trainkit.collectives import all_gather_objects
from trainkit.files import redirect_to_devnull
from trainkit.mesh.axes import open_gloo_axis
from trainkit.run.errors import format_last_words, get_exit_code
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
"""The signals that make a run save and end."""

_FINAL_CODES = {
    kind.code
    for kind in (ConfigError, DataError, CheckpointError, NumericsError, PeerError, PreemptedError)
}
"""Exit codes that a stop does not change: a run that is started again meets the same error."""

StopReason = Callable[[], str | None]
"""`StopReason() -> str | None`: why this process has to stop, such as "SIGTERM", or None."""


# ------------------------------------------------------------------------------------ this process


@contextlib.contextmanager
def trap_signals() -> Iterator[StopReason]:
    """Yield `stop_reason()`: the signal, or the death of the launcher, that stops this process.

    SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 set a flag and do nothing else. A second SIGINT ends the
    process at once (exit code 76; the last checkpoint stands). Under torchrun a process is orphaned
    when its launcher dies: torchrun dies of signals that it does not handle, and its workers live
    on. SIGHUP is ignored, except in workers of a torchrun that has lost its terminal, since it
    kills them half a minute later. Output whose reader has gone, or does not read, is lost and
    blocks nothing.

    `stop_reason` may be called from any thread, at any time. It knows of a signal as soon as it has
    arrived, even while the main thread waits in a collective and runs no Python: the interpreter's
    C handler sends the number through a socket to a thread that waits for it. Outside the main
    thread no handler can be set; there `stop_reason` only reports orphans.

    Yields:
        `stop_reason() -> str | None`, "SIGTERM" for example; its first answer stays.

    Effects:
        Sets signal handlers, and restores the old ones, faulthandler's among them; starts a thread
        and ends it.

    Examples:
        >>> with trap_signals() as stop_reason:
        ...     before = stop_reason()
        ...     signal.raise_signal(signal.SIGTERM)
        ...     before, stop_reason()
        (None, 'SIGTERM')
    """
    reasons: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_tolerate_lost_readers())
        in_main = threading.current_thread() is threading.main_thread()
        first_signal = stack.enter_context(_record_signals()) if in_main else lambda: None
        parent = os.getppid()
        orphaned = f"torchrun (process {parent} on {socket.gethostname()}) has died: orphaned"
        # Other parents, such as shells, may end.
        has_launcher = "TORCHELASTIC_RUN_ID" in os.environ

        def stop_reason() -> str | None:
            reason = first_signal()
            if not reason and has_launcher and os.getppid() != parent:
                reason = orphaned
            if reason and not reasons:
                reasons.append(reason)
            return reasons[0] if reasons else None

        yield stop_reason


@contextlib.contextmanager
def _record_signals() -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the name of the first stop signal that has arrived."""
    process = os.getpid()
    # Formatted now: a signal handler should do as little as it can.
    words = format_last_words(
        PreemptedError.code, "left at once, at a second SIGINT; the last checkpoint stands"
    )
    has_hung_up = _make_hangup_check()
    # Each signal arrives twice, in the handler and through the socket; they are counted separately.
    handled: list[str] = []
    received: list[str] = []
    leaving = threading.Lock()

    def add(number: int, names: list[str]) -> None:
        name = signal.Signals(number).name
        # The lock lets only one of the two print.
        if name == "SIGINT" and name in names and leaving.acquire(blocking=False):
            with contextlib.suppress(OSError):
                os.write(2, words)
            # Not sys.exit: cleaning up could wait for peers.
            os._exit(PreemptedError.code)
        if name not in names:
            names.append(name)

    def handle(number: int, _: object) -> None:
        if os.getpid() == process:
            add(number, handled)
        elif number != signal.SIGINT:  # in a forked child, as without a trap; Ctrl-C is for us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    handlers: dict[int, Any] = dict.fromkeys((*STOP_SIGNALS, signal.SIGHUP), handle)

    def receive(number: int) -> None:
        if number in handlers:
            add(number, received)

    def first_signal() -> str | None:
        names = (*received, *handled)
        return next((name for name in names if name != "SIGHUP" or has_hung_up()), None)

    with _wakeup(receive), _set_handlers({**handlers, signal.SIGPIPE: signal.SIG_IGN}):
        yield first_signal


def _make_hangup_check() -> Callable[[], bool]:
    """Return a function that reports whether torchrun, our parent, has lost its terminal."""
    parent = os.getppid()
    had_terminal = "TORCHELASTIC_RUN_ID" in os.environ and _has_terminal(parent)
    return lambda: had_terminal and not _has_terminal(parent)


_END = b"\0"  # no signal has number 0


def _has_terminal(pid: int) -> bool:
    """Return whether a process has a controlling terminal."""
    status = status_of(pid)
    # tty_nr, the 7th field of proc(5), is 0 without a terminal.
    return bool(status) and status[4] != b"0"


@contextlib.contextmanager
def _wakeup(receive: Callable[[int], None]) -> Iterator[None]:
    """Call `receive(number)` on a thread for each signal that reaches this process."""
    process = os.getpid()
    credentials = struct.Struct("3i")  # of the writing process: its id, user and group
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    # Forked children share the socket; only the kernel (Linux) knows which process wrote.
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
def _set_handlers(table: Mapping[int, Any]) -> Iterator[None]:
    """Set signal handlers, and restore the old ones at the end.

    `signal.signal` returns None for a handler that was set in C, so sigaction itself keeps those.
    """
    libc = ctypes.CDLL(None)
    before: list[tuple[int, Any, Any]] = []
    try:
        for number, handler in table.items():
            action = ctypes.create_string_buffer(1024)  # a struct sigaction takes 152 bytes
            libc.sigaction(number, None, action)
            before.append((number, action, signal.signal(number, handler)))
        yield
    finally:
        # First what Python calls, then the kernel's own record, which may name a handler in C.
        for number, action, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            libc.sigaction(number, action, None)


# ------------------------------------------------------------------------------------ its output


@contextlib.contextmanager
def _tolerate_lost_readers() -> Iterator[None]:
    """Let no output end or block the run: its reader or disk may be gone, or slow.

    Text that does not fit into an unread pipe is lost: the first time after 5 s, later at once.
    """
    # Others take no attributes, so their methods cannot be replaced.
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "__dict__")]
    names = ("write", "flush")
    before = [(s, name, vars(s).get(name)) for s in streams for name in names]
    for stream in streams:
        write = _ignore_errors(stream.write, stream)
        flush = _ignore_errors(stream.flush, stream)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                write = _limit_waiting(write, flush, stream)
        vars(stream).update(write=write, flush=flush)
    try:
        yield
    finally:
        for stream, name, method in before:
            if method is None:
                vars(stream).pop(name, None)
            else:
                setattr(stream, name, method)


def _ignore_errors(method: Callable[..., Any], stream: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except OSError as error:
            if error.errno in {errno.EPIPE, errno.EIO}:  # a pipe or a terminal without a reader
                redirect_to_devnull(stream)
            # As if all had been written; `flush` has no text.
            return len(args[0]) if args else None

    return call


_PATIENCE = 5.0  # seconds for the reader of a full pipe
_CHUNK = 1000  # characters, at most 4,096 bytes: a pipe with any room takes PIPE_BUF at once


def _limit_waiting(
    write: Callable[[str], Any], flush: Callable[[], Any], stream: Any
) -> Callable[[str], int]:
    """Return a `write` to a pipe that drops the text for which the pipe has no room."""
    patience = [_PATIENCE]
    lock = threading.RLock()

    def has_room() -> bool:
        try:
            is_ready = bool(select.select([], [stream], [], patience[0])[1])
        except (OSError, ValueError):  # a descriptor too high for select, or a closed file
            return True
        patience[0] = _PATIENCE if is_ready else 0.0
        return is_ready

    def call(text: str) -> int:
        with lock:
            for start in range(0, len(text), _CHUNK):
                if not has_room():
                    break
                write(text[start : start + _CHUNK])
                flush()
        return len(text)

    return call


# ------------------------------------------------------------------------------------ all ranks


@attrs.frozen
class Vote:
    """What all ranks know after a step, equal on all of them.

    `stop` is why the run has to stop, "SIGTERM on rank 3" for example, or None. `requests` are
    those that rank 0 has found since, plain values. `clock` is the time of rank 0's clock, in
    seconds.
    """

    stop: str | None
    requests: Sequence[Mapping[str, Any]] = ()
    clock: float = 0.0


_REQUEST, _STOP = 1, 2  # votes; the greatest of all ranks counts


@contextlib.contextmanager
def open_step_vote(
    stop_reason: StopReason,
    axis: Axis,
    *,
    take_requests: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[], Vote]]:
    """Yield `vote()`: what all ranks do after this step, though only one of them knows of it.

    A vote and the clock, 16 bytes, are posted at the end of a step and read at the end of the next,
    long after they have arrived, so a step pays only for the posting. A run thus ends at most two
    steps after a signal. Reasons and requests are exchanged once, after a vote for them.

    Args:
        stop_reason: Why this process has to stop, or None: that of `trap_signals`, or one that also
            knows of a time limit.
        axis: The ranks that act together, `ps.world`.
        take_requests: Returns new requests, values of JSON; called on rank 0 once per step.
        clock: Returns seconds; called on rank 0 once per step.

    Yields:
        `vote() -> Vote`; every rank must call it once per step. Once it has returned a reason to
        stop, it returns the same without communication.

    Raises:
        PreemptedError: In place of an error of the disk or a bug, after ranks have agreed to stop:
            the run could not be saved. Errors that a new start would meet again (of the
            configuration, the data, a checkpoint or the numbers) and those of peers stay.

    Effects:
        Communicates on a group of its own: one all-reduce of 16 bytes per call.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> world = solo_parallel().world
        >>> with open_step_vote(lambda: None, world, take_requests=lambda: [{"save": 1}]) as vote:
        ...     vote().requests
        ({'save': 1},)
    """
    agreed: list[str] = []  # the reason, once there is one
    # A vote is no watchdog: rank 0 may have an hour's work of its own.
    timeout = timedelta(hours=1)
    with _report_lost_save(agreed), open_gloo_axis(axis, name="stop", timeout=timeout) as votes:
        if votes.count == 1:

            def vote_alone() -> Vote:
                reason = None if agreed else _format_reasons([stop_reason()])
                agreed.extend([reason] if reason else [])
                found = () if agreed else tuple(take_requests())
                return Vote(agreed[0] if agreed else None, found, clock())

            yield vote_alone
            return
        vote, finish = _make_vote(votes, agreed, stop_reason, take_requests, clock)
        yield vote
        finish()


def _make_vote(
    votes: Axis,
    agreed: list[str],
    stop_reason: StopReason,
    take_requests: Callable[[], Sequence[Mapping[str, Any]]],
    clock: Callable[[], float],
) -> tuple[Callable[[], Vote], Callable[[], object]]:
    """Return `vote()` of several ranks, and a function that waits for the vote that is pending."""
    requests: list[Mapping[str, Any]] = []  # those that the pending vote of this rank is for
    post = _make_poster(votes)

    def post_own() -> Callable[[], tuple[int, float]]:
        if votes.index == 0:
            requests.extend(take_requests())
        own = _STOP if stop_reason() is not None else _REQUEST if requests else 0
        return post(own, clock() if votes.index == 0 else 0.0)

    pending = [post_own()]
    last = Vote(None)

    def vote() -> Vote:
        nonlocal last
        if agreed:
            return attrs.evolve(last, requests=())
        result, now = pending.pop()()
        found: list[Mapping[str, Any]] = []
        if result:
            gathered = all_gather_objects([stop_reason(), requests], votes)
            requests.clear()
            found = [request for _, more in gathered for request in more]
            reason = _format_reasons([x for x, _ in gathered])
            if reason or result == _STOP:
                agreed.append(reason or "one of the ranks")
        if not agreed:
            pending.append(post_own())
        last = Vote(agreed[0] if agreed else None, tuple(found), now)
        return last

    return vote, lambda: [wait_for_result() for wait_for_result in pending]


@contextlib.contextmanager
def open_stop_vote(stop_reason: StopReason, axis: Axis) -> Iterator[StopReason]:
    """Yield `stopping()`: why the run has to stop, equal on all ranks, if any rank has a reason.

    It is the part of `open_step_vote` that a loop without requests needs.

    Args:
        stop_reason: Why this process has to stop, or None: that of `trap_signals`, or one that also
            knows of a time limit.
        axis: The ranks that stop together, `ps.world`.

    Yields:
        `stopping() -> str | None`, "SIGTERM on rank 3" for example; every rank must call it once
        per step.

    Raises:
        PreemptedError: As `open_step_vote`.

    Effects:
        Communicates as `open_step_vote`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> with open_stop_vote(lambda: "SIGTERM", solo_parallel().world) as stopping:
        ...     stopping()
        'SIGTERM on rank 0'
    """
    with open_step_vote(stop_reason, axis) as vote:
        yield lambda: vote().stop


@contextlib.contextmanager
def _report_lost_save(agreed: Sequence[str]) -> Iterator[None]:
    """Raise PreemptedError for an error that follows the agreement to stop: the save is lost."""
    try:
        yield
    except Exception as error:
        if not agreed or get_exit_code(error) in _FINAL_CODES:
            raise
        raise PreemptedError(
            f"open_stop_vote: a stop was requested ({agreed[0]}), but the run could not save: "
            f"{type(error).__name__}: {format_error(error, hint=False)}",
            where=getattr(error, "where", None),
            got=getattr(error, "got", None),
            want=getattr(error, "want", None),
            hint=getattr(error, "hint", None),
        ) from error


def _format_reasons(reasons: Sequence[str | None]) -> str | None:
    """Return the reasons to stop, with their ranks, from those of each rank in rank order."""
    ranks: dict[str, list[str]] = {}
    for rank, reason in enumerate(reasons):
        if reason is not None:
            ranks.setdefault(reason, []).append(str(rank))
    texts = [f"{reason} on rank{'s' * (len(x) > 1)} {', '.join(x)}" for reason, x in ranks.items()]
    return "; ".join(texts) or None


def _make_poster(axis: Axis) -> Callable[[int, float], Callable[[], tuple[int, float]]]:
    """Return a function that posts a vote and a time, and returns one that waits for the result.

    That is the greatest vote and the greatest time. One vote is pending at a time, in one buffer
    for all: half the cost of an `all_reduce` of a new tensor.
    """
    numbers = np.zeros(2, np.float64)  # which has every integer, and microseconds of a century
    buffer = [torch.from_numpy(numbers)]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    assert axis.group is not None
    allreduce = axis.group.allreduce

    def post(vote: int, time_: float) -> Callable[[], tuple[int, float]]:
        numbers[:] = vote, time_
        work = allreduce(buffer, options)

        def wait_for_result() -> tuple[int, float]:
            work.wait()
            return int(numbers[0]), float(numbers[1])

        return wait_for_result

    return post
