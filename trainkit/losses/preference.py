"""Preference losses: what a pair of answers costs, as a function of their log-probabilities.

Of the documents of a row, 2j is the chosen answer and 2j + 1 the rejected one (`chat.pack_pairs`),
and only what has a label is the answer. The denominator is the number of pairs of the global batch,
`batch.count_documents(microbatches, halves=True)`: a pair is counted on the rank where its chosen
answer begins, so that it is one pair in every layout. Under ring and Ulysses the tokens of an
answer lie on several ranks, of which `axis` is told: `ps.sp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainkit.losses.sequences import Documents, count_names, counted, sum_documents
from trainkit.losses.terms import NamedLoss, Terms, output_logprobs, with_terms
from trainkit.types import SOLO, Axis

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
        beta: What the log-ratios are multiplied by.
        label_smoothing: The chance that a pair is the wrong way round (conservative DPO).
        reference_free: Whether the reference takes all answers for equally likely; else its
            log-probability of each label is `batch["reference_logprobs"]`.
        axis: The ranks over which the tokens of a row are dealt.

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

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = beta * (chosen - rejected)
        smooth = label_smoothing
        return -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)

    score = _sums if reference_free else _log_ratios
    return _of_pairs(of_pair, score, scale=beta, axis=axis)


def ipo(beta: float = 0.1, *, axis: Axis = SOLO) -> NamedLoss:
    """Return identity preference optimization: the squared distance of a margin from 1 / (2 beta).

    The log-ratio of an answer is the mean over its tokens, as its authors compute it. It reports
    what `dpo` does.

    Args:
        beta: The strength of the regularization, tau in the paper.
        axis: The ranks over which the tokens of a row are dealt.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Azar et al., "A general theoretical paradigm to understand learning from human preferences"
        (2023).

    Examples:
        >>> ipo().terms[:2]
        ('preference', 'preference/count')
    """

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * beta)).square()

    return _of_pairs(of_pair, _mean_log_ratios, scale=beta, axis=axis)


def simpo(beta: float = 2.0, *, gamma: float = 1.0, axis: Axis = SOLO) -> NamedLoss:
    """Return simple preference optimization: means of log-probabilities, and no reference.

    Args:
        beta: What the means over the tokens of an answer are multiplied by: its reward.
        gamma: The margin by which the chosen reward shall be above the rejected one.
        axis: The ranks over which the tokens of a row are dealt.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Meng et al., "SimPO: simple preference optimization with a reference-free reward" (2024).

    Examples:
        >>> simpo().terms[2:4]
        ('margin', 'margin/count')
    """

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(beta * (chosen - rejected) - gamma)

    return _of_pairs(of_pair, _means, scale=beta, axis=axis)


def orpo(weight: float = 0.1, *, axis: Axis = SOLO) -> NamedLoss:
    """Return odds ratio preference optimization: the chosen answer's own loss, and the odds.

    A pair costs the mean cross entropy of the chosen answer's tokens, and `weight` times -log
    sigmoid of the log of the odds ratio. It needs no reference.

    Args:
        weight: How much the odds count, lambda in the paper.
        axis: The ranks over which the tokens of a row are dealt.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Hong et al., "ORPO: monolithic preference optimization without reference model" (2024).

    Examples:
        >>> orpo().terms[4:6]
        ('accuracy', 'accuracy/count')
    """

    def log_odds(means: Tensor) -> Tensor:
        below = means.clamp(max=-torch.finfo(means.dtype).eps)  # an answer without tokens has 0
        return below - torch.log(-torch.expm1(below))

    def of_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -chosen - weight * logsigmoid(log_odds(chosen) - log_odds(rejected))

    return _of_pairs(of_pair, _means, scale=weight, axis=axis)


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
    microbatch alone: the mean log-ratio of answers to prompts that are not theirs, at least 0; see
    `log_ratio`. The denominator is `batch.count_documents`.

    Beside "preference" it reports "desirable_reward" and "undesirable_reward", `beta` times the
    log-ratio, over the documents of either kind.

    Args:
        beta: What log-ratios are multiplied by.
        desirable_weight: What a good answer counts.
        undesirable_weight: What a bad answer counts.
        axis: The ranks over which the tokens of a row are dealt.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    References:
        Ethayarajh et al., "KTO: model alignment as prospect theoretic optimization" (2024).

    Examples:
        >>> kto().terms[:2]
        ('preference', 'preference/count')
    """
    names = count_names("preference", "desirable_reward", "undesirable_reward")

    @with_terms(*names)
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        found = _documents("kto", output, batch, ("desirable", "kl", _REFERENCE), axis)
        ratio, good = _log_ratios(found), found.means("desirable") > 0.5
        gain = beta * (ratio - found.means("kl"))
        weights = torch.where(good, desirable_weight, undesirable_weight)
        cost = weights * torch.sigmoid(torch.where(good, -gain, gain))
        terms = counted({"preference": cost}, found.begun)
        terms |= counted({"desirable_reward": beta * ratio}, found.begun & good)
        terms |= counted({"undesirable_reward": beta * ratio}, found.begun & ~good)
        return torch.where(found.begun, cost, 0).sum(), terms

    return loss


def log_ratio(*, axis: Axis = SOLO) -> NamedLoss:
    """Return the log-ratios of documents to the reference, summed, as the terms of a `Loss`.

    Of rows whose answers belong to other prompts, `forward_only` and a sum over the `loss` axis
    give what `kto` compares with: max(0, kl / (kl/count)).

    Args:
        axis: The ranks over which the tokens of a row are dealt.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    Examples:
        >>> log_ratio().terms
        ('kl', 'kl/count')
    """

    @with_terms(*count_names("kl"))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        found = _documents("log_ratio", output, batch, (_REFERENCE,), axis)
        ratio = _log_ratios(found)
        return torch.where(found.begun, ratio, 0).sum(), counted({"kl": ratio}, found.begun)

    return loss


_REFERENCE = "reference_logprobs"


def _log_ratios(found: Documents) -> Tensor:
    return found.sums["logprobs"] - found.sums[_REFERENCE]


def _mean_log_ratios(found: Documents) -> Tensor:
    return found.means("logprobs") - found.means(_REFERENCE)


def _sums(found: Documents) -> Tensor:
    return found.sums["logprobs"]


def _means(found: Documents) -> Tensor:
    return found.means("logprobs")


def _documents(
    where: str, output: Any, batch: Mapping[str, Any], names: tuple[str, ...], axis: Axis
) -> Documents:
    logprobs, columns = output_logprobs(where, output, batch)
    own = {name: columns[name].view_as(logprobs) for name in names}
    return sum_documents(batch, {"logprobs": logprobs, **own}, axis=axis)


def _of_pairs(
    of_pair: OfPair, score: Callable[[Documents], Tensor], *, scale: float, axis: Axis
) -> NamedLoss:
    """Return a loss of pairs; rewards are `scale` times the scores of documents."""
    needed = (_REFERENCE,) if score in {_log_ratios, _mean_log_ratios} else ()
    rewards = ("margin", "accuracy", "chosen_reward", "rejected_reward")

    @with_terms(*count_names("preference", *rewards))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        found = _documents("preference", output, batch, needed, axis)
        chosen, rejected = score(found).unflatten(1, (-1, 2)).unbind(-1)
        begun = found.begun[:, ::2]
        cost = of_pair(chosen, rejected)
        margin = scale * (chosen - rejected)
        values = [margin, (margin > 0).to(margin.dtype), scale * chosen, scale * rejected]
        reported = {"preference": cost, **dict(zip(rewards, values, strict=True))}
        return torch.where(begun, cost, 0).sum(), counted(reported, begun)

    return loss
