# The table of contents, which __init__.py loads lazily.
from .load import load_over_steps as load_over_steps
from .load import plot_load as plot_load
from .loss import plot_loss as plot_loss
from .mesh import RankPlace as RankPlace
from .mesh import mesh_places as mesh_places
from .mesh import plot_mesh as plot_mesh
from .packing import plot_packing as plot_packing
from .pipeline import PipelineTask as PipelineTask
from .pipeline import bubble_share as bubble_share
from .pipeline import pipeline_timeline as pipeline_timeline
from .pipeline import plot_pipeline as plot_pipeline
from .zigzag import RingBlock as RingBlock
from .zigzag import ZigzagChunk as ZigzagChunk
from .zigzag import plot_zigzag as plot_zigzag
from .zigzag import ring_blocks as ring_blocks
from .zigzag import zigzag_chunks as zigzag_chunks
