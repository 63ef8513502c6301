"""Where metrics go. A sink is any function `sink(step, values)`; `step` counts finished steps.

Values are plain numbers and strings (what `trainkit.to_host` returns), so a sink never waits for a
device. Sinks that hold a file or the terminal are context managers that yield the function.
Pictures of a run, of a packing and of a layout are here too; their names begin with plot_.
"""

from __future__ import annotations

from trainkit.sinks.console import console, printable
from trainkit.sinks.goodput import Goodput, best_save_interval, expected_goodput, goodput
from trainkit.sinks.guarded import guarded
from trainkit.sinks.jsonl import events, jsonl, read_jsonl, read_metrics, repair_jsonl, sync_lines
from trainkit.sinks.mesh import RankPlace, mesh_places, plot_mesh
from trainkit.sinks.named import named_sinks
from trainkit.sinks.packing import plot_packing
from trainkit.sinks.pipeline import (
    PipelineTask,
    bubble_share,
    pipeline_timeline,
    plot_pipeline,
)
from trainkit.sinks.plot import plot_loss
from trainkit.sinks.run import printer, run_sinks, run_summary
from trainkit.sinks.tee import on_first_rank, tee
from trainkit.sinks.tensorboard import tensorboard
from trainkit.sinks.wandb import wandb
from trainkit.sinks.zigzag import (
    RingBlock,
    ZigzagChunk,
    plot_zigzag,
    ring_blocks,
    zigzag_chunks,
)

__all__ = [
    "Goodput",
    "PipelineTask",
    "RankPlace",
    "RingBlock",
    "ZigzagChunk",
    "best_save_interval",
    "bubble_share",
    "console",
    "events",
    "expected_goodput",
    "goodput",
    "guarded",
    "jsonl",
    "mesh_places",
    "named_sinks",
    "on_first_rank",
    "pipeline_timeline",
    "plot_loss",
    "plot_mesh",
    "plot_packing",
    "plot_pipeline",
    "plot_zigzag",
    "printable",
    "printer",
    "read_jsonl",
    "read_metrics",
    "repair_jsonl",
    "ring_blocks",
    "run_sinks",
    "run_summary",
    "sync_lines",
    "tee",
    "tensorboard",
    "wandb",
    "zigzag_chunks",
]
