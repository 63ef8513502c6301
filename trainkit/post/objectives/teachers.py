"""Distillation: divergences of a student's next-token distributions from a teacher's.

The full logits of neither exist: the logits of some tokens at a time are computed from hidden
states and an output weight, with the gradient of the divergence. If only the k most likely words of
the teacher are given, all others count as one word, so that both are still distributions.

References:
    Hinton et al., "Distilling the knowledge in a neural network" (2015); Agarwal et al., "On-policy
    distillation of language models" (2023), GKD, for the generalized divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_replicated, all_max, all_sum
from trainkit.losses.linear import (
    Factors,
    LabelColumns,
    OfLogits,
    linear_in_chunks,
    make_logits_function,
    select_columns,
)
from trainkit.losses.softmax import (
    add_to_own_,
    largest_logits,
    make_vocabulary_axis,
    own_words,
    pick_own,
)
from trainkit.losses.terms import NamedLoss, Terms, declare_terms, read_output
from trainkit.types import IGNORED_LABEL, Axis, Hidden, VocabularyAxis, check_range

_LEAST = -1e30  # replaces log(0) = -inf, whose product with a probability of 0 is NaN


def distillation(
    teacher: Hidden,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    weighted: bool = False,
    chunk: int | None = None,
) -> NamedLoss:
    """Return the divergence of a student from a teacher whose hidden states are in the batch.

    "distillation" is a sum over the tokens that have labels; their number is the denominator. Its
    `per_token(output, batch)` returns the sum, the detached divergence of each token `[B, S]`, and
    its addend of the denominator.

    Args:
        teacher: The teacher's output weight, or this rank's rows of it, the axis over which they
            are sharded (the student's), and the soft cap. Its `hidden` is not used: hidden states
            are `batch["teacher_hidden"]`, `[B, S, E]`.
        beta: 0 is the forward divergence KL(teacher, student), 1 the reverse one; between them is
            the generalized Jensen-Shannon divergence, whose mixture has `beta` of the teacher.
        temperature: The divisor of both logits; no factor compensates for it.
        top_k: The number of the teacher's words to compare at each token; all by default.
        weighted: Whether to weight tokens by `batch["weights"]`, floating `[B, S]`; then the
            denominator is their sum, `batch.count_weights`, reported as "distillation/count".
        chunk: The number of tokens whose logits exist at a time, as in `linear_cross_entropy`.

    Raises:
        ValueError: A number is out of range; later, the batch has no such hidden states, or student
            and teacher have different vocabularies.

    Examples:
        >>> loss = distillation(Hidden(torch.empty(0), torch.eye(4)), beta=0.5)
        >>> batch = {"labels": torch.tensor([[1, -100]]), "teacher_hidden": torch.ones(1, 2, 4)}
        >>> float(loss(Hidden(torch.ones(1, 2, 4), torch.eye(4)), batch)[0])
        0.0
    """
    _check_settings("distillation", beta, temperature, chunk)
    check_range("distillation", at_least=1, top_k=top_k)

    def make_compare(factors: Factors, columns: LabelColumns, axis: VocabularyAxis) -> OfLogits:
        hidden = columns["teacher_hidden"].detach()
        weight = teacher.weight.detach()
        num_words = len(factors.weight)
        if weight.shape != (num_words, hidden.shape[-1]):
            raise ValueError(
                f"distillation: the teacher's weight must have shape ({num_words}, "
                f"{hidden.shape[-1]}), a row for each word of the student, got "
                f"{tuple(weight.shape)}: both need one vocabulary"
            )
        teacher_factors = Factors(hidden.to(weight.dtype), weight, None, teacher.softcap)
        make_logits = make_logits_function(teacher_factors)
        buffers: list[Tensor] = []  # one for all chunks: the system clears fresh memory each time

        def compare(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            if not buffers:
                buffers.append(torch.empty_like(logits))
            scratch = buffers[0][: len(logits)]
            target = _scale_temperature_(make_logits(rows).to(logits.dtype), temperature)
            # The teacher's logits exist for these tokens only, like the student's.
            target = log_softmax_(target, axis, scratch=scratch)
            if top_k is None:
                return _compare_(logits, target, beta, axis, scratch=scratch)
            ids, logprobs = likeliest(target, top_k, axis)
            return _compare_top_(logits, ids, logprobs, beta, axis, gradient)

        return compare

    return _make_loss(
        "distillation",
        make_compare,
        temperature=temperature,
        weighted=weighted,
        chunk=chunk,
    )


def stored_distillation(
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    weighted: bool = False,
    chunk: int | None = None,
) -> NamedLoss:
    """Return the divergence of a student from the stored most likely words of a teacher.

    Args:
        beta: As in `distillation`.
        temperature: The divisor of the student's logits, equal to that of the teacher's stored
            log-probabilities.
        weighted: As in `distillation`.
        chunk: As in `distillation`.

    Returns:
        A loss like `distillation`, for a batch with "teacher_ids", integers `[B, S, k]`, distinct
        at each token, and "teacher_logprobs", `[B, S, k]`.

    Raises:
        ValueError: A number is out of range; later, the batch has no such columns.

    Examples:
        >>> batch = {"labels": torch.tensor([[1]]), "teacher_ids": torch.tensor([[[2, 0]]])}
        >>> batch["teacher_logprobs"] = torch.tensor([[[0.25, 0.25]]]).log()
        >>> hidden = Hidden(torch.zeros(1, 1, 8), torch.zeros(4, 8))
        >>> float(stored_distillation()(hidden, batch)[0])
        0.0
    """
    _check_settings("stored_distillation", beta, temperature, chunk)

    def make_compare(_: Factors, columns: LabelColumns, axis: VocabularyAxis) -> OfLogits:
        ids = columns["teacher_ids"].long()
        logprobs = columns["teacher_logprobs"]

        def compare(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            target = logprobs[rows].to(logits.dtype)
            return _compare_top_(logits, ids[rows], target, beta, axis, gradient)

        return compare

    return _make_loss(
        "stored_distillation",
        make_compare,
        temperature=temperature,
        weighted=weighted,
        chunk=chunk,
    )


def log_softmax_(logits: Tensor, axis: Axis, *, scratch: Tensor | None = None) -> Tensor:
    """Convert sharded logits `[T, V_r]` to log-probabilities in place.

    Args:
        logits: fp32 or fp64.
        axis: The axis over which the vocabulary is sharded.
        scratch: Memory for exponentials, of the same shape and dtype.

    Effects:
        Overwrites `logits`, which it returns, and `scratch`. Communicates: two all-reduces on
        `axis`, of a number per token each.

    Examples:
        >>> from trainkit.types import SOLO
        >>> log_softmax_(torch.zeros(1, 4), SOLO).exp()
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    logits.sub_(all_max(largest_logits(logits), axis))
    total = all_sum(torch.exp(logits, out=scratch).sum(-1, keepdim=True), axis)
    return logits.sub_(total.log()).clamp_(min=_LEAST)


def likeliest(logprobs: Tensor, k: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the k most likely words, `[T, k]`, and their log-probabilities, in descending order.

    Args:
        logprobs: `[T, V_r]`, this rank's shard.
        k: The number of words, at most the whole vocabulary.
        axis: The axis over which the vocabulary is sharded.

    Effects:
        Communicates on `axis`: all-gathers k ids and log-probabilities of each rank.

    Examples:
        >>> from trainkit.types import SOLO
        >>> likeliest(torch.tensor([[-3.0, -1.0, -2.0]]), 2, SOLO)
        (tensor([[1, 2]]), tensor([[-1., -2.]]))
    """
    axis = make_vocabulary_axis(logprobs, axis, dim=-1)
    best, ids = logprobs.topk(min(k, logprobs.shape[-1]))
    # All ranks send equally many; -inf sorts the padding of small shards to the end.
    padding = 0, min(k, axis.largest) - best.shape[-1]
    best = nn.functional.pad(best, padding, value=-torch.inf)
    ids = nn.functional.pad(ids + axis.first, padding)
    best = all_gather_replicated(best, axis, dim=-1)
    ids = all_gather_replicated(ids, axis, dim=-1)
    best, order = best.topk(min(k, axis.total))
    return ids.gather(-1, order), best


def _check_settings(where: str, beta: float, temperature: float, chunk: int | None) -> None:
    check_range(where, at_least=0, at_most=1, beta=beta)
    check_range(where, above=0, temperature=temperature)
    check_range(where, at_least=1, chunk=chunk)


def _make_loss(
    where: str,
    make_compare: Callable[[Factors, LabelColumns, VocabularyAxis], OfLogits],
    *,
    temperature: float,
    weighted: bool,
    chunk: int | None,
) -> NamedLoss:
    """Make a loss of divergences; `compare` overwrites the logits with their gradient."""

    def per_token(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        factors, labels, axis = read_output(where, output, batch)
        ignored = labels.flatten() == IGNORED_LABEL
        columns = LabelColumns(select_columns(batch, labels), ignored)
        weights = columns["weights"] if weighted else (~ignored).long()
        compare = make_compare(factors, columns, axis)

        def compute(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            values = compare(_scale_temperature_(logits, temperature), rows, gradient)
            chunk_weights = weights[rows].to(values.dtype)
            # Filled, and not multiplied: a weight outside of the loss may be NaN.
            values = (chunk_weights * values).masked_fill(ignored[rows], 0)
            if gradient:  # of the logits before their division by the temperature
                _scale_temperature_(logits.mul_(chunk_weights.unsqueeze(-1)), temperature)
            # The first column is summed and differentiated, the second is reported per token.
            return torch.stack([values, values], dim=-1)

        total, values = linear_in_chunks(factors, compute, axis=axis, chunk=chunk)
        return total, values.view(labels.shape), weights.view(labels.shape)

    names = ("distillation", "distillation/count") if weighted else ("distillation",)

    @declare_terms(*names, per_token=per_token)
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        total, values, weights = per_token(output, batch)
        return total, dict(zip(names, (values.sum(), weights.sum()), strict=False))

    return loss


def _scale_temperature_(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits.div_(temperature)


def _compare_(
    logits: Tensor,
    target: Tensor,
    beta: float,
    axis: Axis,
    *,
    scratch: Tensor,
) -> Tensor:
    """Return the divergence of each token from log-probabilities of all words.

    For a divergence D of probabilities q = softmax(logits), the gradient of the logits is q (g -
    sum q g), where g is dD/dq up to a constant.
    """

    def sum_words(weights: Tensor, values: Tensor) -> Tensor:
        return all_sum(torch.einsum("tv,tv->t", weights, values), axis)

    student = log_softmax_(logits, axis, scratch=scratch)
    p = torch.exp(target, out=scratch)
    if beta == 0:  # KL(p, q), whose gradient is q - p: no further memory
        values = sum_words(p, target.sub_(student))
        logits.exp_().sub_(p)
        return values
    q = student.exp()
    if beta == 1:  # KL(q, p)
        g = student - target
        values = mean = sum_words(q, g)
    else:  # the mixture m = beta p + (1 - beta) q: beta KL(p, m) + (1 - beta) KL(q, m)
        mixed = (beta * p).add_(q, alpha=1 - beta)
        mixed = mixed.clamp_(min=torch.finfo(q.dtype).tiny).log_()
        g = student - mixed
        mean = sum_words(q, g)
        values = beta * sum_words(p, target - mixed) + (1 - beta) * mean
        g.mul_(1 - beta)
        mean = (1 - beta) * mean
    logits.copy_(q.mul_(g.sub_(mean.unsqueeze(-1))))
    return values


def _compare_top_(  # noqa: PLR0917 (two tensors of the teacher)
    logits: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    beta: float,
    axis: VocabularyAxis,
    gradient: bool,
) -> Tensor:
    """Return the divergence of each token from the log-probabilities of k words and of the rest."""
    index, own = own_words(ids, logits.shape[-1], axis)
    picked = all_sum(pick_own(logits, index, own), axis)
    # Exclude the k words. Words of other ranks have index 0, where a minimum with inf does nothing.
    excluded = torch.where(own, -torch.inf, torch.inf).to(logits.dtype)
    if logits.shape[-1]:
        logits.scatter_reduce_(-1, index, excluded, "amin")
    largest = all_max(largest_logits(logits), axis).clamp(min=_LEAST)
    total = all_sum(logits.sub_(largest).exp_().sum(-1, keepdim=True), axis)
    # The k words, and one that stands for the rest: its logit is the logsumexp of all others.
    rest_score = (total.log() + largest).clamp(min=_LEAST)
    scores = torch.cat([picked, rest_score], dim=-1)
    scores.requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        student = scores
        teacher = logprobs
        if ids.shape[-1] == axis.total:  # there is no rest
            student = scores[:, :-1]
        else:
            # Stored log-probabilities are rounded, and may sum to more than 1.
            eps = torch.finfo(logprobs.dtype).eps
            rest = 1 - logprobs.exp().sum(-1, keepdim=True)
            rest = rest.clamp(min=eps).log()
            teacher = torch.cat([logprobs, rest], dim=-1)
        values = _compute_divergence(student.log_softmax(-1), teacher.clamp(min=_LEAST), beta)
        total_divergence = values.sum()
    if gradient:
        (d_scores,) = torch.autograd.grad(total_divergence, scores)
        # By the chain rule: `logits` holds exp(logit - largest), 0 at the k words, so that divided
        # by its sum it is the share of each other word in the gradient of the rest.
        smallest = torch.finfo(total.dtype).tiny
        logits.mul_(d_scores[:, -1:] / total.clamp(min=smallest))
        add_to_own_(logits, index, d_scores[:, :-1] * own)
    return values.detach()


def _compute_divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalized divergence of log-probabilities `[T, K]`, differentiable."""
    student = student.clamp(min=_LEAST)
    q, p = student.exp(), teacher.exp()
    if beta == 0:
        return (p * (teacher - student)).sum(-1)
    if beta == 1:
        return (q * (student - teacher)).sum(-1)
    # As in `_compare_`, with the mixture m: beta KL(p, m) + (1 - beta) KL(q, m).
    mixed = (beta * p + (1 - beta) * q).clamp(min=torch.finfo(q.dtype).tiny).log()
    from_teacher = beta * p * (teacher - mixed)
    from_student = (1 - beta) * q * (student - mixed)
    return (from_teacher + from_student).sum(-1)
