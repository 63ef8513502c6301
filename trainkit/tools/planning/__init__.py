"""What a layout costs before it is run: bytes of each rank, communication, an estimate of time.

`rank_layouts` lists the layouts of a world; the formulas are functions of their own, of shapes
alone.
"""

from trainkit.tools.planning.jobs import Job, explain_refusal, list_layouts
from trainkit.tools.planning.machines import Hardware, get_hardware
from trainkit.tools.planning.memory import MemoryEstimate, estimate_memory
from trainkit.tools.planning.plans import (
    LayoutEstimate,
    TimeEstimate,
    estimate_seconds,
    rank_layouts,
)
from trainkit.tools.planning.table import format_estimates
from trainkit.tools.planning.traffic import Transfer, estimate_traffic

__all__ = [
    "Hardware",
    "Job",
    "LayoutEstimate",
    "MemoryEstimate",
    "TimeEstimate",
    "Transfer",
    "estimate_memory",
    "estimate_seconds",
    "estimate_traffic",
    "explain_refusal",
    "format_estimates",
    "get_hardware",
    "list_layouts",
    "rank_layouts",
]
