"""Weights & Biases: one run on its server, however often the process was started."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.run.sinks.rising import send_once
from trainkit.types import Sink, needs_extra
from trainkit.weights.checkpoint.run_id import get_run_id


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

    Its run has the id of `run.json`, so a run that was requeued stays one series. The server
    cannot take a step back: steps that a restart repeats, which are the same bit for bit, are not
    sent again, and after a roll-back it shows the discarded steps; metrics.jsonl does not.

    Args:
        run_dir: The run directory: its `run.json` holds the id, its name is the run's name.
        step: The step that the run resumes from.
        project: The project on the server.
        config: Shown with the run: plain values. Nothing of the environment is sent.
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
        if not hasattr(library, "init"):  # a folder "wandb" of old runs imports as empty package
            raise ImportError(name="wandb")
    run_dir = Path(run_dir)
    run = library.init(
        project=project,
        id=get_run_id(run_dir)["run"],
        name=run_dir.absolute().name,
        dir=str(run_dir),
        resume="allow",
        config=dict(config or {}),
        # Capturing stdout could make a print wait for the network.
        **{"settings": {"console": "off"}, **options},
    )
    # The server has steps up to `step`, or further if an earlier process sent steps beyond it.
    last_sent = max(step, (getattr(run, "step", 0) or 0) - 1)
    failed = 1
    try:
        yield send_once(lambda step, numbers: run.log(numbers, step=step), last_sent)
        failed = 0
    finally:
        run.finish(exit_code=failed)
