"""Run sinks that may fail or hang on threads of their own, so that training never waits."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy
from queue import SimpleQueue
from typing import Any

import attrs

from trainkit.types import Log, Sink

Make = Callable[[], AbstractContextManager[Sink]]


@attrs.frozen
class _IsolatedSink:
    """A sink's thread, the lines queued for it, and its problems.

    The last item of `lines` is a boolean: whether the block of the run has failed.
    """

    name: str
    thread: threading.Thread
    lines: SimpleQueue[Any]
    problems: SimpleQueue[str]


class _RunFailed(Exception):  # noqa: N818 -- never leaves the sink's thread
    """Raised in a sink's own block where the run has failed, so that the sink closes as failed."""


@contextlib.contextmanager
def isolate_sinks(
    makers: Mapping[str, Make],
    *,
    log: Log,
    room: int = 10_000,
    lag: float = 60.0,
    patience: float = 5.0,
) -> Iterator[Sink]:
    """Yield one sink for several that may fail or hang: it never raises, and never waits.

    Each sink is opened, called and closed on a daemon thread of its own. One that raises is off
    from then on; one that hangs misses the lines that do not fit into its queue. The first problem
    of each is logged. At the end all are closed at the same time; the threads that have not ended
    within `patience` are abandoned.

    Args:
        makers: By name, functions that return a context manager of a sink.
        log: Called with the problems, on the thread that uses the sink.
        room: How many lines may wait for a sink.
        lag: Seconds that lines may wait for a sink before a message says so.
        patience: Seconds that closing may take, for all of them together.

    Effects:
        Starts a thread per sink; each line costs the caller a copy of a dict and a queue's lock.

    Examples:
        >>> def broken():
        ...     raise OSError("no network")
        >>> with isolate_sinks({"page": broken}, log=print) as sink:
        ...     sink(1, {"loss": 2.0})
        the sink 'page' is off: OSError: no network
    """
    sinks = [_start(name, make) for name, make in makers.items()]
    reported: set[str] = set()

    def report(sink: _IsolatedSink, problem: str | None = None) -> None:
        if problem is None and not sink.problems.empty():
            problem = sink.problems.get()
        if problem is not None and sink.name not in reported:
            reported.add(sink.name)
            log(f"the sink {sink.name!r} {problem}")

    caught_up = {sink.name: time.monotonic() for sink in sinks}

    def write(step: int, values: Mapping[str, Any]) -> None:
        # A copy, since the caller may change its dict before the sink's thread reads it.
        line = (step, copy(values))
        now = time.monotonic()
        for sink in sinks:
            report(sink)
            if not (waiting := sink.lines.qsize()):
                caught_up[sink.name] = now
            if waiting >= room or now - caught_up[sink.name] > lag:
                report(sink, f"is {waiting} lines behind; it misses what is more than {room}")
            if waiting < room and sink.thread.is_alive():
                sink.lines.put(line)

    try:
        yield write
    except BaseException:
        _close(sinks, report, patience, failed=True)
        raise
    _close(sinks, report, patience, failed=False)


def _start(name: str, make: Make) -> _IsolatedSink:
    lines: SimpleQueue[Any] = SimpleQueue()
    problems: SimpleQueue[str] = SimpleQueue()

    def run() -> None:
        try:
            with contextlib.suppress(_RunFailed), make() as sink:
                # Until the boolean that `_close` sends.
                while isinstance(line := lines.get(), tuple):
                    sink(*line)
                if line:
                    raise _RunFailed  # noqa: TRY301 -- the sink's own block has to see it
        except BaseException as error:  # noqa: BLE001 -- a sink may even call sys.exit
            text = " ".join(str(error).split())
            problems.put(f"is off: {redacted(f'{type(error).__name__}: {text}', os.environ)}")

    # A daemon, because a sink that hangs must not keep the process from ending.
    thread = threading.Thread(target=run, name=f"sink {name}", daemon=True)
    thread.start()
    return _IsolatedSink(name, thread, lines, problems)


def _close(
    sinks: Iterable[_IsolatedSink], report: Callable[..., None], patience: float, *, failed: bool
) -> None:
    """Close all sinks at the same time, and abandon those that have not ended in time."""
    deadline = time.monotonic() + patience
    # To all before any is waited for: they share the patience.
    for sink in sinks:
        sink.lines.put(failed)
    for sink in sinks:
        sink.thread.join(max(0.0, deadline - time.monotonic()))
        if sink.thread.is_alive():
            report(sink, f"has not ended within {patience:g} s: its last lines may be missing")
        report(sink)


def redacted(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without the values of environment variables that are named like secrets.

    Examples:
        >>> redacted("401 for hunter2hunter2", {"WANDB_API_KEY": "hunter2hunter2"})
        '401 for <WANDB_API_KEY>'
    """
    for name, value in environ.items():
        # Shorter values occur in ordinary words.
        if len(value) >= 8 and re.search(r"KEY|TOKEN|SECRET|PASSW", name.upper()):
            text = text.replace(value, f"<{name}>")
    return text
