"""Where metrics go. A sink is any function `sink(step, values)`; `step` counts finished steps.

Values are plain numbers and strings (what `trainkit.to_host` returns), so a sink never waits for a
device. Sinks that hold a file or the terminal are context managers that yield the function.
"""

from __future__ import annotations

from trainkit.sinks.console import console, printable
from trainkit.sinks.jsonl import events, jsonl, read_jsonl, repair_jsonl
from trainkit.sinks.packing import plot_packing
from trainkit.sinks.plot import plot_loss
from trainkit.sinks.run import run_sinks
from trainkit.sinks.tee import on_first_rank, tee

__all__ = [
    "console",
    "events",
    "jsonl",
    "on_first_rank",
    "plot_loss",
    "plot_packing",
    "printable",
    "read_jsonl",
    "repair_jsonl",
    "run_sinks",
    "tee",
]
