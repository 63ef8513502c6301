"""How processes become a layout: what a launcher says, how ranks meet, and the axes they share.

`parallel_session` does all of it; `axis_from_group` makes an axis of somebody else's process group.
"""

from trainkit.mesh.axes import axis_from_group, solo_parallel, twin_axis
from trainkit.mesh.launch import (
    Launch,
    launch_from_slurm,
    launch_from_torchrun,
    launch_notes,
    read_launch,
    require_torch,
)
from trainkit.mesh.session import parallel_session, world_size

__all__ = [
    "Launch",
    "axis_from_group",
    "launch_from_slurm",
    "launch_from_torchrun",
    "launch_notes",
    "parallel_session",
    "read_launch",
    "require_torch",
    "solo_parallel",
    "twin_axis",
    "world_size",
]
