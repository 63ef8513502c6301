"""Sums, means, extremes and averages over time of whatever is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trainkit.metrics.records import Metric, State, make_metric
from trainkit.types import check_range

_LARGEST_EXPONENT = 20.0
"""exp(20) is 5e8: a curve of perplexities that starts there can still be read."""


def make_sum() -> Metric:
    """Make the sum of all elements of what it is given: `update(state, values)`.

    Examples:
        >>> total = make_sum()
        >>> total.compute(total.update(total.init(), torch.tensor([[1, 1], [2, 2]])))
        tensor(6., dtype=torch.float64)
    """

    def update(state: State, values: Tensor) -> State:
        return {"total": state["total"] + values.double().sum()}

    return make_metric({"total": "sum"}, update=update, compute=lambda state: state["total"])


def make_weighted_mean() -> Metric:
    """Make the mean of all elements: `update(state, values, weights=1.0)`.

    Weights have the shape of the values, or one that broadcasts to it. A value whose weight is 0
    does not count, even if it is NaN or infinite. Without a weight the mean is NaN.

    Examples:
        >>> mean = make_weighted_mean()
        >>> state = mean.update(mean.init(), torch.tensor([1.0, torch.nan]), torch.tensor([3, 0]))
        >>> mean.compute(mean.update(state, torch.tensor(5.0)))
        tensor(2., dtype=torch.float64)
        >>> mean.compute(mean.init())
        tensor(nan, dtype=torch.float64)
    """
    return make_metric({"total": "sum", "weight": "sum"}, update=_add_weighted, compute=_divide)


def _add_weighted(state: State, values: Tensor, weights: Tensor | float = 1.0) -> State:
    x = values.double()
    # full_like fills on the device, where as_tensor(1.0) would be a copy from the host.
    factors = weights.double() if isinstance(weights, Tensor) else torch.full_like(x, weights)
    try:
        x, factors = torch.broadcast_tensors(x, factors)
    except RuntimeError as error:
        raise ValueError(
            f"make_weighted_mean: weights of shape {tuple(factors.shape)} do not broadcast with "
            f"values of shape {tuple(values.shape)}; pass a weight for each value, or one for all"
        ) from error
    # 0 * NaN is NaN.
    products = torch.where(factors == 0, 0, x * factors)
    return {"total": state["total"] + products.sum(), "weight": state["weight"] + factors.sum()}


def _divide(state: Mapping[str, Tensor]) -> Tensor:
    return state["total"] / state["weight"]


def make_perplexity() -> Metric:
    """Make the perplexity of losses in nats: `update(state, losses, weights=1.0)`.

    It is `loss_to_perplexity` of their weighted mean, so that it is over all tokens of all ranks,
    and no mean of perplexities.

    Examples:
        >>> perplexity = make_perplexity()
        >>> losses = torch.tensor([2.0, 4.0]).log()
        >>> perplexity.compute(perplexity.update(perplexity.init(), losses))  # the geometric mean
        tensor(2.8284, dtype=torch.float64)
    """
    return make_metric(
        {"total": "sum", "weight": "sum"},
        update=_add_weighted,
        compute=lambda state: _divide(state).clamp(max=_LARGEST_EXPONENT).exp(),
    )


def loss_to_perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss per token in nats, exp(min(loss, 20)).

    The bound, 4.9e8, keeps the curve of a run that starts badly readable. NaN remains NaN.

    Examples:
        >>> loss_to_perplexity(0.0), loss_to_perplexity(100.0) == loss_to_perplexity(20.0)
        (1.0, True)
    """
    # In this order: min(20, NaN) is 20.
    return math.exp(min(loss, _LARGEST_EXPONENT))


def make_max() -> Metric:
    """Make the largest element of what it is given, -inf before any; `update(state, values)`.

    A NaN makes it NaN.

    Examples:
        >>> largest = make_max()
        >>> largest.compute(largest.update(largest.init(), torch.tensor([3.0, -1.0])))
        tensor(3., dtype=torch.float64)
    """

    def update(state: State, values: Tensor) -> State:
        # An empty tensor has no maximum, so the one so far is among the candidates.
        candidates = [state["max"].view(1), values.double().flatten()]
        return {"max": torch.cat(candidates).amax()}

    return make_metric({"max": "max"}, update=update, compute=lambda state: state["max"])


def make_min() -> Metric:
    """Make the smallest element of what it is given, inf before any; as `make_max`.

    Examples:
        >>> smallest = make_min()
        >>> smallest.compute(smallest.update(smallest.init(), torch.tensor([3.0, -1.0])))
        tensor(-1., dtype=torch.float64)
    """

    def update(state: State, values: Tensor) -> State:
        candidates = [state["min"].view(1), values.double().flatten()]
        return {"min": torch.cat(candidates).amin()}

    return make_metric({"min": "min"}, update=update, compute=lambda state: state["min"])


def make_ema(weight: float = 0.1) -> Metric:
    """Make an exponential moving average: `update(state, value)`, with one number at a time.

    The average is weight * value + (1 - weight) * average, and the first value is the first
    average; NaN before any. Merged, it is the mean of the averages of those ranks that have one:
    the average of the mean, if all of them update together.

    Args:
        weight: That of the newest value.

    Raises:
        ValueError: The weight is not above 0 and at most 1; later, a value is not one number.

    Examples:
        >>> smooth = make_ema(0.5)
        >>> state = smooth.update(smooth.init(), torch.tensor(4.0))
        >>> smooth.compute(smooth.update(state, torch.tensor(2.0)))
        tensor(3., dtype=torch.float64)
    """
    check_range("make_ema", above=0, at_most=1, weight=weight)

    def update(state: State, value: Tensor) -> State:
        if value.numel() != 1:
            raise ValueError(
                f"make_ema: a value is one number, got a tensor of shape {tuple(value.shape)}; "
                "pass its mean"
            )
        newest = value.double().view(())
        moved = weight * newest + (1 - weight) * state["average"]
        average = torch.where(state["ranks"] == 0, newest, moved)
        return {"average": average, "ranks": torch.ones_like(average)}

    # As sums over ranks: that of their averages, and how many ranks have one.
    return make_metric(
        {"average": "sum", "ranks": "sum"},
        update=update,
        compute=lambda state: state["average"] / state["ranks"],
    )
