"""Where metrics go. A sink is any function `sink(step, values)`; `step` counts finished steps.

Values are plain numbers and strings (what `trainkit.to_host` returns), so a sink never waits for a
device. Sinks that hold a file or the terminal are context managers that yield the function.
"""

from trainkit.run.sinks.console import escape_control_characters, open_console
from trainkit.run.sinks.jsonl import (
    compare_evaluations,
    open_events,
    open_jsonl,
    read_jsonl,
    read_metrics,
)
from trainkit.run.sinks.mlflow import open_mlflow
from trainkit.run.sinks.named import LoggingOptions
from trainkit.run.sinks.open_run_sinks import open_run_sinks, summarize_run
from trainkit.run.sinks.ray import open_ray
from trainkit.run.sinks.tee import tee
from trainkit.run.sinks.tensorboard import open_tensorboard
from trainkit.run.sinks.timing import measure_goodput, suggest_save_interval
from trainkit.run.sinks.trackio import open_trackio
from trainkit.run.sinks.wandb import open_wandb

__all__ = [
    "LoggingOptions",
    "compare_evaluations",
    "escape_control_characters",
    "measure_goodput",
    "open_console",
    "open_events",
    "open_jsonl",
    "open_mlflow",
    "open_ray",
    "open_run_sinks",
    "open_tensorboard",
    "open_trackio",
    "open_wandb",
    "read_jsonl",
    "read_metrics",
    "suggest_save_interval",
    "summarize_run",
    "tee",
]
