"""Ray: a gauge of its own metrics, on its dashboard and for Prometheus."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.run.sinks.tensorboard import scalars
from trainkit.types import ConfigError, Sink, needs_extra


@contextlib.contextmanager
def open_ray(run_dir: str | Path, *, step: int = 0) -> Iterator[Sink]:
    """Yield a sink that sets a gauge of Ray to each number of a step, in a worker of Ray.

    The gauge is `trainkit`, which Prometheus reads as `ray_trainkit`; its tag `run` is the name of
    the run directory, and `name` that of the number, as "train/loss". Ray keeps the newest value.
    `ray.train.report` would make all workers wait for each other in each step.

    Args:
        run_dir: The run directory, for its name.
        step: The step that the run resumes from.

    Raises:
        ConfigError: The library ray is missing, or this process belongs to no cluster of Ray.

    Effects:
        Sets a gauge in Ray's registry of this process.

    Examples:
        >>> from functools import partial
        >>> make = partial(open_ray, "runs/first")
    """
    with needs_extra("ray"):
        library = importlib.import_module("ray")
        gauge_type = importlib.import_module("ray.util.metrics").Gauge
    if not library.is_initialized():
        raise ConfigError(
            "open_ray: this process belongs to no cluster of Ray",
            where="--sinks ray",
            hint='start the recipe as the page "Launch" does under Ray, or leave the sink out',
        )
    gauge = gauge_type(
        "trainkit", description="numbers of a training run", tag_keys=("run", "name")
    )
    run = Path(run_dir).absolute().name

    def write(step: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars({**values, "step": step}).items():
            gauge.set(value, tags={"run": run, "name": name})

    write(step, {})
    yield write
