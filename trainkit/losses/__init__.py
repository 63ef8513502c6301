"""Losses as sums over tokens, and their combinations for a training step."""

from trainkit.losses.experts import add_router_losses
from trainkit.losses.linear import linear_cross_entropy
from trainkit.losses.logits import cross_entropy, cross_entropy_per_token, z_loss
from trainkit.losses.logprobs import token_logprobs
from trainkit.losses.softmax import make_vocabulary_axis
from trainkit.losses.sources import report_by_source
from trainkit.losses.terms import (
    add_terms,
    average_terms,
    chunk_loss,
    declare_terms,
    make_score_loss,
    next_token,
    next_token_linear,
    weighted_next_token,
    z_term,
)
from trainkit.losses.weights import weight_by_document, weight_by_microbatch

__all__ = [
    "add_router_losses",
    "add_terms",
    "average_terms",
    "chunk_loss",
    "cross_entropy",
    "cross_entropy_per_token",
    "declare_terms",
    "linear_cross_entropy",
    "make_score_loss",
    "make_vocabulary_axis",
    "next_token",
    "next_token_linear",
    "report_by_source",
    "token_logprobs",
    "weight_by_document",
    "weight_by_microbatch",
    "weighted_next_token",
    "z_loss",
    "z_term",
]
