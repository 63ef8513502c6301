"""The softmax of each token over a vocabulary that may be sharded over ranks, in place.

Rank r has the logits of its shard of V_r words, in rank order; shards may differ in size. Per token
three numbers are enough for a softmax over all words: the maximum, the sum of exponentials, and the
logit of the label, which is on one rank (Shoeybi et al., "Megatron-LM", 2019). An axis of size 1
communicates nothing.
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

# The shard sizes of a weight, per process group and tensor. Both keys are weak: a cache must keep
# neither alive.
_GATHERED: weakref.WeakKeyDictionary[dist.ProcessGroup, WeakTensorKeyDictionary] = (
    weakref.WeakKeyDictionary()
)


def make_vocabulary_axis(own: Tensor, axis: Axis, *, dim: int = 0) -> VocabularyAxis:
    """Return an axis with the sizes of the vocabulary shards of its ranks.

    Losses call this themselves. For logits, which are new tensors in every step, a call before the
    first step saves communication in each: `axis = make_vocabulary_axis(logits, axis, dim=-1)`.

    Args:
        own: This rank's rows of the output weight `[V_r, D]`, or its logits `[..., V_r]`.
        axis: The axis over which the vocabulary is sharded, in rank order.
        dim: The vocabulary dimension of `own`.

    Effects:
        Communicates: one all-gather of one number on `axis`, on the CPU if the group has a CPU
        backend, once for each tensor as long as it lives. An axis of size 1, or one that has the
        sizes, does not communicate.

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
    # The cache is by tensor and not by size: two vocabularies may differ in size on other ranks
    # only, and all ranks must agree on whether to communicate. They agree on which tensor is new.
    assert axis.group is not None
    cache = _GATHERED.setdefault(axis.group, WeakTensorKeyDictionary())
    counts = cache.get(own)
    if counts is None or counts[axis.index] != words:
        local_count = torch.tensor([words], device=get_comm_device(axis))
        counts = tuple(all_gather_replicated(local_count, axis, dim=0).tolist())
        cache[own] = counts
    return counts


def gather_words(logits: Tensor, axis: Axis) -> Tensor:
    """All-gather logits `[..., V_r]` to `[..., V]`.

    Backward takes this rank's shard, as in `collectives.all_gather_replicated`.

    Effects:
        Communicates: one all-gather on `axis`; shards of unequal size are padded to the largest.

    Examples:
        >>> from trainkit.types import SOLO
        >>> gather_words(torch.zeros(1, 4), SOLO).shape
        torch.Size([1, 4])
    """
    if not isinstance(axis, VocabularyAxis) or len(set(axis.words)) == 1:
        return all_gather_replicated(logits, axis, dim=-1)
    padded = nn.functional.pad(logits, (0, axis.largest - logits.shape[-1]))
    gathered = all_gather_replicated(padded, axis, dim=-1)
    parts = gathered.split(axis.largest, dim=-1)
    sized_parts = zip(parts, axis.words, strict=True)
    return torch.cat([x[..., :n] for x, n in sized_parts], dim=-1)


def words_of_rank(whole: Tensor, axis: Axis) -> Tensor:
    """Return this rank's shard of logits `[..., V]`, as a view.

    Effects:
        None; of `axis` only the shard sizes are read.

    Examples:
        >>> from trainkit.types import Share
        >>> words_of_rank(torch.arange(4), Axis("tp", Share(1, 2)))
        tensor([2, 3])
    """
    if isinstance(axis, VocabularyAxis):
        return whole.narrow(-1, axis.first, axis.words[axis.index])
    return whole.chunk(axis.count, -1)[axis.index]


def largest_logits(logits: Tensor) -> Tensor:
    """Return the maximum of each token's logits `[T, V_r]`, `[T, 1]`; -inf for an empty shard.

    Examples:
        >>> largest_logits(torch.zeros(1, 0))
        tensor([[-inf]])
    """
    if not logits.shape[-1]:
        return logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    return logits.amax(-1, keepdim=True)


def pick_own(logits: Tensor, index: Tensor, own: Tensor) -> Tensor:
    """Return the logits of words `[T, K]`, indices from `own_words`; 0 for words of other ranks.

    Examples:
        >>> index, own = torch.tensor([[1, 0]]), torch.tensor([[True, False]])
        >>> pick_own(torch.tensor([[3.0, 4.0]]), index, own)
        tensor([[4., 0.]])
    """
    if not logits.shape[-1]:
        return logits.new_zeros(index.shape)
    return logits.gather(-1, index).masked_fill(~own, 0)


def add_to_own_(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add values `[T, K]` to words of `x` `[T, V_r]`, indices from `own_words`.

    Effects:
        Writes `x` and returns it.

    Examples:
        >>> add_to_own_(torch.zeros(1, 2), torch.tensor([[1]]), torch.ones(1, 1))
        tensor([[0., 1.]])
    """
    return x.scatter_add_(-1, index, values) if x.shape[-1] else x


class Scores(NamedTuple):
    """The scores of T tokens, `[T]` each, equal on all ranks.

    `losses` are cross entropies, `normalizers` log-sum-exps of the logits. The overwritten logits,
    times `scale`, are probabilities.
    """

    losses: Tensor
    normalizers: Tensor
    scale: Tensor


def scores_(logits: Tensor, labels: Tensor, axis: Axis) -> Scores:
    """Compute the scores of logits `[T, V_r]`, and overwrite the logits with their exponentials.

    The cross entropy of an ignored token is that of some word; the caller masks it. A label out of
    range raises on a CPU, and fails an assertion on CUDA, on all ranks.

    Args:
        logits: This rank's shard, fp32 or fp64.
        labels: int64 `[T]`, among all V words.
        axis: The axis over which the vocabulary is sharded.

    Effects:
        Overwrites `logits`. Communicates: two all-reduces on `axis`, of one and of two numbers per
        token.

    Examples:
        >>> from trainkit.types import SOLO
        >>> scores_(torch.zeros(1, 4), torch.tensor([2]), SOLO)  # log 4
        Scores(losses=tensor([1.3863]), normalizers=tensor([1.3863]), scale=tensor([0.2500]))
    """
    index, own = own_words(labels.unsqueeze(-1), logits.shape[-1], axis)
    largest = all_max(largest_logits(logits), axis)
    picked = pick_own(logits.sub_(largest), index, own)
    # One all-reduce for both: the sum of exponentials, and the logit of the label from its rank.
    totals = logits.exp_().sum(-1, keepdim=True)
    sums = torch.cat([totals, picked], dim=-1)
    total, picked = all_sum(sums, axis).unbind(-1)
    normalizers = total.log()
    return Scores(normalizers - picked, normalizers + largest.squeeze(-1), total.reciprocal())


class Partial(NamedTuple):
    """The partial softmax over some words, `[T]` each.

    `largest` is the maximum of the logits, `total` the sum of exp(logit - largest), `picked` the
    logit of the label, or 0 if that is another word.
    """

    largest: Tensor
    total: Tensor
    picked: Tensor


def partial_scores_(
    logits: Tensor,
    words: slice,
    labels: Tensor,
    axis: Axis,
    *,
    of: int,
) -> Partial:
    """Compute the partial softmax over logits of some words `[T, W]`, for `whole_scores`.

    Args:
        logits: fp32 or fp64.
        words: The slice of this rank's words.
        labels: int64 `[T]`, among all words of all ranks.
        axis: The axis over which the vocabulary is sharded.
        of: The number of words of this rank.

    Effects:
        Overwrites `logits`; of `axis` only the shard sizes are read.

    References:
        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

    Examples:
        >>> from trainkit.types import SOLO
        >>> partial_scores_(torch.zeros(1, 2), slice(2, 4), torch.tensor([3]), SOLO, of=4)
        Partial(largest=tensor([0.]), total=tensor([2.]), picked=tensor([0.]))
    """
    index, own = own_words(labels.unsqueeze(-1), of, axis, part=words)
    # If all words are excluded, the maximum is -inf, and -inf - -inf is NaN.
    largest = largest_logits(logits).clamp(min=torch.finfo(logits.dtype).min)
    picked = pick_own(logits, index, own)
    total = logits.sub_(largest).exp_().sum(-1)
    return Partial(largest.squeeze(-1), total, picked.squeeze(-1))


def whole_scores(parts: Sequence[Partial], axis: Axis) -> tuple[Tensor, Tensor]:
    """Combine partial softmaxes over this rank's words; return losses and normalizers, `[T]` each.

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
    fields = zip(*parts, strict=True)
    maxima, totals, picked = (torch.stack(x) for x in fields)
    largest = all_max(maxima.amax(0), axis)
    # A partial sum is relative to its own maximum, and is scaled to that of all words.
    scaled_totals = totals * (maxima - largest).exp()
    sums = torch.stack([scaled_totals.sum(0), picked.sum(0)])
    total, label = all_sum(sums, axis).unbind()
    normalizers = total.log()
    # The label's logit was picked before the maximum was subtracted from it.
    return normalizers - (label - largest), normalizers + largest


def compute_entropies(exponentials: Tensor, scale: Tensor, axis: Axis) -> Tensor:
    """Return the entropy of each token's softmax, `[T]` in nats, from exponentials of `scores_`.

    Effects:
        Communicates: one all-reduce on `axis`, of a number per token.

    Examples:
        >>> from trainkit.types import SOLO
        >>> compute_entropies(torch.ones(1, 4), torch.tensor([0.25]), SOLO)  # log 4
        tensor([1.3863])
    """
    # H = -sum p log p with p = scale * e: -log(scale) - scale * sum e log e.
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
    """Convert the exponentials of `scores_` to the gradient of the logits.

    NaN logits stay NaN, also at ignored tokens, whose derivatives are 0. `curved` is the entropies
    of the tokens and their derivatives, which take the memory of a second chunk.

    Effects:
        Overwrites `exponentials` and returns them; of `axis` only the shard sizes are read.

    Examples:
        >>> from trainkit.types import SOLO
        >>> one, labels = torch.ones(1), torch.tensor([2])
        >>> slopes_(torch.ones(1, 4), labels, SOLO, one, 0 * one, scale=one / 4)
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """
    index, own = own_words(labels.unsqueeze(-1), exponentials.shape[-1], axis)
    slope = scale * (d_losses + d_normalizers)
    entropy_slope = None
    if curved is not None:
        entropies, d_entropies = curved
        scale = torch.as_tensor(scale, dtype=exponentials.dtype, device=exponentials.device)
        # dH/dx = -p (log p + H) = -scale * e * (log e + log scale + H)
        slope = slope - scale * d_entropies * (scale.log() + entropies)
        entropy_slope = torch.xlogy(exponentials, exponentials)
        entropy_slope.mul_((scale * d_entropies).unsqueeze(-1))
    exponentials.mul_(slope.unsqueeze(-1))
    if entropy_slope is not None:
        exponentials.sub_(entropy_slope)
    return add_to_own_(exponentials, index, -d_losses.unsqueeze(-1) * own)


def own_words(
    ids: Tensor,
    words: int,
    axis: Axis,
    *,
    part: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Convert ids of words `[T, K]` to indices into this rank's shard, with a mask of its words.

    With `part`, indices and mask are those of that slice of the shard. Words of other ranks get
    index 0. Ids out of range get an index past the end, on all ranks, so that a gather fails.

    Effects:
        None; of `axis` only the shard sizes are read.

    Examples:
        >>> from trainkit.types import Share
        >>> own_words(torch.tensor([[1, 6]]), 4, Axis("tp", Share(1, 2)))
        (tensor([[0, 2]]), tensor([[False,  True]]))
    """
    first, end, _ = part.indices(words)
    if isinstance(axis, VocabularyAxis):
        before = axis.first
        total = axis.total
    else:  # the words divide evenly
        before = axis.index * words
        total = axis.count * words
    # Index within the slice `part` of this rank's words.
    local = ids - (before + first)
    own = (local >= 0) & (local < end - first)
    wrong = (ids != IGNORED_LABEL) & ((ids < 0) | (ids >= total))
    index = local.masked_fill(~own, 0)
    return index.masked_fill(wrong, end - first), own


def compute_scores(logits: Tensor, labels: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return losses and normalizers of logits `[T, V_r]`, each differentiable.

    Effects:
        Communicates as `scores_`.

    Examples:
        >>> from trainkit.types import SOLO
        >>> compute_scores(torch.zeros(1, 4), torch.tensor([2]), SOLO)
        (tensor([1.3863]), tensor([1.3863]))
    """
    return run_untraced(_ComputeScores, logits, labels, axis)


class _ComputeScores(torch.autograd.Function):
    """Losses and normalizers; the type checker sees unsound overrides, as torch declares Any."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        axis: Axis,
    ) -> tuple[Tensor, Tensor]:
        exponentials = logits.to(accumulation_dtype(logits), copy=True)
        scores = scores_(exponentials, labels, axis)
        ctx.axis = axis
        ctx.dtype = logits.dtype
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(exponentials, labels, scores.scale)
        return scores.losses, scores.normalizers

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_losses: Tensor, d_normalizers: Tensor
    ) -> tuple[Tensor, None, None]:
        exponentials, labels, scale = ctx.saved_tensors
        slopes = slopes_(
            exponentials.clone(),
            labels,
            ctx.axis,
            d_losses,
            d_normalizers,
            scale=scale,
        )
        return slopes.to(ctx.dtype), None, None


def run_untraced(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply an autograd Function, untraced by `torch.compile`, without gradients under no_grad.

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
    # A Function computes gradients of inputs that require them, even under no_grad.
    if not torch.is_grad_enabled():
        args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    run = function.apply
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)
    return run(*args)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for sums over `x`: fp32, or fp64 for fp64.

    Examples:
        >>> import torch
        >>> accumulation_dtype(torch.zeros(1, dtype=torch.bfloat16))
        torch.float32
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32
