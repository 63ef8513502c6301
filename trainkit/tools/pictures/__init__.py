"""Pictures of a packing and of a layout, with the figures that they show.

A `plot_` function writes one file. Its data come from a pure function in the same module, for tests
and tables. Pictures need matplotlib (the extra `recipes`), not torch.
"""

from trainkit.tools.pictures.delta_scan import plot_delta_scan
from trainkit.tools.pictures.mesh import mesh_places, plot_mesh
from trainkit.tools.pictures.packing import plot_packing
from trainkit.tools.pictures.pipeline import bubble_fraction, plot_pipeline, simulate_pipeline
from trainkit.tools.pictures.zigzag import plot_zigzag

__all__ = [
    "bubble_fraction",
    "mesh_places",
    "plot_delta_scan",
    "plot_mesh",
    "plot_packing",
    "plot_pipeline",
    "plot_zigzag",
    "simulate_pipeline",
]
