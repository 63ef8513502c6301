"""Servers that cannot take a step back: each step is sent once, in rising order, in one request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainkit.run.sinks.jsonl import is_more
from trainkit.run.sinks.tensorboard import scalars
from trainkit.types import Sink


def send_once(send: Sink, last_sent: int) -> Sink:
    """Return a sink that sends the numbers of each step once, in rising order.

    Steps that a restart repeats, which are the same bit for bit, are not sent again, nor are those
    that repeat others after a roll-back. What an evaluation adds to the newest step is.

    Args:
        send: Called with a step and its numbers.
        last_sent: The newest step that the server has.

    Examples:
        >>> sink = send_once(print, last_sent=3)
        >>> for step in (3, 4, 5, 4, 5):
        ...     sink(step, {"loss": 2.0, "batch_hash": "00ff"})
        4 {'loss': 2.0}
        5 {'loss': 2.0}
        >>> sink(5, {"eval/loss": 2.5})
        5 {'eval/loss': 2.5}
    """
    last_values: dict[str, float] = {}  # of the step that this process sent last

    def write(step: int, values: Mapping[str, Any]) -> None:
        nonlocal last_sent, last_values
        numbers = scalars(values)
        adds = step == last_sent and is_more(last_values, numbers)
        if step > last_sent or adds:
            send(step, numbers)
            last_values = {**last_values, **numbers} if adds else numbers
            last_sent = step

    return write


@contextlib.contextmanager
def group_requests(
    send: Callable[[list[Any]], Any], *, most: int, seconds: float = 1.0
) -> Iterator[Callable[[list[Any]], None]]:
    """Yield a function that takes rows, and sends those of some time in one request.

    Rows that are given together stay together: of a process that is killed the server has all of
    them, or nothing. What waits at the end of the block is sent then.

    Args:
        send: Called with the rows of a request. What it refuses is not sent again.
        most: How many rows a request may have, unless one call gives more.
        seconds: The time between two requests, except those that are full.

    Examples:
        >>> with group_requests(print, most=3) as add:
        ...     for row in "abc":
        ...         add([row, row.upper()])
        ['a', 'A']
        ['b', 'B']
        ['c', 'C']
    """
    waiting: list[Any] = []
    sent = time.monotonic()

    def flush() -> None:
        nonlocal sent
        rows = waiting.copy()
        waiting.clear()  # before: what the server refuses is not sent again
        send(rows)
        sent = time.monotonic()

    def add(rows: list[Any]) -> None:
        if len(waiting) + len(rows) > most:
            flush()
        waiting.extend(rows)
        if time.monotonic() - sent >= seconds:
            flush()

    try:
        yield add
    finally:
        flush()
