"""Servers that cannot take a step back: each step is sent once, in rising order."""

from __future__ import annotations

from collections.abc import Mapping
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
