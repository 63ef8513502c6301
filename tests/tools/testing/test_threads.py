"""Collectives on 8 ranks that are threads: what each function gives, and its gradient."""

import pytest
import torch
import torch.distributed as dist
from threads import run_threads
from torch import nn

import trainkit as tk
from trainkit.collectives import (
    all_gather,
    all_max,
    all_to_all,
    broadcast,
    reduce_scatter,
    sum_forward,
    sum_grad,
)

WORLD = 8


def plain(axis):
    own = torch.tensor([axis.index, 1])
    return (
        tk.all_sum(own, axis).tolist(),
        all_max(own, axis).tolist(),
        broadcast(own, axis, source=3).tolist(),
    )


def test_sums_maxima_and_broadcasts():
    assert run_threads(plain, WORLD) == [([28, 8], [7, 1], [3, 1])] * WORLD


def gathered_and_scattered(axis, whole):
    """Return whether gathering own parts gives the whole, and scattering sums its parts."""
    own = whole.chunk(axis.count)[axis.index]
    parts = reduce_scatter(whole, axis, dim=0)
    return torch.equal(all_gather(own, axis, dim=0), whole), torch.equal(parts, WORLD * own)


def test_gathering_and_scattering_undo_each_other():
    whole = torch.arange(16.0).reshape(16, 1)
    assert run_threads(gathered_and_scattered, WORLD, whole) == [(True, True)] * WORLD


def exchanged_twice(axis):
    x = torch.arange(16.0).reshape(8, 2) + 100 * axis.index
    there = all_to_all(x, axis, split_dim=0, gather_dim=1)
    return there.shape == (1, 16), torch.equal(
        all_to_all(there, axis, split_dim=1, gather_dim=0), x
    )


def test_an_exchange_is_undone_by_the_one_the_other_way():
    assert run_threads(exchanged_twice, WORLD) == [(True, True)] * WORLD


def gradients(axis):
    """Return the gradient of each differentiable collective for a loss weighted by rank."""
    found = []
    for f in (sum_grad, sum_forward):
        x = torch.ones(2, requires_grad=True)
        (f(x, axis) * (axis.index + 1)).sum().backward()
        found.append(x.grad.tolist())
    return found


def test_one_sums_in_forward_and_the_other_in_backward():
    own = [[[36.0, 36.0], [rank + 1.0] * 2] for rank in range(WORLD)]
    assert run_threads(gradients, WORLD) == own


def synchronised(axis):
    used, unused, rare = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    used.grad = torch.full((2,), float(axis.index))
    if axis.index == 5:
        rare.grad = torch.ones(2)
    tk.sync_sp_grads([used, unused, rare], axis)
    norm = tk.grad_norm([used], axis=axis)
    return used.grad.tolist(), unused.grad, rare.grad.tolist(), float(norm)


def test_gradients_are_summed_over_the_axis_and_norms_over_stages():
    norm = pytest.approx((8 * 2 * 28**2) ** 0.5)
    assert run_threads(synchronised, WORLD) == [([28.0, 28.0], None, [1.0, 1.0], norm)] * WORLD


def reduced(axis):
    sums = {"loss": torch.tensor(0.5), "tokens": torch.tensor(axis.index)}
    return {name: value.item() for name, value in tk.reduce_metrics(sums, axis).items()}


def test_metrics_are_summed():
    assert run_threads(reduced, WORLD) == [{"loss": 4.0, "tokens": 28}] * WORLD


def failing(axis):
    if axis.index == 1:
        raise KeyError("the first cause")
    dist.barrier()


def test_a_rank_that_raises_ends_the_others():
    with pytest.raises(KeyError, match="the first cause"):
        run_threads(failing, 3)
    assert run_threads(reduced, 2) == [{"loss": 1.0, "tokens": 1}] * 2  # nothing is left of it
