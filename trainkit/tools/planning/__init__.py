"""What a layout costs before it is run: bytes of each rank, communication, an estimate of time.

`plan` lists the layouts of a world; the formulas are functions of their own, of shapes alone.
"""

from trainkit.tools.planning.jobs import Job, layouts_of, refusal
from trainkit.tools.planning.machines import Hardware, hardware
from trainkit.tools.planning.memory import Memory, memory_of
from trainkit.tools.planning.plans import Plan, Seconds, plan, seconds_of
from trainkit.tools.planning.table import plan_table
from trainkit.tools.planning.traffic import Transfer, traffic_of

__all__ = [
    "Hardware",
    "Job",
    "Memory",
    "Plan",
    "Seconds",
    "Transfer",
    "hardware",
    "layouts_of",
    "memory_of",
    "plan",
    "plan_table",
    "refusal",
    "seconds_of",
    "traffic_of",
]
