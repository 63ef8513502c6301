"""Losses: sums over the tokens that are trained on, and how they combine for a training step."""

from __future__ import annotations

from trainkit.losses.by_source import by_source
from trainkit.losses.cross_entropy import cross_entropy, cross_entropy_per_token, z_loss
from trainkit.losses.linear_cross_entropy import (
    OfScores,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)
from trainkit.losses.routed import routed
from trainkit.losses.terms import (
    NamedLoss,
    PerToken,
    Terms,
    add_terms,
    in_chunks,
    mean_terms,
    next_token,
    next_token_linear,
    with_terms,
    z_term,
)

__all__ = [
    "NamedLoss",
    "OfScores",
    "PerToken",
    "Terms",
    "add_terms",
    "by_source",
    "cross_entropy",
    "cross_entropy_per_token",
    "in_chunks",
    "linear_cross_entropy",
    "linear_cross_entropy_per_token",
    "mean_terms",
    "next_token",
    "next_token_linear",
    "routed",
    "with_terms",
    "z_loss",
    "z_term",
]
