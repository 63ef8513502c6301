"""Optimizers, all plain `torch.optim.Optimizer`, and parameter groups."""

from __future__ import annotations

from trainkit.optim.adamw import adamw
from trainkit.optim.groups import decay_groups
from trainkit.optim.muon import Muon, hidden_matrices, orthogonalized

__all__ = ["Muon", "adamw", "decay_groups", "hidden_matrices", "orthogonalized"]
