"""Cross entropy over a vocabulary that is cut over ranks; the whole logits exist nowhere.

Each rank has the logits of its words alone, in rank order. Per token, three numbers are enough for
a softmax over all of them: the maximum, the sum of exponentials, and the logit of the label, which
one rank owns (Shoeybi et al., "Megatron-LM", 2019). Gradients are ready when forward returns.

All functions are sums over the tokens that are trained on, equal on all ranks of the axis, and
treat ignored tokens and broken logits as `losses.cross_entropy` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit import losses
from trainkit.collectives import all_max, all_sum
from trainkit.losses.cross_entropy import accumulation_dtype, check_labels
from trainkit.losses.linear_cross_entropy import (
    Softmax,
    cast_factors,
    linear_in_chunks,
    run_untraced,
)
from trainkit.losses.terms import NamedLoss, Terms, with_terms
from trainkit.types import IGNORED_LABEL, Axis

# -------------------------------------------------------------------------------------- functions


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """Return the summed cross entropy, in nats, of all tokens whose label is not -100.

    Accumulated in fp32 (fp64 logits stay fp64). What it sends does not grow with the vocabulary.

    Args:
        logits: The scores of this rank's words, any floating dtype, `[..., V / N]`.
        labels: The next token of each position among all V words, int64 `[...]`, equal on all
            ranks; -100 is ignored.
        axis: The axis over which the vocabulary is cut, `ps.tp`.

    Returns:
        A scalar, fp32 or fp64, equal on all ranks.

    Raises:
        ValueError: The shapes do not match or the labels are not int64.

    Effects:
        Communicates: two all-reduces on `axis`, of one and of two numbers per token.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> labels = torch.tensor([0, -100, 2])
        >>> vocabulary_cross_entropy(torch.zeros(3, 4), labels, solo_parallel().tp)  # 2 log 4
        tensor(2.7726)
    """
    return vocabulary_cross_entropy_per_token(logits, labels, axis)[0]


def vocabulary_cross_entropy_per_token(
    logits: Tensor, labels: Tensor, axis: Axis
) -> tuple[Tensor, Tensor]:
    """Return `vocabulary_cross_entropy` and each token's part of it, detached `[...]`.

    Effects:
        Communicates as `vocabulary_cross_entropy`.
    """
    check_labels("vocabulary_cross_entropy", logits, labels)
    return _of_logits(logits, labels, partial(_cross_entropy_, axis))


def vocabulary_z_loss(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """Return the sum of logsumexp(all logits)^2 over all tokens whose label is not -100.

    Args:
        logits: The scores of this rank's words, any floating dtype, `[..., V / N]`.
        labels: As for `vocabulary_cross_entropy`.
        axis: The axis over which the vocabulary is cut, `ps.tp`.

    Returns:
        A scalar, fp32 or fp64, equal on all ranks; see `losses.z_loss`.

    Raises:
        ValueError: The shapes do not match or the labels are not int64.

    Effects:
        Communicates: two all-reduces on `axis`, of one number per token each.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> labels = torch.tensor([0, -100, 2])
        >>> float(vocabulary_z_loss(torch.zeros(3, 4), labels, solo_parallel().tp))  # 2 (log 4)^2
        3.84...
    """
    check_labels("vocabulary_z_loss", logits, labels)
    return _of_logits(logits, labels, partial(_squared_normalizer_, axis))[0]


def vocabulary_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, axis: Axis, *, chunk: int | None = None
) -> Tensor:
    """Return the cross entropy of `hidden @ whole_weight.T` from this rank's rows of the weight.

    Never more than a chunk of this rank's logits exists. Accumulation, dtypes and autocast are as
    in `losses.linear_cross_entropy`.

    The gradient of `hidden` is this rank's part, of its words alone. Let `hidden` come from
    `collectives.gather_dim` or go through `collectives.sum_grad`: these sum it, once.

    Args:
        hidden: What enters the output layer, `[..., D]`, whole and equal on all ranks.
        weight: This rank's rows of the output layer's weight, `[V / N, D]`, in rank order.
        labels: The next token of each position among all V words, int64 `[...]`, equal on all
            ranks; -100 is ignored.
        axis: The axis over which the vocabulary is cut, `ps.tp`.
        chunk: Tokens whose logits exist at a time; by default as in `losses.linear_cross_entropy`,
            of this rank's part.

    Returns:
        A scalar, fp32 or fp64, equal on all ranks.

    Raises:
        ValueError: Shapes or dtypes do not match or `chunk` is below 1.

    Effects:
        Communicates: two all-reduces on `axis` per chunk, of one and of two numbers per token.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> hidden, weight, labels = torch.zeros(2, 8), torch.zeros(4, 8), torch.tensor([0, -100])
        >>> vocabulary_linear_cross_entropy(hidden, weight, labels, solo_parallel().tp)  # log 4
        tensor(1.3863)
    """
    return vocabulary_linear_cross_entropy_per_token(hidden, weight, labels, axis, chunk=chunk)[0]


def vocabulary_linear_cross_entropy_per_token(
    hidden: Tensor, weight: Tensor, labels: Tensor, axis: Axis, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `vocabulary_linear_cross_entropy` and each token's part of it, detached `[...]`.

    Effects:
        Communicates as `vocabulary_linear_cross_entropy`.
    """
    where = "vocabulary_linear_cross_entropy"
    hidden, weight = cast_factors(where, hidden, weight, labels, chunk)
    softmax = partial(_cross_entropy_, axis)
    return linear_in_chunks(hidden, weight, labels, softmax, chunk=chunk)


# ------------------------------------------------------------------------------------------ losses


def next_token(axis: Axis) -> NamedLoss:
    """Return `losses.next_token` for a model that returns logits `[B, S, V / N]`, cut over `axis`.

    Args:
        axis: `ps.tp`; at size 1 the loss is `losses.next_token` itself.

    Effects:
        None here; the loss communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> next_token(solo_parallel().tp).terms
        ('loss',)
    """
    if axis.count == 1:
        return losses.next_token

    def per_token(logits: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return vocabulary_cross_entropy_per_token(logits, batch["labels"], axis)

    return _loss_of(per_token)


def next_token_linear(axis: Axis) -> NamedLoss:
    """Return `losses.next_token_linear` for hidden `[B, S, D]` and a weight `[V / N, D]`.

    Args:
        axis: `ps.tp`; at size 1 the loss is `losses.next_token_linear` itself.

    Effects:
        None here; the loss communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> next_token_linear(solo_parallel().tp).terms
        ('loss',)
    """
    if axis.count == 1:
        return losses.next_token_linear

    def per_token(output: tuple[Tensor, Tensor], batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return vocabulary_linear_cross_entropy_per_token(*output, batch["labels"], axis)

    return _loss_of(per_token)


def z_term(axis: Axis) -> NamedLoss:
    """Return `losses.z_term` for a model that returns logits `[B, S, V / N]`, cut over `axis`.

    Args:
        axis: `ps.tp`; at size 1 the loss is `losses.z_term` itself.

    Effects:
        None here; the loss communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> z_term(solo_parallel().tp).terms
        ('z_loss',)
    """
    if axis.count == 1:
        return losses.z_term

    @with_terms("z_loss")
    def loss(logits: Tensor, batch: Mapping[str, Any]) -> Terms:
        total = vocabulary_z_loss(logits, batch["labels"], axis)
        return total, {"z_loss": total.detach()}

    return loss


def _loss_of(per_token: Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor]]) -> NamedLoss:
    @with_terms("loss", per_token=per_token)
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        total, _ = per_token(output, batch)
        return total, {"loss": total.detach()}

    return loss


# ----------------------------------------------------------------------------------------- softmax


def _cross_entropy_(axis: Axis, logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
    """Return each token's loss; turn the logits of this rank into the gradient of their sum."""
    ignored = (labels == IGNORED_LABEL).unsqueeze(-1)
    local = labels.unsqueeze(-1) - axis.index * logits.shape[-1]
    own = (local >= 0) & (local < logits.shape[-1])
    local = local.masked_fill(~own, 0)
    logits.sub_(all_max(logits.amax(-1, keepdim=True), axis))
    picked = logits.gather(-1, local).masked_fill(~own, 0)
    sums = torch.cat([logits.exp_().sum(-1, keepdim=True), picked], dim=-1)
    total, picked = all_sum(sums, axis).split(1, dim=-1)
    if gradient:
        logits.mul_(total.reciprocal() * ~ignored)  # a NaN stays one, on every rank
        at_label = (own & ~ignored).to(logits.dtype)
        logits.scatter_add_(-1, local, -at_label)
    return (total.log() - picked).masked_fill(ignored, 0).squeeze(-1)


def _squared_normalizer_(axis: Axis, logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
    """Return each token's squared normalizer; turn the logits into the gradient of their sum."""
    ignored = (labels == IGNORED_LABEL).unsqueeze(-1)
    largest = all_max(logits.amax(-1, keepdim=True), axis)
    total = all_sum(logits.sub_(largest).exp_().sum(-1, keepdim=True), axis)
    normalizer = total.log() + largest
    if gradient:
        logits.mul_(2 * normalizer / total * ~ignored)
    return normalizer.square().masked_fill(ignored, 0).squeeze(-1)


def _of_logits(logits: Tensor, labels: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Return the sum of the terms that a softmax makes of logits, and the terms, detached."""
    total, terms = run_untraced(_OfLogits, logits.flatten(0, -2), labels.flatten(), softmax)
    return total, terms.view(labels.shape)


class _OfLogits(torch.autograd.Function):
    """A sum of terms of the logits and the terms themselves."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, logits: Tensor, labels: Tensor, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        slopes = logits.to(accumulation_dtype(logits), copy=True)
        terms = softmax(slopes, labels, ctx.needs_input_grad[0])
        ctx.dtype = logits.dtype
        ctx.save_for_backward(slopes if ctx.needs_input_grad[0] else None)
        ctx.mark_non_differentiable(terms)
        return terms.sum(), terms

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_total: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * d_total).to(ctx.dtype), None, None
