"""Policy gradients on sampled answers: surrogates, divergences and importance weights.

Each label has an advantage, `batch["advantages"]`, and its log-probability at that time,
`batch["old_logprobs"]`. Algorithms differ in three choices: the surrogate (`ppo_clip`, `cispo`),
ratios of tokens or of answers (`policy_gradient`, `sequence_policy_gradient`), and the denominator:

- PPO, DAPO: `ppo_clip` tokens over `batch.count_valid_tokens`.
- GRPO: weighted `ppo_clip` tokens with `weight_by_document`, over `batch.count_documents`.
- Dr. GRPO: `ppo_clip` tokens over `batch.count_documents` times the maximum length of an answer.
- CISPO: `cispo` of tokens over `batch.count_valid_tokens`.
- GSPO: `ppo_clip` answers over `batch.count_documents`.

References:
    Schulman et al., "Proximal policy optimization" (2017); Shao et al., "DeepSeekMath" (2024), for
    GRPO; Liu et al., "Understanding R1-Zero-like training" (2025), for Dr. GRPO; MiniMax,
    "MiniMax-M1" (2025), for CISPO; Zheng et al., "Group sequence policy optimization" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from attrs.validators import optional
from torch import Tensor

from trainkit.losses.linear import LabelColumns, OfScores, TokenScores
from trainkit.losses.shaping import UNSHAPED, Shaping
from trainkit.losses.terms import (
    NamedLoss,
    ShapingOf,
    Terms,
    declare_terms,
    make_score_loss,
    output_logprobs,
)
from trainkit.post.objectives.sequences import count_names, sum_documents, sum_with_counts
from trainkit.types import (
    IGNORED_LABEL,
    SOLO,
    Axis,
    ConfigError,
    check_range,
    non_negative,
    positive,
)

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`Surrogate(logprobs, ratios, advantages) -> (losses, is_clipped)`, of tokens or of answers."""

Estimator = Callable[[Tensor, Tensor], Tensor]
"""`Estimator(logprobs, reference) -> divergences`, of tokens."""


def ppo_clip(low: float = 0.2, high: float = 0.2) -> Surrogate:
    """Return PPO's clipped surrogate: no gain from a ratio below 1 - low or above 1 + high.

    Args:
        low: From 0 to 1; 1 sets no lower bound.
        high: At least 0.

    Raises:
        ValueError: A bound is out of range.

    References:
        Schulman et al. 2017; Yu et al., "DAPO" (2025), for a high that is not low.

    Examples:
        >>> ratios, advantages = torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0])
        >>> ppo_clip()(ratios.log(), ratios, advantages)
        (tensor([-1.2000,  1.5000]), tensor([ True, False]))
    """
    check_range("ppo_clip", at_least=0, at_most=1, low=low)
    check_range("ppo_clip", at_least=0, high=high)

    def surrogate(_: Tensor, ratios: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        plain = ratios * advantages
        bounded = ratios.clamp(1 - low, 1 + high) * advantages
        # The lesser of both: only a ratio that has moved too far in the good direction is clipped.
        return -torch.minimum(plain, bounded), bounded < plain

    return surrogate


def cispo(low: float = 1.0, high: float = 0.28) -> Surrogate:
    """Return CISPO's surrogate: log-probabilities weighted by clipped ratios.

    Every token has a gradient, even if its ratio is clipped. A word that the sampling settings now
    exclude adds 0.

    Args:
        low: From 0 to 1; 1 sets no lower bound.
        high: At least 0.

    Raises:
        ValueError: A bound is out of range.

    References:
        MiniMax 2025.

    Examples:
        >>> ratios, advantages = torch.tensor([2.0]), torch.tensor([1.0])
        >>> cispo(high=0.5)(torch.tensor([-1.0]), ratios, advantages)
        (tensor([1.5000]), tensor([True]))
    """
    check_range("cispo", at_least=0, at_most=1, low=low)
    check_range("cispo", at_least=0, high=high)

    def surrogate(logprobs: Tensor, ratios: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        # Without a gradient: the ratio only weights the gradient of the log-probability.
        bounded = ratios.detach().clamp(1 - low, 1 + high)
        logprobs = logprobs.masked_fill(logprobs == -torch.inf, 0)  # excluded: 0 * -inf is NaN
        return -bounded * advantages * logprobs, bounded != ratios.detach()

    return surrogate


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return log-ratios, an unbiased estimate of KL(policy, reference) that may be negative.

    References:
        Schulman, "Approximating KL divergence" (2020), as `k2` and `k3`.

    Examples:
        >>> k1(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor([1.])
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return half the squared log-ratios: biased, with little variance.

    Examples:
        >>> k2(torch.tensor([-1.0]), torch.tensor([-3.0]))
        tensor([2.])
    """
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ratio - 1 - log ratio of the reference: unbiased, never below 0.

    Examples:
        >>> k3(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.])
    """
    # expm1: near a difference of 0, exp(x) - 1 would lose all digits.
    difference = reference - logprobs
    return difference.expm1() - difference


def importance_weights(old: Tensor, sampler: Tensor, *, most: float) -> Tensor:
    """Return truncated importance weights: exp(old - sampler), clamped to at most `most`.

    Raises:
        ValueError: `most` is not above 0. Infinity truncates nothing.

    References:
        Ionides, "Truncated importance sampling" (2008); Yao et al., "Your efficient RL framework
        secretly brings you off-policy RL training" (2025).

    Examples:
        >>> importance_weights(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -9.0]), most=2.0)
        tensor([1., 2.])
    """
    if not most > 0:
        raise ValueError(f"importance_weights: most must be above 0, got {most}")
    return (old - sampler).exp().clamp(max=most)


@attrs.frozen(kw_only=True)
class PolicyOptions:
    """Options of policy gradients: a divergence from a reference, and importance sampling.

    Raises:
        ConfigError: There is a `kl_weight` and no `kl`, `kl_weight` is below 0 or not finite, or
            `most_importance` is not above 0.

    Examples:
        >>> PolicyOptions(kl=k3, kl_weight=0.04).most_importance is None
        True
    """

    kl: Estimator | None = None
    """The estimator of the divergence from `batch["reference_logprobs"]`."""

    kl_weight: float = attrs.field(default=0.0, validator=non_negative)
    """The weight of the divergence in the loss; 0 only reports it."""

    most_importance: float | None = attrs.field(default=None, validator=optional(positive))
    """The maximum of the `importance_weights` of `batch["sampler_logprobs"]`; None uses none."""

    def __attrs_post_init__(self) -> None:
        if self.kl_weight and self.kl is None:
            raise ConfigError(
                f"PolicyOptions: kl_weight is {self.kl_weight} without a kl; use k3, k2 or k1",
                where="kl",
                got=None,
            )


NOTHING_ADDED = PolicyOptions()
_REFERENCE = "reference_logprobs"


def policy_gradient(
    surrogate: Surrogate,
    *,
    added: PolicyOptions = NOTHING_ADDED,
    entropy_weight: float = 0.0,
    weighted: bool = False,
    shaping: Shaping | ShapingOf = UNSHAPED,
) -> NamedLoss:
    """Return the policy gradient of tokens, for logits or a `Hidden`, in one pass.

    "policy" is the differentiated term. Reported too, as sums over tokens with a "/count", are
    "clipped", the tokens whose ratio was clipped; "old_kl", the divergence of the old policy, which
    drew the tokens, from this one (`k3`); "ratio_beyond_2" and "ratio_beyond_10", the tokens that
    have become more than 2 or 10 times more or less likely, because a maximum has no sum; and, if
    the options use them, "kl", "entropy" and "truncated", the tokens with truncated importance
    weights. A word that the sampling settings now exclude has a ratio of 0, and no divergence.

    Args:
        surrogate: `ppo_clip`, `cispo`, or your own.
        added: A divergence and importance weights.
        entropy_weight: The weight of each token's entropy, which is subtracted from the loss.
        weighted: Whether to weight tokens by `batch["weights"]`; see `weight_by_document`.
        shaping: The sampling settings, which the old log-probabilities include too.

    Raises:
        ValueError: `entropy_weight` is not finite.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, 2]]), "advantages": torch.ones(1, 2)}
        >>> batch["old_logprobs"] = torch.full((1, 2), -1.3862944)
        >>> total, terms = policy_gradient(ppo_clip())(torch.zeros(1, 2, 4), batch)
        >>> float(total), float(terms["clipped"])
        (-2.0, 0.0)
    """
    check_range("policy_gradient", entropy_weight=entropy_weight)

    def policy(scores: TokenScores, columns: LabelColumns) -> Tensor:
        losses, _ = _apply_surrogate(surrogate, scores, columns)  # minus ratio times advantage
        if added.most_importance is not None:
            old = _get_column(scores, columns, "old_logprobs")
            sampler = _get_column(scores, columns, "sampler_logprobs")
            losses = losses * importance_weights(old, sampler, most=added.most_importance)
        if added.kl is not None and added.kl_weight:  # a weight of 0 only reports it, below
            kl = _estimate_kl(added.kl, scores, columns, _REFERENCE)
            losses = losses + added.kl_weight * kl
        if entropy_weight:
            losses = losses - entropy_weight * scores.entropies
        return losses * _get_column(scores, columns, "weights") if weighted else losses

    metrics = _make_metrics(surrogate, added)
    if entropy_weight:
        metrics["entropy"] = lambda scores, _: scores.entropies
    # Terms with a weight of 0 are reported, and not differentiated.
    terms: dict[str, tuple[OfScores, float]] = {"policy": (policy, 1.0)}
    for name, metric in metrics.items():
        terms[name] = (metric, 0.0)
        terms[f"{name}/count"] = (lambda scores, _: torch.ones_like(scores.losses), 0.0)
    return make_score_loss(terms, shaping=shaping)


def sequence_policy_gradient(
    surrogate: Surrogate, *, added: PolicyOptions = NOTHING_ADDED, axis: Axis = SOLO
) -> NamedLoss:
    """Return the policy gradient of answers, whose ratio is the geometric mean over tokens.

    An answer is the tokens with labels of a document; its advantage is the mean over them. The
    denominator is `batch.count_documents`. It reports "policy", "clipped", "old_kl", and if the
    options use them "kl" and "truncated", as sums over answers with a "/count". The importance
    weight of an answer is the product over its tokens.

    Args:
        surrogate: `ppo_clip`, or another.
        added: A divergence, the mean over the tokens of an answer, and importance weights.
        axis: The ranks over which the tokens of a row are sharded, `ps.sp`.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    Examples:
        >>> sequence_policy_gradient(ppo_clip(3e-4, 4e-4)).terms[:2]
        ('policy', 'policy/count')
    """
    # Declared before the loss runs: ranks of a pipeline that do not run it report them, too.
    names = ["policy", "clipped", "old_kl"]
    names += ["kl"] if added.kl is not None else []
    names += ["truncated"] if added.most_importance is not None else []

    @declare_terms(*count_names(*names))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        logprobs, label_columns = output_logprobs("sequence_policy_gradient", output, batch)
        mask = batch["labels"] != IGNORED_LABEL

        def get_column(name: str) -> Tensor:
            column = label_columns[name].view_as(logprobs).to(logprobs.dtype)
            return torch.where(mask, column, 0)  # columns may hold NaN outside the loss

        old = get_column("old_logprobs")
        columns = {
            "logprobs": logprobs,
            "advantages": get_column("advantages"),
            "log_ratios": logprobs - old,
            "old_kl": _estimate_old_kl(logprobs, old),
        }
        if added.kl is not None:
            columns["kl"] = added.kl(logprobs, get_column(_REFERENCE))
        if added.most_importance is not None:
            columns["importance"] = old - get_column("sampler_logprobs")
        # One all-reduce for all columns, since the tokens of an answer may be on several ranks.
        answers = sum_documents(batch, columns, axis=axis, where="sequence_policy_gradient")
        # GSPO: exp of the mean log-ratio is the geometric mean of the tokens' ratios.
        losses, is_clipped = surrogate(
            answers.means("logprobs"),
            answers.means("log_ratios").exp(),
            answers.means("advantages"),
        )
        values = {"clipped": is_clipped.to(losses.dtype), "old_kl": answers.means("old_kl")}
        if added.most_importance is not None:
            importance = answers.sums["importance"].exp()  # the product over tokens
            losses = losses * importance.clamp(max=added.most_importance)
            values["truncated"] = (importance > added.most_importance).to(losses.dtype)
        if added.kl is not None:
            values["kl"] = answers.means("kl")
            losses = losses + added.kl_weight * values["kl"]
        # Every rank of the axis has the sums of an answer; the one where it starts counts it.
        terms = sum_with_counts({"policy": losses, **values}, answers.starts_here)
        total = torch.where(answers.starts_here, losses, 0).sum()
        return total, {name: terms[name] for name in loss.terms}

    return loss


def _get_column(scores: TokenScores, columns: LabelColumns, name: str) -> Tensor:
    # Weights are fp64; log-probabilities may be stored as fp16.
    return columns[name].to(scores.losses.dtype)


def _apply_surrogate(
    surrogate: Surrogate, scores: TokenScores, columns: LabelColumns
) -> tuple[Tensor, Tensor]:
    # A loss is minus a log-probability; the ratio is pi(token) / pi_old(token).
    logprobs = -scores.losses
    ratios = (logprobs - _get_column(scores, columns, "old_logprobs")).exp()
    return surrogate(logprobs, ratios, _get_column(scores, columns, "advantages"))


def _estimate_kl(
    estimator: Estimator,
    scores: TokenScores,
    columns: LabelColumns,
    other: str,
) -> Tensor:
    """Return the divergence from the log-probabilities of a column; 0 for an excluded word."""
    is_excluded = scores.losses == torch.inf  # a log-probability of -inf
    return estimator(
        (-scores.losses).masked_fill(is_excluded, 0),
        _get_column(scores, columns, other).masked_fill(is_excluded, 0),
    )


def _estimate_old_kl(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return `k3` of the old policy, which drew the tokens, from this one."""
    # The tokens are samples of the old policy, which is therefore the first of the divergence.
    return k3(old, logprobs)


def _make_metrics(surrogate: Surrogate, added: PolicyOptions) -> dict[str, OfScores]:
    """Return the metrics of each token, by name."""

    def ratio_beyond(factor: float) -> OfScores:
        def metric(scores: TokenScores, columns: LabelColumns) -> Tensor:
            log_ratio = -scores.losses - _get_column(scores, columns, "old_logprobs")
            # In logs, so that neither direction overflows.
            return (log_ratio.abs() > math.log(factor)).to(scores.losses.dtype)

        return metric

    def truncated(scores: TokenScores, columns: LabelColumns) -> Tensor:
        old = _get_column(scores, columns, "old_logprobs")
        sampler = _get_column(scores, columns, "sampler_logprobs")
        is_truncated = old - sampler > math.log(added.most_importance or 1.0)
        return is_truncated.to(scores.losses.dtype)

    metrics: dict[str, OfScores] = {
        "clipped": lambda scores, columns: _apply_surrogate(surrogate, scores, columns)[1].double(),
        "old_kl": lambda scores, columns: _estimate_kl(
            _estimate_old_kl,
            scores,
            columns,
            "old_logprobs",
        ),
        "ratio_beyond_2": ratio_beyond(2.0),
        "ratio_beyond_10": ratio_beyond(10.0),
    }
    if (estimator := added.kl) is not None:
        metrics["kl"] = lambda scores, columns: _estimate_kl(estimator, scores, columns, _REFERENCE)
    if added.most_importance is not None:
        metrics["truncated"] = truncated
    return metrics
