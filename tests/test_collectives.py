"""Differentiable collectives give the values and gradients of one process that holds everything."""

import pytest
import torch

from trainkit.collectives import (
    exchange,
    gather_dim,
    gather_replicated,
    scatter_sum,
    sum_forward,
    sum_grad,
)
from trainkit.mesh import axis_from_group, solo_parallel
from trainkit.testing import run_ranks


def drawn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def world_axis():
    assert torch.distributed.group.WORLD is not None
    return axis_from_group(torch.distributed.group.WORLD)


def difference(a, b):
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item()


def each_against_one_process():
    """Return the largest difference of every function, values and gradients, on this rank.

    Weights differ per rank, so the one process's loss is the sum over ranks of sum(weight * out).
    """
    axis = world_axis()
    n, r = axis.count, axis.index
    xs = [drawn(n * 2, 3, n, seed=rank).requires_grad_() for rank in range(n)]
    x = drawn(n * 2, 3, n, seed=r).requires_grad_()
    found = {}

    def compare(name, out, wanted, summed=True):
        weights = [drawn(*out.shape, seed=100 + (k if summed else 0)) for k in range(n)]
        # The gradient reaches the function as an expanded, hence not contiguous, tensor too.
        (d_x,) = torch.autograd.grad((out * weights[r]).sum() + out.sum(), x)
        loss = sum((w * y).sum() + y.sum() for w, y in zip(weights, wanted, strict=True))
        whole = loss if summed else loss / n
        (d_wanted,) = torch.autograd.grad(whole, xs[r])
        found[name] = max(difference(out, wanted[r]), difference(d_x, d_wanted))
        assert out.is_contiguous()

    for dim in (0, 1, 2, -1):
        compare(f"gather {dim}", gather_dim(x, axis, dim=dim), [torch.cat(xs, dim)] * n)
    for dim in (0, 2, -1):
        compare(f"scatter {dim}", scatter_sum(x, axis, dim=dim), sum(xs).chunk(n, dim))
    for split, gather in ((0, 1), (2, 0), (0, 2), (-1, -2), (0, 0)):
        out = exchange(x, axis, split_dim=split, gather_dim=gather)
        wanted = [torch.cat([y.chunk(n, split)[k] for y in xs], gather) for k in range(n)]
        compare(f"exchange {split} {gather}", out, wanted)
    for dim in (0, 1, -1):
        out = gather_replicated(x, axis, dim=dim)
        compare(f"replicated {dim}", out, [torch.cat(xs, dim)] * n, summed=False)
    compare("sum_forward", sum_forward(x, axis), [sum(xs)] * n, summed=False)

    same = drawn(4, 3, seed=7).requires_grad_()
    weights = [drawn(4, 3, seed=50 + k) for k in range(n)]
    (d_same,) = torch.autograd.grad((sum_grad(same, axis) * weights[r]).sum(), same)
    found["sum_grad"] = difference(d_same, sum(weights))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_one_process(world):
    for found in run_ranks(each_against_one_process, world):
        assert len(found) == 17
        assert max(found.values()) < 1e-12, found


def refusals():
    axis = world_axis()
    texts = []
    for call in (
        lambda: scatter_sum(torch.ones(2, 7), axis, dim=1),
        lambda: exchange(torch.ones(2, 7), axis, split_dim=1, gather_dim=0),
    ):
        with pytest.raises(ValueError, match="does not divide") as caught:
            call()
        texts.append(str(caught.value))
    # Nothing was sent: ranks that were refused can go on.
    assert gather_dim(torch.ones(1), axis, dim=0).sum() == axis.count
    return texts


def test_sizes_that_do_not_divide_are_refused_before_anything_is_sent_naming_both_numbers():
    for texts in run_ranks(refusals, 2):
        for text in texts:
            assert "size 7" in text
            assert "2 equal parts" in text


def other_dtypes_and_second_order():
    axis = world_axis()
    assert scatter_sum(torch.ones(4, dtype=torch.bfloat16), axis, dim=0).dtype == torch.bfloat16
    x = drawn(4, seed=axis.index).requires_grad_()
    (d_x,) = torch.autograd.grad(gather_dim(x, axis, dim=0).pow(3).sum(), x, create_graph=True)
    (d_d,) = torch.autograd.grad(d_x.sum(), x)
    with torch.no_grad():
        assert not gather_dim(x, axis, dim=0).requires_grad
    return difference(d_d, 6 * axis.count * axis.count * x.detach() / axis.count)


def test_other_dtypes_and_second_derivatives_work():
    assert max(run_ranks(other_dtypes_and_second_order, 2)) < 1e-12


def test_on_one_rank_each_is_the_identity():
    axis, x = solo_parallel().tp, torch.ones(3, 5)
    for out in (
        gather_dim(x, axis, dim=1),
        gather_replicated(x, axis, dim=1),
        scatter_sum(x, axis, dim=1),
        exchange(x, axis, split_dim=0, gather_dim=1),
        sum_grad(x, axis),
        sum_forward(x, axis),
    ):
        assert out is x
