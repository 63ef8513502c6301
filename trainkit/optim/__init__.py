"""Optimizers, all plain `torch.optim.Optimizer`, and parameter groups."""

from trainkit.optim.adamw import adamw
from trainkit.optim.combine import averaged, together
from trainkit.optim.elementwise import Elementwise
from trainkit.optim.groups import decay_groups, split_by_pattern
from trainkit.optim.muon import Muon, hidden_matrices, orthogonalized
from trainkit.optim.offload import offload_state_
from trainkit.optim.rules import Lion, Momentum, NarrowAdamW, ScheduleFree, SignSGD
from trainkit.optim.table import OPTIMIZERS, make_optimizer, read_groups, read_options, state_bytes

__all__ = [
    "OPTIMIZERS",
    "Elementwise",
    "Lion",
    "Momentum",
    "Muon",
    "NarrowAdamW",
    "ScheduleFree",
    "SignSGD",
    "adamw",
    "averaged",
    "decay_groups",
    "hidden_matrices",
    "make_optimizer",
    "offload_state_",
    "orthogonalized",
    "read_groups",
    "read_options",
    "split_by_pattern",
    "state_bytes",
    "together",
]
