"""Processes and axes: launcher variables, the rendezvous of ranks, and the axes of a layout.

`parallel_session` does all of it; `axis_from_group` makes an axis of somebody else's process group.
"""

from trainkit.mesh.axes import axis_from_group, open_gloo_axis, solo_parallel
from trainkit.mesh.launch import (
    Launch,
    describe_launch,
    launch_from_slurm,
    launch_from_torchrun,
    read_launch,
    require_torch,
)
from trainkit.mesh.session import get_world_size, parallel_session

__all__ = [
    "Launch",
    "axis_from_group",
    "describe_launch",
    "get_world_size",
    "launch_from_slurm",
    "launch_from_torchrun",
    "open_gloo_axis",
    "parallel_session",
    "read_launch",
    "require_torch",
    "solo_parallel",
]
