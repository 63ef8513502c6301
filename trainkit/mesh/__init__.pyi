# The table of contents, which __init__.py loads lazily.
from .axes import axis_from_group as axis_from_group
from .axes import solo_parallel as solo_parallel
from .axes import twin_axis as twin_axis
from .launch import Launch as Launch
from .launch import launch_from_slurm as launch_from_slurm
from .launch import launch_from_torchrun as launch_from_torchrun
from .launch import launch_notes as launch_notes
from .launch import read_launch as read_launch
from .launch import require_torch as require_torch
from .session import parallel_session as parallel_session
from .session import world_size as world_size
