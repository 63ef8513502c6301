"""Losses as a training step sees them: functions of an output and a batch, whose terms have names.

A `Loss` returns the sum to differentiate and a dict of detached sums to report. Its attribute
`terms` names them in advance, for the pipeline stages that see no loss and must still join the
sums. A term with a denominator of its own reports two sums, `name` and `name/count`. A loss that
knows what each token adds has a second function for it in its attribute `per_token`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from trainkit.losses.cross_entropy import cross_entropy, cross_entropy_per_token, z_loss
from trainkit.losses.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)

Terms = tuple[Tensor, dict[str, Tensor]]
"""The sum to differentiate, and the detached sums to report by name."""

PerToken = Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor]]
"""From an output and a batch to the sum to differentiate and its detached parts `[B, S]`."""


class NamedLoss(Protocol):
    """A `Loss` that says which terms it reports, and may have a `PerToken` form."""

    terms: tuple[str, ...]
    per_token: PerToken | None

    def __call__(self, output: Any, batch: Mapping[str, Any], /) -> Terms:
        """Return the sum to differentiate, and the terms."""
        ...


def with_terms(
    *terms: str, per_token: PerToken | None = None
) -> Callable[[Callable[[Any, Mapping[str, Any]], Terms]], NamedLoss]:
    """Return a decorator that makes a function a `Loss` by writing down which terms it reports.

    Args:
        terms: the keys of the dict that the function returns.
        per_token: the same loss with its parts, for `by_source`.

    Examples:
        >>> import torch
        >>> @with_terms("squares")
        ... def squares(output, batch):
        ...     total = (output - batch["targets"]).square().sum()
        ...     return total, {"squares": total.detach()}
        >>> squares.terms
        ('squares',)
    """

    def decorate(function: Callable[[Any, Mapping[str, Any]], Terms]) -> NamedLoss:
        loss = cast("NamedLoss", function)
        loss.terms, loss.per_token = terms, per_token
        return loss

    return decorate


def _of_logits(logits: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    return cross_entropy_per_token(logits, batch["labels"])


def _of_hidden(output: tuple[Tensor, Tensor], batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    return linear_cross_entropy_per_token(*output, batch["labels"])


@with_terms("loss", per_token=_of_logits)
def next_token(logits: Tensor, batch: Mapping[str, Any]) -> Terms:
    """Return the summed cross entropy of a batch, for a model that returns logits `[B, S, V]`.

    Examples:
        >>> import torch
        >>> total, terms = next_token(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["loss"])  # log 4
        1.38...
    """
    total = cross_entropy(logits, batch["labels"])
    return total, {"loss": total.detach()}


@with_terms("loss", per_token=_of_hidden)
def next_token_linear(output: tuple[Tensor, Tensor], batch: Mapping[str, Any]) -> Terms:
    """Return what `next_token` does, of hidden states `[B, S, D]` and an output weight `[V, D]`.

    Examples:
        >>> import torch
        >>> output = torch.zeros(1, 2, 8), torch.zeros(4, 8)
        >>> total, terms = next_token_linear(output, {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["loss"])  # log 4
        1.38...
    """
    hidden, weight = output
    total = linear_cross_entropy(hidden, weight, batch["labels"])
    return total, {"loss": total.detach()}


@with_terms("z_loss")
def z_term(logits: Tensor, batch: Mapping[str, Any]) -> Terms:
    """Return `z_loss` of a batch as a `Loss`, for a model that returns logits `[B, S, V]`.

    Examples:
        >>> import torch
        >>> total, terms = z_term(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> float(terms["z_loss"])  # (log 4)^2
        1.92...
    """
    total = z_loss(logits, batch["labels"])
    return total, {"z_loss": total.detach()}


def add_terms(*weighted: tuple[NamedLoss, float]) -> NamedLoss:
    """Return the weighted sum of several losses as one loss, which reports every term, unweighted.

    Args:
        weighted: pairs of a loss and its weight. All see the same output and batch.

    Raises:
        ValueError: if there is no loss, a loss without `terms`, two terms of one name, or a weight
            that is not finite.

    Examples:
        >>> import torch
        >>> loss = add_terms((next_token, 1.0), (z_term, 1e-4))
        >>> loss.terms
        ('loss', 'z_loss')
        >>> total, terms = loss(torch.zeros(1, 2, 4), {"labels": torch.tensor([[1, -100]])})
        >>> bool(torch.isclose(total, terms["loss"] + 1e-4 * terms["z_loss"]))
        True
    """
    _check(weighted)

    @with_terms(*(term for loss, _ in weighted for term in loss.terms))
    def total_loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        sums, terms = zip(*(loss(output, batch) for loss, _ in weighted), strict=True)
        weights = (weight for _, weight in weighted)
        first, *rest = (weight * part for weight, part in zip(weights, sums, strict=True))
        return sum(rest, first), {name: value for each in terms for name, value in each.items()}

    return total_loss


def mean_terms(sums: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Return the means of summed terms: `name` over `name/count` if there is one, else over tokens.

    Args:
        sums: Scalars by name, summed over microbatches and ranks.
        tokens: How many tokens they were summed over; 0 counts as 1, so that a step without any has
            a loss of 0.

    Returns:
        The means, without the counts. A term whose own count is 0 is NaN: there was nothing to
        measure.

    Examples:
        >>> import torch
        >>> sums = {"loss": torch.tensor(6.0), "loss/web": torch.tensor(4.0)}
        >>> mean_terms(sums | {"loss/web/count": torch.tensor(2)}, torch.tensor(4))
        {'loss': tensor(1.5000), 'loss/web': tensor(2.)}
    """
    return {
        name: total / sums.get(f"{name}/count", tokens.clamp(min=1))
        for name, total in sums.items()
        if not name.endswith("/count")
    }


def _check(weighted: tuple[tuple[NamedLoss, float], ...]) -> None:
    if not weighted:
        raise ValueError("add_terms: at least one (loss, weight) pair is needed, got none")
    for loss, weight in weighted:
        if not hasattr(loss, "terms"):
            raise ValueError(
                f"add_terms: {loss!r} does not say which terms it reports; decorate it with "
                "with_terms(...)"
            )
        if not math.isfinite(weight):
            raise ValueError(f"add_terms: the weight of {loss.terms} must be finite, got {weight}")
    counts = Counter(term for loss, _ in weighted for term in loss.terms)
    twice = sorted(term for term, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"add_terms: every term must have a name of its own, got {twice} more than once"
        )
