"""Where metrics go. A sink is any function `sink(step, values)`; `step` counts finished steps.

Values are plain numbers and strings (what `trainkit.to_host` returns), so a sink never waits for a
device. Sinks that hold a file or the terminal are context managers that yield the function.
"""

from trainkit.run.sinks.console import console, printable
from trainkit.run.sinks.guards import guarded
from trainkit.run.sinks.jsonl import (
    before_and_after,
    events,
    jsonl,
    read_jsonl,
    read_metrics,
    repair_jsonl,
    sync_lines,
)
from trainkit.run.sinks.named import LoggingOptions, named_sinks
from trainkit.run.sinks.run_sinks import run_sinks, run_summary
from trainkit.run.sinks.tee import tee
from trainkit.run.sinks.tensorboard import tensorboard
from trainkit.run.sinks.timing import Goodput, best_save_interval, goodput
from trainkit.run.sinks.wandb import wandb

__all__ = [
    "Goodput",
    "LoggingOptions",
    "before_and_after",
    "best_save_interval",
    "console",
    "events",
    "goodput",
    "guarded",
    "jsonl",
    "named_sinks",
    "printable",
    "read_jsonl",
    "read_metrics",
    "repair_jsonl",
    "run_sinks",
    "run_summary",
    "sync_lines",
    "tee",
    "tensorboard",
    "wandb",
]
