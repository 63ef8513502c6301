"""TensorBoard: scalars in event files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.run.sinks.jsonl import is_more
from trainkit.types import Sink, needs_extra


@contextlib.contextmanager
def open_tensorboard(path: str | Path, *, step: int = 0) -> Iterator[Sink]:
    """Yield a sink that writes the numbers of each step as scalars for TensorBoard.

    After a restart or a roll-back TensorBoard shows one series: earlier values of the steps that
    are repeated are hidden.

    Args:
        path: The directory of the event files, created if it does not exist.
        step: The step that the run resumes from.

    Raises:
        ConfigError: The library tensorboard is missing.

    Effects:
        Writes event files into `path`, through a thread of the library's own.

    Examples:
        >>> from functools import partial
        >>> make = partial(open_tensorboard, "runs/first/tensorboard")
    """
    with needs_extra("sinks"):
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- an extra, and slow
    path = str(path)
    last_step = step
    last_values: dict[str, float] = {}
    with contextlib.ExitStack() as stack:

        def open_writer(step: int) -> Any:
            stack.close()
            return stack.enter_context(contextlib.closing(SummaryWriter(path, purge_step=step)))

        writer = open_writer(step + 1)

        def write(step: int, values: Mapping[str, Any]) -> None:
            nonlocal writer, last_step, last_values
            numbers = scalars(values)
            # An evaluation adds names to its step; anything else up to the last step repeats it.
            adds = step == last_step and is_more(last_values, numbers)
            if step <= last_step and not adds:
                writer = open_writer(step)  # hides what was written from this step on
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            last_values = {**last_values, **numbers} if adds else numbers
            last_step = step

        yield write


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers within the range of a float.

    Examples:
        >>> scalars({"loss": 2.5, "tokens": 7, "batch_hash": "00ff", "note": None, "n": 10**400})
        {'loss': 2.5, 'tokens': 7}
    """
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1023)
    }
