"""MLflow: one run on its server, however often the process was started."""

from __future__ import annotations

import contextlib
import importlib
import re
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainkit.files import flatten_table
from trainkit.run.sinks.rising import send_once
from trainkit.types import ConfigError, Sink, needs_extra
from trainkit.weights.checkpoint.run_id import get_run_id

_SECONDS = 1.0  # between two requests
_MOST_METRICS = 1000  # of a request; MLflow's client sends more in several
_MOST_CHARACTERS = 6000  # of a parameter, as MLflow's servers take it


@contextlib.contextmanager
def open_mlflow(
    run_dir: str | Path,
    *,
    step: int = 0,
    project: str = "trainkit",
    config: Mapping[str, Any] | None = None,
) -> Iterator[Sink]:
    """Yield a sink that logs the numbers of each step to MLflow, once a second at most.

    The tag `trainkit.run` of its run is the id of `run.json`, so a run that was requeued stays one.
    Steps that the server has are not sent again: after a roll-back it shows the discarded ones;
    metrics.jsonl does not. The metric `step` says which is the newest. Where a name has characters
    that MLflow refuses, as "acc,none", they become "_".

    Args:
        run_dir: The run directory: its `run.json` holds the id, its name is the run's name.
        step: The step that the run resumes from.
        project: The experiment, made where there is none of that name.
        config: The parameters of the run: plain values, or dicts of them. A parameter that the
            server has keeps its first value. Nothing of the environment is sent.

    Raises:
        ConfigError: The library mlflow is missing, or MLFLOW_TRACKING_URI, where only its client
            is installed.

    Effects:
        Talks to the server of MLFLOW_TRACKING_URI, with the credentials that MLflow finds. Without
        that variable, a whole `mlflow` writes into the working directory. The library reports its
        use to its authors unless MLFLOW_DISABLE_TELEMETRY is true.

    Examples:
        >>> from functools import partial
        >>> make = partial(open_mlflow, "runs/first", project="mine")
    """
    with needs_extra("mlflow"):
        library = importlib.import_module("mlflow")
    if library.get_tracking_uri().startswith("sqlite:") and not find_spec("sqlalchemy"):
        raise ConfigError(
            "open_mlflow: the client of MLflow alone writes no database: set MLFLOW_TRACKING_URI "
            "to a server, or pip install mlflow",
            where="--sinks mlflow",
        )
    client = library.MlflowClient()
    run = _find_run(library, client, Path(run_dir), project)
    run_id = run.info.run_id
    facts = {_fit_name(name): str(value) for name, value in flatten_table(config or {})}
    new = [(name, facts[name][:_MOST_CHARACTERS]) for name in facts if name not in run.data.params]
    client.log_batch(run_id, params=[library.entities.Param(*pair) for pair in new])
    client.update_run(run_id, status="RUNNING")
    waiting: list[Any] = []
    sent = time.monotonic()

    def flush() -> None:
        nonlocal sent
        metrics = waiting.copy()
        waiting.clear()  # before: what the server refuses is not sent again
        client.log_batch(run_id, metrics=metrics)
        sent = time.monotonic()

    def send(step: int, numbers: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            library.entities.Metric(_fit_name(name), value, now, step)
            for name, value in {**numbers, "step": step}.items()
        ]
        # A step is in one request: of a run that is killed the server has all of it, or nothing.
        if len(waiting) + len(metrics) > _MOST_METRICS:
            flush()
        waiting.extend(metrics)
        if time.monotonic() - sent >= _SECONDS:
            flush()

    status = "FAILED"
    try:
        yield send_once(send, max(step, int(run.data.metrics.get("step", 0))))
        status = "FINISHED"
    finally:
        try:
            flush()
        finally:
            client.set_terminated(run_id, status)


def _find_run(library: Any, client: Any, run_dir: Path, project: str) -> Any:
    experiment = client.get_experiment_by_name(project)
    if experiment is None:
        with contextlib.suppress(library.MlflowException):  # another run has created it meanwhile
            client.create_experiment(project)
        experiment = client.get_experiment_by_name(project)
    identity = get_run_id(run_dir)["run"]
    home = experiment.experiment_id
    found = client.search_runs([home], f"tags.`trainkit.run` = '{identity}'", max_results=1)
    name = run_dir.absolute().name
    return found[0] if found else client.create_run(home, None, {"trainkit.run": identity}, name)


def _fit_name(name: str) -> str:
    return re.sub(r"[^/\w.\- :]", "_", name)
