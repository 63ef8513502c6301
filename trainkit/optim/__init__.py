"""Optimizers, all plain `torch.optim.Optimizer`, and parameter groups."""

from trainkit.optim.adamw import adamw
from trainkit.optim.combine import combine_optimizers, use_averaged_parameters
from trainkit.optim.groups import decay_groups, split_by_pattern
from trainkit.optim.muon import Muon, orthogonalize
from trainkit.optim.offload import offload_optimizer_
from trainkit.optim.rules import Lion, LowPrecisionAdamW, Momentum, ScheduleFree, SignSGD
from trainkit.optim.table import (
    make_optimizer,
    parse_groups,
    parse_options,
)

__all__ = [
    "Lion",
    "LowPrecisionAdamW",
    "Momentum",
    "Muon",
    "ScheduleFree",
    "SignSGD",
    "adamw",
    "combine_optimizers",
    "decay_groups",
    "make_optimizer",
    "offload_optimizer_",
    "orthogonalize",
    "parse_groups",
    "parse_options",
    "split_by_pattern",
    "use_averaged_parameters",
]
