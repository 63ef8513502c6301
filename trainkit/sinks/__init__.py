"""Where metrics go. A sink is any function `sink(step, values)`; `step` counts finished steps.

Values are plain numbers and strings (what `trainkit.to_host` returns), so a sink never waits for a
device. Sinks that hold a file or the terminal are context managers that yield the function.
Pictures of a run, of a packing and of a layout are here too; their names begin with plot_.
"""

from __future__ import annotations

from trainkit.sinks.console import console, printable
from trainkit.sinks.jsonl import events, jsonl, read_jsonl, repair_jsonl
from trainkit.sinks.mesh import RankPlace, mesh_places, plot_mesh
from trainkit.sinks.packing import plot_packing
from trainkit.sinks.pipeline import (
    PipelineTask,
    bubble_share,
    pipeline_timeline,
    plot_pipeline,
)
from trainkit.sinks.plot import plot_loss
from trainkit.sinks.run import run_sinks
from trainkit.sinks.tee import on_first_rank, tee
from trainkit.sinks.zigzag import (
    RingBlock,
    ZigzagChunk,
    plot_zigzag,
    ring_blocks,
    zigzag_chunks,
)

__all__ = [
    "PipelineTask",
    "RankPlace",
    "RingBlock",
    "ZigzagChunk",
    "bubble_share",
    "console",
    "events",
    "jsonl",
    "mesh_places",
    "on_first_rank",
    "pipeline_timeline",
    "plot_loss",
    "plot_mesh",
    "plot_packing",
    "plot_pipeline",
    "plot_zigzag",
    "printable",
    "read_jsonl",
    "repair_jsonl",
    "ring_blocks",
    "run_sinks",
    "tee",
    "zigzag_chunks",
]
