"""Optimizers, all plain `torch.optim.Optimizer`, and parameter groups."""

from __future__ import annotations

from trainkit.optim.adamw import adamw
from trainkit.optim.elementwise import Elementwise
from trainkit.optim.groups import decay_groups, split_by_pattern
from trainkit.optim.muon import Muon, hidden_matrices, orthogonalized
from trainkit.optim.rules import Lion, Momentum, NarrowAdamW, ScheduleFree, SignSGD
from trainkit.optim.table import OPTIMIZERS, make_optimizer, state_bytes
from trainkit.optim.together import averaged, together

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
    "orthogonalized",
    "split_by_pattern",
    "state_bytes",
    "together",
]
