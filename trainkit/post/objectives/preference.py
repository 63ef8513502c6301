"""Preference losses: functions of the log-probabilities of two answers to a prompt.

Document 2j of a row is the chosen answer and 2j + 1 the rejected one (`chat.pack_pairs`); only
tokens with a label belong to the answer. The denominator is the number of pairs of the global
batch, `batch.count_documents(microbatches, halves=True)`. A pair counts on the rank where its
chosen answer starts, so that it is one pair in every layout. An answer without its pair raises
ValueError on a CPU; on other devices, where a check would need a host sync, the loss is NaN. With
ring and Ulysses the tokens of an answer are on several ranks; pass `axis=ps.sp`.
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
from trainkit.post.objectives.sequences import (
    Documents,
    count_names,
    sum_documents,
    sum_with_counts,
)
from trainkit.types import SOLO, Axis, check_range

OfPair = Callable[[Tensor, Tensor], Tensor]
"""`OfPair(chosen, rejected) -> losses`: from the scores of two answers to the loss of a pair."""


def dpo(
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
    axis: Axis = SOLO,
) -> NamedLoss:
    """Return direct preference optimization: -log sigmoid of the margin of two log-ratios.

    It reports "preference", the "margin" between the rewards of both answers, the "accuracy"
    (pairs with a margin above 0), "chosen_reward" and "rejected_reward", each a sum over pairs with
    its "/count". A reward is `beta` times the log-ratio of the whole answer.

    Args:
        beta: The factor of the log-ratios, above 0.
        label_smoothing: The probability that a pair is labeled the wrong way round (conservative
            DPO), below a half.
        reference_free: Whether the reference is uniform. Otherwise its log-probability of each
            label is `batch["reference_logprobs"]`.
        axis: The ranks over which the tokens of a row are sharded.

    Raises:
        ValueError: A number is out of range.

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

    def pair_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = beta * (chosen - rejected)  # of the rewards that DPO implies
        smooth = label_smoothing
        # With probability `smooth` the rejected answer is the better one.
        return -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)

    return _make_pair_loss(pair_loss, "sum", reference=not reference_free, scale=beta, axis=axis)


def ipo(beta: float = 0.1, *, axis: Axis = SOLO) -> NamedLoss:
    """Return identity preference optimization: the squared distance of a margin from 1 / (2 beta).

    The log-ratio of an answer is the mean over its tokens, as its authors compute it. The reported
    terms are those of `dpo`.

    Args:
        beta: The strength of the regularization, tau in the paper; above 0.
        axis: The ranks over which the tokens of a row are sharded.

    Raises:
        ValueError: A number is out of range.

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

    def pair_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        # A target for the margin, where DPO would let it grow without bound.
        return (chosen - rejected - 1 / (2 * beta)).square()

    return _make_pair_loss(pair_loss, "mean", reference=True, scale=beta, axis=axis)


def simpo(beta: float = 2.0, *, gamma: float = 1.0, axis: Axis = SOLO) -> NamedLoss:
    """Return simple preference optimization: means of log-probabilities, and no reference.

    A pair with an answer that has no label, and so no mean, adds 0.

    Args:
        beta: The factor of the mean over the tokens of an answer, above 0; the product is its
            reward.
        gamma: The target margin between the chosen and the rejected reward, at least 0.
        axis: The ranks over which the tokens of a row are sharded.

    Raises:
        ValueError: A number is out of range.

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

    def pair_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(beta * (chosen - rejected) - gamma)

    return _make_pair_loss(pair_loss, "mean", reference=False, scale=beta, axis=axis)


def orpo(weight: float = 0.1, *, axis: Axis = SOLO) -> NamedLoss:
    """Return odds ratio preference optimization: cross entropy of the chosen answer plus odds.

    The loss of a pair is the mean cross entropy of the chosen answer's tokens plus `weight` times
    -log sigmoid of the log odds ratio, or 0 if one of its answers has no label. It needs no
    reference.

    Args:
        weight: The weight of the odds term, lambda in the paper; at least 0.
        axis: The ranks over which the tokens of a row are sharded.

    Raises:
        ValueError: A number is out of range.

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
        # log(p / (1 - p)) of p = exp(mean); the odds of p = 1 are infinite.
        means = means.clamp(max=-torch.finfo(means.dtype).eps)
        return means - torch.log(-torch.expm1(means))

    def pair_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        # `chosen` is the mean log-probability, so minus it is the cross entropy.
        log_odds_ratio = log_odds(chosen) - log_odds(rejected)
        return -chosen - weight * logsigmoid(log_odds_ratio)

    return _make_pair_loss(pair_loss, "mean", reference=False, scale=weight, axis=axis)


def kto(
    beta: float = 0.1,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    axis: Axis = SOLO,
) -> NamedLoss:
    """Return Kahneman-Tversky optimization, for answers that are desirable or not, without pairs.

    The flag of a document is `batch["desirable"]`, 1 or 0 at each of its labels. The reference
    point of the step is `batch["kl"]` at each label: the mean log-ratio of answers to mismatched
    prompts over the whole step, clamped to at least 0; see `log_ratio` and `add_reference_point`.
    The denominator is `batch.count_documents`.

    It reports "preference", and "desirable_reward" and "undesirable_reward", `beta` times the
    log-ratio, over the documents of either kind.

    Args:
        beta: The factor of the log-ratios, above 0.
        desirable_weight: The weight of a desirable answer, at least 0.
        undesirable_weight: The weight of an undesirable answer, at least 0.
        axis: The ranks over which the tokens of a row are sharded.

    Raises:
        ValueError: A number is out of range.

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
        documents = _sum_scores("kto", output, batch, "desirable", "kl", axis=axis)
        ratios = documents.sums[_SCORES]
        is_desirable = documents.means("desirable") > 0.5  # equal at all labels of a document
        # weight * (1 - sigmoid(gain)), where a gain is for desirable answers a higher log-ratio.
        gains = beta * (ratios - documents.means("kl").clamp(min=0))
        weights = torch.where(is_desirable, desirable_weight, undesirable_weight)
        losses = weights * torch.sigmoid(torch.where(is_desirable, -gains, gains))
        terms = sum_with_counts({"preference": losses}, documents.starts_here)
        # A document without labels has no flag: it is in neither count of rewards.
        has_flag = documents.starts_here & (documents.tokens > 0)
        rewards = beta * ratios
        terms |= sum_with_counts({"desirable_reward": rewards}, has_flag & is_desirable)
        terms |= sum_with_counts({"undesirable_reward": rewards}, has_flag & ~is_desirable)
        return torch.where(documents.starts_here, losses, 0).sum(), terms

    return loss


def log_ratio(*, axis: Axis = SOLO) -> NamedLoss:
    """Return the sum of the log-ratios of documents to the reference, as a `Loss`.

    Evaluated on rows with mismatched answers (`chat.mismatch_answers`), its "kl" is the mean that
    `add_reference_point` adds for `kto`; it is equal in every layout.

    Args:
        axis: The ranks over which the tokens of a row are sharded.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    Examples:
        >>> log_ratio().terms
        ('kl', 'kl/count')
    """

    @declare_terms(*count_names("kl"))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        documents = _sum_scores("log_ratio", output, batch, axis=axis)
        ratios = documents.sums[_SCORES]
        terms = sum_with_counts({"kl": ratios}, documents.starts_here)
        return torch.where(documents.starts_here, ratios, 0).sum(), terms

    return loss


def add_reference_point(
    microbatches: Iterable[Mapping[str, Any]], kl: Tensor
) -> list[Mapping[str, Any]]:
    """Add the reference point of `kto` to microbatches as the column "kl", clamped and detached.

    Args:
        microbatches: The microbatches of a step, with "labels".
        kl: The mean log-ratio of mismatched answers over the whole step, floating, 0-d.

    Returns:
        The microbatches with "kl", fp32 `[B, S]`.

    References:
        Ethayarajh et al. 2024, section 4.1: the reference point z0, without a gradient.

    Examples:
        >>> [batch] = add_reference_point([{"labels": torch.zeros(1, 2)}], torch.tensor(-0.5))
        >>> batch["kl"]
        tensor([[0., 0.]])
    """
    point = kl.detach().float().clamp(min=0)  # a KL divergence is never below 0, its estimate is
    result = []
    for batch in microbatches:
        labels = read_field("add_reference_point", batch, "labels")
        result.append(add_column(batch, "kl", point.to(labels.device).expand(labels.shape)))
    return result


_SCORES = "scores"


def _sum_scores(
    where: str,
    output: Any,
    batch: Mapping[str, Any],
    *names: str,
    reference: bool = True,
    axis: Axis,
) -> Documents:
    """Sum columns over documents, and their log-ratios or log-probabilities as `_SCORES`."""
    logprobs, label_columns = output_logprobs(where, output, batch)
    columns = {name: label_columns[name].view_as(logprobs) for name in names}
    scores = logprobs
    if reference:
        # Per token: the difference of two sums over a long answer would lose digits.
        scores = logprobs - label_columns["reference_logprobs"].view_as(logprobs)
    return sum_documents(batch, {_SCORES: scores, **columns}, axis=axis, where=where)


def _make_pair_loss(
    pair_loss: OfPair,
    over_tokens: Literal["sum", "mean"],
    *,
    reference: bool,
    scale: float,
    axis: Axis,
) -> NamedLoss:
    """Make a loss of pairs; rewards are `scale` times the scores of documents."""
    names = ("preference", "margin", "accuracy", "chosen_reward", "rejected_reward")

    @declare_terms(*count_names(*names))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        documents = _sum_scores("preference", output, batch, reference=reference, axis=axis)
        # [B, N] by document id, N even; ids without a document have zeros and are in no count.
        scores = documents.means(_SCORES) if over_tokens == "mean" else documents.sums[_SCORES]
        # The mean of nothing is no log-probability.
        needs_tokens = over_tokens == "mean" and not reference
        return make_pair_terms(
            scores,
            pair_loss,
            exists=documents.exists,
            starts_here=documents.starts_here,
            has_score=documents.tokens > 0 if needs_tokens else None,
            scale=scale,
        )

    return loss


def make_pair_terms(
    scores: Tensor,
    pair_loss: OfPair,
    *,
    exists: Tensor,
    starts_here: Tensor,
    has_score: Tensor | None = None,
    scale: float = 1.0,
) -> Terms:
    """Return the loss of pairs of documents from their scores, and its terms.

    Args:
        scores: `[B, N]` by document id, N even.
        pair_loss: The loss of a pair.
        exists: `[B, N]`, True for documents that exist on any rank.
        starts_here: `[B, N]`, True for those that start on this one.
        has_score: `[B, N]`, False for documents whose pairs are left out; None leaves out none.
        scale: The reward of a document is this times its score.

    Raises:
        ValueError: A document has no pair, on a CPU; on other devices the loss is NaN.

    Examples:
        >>> yes = torch.tensor([[True, True]])
        >>> total, terms = make_pair_terms(
        ...     torch.tensor([[2.0, 0.5]]), lambda a, b: b - a, exists=yes, starts_here=yes
        ... )
        >>> total, terms["margin"]
        (tensor(-1.5000), tensor(1.5000))
    """
    chosen, rejected = _split_pairs(scores)
    # Documents 2j and 2j + 1 are a pair, so at most the last document of a row has none.
    has_chosen, has_rejected = _split_pairs(exists)
    is_broken = has_chosen != has_rejected
    if can_read_values(is_broken) and is_broken.any():
        row, pair = is_broken.nonzero()[0].tolist()
        raise ValueError(
            f"preference: document {2 * pair} of row {row} is the last one, and no pair; "
            "chat.pack_pairs packs both answers into a row"
        )
    counts = starts_here[:, ::2]  # a pair counts where its chosen answer starts
    if has_score is not None:
        chosen_has_score, rejected_has_score = _split_pairs(has_score)
        counts = counts & (is_broken | chosen_has_score & rejected_has_score)
    # NaN reaches the step's check of finite losses, which needs no further host sync.
    losses = pair_loss(chosen, rejected) * torch.where(is_broken, torch.nan, 1)
    margin = scale * (chosen - rejected)
    terms = {
        "preference": losses,
        "margin": margin,
        "accuracy": (margin > 0).to(margin.dtype),
        "chosen_reward": scale * chosen,
        "rejected_reward": scale * rejected,
    }
    return torch.where(counts, losses, 0).sum(), sum_with_counts(terms, counts)


def _split_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split documents into chosen and rejected answers, `[B, N / 2]` each."""
    return x[:, ::2], x[:, 1::2]
