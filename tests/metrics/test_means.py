"""Sums, means, extremes and averages: by hand, in any number of updates, and never in place.

The cases of sums and weighted means are those of d9d's own tests, and the average over time is
KempnerForge's.
"""

import math

import pytest
import torch
from safetensors.torch import load, save

from trainkit import metrics
from trainkit.types import Share

NAN = math.nan


def value_of(metric, state):
    return metric.compute(state).tolist()


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name, x in state.items():
        torch.testing.assert_close(x, other[name], rtol=0, atol=0, equal_nan=True)


def values_after(metric, updates):
    """Return the value before and after each update; each state is saved and restored."""
    state, values = metric.init(), [value_of(metric, metric.init())]
    for inputs in updates:
        before = {name: x.clone() for name, x in state.items()}
        updated = metric.update(state, *inputs)
        assert_same(state, before)  # an update writes to nothing
        state = metrics.restore_state(metric, load(save(updated)), Share(0, 1))
        assert_same(updated, state)
        assert_same(metrics.merge_states(metric, state), state)
        values.append(value_of(metric, state))
    return values


def tensors(*rows):
    return [tuple(torch.tensor(x) for x in row) for row in rows]


WEIGHTED = [
    # A weight of 0 adds nothing, at first and later.
    (tensors(([1.0, 2.0], [1.0, 1.0]), (4.0, 0.0)), [NAN, 1.5, 1.5]),
    (tensors(([10.0], [1.0]), ([500.0], [0.0]), ([20.0], [1.0])), [NAN, 10, 10, 15]),
    (tensors(([10.0], [0.0]), ([NAN, math.inf, 3.0], [0.0, 0.0, 2.0])), [NAN, NAN, 3]),
    # Any number of dimensions.
    (
        tensors(([[1.0, 2.0], [3.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]), ([10.0, 10.0], [8.0, 8.0])),
        [NAN, 2.5, 8.5],
    ),
    # Nothing at all.
    (tensors(([], []), ([5.0], [1.0])), [NAN, NAN, 5]),
    # One weight for all values counts once for each of them.
    (tensors(([1.0, 3.0], 2.0), ([8.0],)), [NAN, 2, 3.2]),
    (tensors(([[1.0, 1.0], [4.0, 4.0]], [[1], [2]])), [NAN, 3]),
    # Only a value that counts makes the mean NaN.
    (tensors(([NAN, 1.0], [1.0, 1.0])), [NAN, NAN]),
]


@pytest.mark.parametrize(("updates", "expected"), WEIGHTED)
def test_a_weighted_mean(updates, expected):
    mean = metrics.make_weighted_mean()
    assert values_after(mean, updates) == pytest.approx(expected, nan_ok=True)
    perplexity = metrics.make_perplexity()
    expected = [math.exp(min(x, 20)) for x in expected]
    assert values_after(perplexity, updates) == pytest.approx(expected, nan_ok=True)


def test_weights_that_fit_no_values_are_refused():
    mean = metrics.make_weighted_mean()
    with pytest.raises(ValueError, match=r"weights of shape \(2,\) do not broadcast .* \(3,\)"):
        mean.update(mean.init(), torch.ones(3), torch.ones(2))


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (tensors(([1.0],), ([2.0, 3.0],), ([[1.0, 1.0], [2.0, 2.0]],)), [0, 1, 6, 12]),
        (tensors(([],), ([10.5],)), [0, 0, 10.5]),
        (tensors(([2**53 - 1],), (1,)), [0, 2**53 - 1, 2**53]),
        (tensors(([True, False, True],)), [0, 2]),
    ],
)
def test_a_sum(updates, expected):
    assert values_after(metrics.make_sum(), updates) == expected


def test_a_sum_of_many_small_numbers_does_not_stop():
    total = metrics.make_sum()
    state = total.update(total.init(), torch.tensor(2.0**24))
    for _ in range(3):
        state = total.update(state, torch.tensor(1.0))  # which fp32 would not add
    assert value_of(total, state) == 2**24 + 3


def test_extremes_take_ties_nothing_and_nan():
    inf = math.inf
    updates = tensors(([3.0, -1.0, 3.0],), ([],), ([[-1.0], [2.0]],), (7,))
    assert values_after(metrics.make_max(), updates) == [-inf, 3, 3, 3, 7]
    assert values_after(metrics.make_min(), updates) == [inf, -1, -1, -1, -1]
    for make in (metrics.make_max, metrics.make_min):
        values = values_after(make(), tensors(([1.0, NAN],), ([2.0],)))
        assert values[1:] == pytest.approx([NAN, NAN], nan_ok=True)


def test_the_average_over_time_begins_with_the_first_value():
    values = values_after(metrics.make_ema(), tensors((10.0,), ([0.0],), (20.0,)))
    assert values == pytest.approx([NAN, 10, 9, 10.1], nan_ok=True)
    assert values_after(metrics.make_ema(1.0), tensors((3.0,), (4.0,))) == pytest.approx(
        [NAN, 3, 4], nan_ok=True
    )
    zero_first = values_after(metrics.make_ema(0.5), tensors((0.0,), (4.0,)))
    assert zero_first[1:] == [0, 2]


@pytest.mark.parametrize("weight", [0.0, -0.1, 1.1, NAN])
def test_an_average_refuses_what_is_no_weight(weight):
    with pytest.raises(ValueError, match=r"make_ema: weight must be .*above 0 and at most 1"):
        metrics.make_ema(weight)


def test_an_average_takes_one_number_at_a_time():
    smooth = metrics.make_ema()
    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(2,\)"):
        smooth.update(smooth.init(), torch.ones(2))


def test_a_perplexity_is_bounded_and_of_the_mean():
    assert metrics.loss_to_perplexity(2.0) == math.exp(2)
    assert metrics.loss_to_perplexity(1e9) == metrics.loss_to_perplexity(20.0) == math.exp(20)
    assert metrics.loss_to_perplexity(math.inf) == math.exp(20)
    assert math.isnan(metrics.loss_to_perplexity(NAN))  # a loss that is lost is not 4.9e8
    ones = tensors(([1.0, 3.0],), (torch.inf,))
    assert values_after(metrics.make_perplexity(), ones)[1:] == [math.exp(2), math.exp(20)]


def test_what_is_measured_is_detached():
    mean = metrics.make_weighted_mean()
    x = torch.ones(2, requires_grad=True) * 2
    assert not any(t.requires_grad for t in mean.update(mean.init(), x, x).values())
