"""Several sinks as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.types import Sink


def tee(*sinks: Sink) -> Sink:
    """Return a sink that passes everything on to `sinks`, in this order.

    Examples:
        >>> seen = []
        >>> sink = tee(lambda step, values: seen.append(step), lambda step, values: print(values))
        >>> sink(1, {"loss": 2.0})
        {'loss': 2.0}
        >>> seen
        [1]
    """

    def write(step: int, values: Mapping[str, Any]) -> None:
        for sink in sinks:
            sink(step, values)

    return write
