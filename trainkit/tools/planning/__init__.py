"""Estimates of a layout before it is run: memory of each rank, communication and step time.

`rank_layouts` ranks the layouts of a world; the other functions are its parts. All figures follow
from shapes.
"""

from trainkit.tools.planning.jobs import Job, list_layouts
from trainkit.tools.planning.machines import get_hardware
from trainkit.tools.planning.memory import estimate_memory
from trainkit.tools.planning.plans import estimate_seconds, rank_layouts
from trainkit.tools.planning.table import format_estimates

__all__ = [
    "Job",
    "estimate_memory",
    "estimate_seconds",
    "format_estimates",
    "get_hardware",
    "list_layouts",
    "rank_layouts",
]
