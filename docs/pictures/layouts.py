"""Draw the pictures of meshes, a ring's zigzag shards and delta layers, and pipeline schedules.

python docs/pictures/layouts.py
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

from pathlib import Path

from trainkit import pictures
from trainkit.types import Layout

FOLDER = Path(__file__).parent


def main() -> None:
    """Draw the pictures."""
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    pictures.plot_mesh(layout, FOLDER / "mesh.svg")
    pictures.plot_mesh(Layout(dp_shard=8, ep=4), FOLDER / "experts-mesh.svg")
    pictures.plot_zigzag([64, 32], 4, FOLDER / "zigzag.svg")
    pictures.plot_delta_scan(4, FOLDER / "delta-scan.svg")
    schedules = ["1f1b", "interleaved_1f1b", "zero_bubble_v"]
    pictures.plot_pipeline(schedules, FOLDER / "pipeline.svg", pp=4, microbatches=8)


if __name__ == "__main__":
    main()
