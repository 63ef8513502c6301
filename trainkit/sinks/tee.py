"""Several sinks as one, and sinks that only one rank opens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

from trainkit.types import Share, Sink

P = ParamSpec("P")
Writer = TypeVar("Writer", bound=Callable[..., None])


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


@contextlib.contextmanager
def on_first_rank(
    share: Share,
    make: Callable[P, AbstractContextManager[Writer]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Iterator[Writer]:
    """Open `make(*args, **kwargs)` where `share.index` is 0; elsewhere give what does nothing.

    So that a recipe has the same lines on every rank, and one rank has the files.

    Args:
        share: Which rank of how many; in a recipe `ps.world.share`.
        make: `console`, `jsonl`, `events`, or any context manager that yields a function.
        *args: Passed to `make`.
        **kwargs: Passed to `make`.

    Examples:
        >>> with on_first_rank(Share(1, 2), open, "never made", "w") as sink:
        ...     sink(1, {"loss": 2.0})
    """
    if share.index == 0:
        with make(*args, **kwargs) as writer:
            yield writer
    else:
        yield cast("Writer", _ignore)


def _ignore(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
