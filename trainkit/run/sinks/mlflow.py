"""MLflow: one run on its server, however often the process was started."""

from __future__ import annotations

import contextlib
import importlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.files import flatten_table
from trainkit.run.sinks.rising import group_requests, send_once
from trainkit.types import ConfigError, Sink, needs_extra
from trainkit.weights.checkpoint.run_id import get_run_id


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
        ConfigError: The library mlflow is missing, or MLFLOW_TRACKING_URI.

    Effects:
        Talks to the server of MLFLOW_TRACKING_URI, with the credentials that MLflow finds. The
        library reports its use to its authors unless MLFLOW_DISABLE_TELEMETRY is true.

    Examples:
        >>> from functools import partial
        >>> make = partial(open_mlflow, "runs/first", project="mine")
    """
    with needs_extra("mlflow"):
        library = importlib.import_module("mlflow")
    # MLflow's default is a database in the working directory, which a requeued run may not find.
    if not library.is_tracking_uri_set():
        raise ConfigError(
            "open_mlflow: set MLFLOW_TRACKING_URI to a server, as http://127.0.0.1:5000, or to a "
            "database, as sqlite:////runs/mlflow.db, which needs pip install mlflow",
            where="--sinks mlflow",
        )
    client = library.MlflowClient()
    # This comes first: a server that is not there is waited for once, for minutes, and not twice.
    if client.get_experiment_by_name(project) is None:
        with contextlib.suppress(library.MlflowException):  # another run has created it meanwhile
            client.create_experiment(project)
    home = client.get_experiment_by_name(project).experiment_id
    tags = {"trainkit.run": get_run_id(run_dir)["run"]}
    found = client.search_runs([home], f"tags.`trainkit.run` = '{tags['trainkit.run']}'")
    name = Path(run_dir).absolute().name
    run = found[0] if found else client.create_run(home, tags=tags, run_name=name)
    run_id = run.info.run_id
    client.update_run(run_id, status="RUNNING")
    params = {_fit_name(name): value for name, value in flatten_table(config or {})}
    library.log_params(params | run.data.params, run_id=run_id)
    status = "FAILED"
    try:
        # A step is in one request: of a run that is killed the server has all of it, or nothing.
        with group_requests(lambda rows: client.log_batch(run_id, rows), most=1000) as add:

            def send(step: int, numbers: Mapping[str, float]) -> None:
                make, now = library.entities.Metric, int(time.time() * 1000)
                values = {**numbers, "step": step}
                add([make(_fit_name(name), values[name], now, step) for name in values])

            yield send_once(send, max(step, int(run.data.metrics.get("step", 0))))
            status = "FINISHED"
    finally:
        client.set_terminated(run_id, status)


def _fit_name(name: str) -> str:
    return re.sub(r"[^/\w.\- :]", "_", name)
