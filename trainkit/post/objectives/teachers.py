"""Distillation: how far a student's next-token distributions are from a teacher's.

Neither's whole logits exist: those of some tokens at a time are made of hidden states and an output
weight, and compared while they are there, gradient included. Where only the teacher's k likeliest
words are known, all others count as one word, so that what is compared are distributions still.

References:
    Hinton et al., "Distilling the knowledge in a neural network" (2015); Agarwal et al., "On-policy
    distillation of language models" (2023), GKD, for the generalized divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.collectives import all_gather_replicated, all_max, all_sum
from trainkit.losses.linear import (
    Factors,
    LabelColumns,
    OfLogits,
    linear_in_chunks,
    logits_maker,
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

_LEAST = -1e30  # stands for the logarithm of 0, which times a probability of 0 would be NaN


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

    "distillation" is a sum over the tokens that have labels, whose number is the denominator. Its
    `per_token(output, batch)` gives the sum, each token's part of it, detached `[B, S]`, and what
    it adds to the denominator.

    Args:
        teacher: Its output weight, or this rank's rows of it, the axis over which they are cut (the
            student's), and its soft cap. What stands here for hidden states is not looked at: they
            are `batch["teacher_hidden"]`, `[B, S, E]`.
        beta: 0 is the forward divergence KL(teacher, student), 1 the reverse one; between them is
            the generalized Jensen-Shannon divergence, whose mixture has `beta` of the teacher.
        temperature: What the logits of both are divided by; no factor makes up for it.
        top_k: How many of the teacher's words are told apart at each token; all by default.
        weighted: Whether a token counts `batch["weights"]`, floating `[B, S]`; then the denominator
            is their sum, `batch.count_weights`, which is reported as "distillation/count".
        chunk: Tokens whose logits exist at a time, as in `linear_cross_entropy`.

    Raises:
        ValueError: A number is out of its range; later, the batch has no such hidden states, or
            student and teacher have other vocabularies.

    Examples:
        >>> loss = distillation(Hidden(torch.empty(0), torch.eye(4)), beta=0.5)
        >>> batch = {"labels": torch.tensor([[1, -100]]), "teacher_hidden": torch.ones(1, 2, 4)}
        >>> float(loss(Hidden(torch.ones(1, 2, 4), torch.eye(4)), batch)[0])
        0.0
    """
    _check("distillation", beta, temperature, chunk)
    check_range("distillation", at_least=1, top_k=top_k)

    def bind_compare(factors: Factors, columns: LabelColumns, axis: VocabularyAxis) -> OfLogits:
        hidden, weight = columns["teacher_hidden"].detach(), teacher.weight.detach()
        _check_teacher(hidden, weight, words=len(factors.weight))
        make = logits_maker(Factors(hidden.to(weight.dtype), weight, None, teacher.softcap))
        scratch = list[Tensor]()  # fresh memory would be cleared by the system for each chunk

        def compare(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            if not scratch:
                scratch.append(torch.empty_like(logits))
            free = scratch[0][: len(logits)]
            wanted = _divided_(make(rows).to(logits.dtype), temperature)
            wanted = log_softmax_(wanted, axis, scratch=free)
            if top_k is None:
                return _compare_(logits, wanted, beta, axis, scratch=free)
            ids, logprobs = likeliest(wanted, top_k, axis)
            return _compare_top_(logits, (ids, logprobs), beta, axis, gradient)

        return compare

    return _make_loss(
        "distillation", bind_compare, temperature=temperature, weighted=weighted, chunk=chunk
    )


def stored_distillation(
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    weighted: bool = False,
    chunk: int | None = None,
) -> NamedLoss:
    """Return the divergence from a teacher of which the batch holds the likeliest words.

    Args:
        beta: As in `distillation`.
        temperature: What the student's logits are divided by: the one at which the teacher's
            log-probabilities were taken.
        weighted: As in `distillation`.
        chunk: As in `distillation`.

    Returns:
        A loss as `distillation` is, of a batch with "teacher_ids", integers `[B, S, k]`, different
        words each, and "teacher_logprobs", `[B, S, k]`.

    Raises:
        ValueError: A number is out of its range; later, the batch has no such columns.

    Examples:
        >>> batch = {"labels": torch.tensor([[1]]), "teacher_ids": torch.tensor([[[2, 0]]])}
        >>> batch["teacher_logprobs"] = torch.tensor([[[0.25, 0.25]]]).log()
        >>> hidden = Hidden(torch.zeros(1, 1, 8), torch.zeros(4, 8))
        >>> float(stored_distillation()(hidden, batch)[0])
        0.0
    """
    _check("stored_distillation", beta, temperature, chunk)

    def bind_compare(_: Factors, columns: LabelColumns, axis: VocabularyAxis) -> OfLogits:
        ids, logprobs = columns["teacher_ids"].long(), columns["teacher_logprobs"]

        def compare(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            own = logprobs[rows].to(logits.dtype)
            return _compare_top_(logits, (ids[rows], own), beta, axis, gradient)

        return compare

    return _make_loss(
        "stored_distillation", bind_compare, temperature=temperature, weighted=weighted, chunk=chunk
    )


def log_softmax_(logits: Tensor, axis: Axis, *, scratch: Tensor | None = None) -> Tensor:
    """Turn logits `[T, V_r]` of this rank's words into log-probabilities.

    Args:
        logits: fp32 or fp64.
        axis: The axis over which the vocabulary is cut.
        scratch: What exponentials may be written into, of the same shape and dtype.

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
    """Return the k likeliest of all words, `[T, k]`, and their log-probabilities, likeliest first.

    Args:
        logprobs: `[T, V_r]`, of this rank's words.
        k: How many; of a smaller vocabulary all.
        axis: The axis over which the vocabulary is cut.

    Effects:
        Communicates on `axis`: k words and numbers of each rank are gathered.

    Examples:
        >>> from trainkit.types import SOLO
        >>> likeliest(torch.tensor([[-3.0, -1.0, -2.0]]), 2, SOLO)
        (tensor([[1, 2]]), tensor([[-1., -2.]]))
    """
    axis = make_vocabulary_axis(logprobs, axis, dim=-1)
    words, sent = logprobs.shape[-1], min(k, axis.largest)
    best, ids = logprobs.topk(min(k, words))
    missing = 0, sent - best.shape[-1]  # every rank sends as many; these are the last of all
    best = all_gather_replicated(nn.functional.pad(best, missing, value=-torch.inf), axis, dim=-1)
    ids = all_gather_replicated(nn.functional.pad(ids + axis.first, missing), axis, dim=-1)
    best, places = best.topk(min(k, axis.total))
    return ids.gather(-1, places), best


def _check(where: str, beta: float, temperature: float, chunk: int | None) -> None:
    check_range(where, at_least=0, at_most=1, beta=beta)
    check_range(where, above=0, temperature=temperature)
    check_range(where, at_least=1, chunk=chunk)


def _check_teacher(hidden: Tensor, weight: Tensor, *, words: int) -> None:
    if weight.shape != (words, hidden.shape[-1]):
        want = f"({words}, {hidden.shape[-1]}), a row for each word of the student"
        got = f"got {tuple(weight.shape)}: both need one vocabulary"
        raise ValueError(f"distillation: the teacher's weight must have shape {want}, {got}")


def _make_loss(
    where: str,
    bind_compare: Callable[[Factors, LabelColumns, VocabularyAxis], OfLogits],
    *,
    temperature: float,
    weighted: bool,
    chunk: int | None,
) -> NamedLoss:
    """Return a loss of divergences, of which `compare` leaves the gradient in the logits."""

    def per_token(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        factors, labels, axis = read_output(where, output, batch)
        ignored = labels.flatten() == IGNORED_LABEL
        columns = LabelColumns(select_columns(batch, labels), ignored)
        weights = columns["weights"] if weighted else (~ignored).long()
        compare = bind_compare(factors, columns, axis)

        def compute(logits: Tensor, rows: slice, gradient: bool) -> Tensor:
            values = compare(_divided_(logits, temperature), rows, gradient)
            own = weights[rows].to(values.dtype)
            values = (own * values).masked_fill(ignored[rows], 0)
            if gradient:
                _divided_(logits.mul_(own.unsqueeze(-1)), temperature)
            return torch.stack([values, values], dim=-1)

        total, values = linear_in_chunks(factors, compute, axis=axis, chunk=chunk)
        return total, values.view(labels.shape), weights.view(labels.shape)

    names = ("distillation", "distillation/count") if weighted else ("distillation",)

    @declare_terms(*names, per_token=per_token)
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        total, values, weights = per_token(output, batch)
        return total, dict(zip(names, (values.sum(), weights.sum()), strict=False))

    return loss


def _divided_(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits.div_(temperature)


def _compare_(
    logits: Tensor, wanted: Tensor, beta: float, axis: Axis, *, scratch: Tensor
) -> Tensor:
    """Return the divergence of each token from log-probabilities of all words.

    For a divergence D of probabilities q that are a softmax, the gradient of its logits is q (g -
    sum q g), where g is dD/dq up to what is equal for all words.
    """
    own = log_softmax_(logits, axis, scratch=scratch)
    sum_of, p = partial(_sum_of_words, axis=axis), torch.exp(wanted, out=scratch)
    if beta == 0:
        values = sum_of(p, wanted.sub_(own))
        logits.exp_().sub_(p)
        return values
    q = own.exp()
    if beta == 1:
        g = own - wanted
        values = mean = sum_of(q, g)
    else:
        mixed = (beta * p).add_(q, alpha=1 - beta).clamp_(min=torch.finfo(q.dtype).tiny).log_()
        g = own - mixed
        mean = sum_of(q, g)
        values = beta * sum_of(p, wanted - mixed) + (1 - beta) * mean
        g, mean = g.mul_(1 - beta), (1 - beta) * mean
    logits.copy_(q.mul_(g.sub_(mean.unsqueeze(-1))))
    return values


def _sum_of_words(weights: Tensor, values: Tensor, *, axis: Axis) -> Tensor:
    return all_sum(torch.einsum("tv,tv->t", weights, values), axis)


def _compare_top_(
    logits: Tensor,
    known: tuple[Tensor, Tensor],
    beta: float,
    axis: VocabularyAxis,
    gradient: bool,
) -> Tensor:
    """Return the divergence of each token from k words' log-probabilities and one for the rest."""
    ids, logprobs = known
    index, own = own_words(ids, logits.shape[-1], axis)
    picked = all_sum(pick_own(logits, index, own), axis)
    # What others own points at word 0, which stays as it is: it is no -inf, and so no minimum.
    taken = torch.where(own, -torch.inf, torch.inf).to(logits.dtype)
    if logits.shape[-1]:
        logits.scatter_reduce_(-1, index, taken, "amin")
    largest = all_max(largest_logits(logits), axis).clamp(min=_LEAST)
    total = all_sum(logits.sub_(largest).exp_().sum(-1, keepdim=True), axis)
    scores = torch.cat([picked, (total.log() + largest).clamp(min=_LEAST)], dim=-1)
    scores.requires_grad_(gradient)
    all_words = ids.shape[-1] == axis.total
    with torch.set_grad_enabled(gradient):
        student, teacher = scores, logprobs
        if all_words:
            student = scores[:, :-1]
        else:
            least = torch.finfo(logprobs.dtype).eps
            rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=least).log()
            teacher = torch.cat([logprobs, rest], dim=-1)
        values = _divergence(student.log_softmax(-1), teacher.clamp(min=_LEAST), beta)
        whole = values.sum()
    if gradient:
        (d_scores,) = torch.autograd.grad(whole, scores)
        logits.mul_(d_scores[:, -1:] / total.clamp(min=torch.finfo(total.dtype).tiny))
        add_to_own_(logits, index, d_scores[:, :-1] * own)
    return values.detach()


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalized divergence of log-probabilities `[T, K]`, differentiable."""
    student = student.clamp(min=_LEAST)
    q, p = student.exp(), teacher.exp()
    if beta == 0:
        return (p * (teacher - student)).sum(-1)
    if beta == 1:
        return (q * (student - teacher)).sum(-1)
    mixed = (beta * p + (1 - beta) * q).clamp(min=torch.finfo(q.dtype).tiny).log()
    return (beta * p * (teacher - mixed) + (1 - beta) * q * (student - mixed)).sum(-1)
