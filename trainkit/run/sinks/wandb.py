"""Weights & Biases: one run on its server, however often the process was started."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.run.sinks.jsonl import is_more
from trainkit.run.sinks.tensorboard import scalars
from trainkit.types import Sink, needs_extra
from trainkit.weights.checkpoint.directory import get_run_id


@contextlib.contextmanager
def open_wandb(
    run_dir: str | Path,
    *,
    step: int = 0,
    project: str = "trainkit",
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Sink]:
    """Yield a sink that logs the numbers of each step to Weights & Biases.

    Its run has the id of `run.json`, so that a run that was requeued goes on as one series. The
    server cannot take a step back: steps that a restart repeats, which are the same bit for bit,
    are not sent again, and after a rollback it shows the abandoned steps; metrics.jsonl does not.

    Args:
        run_dir: The run directory: its `run.json` holds the id, its name is shown.
        step: The step that the run goes on from.
        project: The project of the page.
        config: Shown beside the run: plain values. Nothing of the environment is sent.
        **options: Further arguments of `wandb.init`.

    Raises:
        ConfigError: The library wandb is missing.

    Effects:
        Talks to a server, through a process of the library's own; writes into `run_dir`/wandb.

    Examples:
        >>> from functools import partial
        >>> make = partial(open_wandb, "runs/first", project="mine")
    """
    with needs_extra("sinks"):
        library = importlib.import_module("wandb")
        if not hasattr(library, "init"):  # a folder of old runs passes for an empty package
            raise ImportError(name="wandb")
    run_dir = Path(run_dir)
    run = library.init(
        project=project,
        id=get_run_id(run_dir)["run"],
        name=run_dir.absolute().name,
        dir=str(run_dir),
        resume="allow",
        config=dict(config or {}),
        # Its hold on stdout could make a print wait for the network.
        **{"settings": {"console": "off"}, **options},
    )
    # What the server has: up to `step`, or further on if steps beyond it were sent before.
    sent = max(step, (getattr(run, "step", 0) or 0) - 1)
    told: dict[str, float] = {}  # of the step that was sent last, by this process
    failed = 1
    try:

        def write(step: int, values: Mapping[str, Any]) -> None:
            nonlocal sent, told
            numbers = scalars(values)
            more = step == sent and is_more(told, numbers)
            if step > sent or more:
                run.log(numbers, step=step)
                sent, told = step, {**told, **numbers} if more else numbers

        yield write
        failed = 0
    finally:
        run.finish(exit_code=failed)
