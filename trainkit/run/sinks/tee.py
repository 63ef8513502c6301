"""One sink for several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.types import Sink


def tee(*sinks: Sink) -> Sink:
    """Return a sink that calls each of `sinks`, in this order.

    Examples:
        >>> steps = []
        >>> sink = tee(lambda step, values: steps.append(step), lambda step, values: print(values))
        >>> sink(1, {"loss": 2.0})
        {'loss': 2.0}
        >>> steps
        [1]
    """

    def write(step: int, values: Mapping[str, Any]) -> None:
        # A sink that raises stops those after it; one from `isolate_sinks` never does.
        for sink in sinks:
            sink(step, values)

    return write
