"""The softmax of each token over a vocabulary that may be cut over ranks, in place.

Each rank has the logits of its words alone, in rank order. Per token, three numbers are enough for
a softmax over all of them: the maximum, the sum of exponentials, and the logit of the label, which
one rank owns (Shoeybi et al., "Megatron-LM", 2019). On an axis of size 1 nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.collectives import all_max, all_sum
from trainkit.types import IGNORED_LABEL, Axis


class Scores(NamedTuple):
    """What the logits of each token come to: `[T]` each, equal on all ranks.

    `losses` are cross entropies, `normalizers` log-sum-exps of the logits. Times `scale`, the
    overwritten logits are probabilities.
    """

    losses: Tensor
    normalizers: Tensor
    scale: Tensor


def scores_(logits: Tensor, labels: Tensor, axis: Axis) -> Scores:
    """Return the scores of logits `[T, V / N]`, which are overwritten by their exponentials.

    The cross entropy of an ignored token is that of some word, to be masked. A label that is no
    word raises on a CPU, and fails an assertion on CUDA, on every rank alike.

    Args:
        logits: This rank's part, fp32 or fp64.
        labels: int64 `[T]`, among all V words.
        axis: The axis over which the vocabulary is cut.

    Effects:
        Overwrites `logits`. Communicates: two all-reduces on `axis`, of one and of two numbers per
        token.

    Examples:
        >>> from trainkit.types import SOLO
        >>> scores_(torch.zeros(1, 4), torch.tensor([2]), SOLO)  # log 4
        Scores(losses=tensor([1.3863]), normalizers=tensor([1.3863]), scale=tensor([0.2500]))
    """
    index, own = _own_labels(labels, logits.shape[-1], axis)
    largest = all_max(logits.amax(-1, keepdim=True), axis)
    picked = logits.sub_(largest).gather(-1, index).masked_fill(~own, 0)
    sums = torch.cat([logits.exp_().sum(-1, keepdim=True), picked], dim=-1)
    total, picked = all_sum(sums, axis).unbind(-1)
    normalizers = total.log()
    return Scores(normalizers - picked, normalizers + largest.squeeze(-1), total.reciprocal())


class Partial(NamedTuple):
    """What the logits of some words come to, `[T]` each.

    `largest` is their maximum, `total` the sum of exponentials of what is below it, `picked` the
    logit of the label, 0 where that is another word.
    """

    largest: Tensor
    total: Tensor
    picked: Tensor


def partial_scores_(
    logits: Tensor, words: slice, labels: Tensor, axis: Axis, *, of: int
) -> Partial:
    """Return what logits of some words `[T, W]` come to; `whole_scores` puts such parts together.

    Args:
        logits: fp32 or fp64.
        words: Which of this rank's words they are of.
        labels: int64 `[T]`, among all words of all ranks.
        axis: The axis over which the vocabulary is cut.
        of: How many words this rank has.

    Effects:
        Overwrites `logits`; `axis` only says which words these are.

    References:
        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

    Examples:
        >>> from trainkit.types import SOLO
        >>> partial_scores_(torch.zeros(1, 2), slice(2, 4), torch.tensor([3]), SOLO, of=4)
        Partial(largest=tensor([0.]), total=tensor([2.]), picked=tensor([0.]))
    """
    index, own = own_words(labels.unsqueeze(-1), of, axis, part=words)
    # Words that are all ruled out, by -inf, must not be a maximum: -inf - -inf is NaN.
    largest = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    picked = logits.gather(-1, index).masked_fill(~own, 0)
    total = logits.sub_(largest).exp_().sum(-1)
    return Partial(largest.squeeze(-1), total, picked.squeeze(-1))


def whole_scores(parts: Sequence[Partial], axis: Axis) -> tuple[Tensor, Tensor]:
    """Return losses and normalizers, `[T]` each, of what parts of this rank's words came to.

    Effects:
        Communicates: two all-reduces on `axis`, of one and of two numbers per token.

    Examples:
        >>> from trainkit.types import SOLO
        >>> zeros, labels = torch.zeros(1, 2), torch.tensor([3])
        >>> words = slice(0, 2), slice(2, 4)
        >>> parts = [partial_scores_(zeros.clone(), x, labels, SOLO, of=4) for x in words]
        >>> whole_scores(parts, SOLO)  # log 4
        (tensor([1.3863]), tensor([1.3863]))
    """
    each, totals, picked = (torch.stack(x) for x in zip(*parts, strict=True))
    largest = all_max(each.amax(0), axis)
    sums = torch.stack([(totals * (each - largest).exp()).sum(0), picked.sum(0)])
    total, label = all_sum(sums, axis).unbind()
    normalizers = total.log()
    return normalizers - (label - largest), normalizers + largest


def entropies_of(exponentials: Tensor, scale: Tensor, axis: Axis) -> Tensor:
    """Return the entropy of each token's softmax, `[T]` in nats, of exponentials of `scores_`.

    Effects:
        Communicates: one all-reduce on `axis`, of a number per token.

    Examples:
        >>> from trainkit.types import SOLO
        >>> entropies_of(torch.ones(1, 4), torch.tensor([0.25]), SOLO)  # log 4
        tensor([1.3863])
    """
    means = scale * all_sum(torch.xlogy(exponentials, exponentials).sum(-1), axis)
    return -scale.log() - means


def slopes_(
    exponentials: Tensor,
    labels: Tensor,
    axis: Axis,
    d_losses: Tensor,
    d_normalizers: Tensor,
    *,
    scale: Tensor | float = 1.0,
    curved: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Turn the exponentials of `scores_` into the gradient of the logits.

    Broken logits stay NaN at ignored tokens too, whose derivatives are 0. `curved` are the
    `entropies_of` of the tokens and the derivatives of these, which take as much memory once more.

    Effects:
        Overwrites `exponentials` and returns them; `axis` only says which words these are.

    Examples:
        >>> from trainkit.types import SOLO
        >>> one, labels = torch.ones(1), torch.tensor([2])
        >>> slopes_(torch.ones(1, 4), labels, SOLO, one, 0 * one, scale=one / 4)
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """
    index, own = _own_labels(labels, exponentials.shape[-1], axis)
    steep, bent = scale * (d_losses + d_normalizers), None
    if curved is not None:
        entropies, d_entropies = curved
        own_scale = torch.as_tensor(scale, dtype=exponentials.dtype, device=exponentials.device)
        steep = steep - own_scale * d_entropies * (own_scale.log() + entropies)
        bent = torch.xlogy(exponentials, exponentials)
        bent.mul_((own_scale * d_entropies).unsqueeze(-1))
    exponentials.mul_(steep.unsqueeze(-1))
    if bent is not None:
        exponentials.sub_(bent)
    return exponentials.scatter_add_(-1, index, -d_losses.unsqueeze(-1) * own)


def _own_labels(labels: Tensor, words: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the labels as indices of this rank's words `[T, 1]`, and which of them it owns."""
    return own_words(labels.unsqueeze(-1), words, axis)


def own_words(
    ids: Tensor, words: int, axis: Axis, *, part: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Return words among all, `[T, K]`, as indices of this rank's, and which of them it owns.

    Of a `part` of its words they are the indices there, and others than these are not owned. What
    is not owned points at word 0; what is no word at all points past the end, on every rank.

    Effects:
        None; `axis` only says which words these are.

    Examples:
        >>> from trainkit.types import Share
        >>> own_words(torch.tensor([[1, 6]]), 4, Axis("tp", Share(1, 2)))
        (tensor([[0, 2]]), tensor([[False,  True]]))
    """
    first, end, _ = part.indices(words)
    local = ids - (axis.index * words + first)
    own = (local >= 0) & (local < end - first)
    wrong = (ids != IGNORED_LABEL) & ((ids < 0) | (ids >= axis.count * words))
    return local.masked_fill(~own, 0).masked_fill(wrong, end - first), own


def scores_of_logits(logits: Tensor, labels: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return losses and normalizers of logits `[T, V / N]`, each differentiable.

    Effects:
        Communicates as `scores_`.

    Examples:
        >>> from trainkit.types import SOLO
        >>> scores_of_logits(torch.zeros(1, 4), torch.tensor([2]), SOLO)
        (tensor([1.3863]), tensor([1.3863]))
    """
    return run_untraced(_ScoresOfLogits, logits, labels, axis)


class _ScoresOfLogits(torch.autograd.Function):
    """Torch declares both methods as taking and returning anything: they override it unsoundly."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, logits: Tensor, labels: Tensor, axis: Axis
    ) -> tuple[Tensor, Tensor]:
        exponentials = logits.to(accumulation_dtype(logits), copy=True)
        scores = scores_(exponentials, labels, axis)
        ctx.axis, ctx.dtype = axis, logits.dtype
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(exponentials, labels, scores.scale)
        return scores.losses, scores.normalizers

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_losses: Tensor, d_normalizers: Tensor
    ) -> tuple[Tensor, None, None]:
        exponentials, labels, scale = ctx.saved_tensors
        scores = d_losses, d_normalizers
        slopes = slopes_(exponentials.clone(), labels, ctx.axis, *scores, scale=scale)
        return slopes.to(ctx.dtype), None, None


def run_untraced(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run a Function as it is inside `torch.compile`, and without gradients where none are wanted.

    Traced, 512 tokens of the benchmark of `linear_cross_entropy` take twice the memory.

    Examples:
        >>> import torch
        >>> class Doubled(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x, ctx.needs_input_grad[0]
        >>> with torch.no_grad():
        ...     run_untraced(Doubled, torch.ones(1, requires_grad=True))
        (tensor([2.]), False)
    """
    if not torch.is_grad_enabled():  # which a Function does not ask
        args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    run = function.apply
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)
    return run(*args)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums over `x` are made: fp32, or fp64 if that is what it holds.

    Examples:
        >>> import torch
        >>> accumulation_dtype(torch.zeros(1, dtype=torch.bfloat16))
        torch.float32
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32
