"""Trackio: one run in a database on this machine, or on a Space of Hugging Face."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.run.sinks.rising import send_once
from trainkit.types import Sink, needs_extra
from trainkit.weights.checkpoint.run_id import get_run_id


@contextmanager
def open_trackio(
    run_dir: str | Path,
    *,
    step: int = 0,
    project: str = "trainkit",
    config: Mapping[str, Any] | None = None,
) -> Iterator[Sink]:
    """Yield a sink that logs the numbers of each step to Trackio.

    Trackio knows a run by its name: here that of the run directory with the first eight digits of
    the id in `run.json`, so a run that was requeued stays one, and two directories of one name are
    two. Steps that it has are not sent again: after a roll-back it shows the discarded ones;
    metrics.jsonl does not.

    Args:
        run_dir: The run directory.
        step: The step that the run resumes from.
        project: The project, made where there is none of that name.
        config: Shown with the run: plain values. Nothing of the environment is sent.

    Raises:
        ConfigError: The library trackio is missing.

    Effects:
        Writes into TRACKIO_DIR, by default ~/.cache/huggingface/trackio, through a thread of the
        library's own; to a server instead where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names one.
        Prints where the pages are.

    Examples:
        >>> from functools import partial
        >>> make = partial(open_trackio, "runs/first", project="mine")
    """
    with needs_extra("trackio"):
        library = importlib.import_module("trackio")
    run_dir = Path(run_dir)
    run = library.init(
        project=project,
        name=f"{run_dir.absolute().name}-{get_run_id(run_dir)['run'][:8]}",
        config=dict(config or {}),
        resume="allow",
        embed=False,
        # The values of a step hold what a run measures of its device.
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    try:
        # The step after its newest has no public name. Without it, what is repeated is sent twice.
        last_sent = max(step, getattr(run, "_next_step", 0) - 1)
        yield send_once(lambda step, numbers: run.log(numbers, step=step), last_sent)
    finally:
        run.finish()
