"""Preference losses: what a pair of answers costs, as a function of their log-probabilities.

Of the documents of a row, 2j is the chosen answer and 2j + 1 the rejected one (`chat.pack_pairs`),
and only what has a label is the answer. The denominator is the number of pairs of the global batch,
`batch.count_documents(microbatches, halves=True)`: a pair is counted on the rank where its chosen
answer begins, so that it is one pair in every layout. A row with an answer that is in no pair is
refused on a CPU; elsewhere its loss is NaN, as looking would wait for the device. Under ring and
Ulysses the tokens of an answer lie on several ranks, of which `axis` is told: `ps.sp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainkit.batch.denominators import can_read_values
from trainkit.losses.logits import read_field
from trainkit.losses.terms import NamedLoss, Terms, declare_terms, output_logprobs
from trainkit.losses.weights import add_column
from trainkit.post.objectives.sequences import Documents, count_names, counted, sum_documents
from trainkit.types import SOLO, Axis, check_range

OfPair = Callable[[Tensor, Tensor], Tensor]
"""From the scores of the chosen and of the rejected answers to what each pair costs."""


def dpo(
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
    axis: Axis = SOLO,
) -> NamedLoss:
    """Return direct preference optimization: -log sigmoid of the margin of two log-ratios.

    Beside "preference" it reports the "margin" between the rewards of both answers, the "accuracy"
    (the share of pairs with a margin above 0), "chosen_reward" and "rejected_reward", each a sum
    over pairs with its "/count". A reward is `beta` times the log-ratio of the whole answer.

    Args:
        beta: What the log-ratios are multiplied by, above 0.
        label_smoothing: The chance that a pair is the wrong way round (conservative DPO), below a
            half.
        reference_free: Whether the reference takes all answers for equally likely; else its
            log-probability of each label is `batch["reference_logprobs"]`.
        axis: The ranks over which the tokens of a row are dealt.

    Raises:
        ValueError: A number is out of its range.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Rafailov et al., "Direct preference optimization" (2023); Mitchell, "A note on DPO with
        noisy preferences" (2023), for the label smoothing.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, 2, 1, 3]])}
        >>> batch["document_ids"] = torch.tensor([[0, 0, 1, 1]])
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 1]])
        >>> batch["reference_logprobs"] = torch.full((1, 4), -1.0)
        >>> total, terms = dpo()(torch.zeros(1, 4, 5), batch)
        >>> float(total), int(terms["preference/count"])  # log 2
        (0.69..., 1)
    """
    check_range("dpo", above=0, beta=beta)
    check_range("dpo", at_least=0, below=0.5, label_smoothing=label_smoothing)

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = beta * (chosen - rejected)
        smooth = label_smoothing
        return -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)

    return _of_pairs(of_pair, "sum", reference=not reference_free, scale=beta, axis=axis)


def ipo(beta: float = 0.1, *, axis: Axis = SOLO) -> NamedLoss:
    """Return identity preference optimization: the squared distance of a margin from 1 / (2 beta).

    The log-ratio of an answer is the mean over its tokens, as its authors compute it. It reports
    what `dpo` does.

    Args:
        beta: The strength of the regularization, tau in the paper; above 0.
        axis: The ranks over which the tokens of a row are dealt.

    Raises:
        ValueError: A number is out of its range.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Azar et al., "A general theoretical paradigm to understand learning from human preferences"
        (2023).

    Examples:
        >>> ipo().terms[:2]
        ('preference', 'preference/count')
    """
    check_range("ipo", above=0, beta=beta)

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * beta)).square()

    return _of_pairs(of_pair, "mean", reference=True, scale=beta, axis=axis)


def simpo(beta: float = 2.0, *, gamma: float = 1.0, axis: Axis = SOLO) -> NamedLoss:
    """Return simple preference optimization: means of log-probabilities, and no reference.

    A pair of which one answer has no label, and so no mean, costs nothing.

    Args:
        beta: What the means over the tokens of an answer are multiplied by, above 0: its reward.
        gamma: The margin by which the chosen reward shall be above the rejected one, at least 0.
        axis: The ranks over which the tokens of a row are dealt.

    Raises:
        ValueError: A number is out of its range.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Meng et al., "SimPO: simple preference optimization with a reference-free reward" (2024).

    Examples:
        >>> simpo().terms[2:4]
        ('margin', 'margin/count')
    """
    check_range("simpo", above=0, beta=beta)
    check_range("simpo", at_least=0, gamma=gamma)

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(beta * (chosen - rejected) - gamma)

    return _of_pairs(of_pair, "mean", reference=False, scale=beta, axis=axis)


def orpo(weight: float = 0.1, *, axis: Axis = SOLO) -> NamedLoss:
    """Return odds ratio preference optimization: the chosen answer's own loss, and the odds.

    A pair costs the mean cross entropy of the chosen answer's tokens, and `weight` times -log
    sigmoid of the log of the odds ratio; nothing if one of its answers has no label. It needs no
    reference.

    Args:
        weight: How much the odds count, lambda in the paper; at least 0.
        axis: The ranks over which the tokens of a row are dealt.

    Raises:
        ValueError: A number is out of its range.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Hong et al., "ORPO: monolithic preference optimization without reference model" (2024).

    Examples:
        >>> orpo().terms[4:6]
        ('accuracy', 'accuracy/count')
    """
    check_range("orpo", at_least=0, weight=weight)

    def log_odds(means: Tensor) -> Tensor:
        below = means.clamp(max=-torch.finfo(means.dtype).eps)  # the odds of 1 are infinite
        return below - torch.log(-torch.expm1(below))

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -chosen - weight * logsigmoid(log_odds(chosen) - log_odds(rejected))

    return _of_pairs(of_pair, "mean", reference=False, scale=weight, axis=axis)


def kto(
    beta: float = 0.1,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    axis: Axis = SOLO,
) -> NamedLoss:
    """Return Kahneman-Tversky optimization: answers that are good or bad, each by itself.

    A document's flag is `batch["desirable"]`, 1 or 0 at each of its labels. What it is compared
    with, the reference point of the step, is `batch["kl"]` at each label, and no function of this
    microbatch alone: the mean log-ratio of answers to prompts that are not theirs; see `log_ratio`
    and `add_reference_point`. Below 0 it counts as 0. The denominator is `batch.count_documents`.

    Beside "preference" it reports "desirable_reward" and "undesirable_reward", `beta` times the
    log-ratio, over the documents of either kind.

    Args:
        beta: What log-ratios are multiplied by, above 0.
        desirable_weight: What a good answer counts, at least 0.
        undesirable_weight: What a bad answer counts, at least 0.
        axis: The ranks over which the tokens of a row are dealt.

    Raises:
        ValueError: A number is out of its range.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Ethayarajh et al., "KTO: model alignment as prospect theoretic optimization" (2024).

    Examples:
        >>> kto().terms[:2]
        ('preference', 'preference/count')
    """
    check_range("kto", above=0, beta=beta)
    check_range(
        "kto",
        at_least=0,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    names = count_names("preference", "desirable_reward", "undesirable_reward")

    @declare_terms(*names)
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        found = _documents("kto", output, batch, "desirable", "kl", axis=axis)
        ratio, good = found.sums[_SCORES], found.means("desirable") > 0.5
        gain = beta * (ratio - found.means("kl").clamp(min=0))
        weights = torch.where(good, desirable_weight, undesirable_weight)
        cost = weights * torch.sigmoid(torch.where(good, -gain, gain))
        terms = counted({"preference": cost}, found.begun)
        flagged = found.begun & (found.tokens > 0)
        terms |= counted({"desirable_reward": beta * ratio}, flagged & good)
        terms |= counted({"undesirable_reward": beta * ratio}, flagged & ~good)
        return torch.where(found.begun, cost, 0).sum(), terms

    return loss


def log_ratio(*, axis: Axis = SOLO) -> NamedLoss:
    """Return the log-ratios of documents to the reference, summed, as the terms of a `Loss`.

    Of rows whose answers belong to other prompts (`chat.mismatch_answers`) `evaluate` gives, as
    "kl", the mean that `add_reference_point` gives to `kto`: one number in every layout.

    Args:
        axis: The ranks over which the tokens of a row are dealt.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    Examples:
        >>> log_ratio().terms
        ('kl', 'kl/count')
    """

    @declare_terms(*count_names("kl"))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        found = _documents("log_ratio", output, batch, axis=axis)
        ratio = found.sums[_SCORES]
        return torch.where(found.begun, ratio, 0).sum(), counted({"kl": ratio}, found.begun)

    return loss


def add_reference_point(
    microbatches: Iterable[Mapping[str, Any]], kl: Tensor
) -> list[Mapping[str, Any]]:
    """Return microbatches with what `kto` compares with as the column "kl": at least 0, detached.

    Args:
        microbatches: Those of a step, with "labels".
        kl: The mean log-ratio of mismatched answers over the whole step, floating, 0-d.

    Returns:
        The same with "kl", fp32 `[B, S]`.

    References:
        Ethayarajh et al. 2024, section 4.1: the reference point z0, which no gradient goes through.

    Examples:
        >>> [batch] = add_reference_point([{"labels": torch.zeros(1, 2)}], torch.tensor(-0.5))
        >>> batch["kl"]
        tensor([[0., 0.]])
    """
    point = kl.detach().float().clamp(min=0)
    where = "add_reference_point"
    labels = [(batch, read_field(where, batch, "labels")) for batch in microbatches]
    return [add_column(batch, "kl", point.to(x.device).expand(x.shape)) for batch, x in labels]


_SCORES = "scores"


def _documents(
    where: str,
    output: Any,
    batch: Mapping[str, Any],
    *names: str,
    reference: bool = True,
    axis: Axis,
) -> Documents:
    """Return documents with columns, and their log-ratios or log-probabilities as `_SCORES`."""
    logprobs, columns = output_logprobs(where, output, batch)
    own = {name: columns[name].view_as(logprobs) for name in names}
    # Token by token: what is left of two sums over a long answer would have lost digits.
    scores = logprobs - columns["reference_logprobs"].view_as(logprobs) if reference else logprobs
    return sum_documents(batch, {_SCORES: scores, **own}, axis=axis, where=where)


def _of_pairs(
    of_pair: OfPair,
    over_tokens: Literal["sum", "mean"],
    *,
    reference: bool,
    scale: float,
    axis: Axis,
) -> NamedLoss:
    """Return a loss of pairs; rewards are `scale` times the scores of documents."""
    rewards = ("margin", "accuracy", "chosen_reward", "rejected_reward")

    @declare_terms(*count_names("preference", *rewards))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        found = _documents("preference", output, batch, reference=reference, axis=axis)
        scores = found.means(_SCORES) if over_tokens == "mean" else found.sums[_SCORES]
        chosen, rejected = _in_pairs(scores)
        broken, begun = _broken_pairs(found), found.begun[:, ::2]
        if over_tokens == "mean" and not reference:  # the mean of nothing is no log-probability
            answered, other = _in_pairs(found.tokens > 0)
            begun = begun & (broken | answered & other)
        cost = of_pair(chosen, rejected) * torch.where(broken, torch.nan, 1)
        margin = scale * (chosen - rejected)
        values = [margin, (margin > 0).to(margin.dtype), scale * chosen, scale * rejected]
        reported = {"preference": cost, **dict(zip(rewards, values, strict=True))}
        return torch.where(begun, cost, 0).sum(), counted(reported, begun)

    return loss


def _in_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what belongs to chosen and to rejected answers, `[B, N / 2]` each."""
    return x[:, ::2], x[:, 1::2]


def _broken_pairs(found: Documents) -> Tensor:
    """Return which pairs have one answer alone, bool `[B, N / 2]`; where no sync is made, raise."""
    chosen, rejected = _in_pairs(found.known)
    broken = chosen != rejected
    if can_read_values(broken) and broken.any():
        row, pair = broken.nonzero()[0].tolist()
        what = f"document {2 * pair} of row {row} is the last one, and no pair"
        raise ValueError(f"preference: {what}; chat.pack_pairs keeps both answers in a row")
    return broken
