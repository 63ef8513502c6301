"""Losses: sums over the tokens that are trained on, and how they combine for a training step."""

from trainkit.losses.experts import routed
from trainkit.losses.linear import Columns, OfScores, TokenScores, linear_cross_entropy
from trainkit.losses.logits import cross_entropy, cross_entropy_per_token, z_loss
from trainkit.losses.logprobs import token_logprobs
from trainkit.losses.shaping import Shaping
from trainkit.losses.softmax import vocabulary_axis
from trainkit.losses.sources import by_source
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
    "Columns",
    "NamedLoss",
    "OfScores",
    "PerToken",
    "Shaping",
    "Terms",
    "TokenScores",
    "add_terms",
    "by_source",
    "cross_entropy",
    "cross_entropy_per_token",
    "document_mean",
    "in_chunks",
    "linear_cross_entropy",
    "loss_of_scores",
    "mean_terms",
    "microbatch_mean",
    "next_token",
    "next_token_linear",
    "routed",
    "token_logprobs",
    "vocabulary_axis",
    "weighted",
    "with_terms",
    "z_loss",
    "z_term",
]
