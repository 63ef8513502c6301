"""Pictures of a run, of a packing and of a layout, each with the numbers that it shows.

A `plot_` function writes one file; its data come from a pure function in the same module, for tests
and tables. Matplotlib is needed (the extra `recipes`), torch is not.
"""

from trainkit.tools.pictures.mesh import RankPlace, mesh_places, plot_mesh
from trainkit.tools.pictures.packing import plot_packing
from trainkit.tools.pictures.pipeline import (
    PipelineTask,
    bubble_fraction,
    plot_pipeline,
    simulate_pipeline,
)
from trainkit.tools.pictures.zigzag import (
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
    "bubble_fraction",
    "mesh_places",
    "plot_mesh",
    "plot_packing",
    "plot_pipeline",
    "plot_zigzag",
    "ring_blocks",
    "simulate_pipeline",
    "zigzag_chunks",
]
