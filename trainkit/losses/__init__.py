"""Losses: sums over the tokens that are trained on, and how they combine for a training step."""

from __future__ import annotations

from trainkit.losses.by_source import by_source
from trainkit.losses.cross_entropy import cross_entropy, z_loss
from trainkit.losses.linear_cross_entropy import linear_cross_entropy
from trainkit.losses.terms import (
    NamedLoss,
    add_terms,
    mean_terms,
    next_token,
    next_token_linear,
    with_terms,
    z_term,
)

__all__ = [
    "NamedLoss",
    "add_terms",
    "by_source",
    "cross_entropy",
    "linear_cross_entropy",
    "mean_terms",
    "next_token",
    "next_token_linear",
    "with_terms",
    "z_loss",
    "z_term",
]
