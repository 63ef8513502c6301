"""The softmax of each token over a vocabulary that may be cut over ranks, in place.

Each rank has the logits of its words alone, in rank order: V_r words on rank r, as many or as few
as it happens to have. Per token, three numbers are enough for
a softmax over all of them: the maximum, the sum of exponentials, and the logit of the label, which
one rank owns (Shoeybi et al., "Megatron-LM", 2019). On an axis of size 1 nothing is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from trainkit.collectives import all_gather_replicated, all_max, all_sum, get_comm_device
from trainkit.types import IGNORED_LABEL, Axis, VocabularyAxis

_GATHERED: weakref.WeakKeyDictionary[dist.ProcessGroup, WeakTensorKeyDictionary] = (
    weakref.WeakKeyDictionary()
)


def make_vocabulary_axis(own: Tensor, axis: Axis, *, dim: int = 0) -> VocabularyAxis:
    """Return an axis that knows how many words of the vocabulary each of its ranks has.

    Losses call this themselves. For logits, which are new tensors in every step, a call before the
    first step saves the exchange in each: `axis = make_vocabulary_axis(logits, axis, dim=-1)`.

    Args:
        own: This rank's rows of the output weight `[V_r, D]`, or its logits `[..., V_r]`.
        axis: The axis over which the vocabulary is cut, in rank order.
        dim: The dimension of `own` along which words lie.

    Effects:
        Communicates: one all-gather of one number on `axis`, on the CPU where the group has a CPU
        backend. The same tensor is asked once, for as long as it lives. An axis of size 1, or one
        that knows its words already, asks nobody.

    Examples:
        >>> from trainkit.types import SOLO
        >>> make_vocabulary_axis(torch.zeros(9, 2), SOLO).words
        (9,)
    """
    if isinstance(axis, VocabularyAxis):
        return axis
    words = own.shape[dim] if own.ndim else 0
    if axis.count == 1:
        return VocabularyAxis(axis.name, axis.share, axis.group, axis.mesh, words=(words,))
    gather = _gather_words
    if torch.compiler.is_compiling():
        gather = torch.compiler.disable(gather)
    counts = gather(own, words, axis)
    return VocabularyAxis(axis.name, axis.share, axis.group, axis.mesh, words=counts)


def _gather_words(own: Tensor, words: int, axis: Axis) -> tuple[int, ...]:
    # Kept by tensor and not by size: two vocabularies may differ in size on other ranks alone, and
    # all ranks must agree on whether to ask. They agree on having seen this very tensor before.
    assert axis.group is not None
    known = _GATHERED.setdefault(axis.group, WeakTensorKeyDictionary())
    counts = known.get(own)
    if counts is None or counts[axis.index] != words:
        mine = torch.tensor([words], device=get_comm_device(axis))
        counts = tuple(all_gather_replicated(mine, axis, dim=0).tolist())
        known[own] = counts
    return counts


def _first_and_total(words: int, axis: Axis) -> tuple[int, int]:
    """Return the place of this rank's first word, and how many words there are."""
    if isinstance(axis, VocabularyAxis):
        return axis.first, axis.total
    return axis.index * words, axis.count * words


def gather_words(logits: Tensor, axis: Axis) -> Tensor:
    """Return the logits `[..., V]` of all words, of this rank's `[..., V_r]`.

    Backward takes this rank's part, as that of `collectives.all_gather_replicated`.

    Effects:
        Communicates: one all-gather on `axis`; parts of unequal size are padded to the largest.

    Examples:
        >>> from trainkit.types import SOLO
        >>> gather_words(torch.zeros(1, 4), SOLO).shape
        torch.Size([1, 4])
    """
    if not isinstance(axis, VocabularyAxis) or len(set(axis.words)) == 1:
        return all_gather_replicated(logits, axis, dim=-1)
    padded = nn.functional.pad(logits, (0, axis.largest - logits.shape[-1]))
    parts = all_gather_replicated(padded, axis, dim=-1).split(axis.largest, dim=-1)
    return torch.cat([x[..., :n] for x, n in zip(parts, axis.words, strict=True)], dim=-1)


def words_of_rank(whole: Tensor, axis: Axis) -> Tensor:
    """Return this rank's words of logits `[..., V]` of all words, as a view.

    Effects:
        None; `axis` only says which words these are.

    Examples:
        >>> from trainkit.types import Share
        >>> words_of_rank(torch.arange(4), Axis("tp", Share(1, 2)))
        tensor([2, 3])
    """
    if isinstance(axis, VocabularyAxis):
        return whole.narrow(-1, axis.first, axis.words[axis.index])
    return whole.chunk(axis.count, -1)[axis.index]


def largest_logits(logits: Tensor) -> Tensor:
    """Return the largest of each token's logits `[T, V_r]`, `[T, 1]`; -inf where there is no word.

    Examples:
        >>> largest_logits(torch.zeros(1, 0))
        tensor([[-inf]])
    """
    if not logits.shape[-1]:
        return logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    return logits.amax(-1, keepdim=True)


def pick_own(logits: Tensor, index: Tensor, own: Tensor) -> Tensor:
    """Return the logits of words `[T, K]` as `own_words` gives them; 0 where another rank has one.

    Examples:
        >>> index, own = torch.tensor([[1, 0]]), torch.tensor([[True, False]])
        >>> pick_own(torch.tensor([[3.0, 4.0]]), index, own)
        tensor([[4., 0.]])
    """
    if not logits.shape[-1]:
        return logits.new_zeros(index.shape)
    return logits.gather(-1, index).masked_fill(~own, 0)


def add_to_own_(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add values `[T, K]` to words of `x` `[T, V_r]` as `own_words` gives them, if there is a word.

    Effects:
        Writes `x` and returns it.

    Examples:
        >>> add_to_own_(torch.zeros(1, 2), torch.tensor([[1]]), torch.ones(1, 1))
        tensor([[0., 1.]])
    """
    return x.scatter_add_(-1, index, values) if x.shape[-1] else x


class Scores(NamedTuple):
    """What the logits of each token come to: `[T]` each, equal on all ranks.

    `losses` are cross entropies, `normalizers` log-sum-exps of the logits. Times `scale`, the
    overwritten logits are probabilities.
    """

    losses: Tensor
    normalizers: Tensor
    scale: Tensor


def scores_(logits: Tensor, labels: Tensor, axis: Axis) -> Scores:
    """Return the scores of logits `[T, V_r]`, which are overwritten by their exponentials.

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
    largest = all_max(largest_logits(logits), axis)
    picked = pick_own(logits.sub_(largest), index, own)
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
    largest = largest_logits(logits).clamp(min=torch.finfo(logits.dtype).min)
    picked = pick_own(logits, index, own)
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
    return add_to_own_(exponentials, index, -d_losses.unsqueeze(-1) * own)


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
    before, total = _first_and_total(words, axis)
    local = ids - (before + first)
    own = (local >= 0) & (local < end - first)
    wrong = (ids != IGNORED_LABEL) & ((ids < 0) | (ids >= total))
    return local.masked_fill(~own, 0).masked_fill(wrong, end - first), own


def scores_of_logits(logits: Tensor, labels: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return losses and normalizers of logits `[T, V_r]`, each differentiable.

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
