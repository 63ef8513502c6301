"""Optimizers, all plain `torch.optim.Optimizer`, and parameter groups."""

from __future__ import annotations

from trainkit.optim.adamw import adamw
from trainkit.optim.groups import decay_groups

__all__ = ["adamw", "decay_groups"]
