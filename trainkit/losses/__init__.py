"""Losses: sums over the tokens that are trained on, and how they combine for a training step."""

from __future__ import annotations

from trainkit.losses.advantages import gae, group_advantages, leave_one_out
from trainkit.losses.by_source import by_source
from trainkit.losses.cross_entropy import cross_entropy, cross_entropy_per_token, z_loss
from trainkit.losses.distillation import distillation, stored_distillation
from trainkit.losses.linear_cross_entropy import (
    Columns,
    OfScores,
    TokenScores,
    linear_cross_entropy,
    token_logprobs,
)
from trainkit.losses.policy import (
    Added,
    bounded_weights,
    clipped,
    importance,
    k1,
    k2,
    k3,
    policy_gradient,
    sequence_policy_gradient,
)
from trainkit.losses.preference import dpo, ipo, kto, log_ratio, orpo, simpo
from trainkit.losses.routed import routed
from trainkit.losses.shaping import Shaping
from trainkit.losses.terms import (
    NamedLoss,
    PerToken,
    Terms,
    add_terms,
    in_chunks,
    loss_of_scores,
    mean_terms,
    next_token,
    next_token_linear,
    weighted,
    with_terms,
    z_term,
)
from trainkit.losses.weights import document_mean, microbatch_mean

__all__ = [
    "Added",
    "Columns",
    "NamedLoss",
    "OfScores",
    "PerToken",
    "Shaping",
    "Terms",
    "TokenScores",
    "add_terms",
    "bounded_weights",
    "by_source",
    "clipped",
    "cross_entropy",
    "cross_entropy_per_token",
    "distillation",
    "document_mean",
    "dpo",
    "gae",
    "group_advantages",
    "importance",
    "in_chunks",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kto",
    "leave_one_out",
    "linear_cross_entropy",
    "log_ratio",
    "loss_of_scores",
    "mean_terms",
    "microbatch_mean",
    "next_token",
    "next_token_linear",
    "orpo",
    "policy_gradient",
    "routed",
    "sequence_policy_gradient",
    "simpo",
    "stored_distillation",
    "token_logprobs",
    "weighted",
    "with_terms",
    "z_loss",
    "z_term",
]
