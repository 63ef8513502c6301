"""Policy gradients on answers that were sampled: ratios, what bounds them, and what is added.

Each label has an advantage, `batch["advantages"]`, and the log-probability that it had when the
advantages were made, `batch["old_logprobs"]`. The forms differ in three choices, each a small
function: what a ratio costs (`ppo_clip`, `cispo`), whether it is that of a token or of an
answer (`policy_gradient`, `sequence_policy_gradient`), and what is divided by:

- PPO, DAPO: `ppo_clip` tokens over `batch.count_valid_tokens`.
- GRPO: weighted `ppo_clip` tokens with `weight_by_document`, over `batch.count_documents`.
- Dr. GRPO: `ppo_clip` tokens over `batch.count_documents` times the length that an answer may have.
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
from trainkit.post.objectives.sequences import count_names, counted, sum_documents
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
"""From log-probabilities, ratios to the old ones, and advantages to what each token or answer
costs, and whether its ratio was bounded."""

Estimator = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities and those of the reference to an estimate of the divergence, of each."""


def ppo_clip(low: float = 0.2, high: float = 0.2) -> Surrogate:
    """Return the pessimistic surrogate: no gain from a ratio beyond 1 - low or 1 + high.

    Args:
        low: From 0 to 1; 1 bounds nothing from below.
        high: At least 0.

    Raises:
        ValueError: A bound is out of its range.

    References:
        Schulman et al. 2017; Yu et al., "DAPO" (2025), for a high that is not low.

    Examples:
        >>> ratios, advantages = torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0])
        >>> ppo_clip()(ratios.log(), ratios, advantages)
        (tensor([-1.2000,  1.5000]), tensor([ True, False]))
    """
    check_range("clipped", at_least=0, at_most=1, low=low)
    check_range("clipped", at_least=0, high=high)

    def surrogate(_: Tensor, ratios: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        plain = ratios * advantages
        bounded = ratios.clamp(1 - low, 1 + high) * advantages
        return -torch.minimum(plain, bounded), bounded < plain

    return surrogate


def cispo(low: float = 1.0, high: float = 0.28) -> Surrogate:
    """Return CISPO's surrogate: log-probabilities, weighed by ratios within bounds.

    Every token keeps a gradient, also where its ratio is bounded; but for a word that the shaping
    leaves out by now, which costs nothing.

    Args:
        low: From 0 to 1; 1 bounds nothing from below.
        high: At least 0.

    Raises:
        ValueError: A bound is out of its range.

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
        bounded = ratios.detach().clamp(1 - low, 1 + high)
        known = logprobs.masked_fill(logprobs == -torch.inf, 0)  # of words that are left out
        return -bounded * advantages * known, bounded != ratios.detach()

    return surrogate


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return log-ratios: an unbiased estimate of KL(policy, reference) that may be below 0.

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
    difference = reference - logprobs
    return difference.expm1() - difference


def importance_weights(old: Tensor, sampler: Tensor, *, most: float) -> Tensor:
    """Return how much likelier what was drawn is to the trainer than to its sampler, at most so.

    Raises:
        ValueError: `most` is not above 0; infinite, it truncates nothing.

    References:
        Ionides, "Truncated importance sampling" (2008); Yao et al., "Your efficient RL framework
        secretly brings you off-policy RL training" (2025).

    Examples:
        >>> importance_weights(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -9.0]), most=2.0)
        tensor([1., 2.])
    """
    if not most > 0:
        raise ValueError(f"importance: most must be above 0, got {most}")
    return (old - sampler).exp().clamp(max=most)


@attrs.frozen(kw_only=True)
class PolicyOptions:
    """What is added to a policy gradient, and how answers of another sampler are weighed.

    Raises:
        ConfigError: A divergence is weighed that is not there, `kl_weight` is below 0 or not
            finite, or `most_importance` is not above 0.

    Examples:
        >>> PolicyOptions(kl=k3, kl_weight=0.04).most_importance is None
        True
    """

    kl: Estimator | None = None
    """Estimates the divergence from `batch["reference_logprobs"]`, which is added..."""

    kl_weight: float = attrs.field(default=0.0, validator=non_negative)
    """... this many times; 0 only reports it."""

    most_importance: float | None = attrs.field(default=None, validator=optional(positive))
    """Weigh by the `importance_weights` of `batch["sampler_logprobs"]`, truncated here."""

    def __attrs_post_init__(self) -> None:
        if self.kl_weight and self.kl is None:
            what = f"kl_weight is {self.kl_weight}, and no kl says what it weighs"
            raise ConfigError(f"Added: {what}; take k3, k2 or k1", where="kl", got=None)


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
    """Return the policy gradient of tokens, of logits or of a `Hidden`, from one pass.

    "policy" is what is differentiated. Reported beside it, as sums over tokens with a "/count":
    "clipped", the tokens whose ratio was bounded; "old_kl", the divergence from this policy of the
    old one, by which tokens were drawn (`k3`); "ratio_beyond_2" and "ratio_beyond_10", the tokens
    that have become so many times likelier or less likely, which stand for extremes, as these have
    no sum; and, where they are asked, "kl", "entropy", and "truncated", the tokens whose importance
    was. A word that the shaping leaves out by now has a ratio of 0, and no divergence.

    Args:
        surrogate: What a ratio costs: `ppo_clip`, `cispo`, or one of your own.
        added: What else is there.
        entropy_weight: How much of each token's entropy is taken off; below 0 it is added.
        weighted: Whether a token counts `batch["weights"]`; see `weight_by_document`.
        shaping: How the sampler shapes logits, which old log-probabilities stand for too.

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

    def cost(scores: TokenScores, columns: LabelColumns) -> Tensor:
        value, _ = _bound(surrogate, scores, columns)
        if added.most_importance is not None:
            own = (_column(scores, columns, name) for name in ("old_logprobs", "sampler_logprobs"))
            value = value * importance_weights(*own, most=added.most_importance)
        if added.kl is not None and added.kl_weight:
            value = value + added.kl_weight * _kl(added.kl, scores, columns, _REFERENCE)
        if entropy_weight:
            value = value - entropy_weight * scores.entropies
        return value * _column(scores, columns, "weights") if weighted else value

    figures = _figures(surrogate, added)
    if entropy_weight:
        figures["entropy"] = lambda scores, _: scores.entropies
    measured = {
        name: (of, 0.0)
        for figure, measure in figures.items()
        for name, of in ((figure, measure), (f"{figure}/count", _one))
    }
    return make_score_loss({"policy": (cost, 1.0), **measured}, shaping=shaping)


def sequence_policy_gradient(
    surrogate: Surrogate, *, added: PolicyOptions = NOTHING_ADDED, axis: Axis = SOLO
) -> NamedLoss:
    """Return the policy gradient of whole answers: one ratio each, the geometric mean of tokens'.

    An answer is what has labels in a document; its advantage, the same at each of its labels, is
    their mean. The denominator is `batch.count_documents`. It reports "policy", "clipped",
    "old_kl", and where they are asked "kl" and "truncated", as sums over answers with a "/count".
    Importance is that of the whole answer, the product of its tokens'.

    Args:
        surrogate: What a ratio costs: `ppo_clip`, or another.
        added: What else is there; divergences are means over the tokens of an answer.
        axis: The ranks over which the tokens of a row are dealt, `ps.sp`.

    Effects:
        None here; the loss communicates on `axis`: an all-reduce, and in backward another.

    Examples:
        >>> sequence_policy_gradient(ppo_clip(3e-4, 4e-4)).terms[:2]
        ('policy', 'policy/count')
    """
    optional = {"kl": added.kl is not None, "truncated": added.most_importance is not None}
    asked = [name for name, is_asked in optional.items() if is_asked]

    @declare_terms(*count_names("policy", "clipped", "old_kl", *asked))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        logprobs, beside = output_logprobs("sequence_policy_gradient", output, batch)
        kept = batch["labels"] != IGNORED_LABEL

        def column(name: str) -> Tensor:
            own = beside[name].view_as(logprobs).to(logprobs.dtype)
            return torch.where(kept, own, 0)

        old = column("old_logprobs")
        columns = {"logprobs": logprobs, "advantages": column("advantages")}
        columns |= {"log_ratios": logprobs - old, "old_kl": _from_policy(logprobs, old)}
        if added.kl is not None:
            columns["kl"] = added.kl(logprobs, column(_REFERENCE))
        if added.most_importance is not None:
            columns["importance"] = old - column("sampler_logprobs")
        found = sum_documents(batch, columns, axis=axis, where="sequence_policy_gradient")
        ratios = found.means("log_ratios").exp()
        cost, bounded = surrogate(found.means("logprobs"), ratios, found.means("advantages"))
        figures = {"clipped": bounded.to(cost.dtype), "old_kl": found.means("old_kl")}
        if added.most_importance is not None:
            drift = found.sums["importance"].exp()
            cost = cost * drift.clamp(max=added.most_importance)
            figures["truncated"] = (drift > added.most_importance).to(cost.dtype)
        if added.kl is not None:
            figures["kl"] = found.means("kl")
            cost = cost + added.kl_weight * figures["kl"]
        reported = counted({"policy": cost, **figures}, found.begun)
        return torch.where(found.begun, cost, 0).sum(), {
            name: reported[name] for name in loss.terms
        }

    return loss


def _column(scores: TokenScores, columns: LabelColumns, name: str) -> Tensor:
    return columns[name].to(scores.losses.dtype)


def _bound(
    surrogate: Surrogate, scores: TokenScores, columns: LabelColumns
) -> tuple[Tensor, Tensor]:
    ratios = (-scores.losses - _column(scores, columns, "old_logprobs")).exp()
    return surrogate(-scores.losses, ratios, _column(scores, columns, "advantages"))


def _kl(estimator: Estimator, scores: TokenScores, columns: LabelColumns, other: str) -> Tensor:
    """Return the divergence from what a column says; 0 of a word that is left out by now."""
    lost = scores.losses == torch.inf
    own = (-scores.losses, _column(scores, columns, other))
    return estimator(*(x.masked_fill(lost, 0) for x in own))


def _from_policy(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return `k3` of the old policy, by which tokens were drawn, from this one."""
    return k3(old, logprobs)


def _one(scores: TokenScores, _: LabelColumns) -> Tensor:
    return torch.ones_like(scores.losses)


def _figures(surrogate: Surrogate, added: PolicyOptions) -> dict[str, OfScores]:
    """Return what is measured of each token, by name."""

    def beyond(times: float) -> OfScores:
        def measure(scores: TokenScores, columns: LabelColumns) -> Tensor:
            log_ratio = -scores.losses - _column(scores, columns, "old_logprobs")
            return (log_ratio.abs() > math.log(times)).to(scores.losses.dtype)

        return measure

    def truncated(scores: TokenScores, columns: LabelColumns) -> Tensor:
        old, sampler = (_column(scores, columns, x) for x in ("old_logprobs", "sampler_logprobs"))
        return (old - sampler > math.log(added.most_importance or 1.0)).to(scores.losses.dtype)

    figures: dict[str, OfScores] = {
        "clipped": lambda scores, columns: _bound(surrogate, scores, columns)[1].double(),
        "old_kl": lambda scores, columns: _kl(_from_policy, scores, columns, "old_logprobs"),
        "ratio_beyond_2": beyond(2.0),
        "ratio_beyond_10": beyond(10.0),
    }
    if (estimator := added.kl) is not None:
        figures["kl"] = lambda scores, columns: _kl(estimator, scores, columns, _REFERENCE)
    if added.most_importance is not None:
        figures["truncated"] = truncated
    return figures
