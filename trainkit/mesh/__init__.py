"""Processes and axes: launcher variables, the rendezvous of ranks, and the axes of a layout.

`parallel_session` does all of it; `axis_from_group` makes an axis of an existing process group.
"""

from trainkit.mesh.axes import axis_from_group, solo_parallel
from trainkit.mesh.launch import read_launch
from trainkit.mesh.session import get_world_size, parallel_session

__all__ = [
    "axis_from_group",
    "get_world_size",
    "parallel_session",
    "read_launch",
    "solo_parallel",
]
