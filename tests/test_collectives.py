"""Differentiable collectives give the values and gradients of one process that holds everything."""

import time

import attrs
import pytest
import torch

from trainkit.collectives import (
    all_gather,
    all_gather_replicated,
    all_max,
    all_min,
    all_to_all,
    check_communication,
    reduce_scatter,
    reduce_scatter_bf16,
    sum_forward,
    sum_grad,
)
from trainkit.mesh import axis_from_group, solo_parallel
from trainkit.tools.testing import run_ranks
from trainkit.types import PeerError, Share


def drawn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def world_axis():
    assert torch.distributed.group.WORLD is not None
    return axis_from_group(torch.distributed.group.WORLD)


def difference(a, b):
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item()


def check_with_a_fault(fault, done=None):
    """Check the communication of ranks, of which the second is silent or sends another number."""
    axis = world_axis()
    if fault == "is silent" and axis.index == 1:
        while not done.exists():  # until the other has given up, however slow this machine is
            time.sleep(0.01)
        return None
    if fault == "sends another number" and axis.index == 1:
        axis = attrs.evolve(axis, share=Share(2, 3))
    try:
        return check_communication(axis, timeout=0.5 if fault == "is silent" else 30.0)
    except PeerError as error:
        return str(error)
    finally:
        if done is not None:
            done.touch()


def test_communication_that_works_is_measured():
    assert all(0 < seconds < 30 for seconds in run_ranks(check_with_a_fault, 2, None))
    assert check_communication(solo_parallel().world) == 0.0


def test_a_rank_that_does_not_answer_is_found_within_the_timeout(tmp_path):
    found = run_ranks(check_with_a_fault, 2, "is silent", tmp_path / "done")
    assert "did not answer each other within 0.5 s" in found[0]


def test_a_sum_that_is_wrong_is_found():
    for said in run_ranks(check_with_a_fault, 2, "sends another number"):
        assert "the sum over the ranks of" in said


def extremes():
    axis = world_axis()
    x = torch.tensor([axis.index, -axis.index, 7])
    return all_max(x, axis).tolist(), all_min(x, axis).tolist(), x.tolist()


def test_extremes_are_those_of_all_ranks_and_inputs_stay():
    for index, found in enumerate(run_ranks(extremes, 2)):
        assert found == ([1, 0, 7], [0, -1, 7], [index, -index, 7])
    x = torch.tensor([3])
    assert all_min(x, solo_parallel().world) is x


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
        compare(f"gather {dim}", all_gather(x, axis, dim=dim), [torch.cat(xs, dim)] * n)
    for dim in (0, 2, -1):
        compare(f"scatter {dim}", reduce_scatter(x, axis, dim=dim), sum(xs).chunk(n, dim))
    for split, gather in ((0, 1), (2, 0), (0, 2), (-1, -2), (0, 0)):
        out = all_to_all(x, axis, split_dim=split, gather_dim=gather)
        wanted = [torch.cat([y.chunk(n, split)[k] for y in xs], gather) for k in range(n)]
        compare(f"exchange {split} {gather}", out, wanted)
    for dim in (0, 1, -1):
        out = all_gather_replicated(x, axis, dim=dim)
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
        lambda: reduce_scatter(torch.ones(2, 7), axis, dim=1),
        lambda: all_to_all(torch.ones(2, 7), axis, split_dim=1, gather_dim=0),
    ):
        with pytest.raises(ValueError, match="does not divide") as caught:
            call()
        texts.append(str(caught.value))
    # Nothing was sent: ranks that were refused can go on.
    assert all_gather(torch.ones(1), axis, dim=0).sum() == axis.count
    return texts


def test_sizes_that_do_not_divide_are_refused_before_anything_is_sent_naming_both_numbers():
    for texts in run_ranks(refusals, 2):
        for text in texts:
            assert "size 7" in text
            assert "2 equal parts" in text


def other_dtypes_and_second_order():
    axis = world_axis()
    assert reduce_scatter(torch.ones(4, dtype=torch.bfloat16), axis, dim=0).dtype == torch.bfloat16
    x = drawn(4, seed=axis.index).requires_grad_()
    (d_x,) = torch.autograd.grad(all_gather(x, axis, dim=0).pow(3).sum(), x, create_graph=True)
    (d_d,) = torch.autograd.grad(d_x.sum(), x)
    with torch.no_grad():
        assert not all_gather(x, axis, dim=0).requires_grad
    return difference(d_d, 6 * axis.count * axis.count * x.detach() / axis.count)


def test_other_dtypes_and_second_derivatives_work():
    assert max(run_ranks(other_dtypes_and_second_order, 2)) < 1e-12


def test_on_one_rank_each_is_the_identity():
    axis, x = solo_parallel().tp, torch.ones(3, 5)
    for out in (
        all_gather(x, axis, dim=1),
        all_gather_replicated(x, axis, dim=1),
        reduce_scatter(x, axis, dim=1),
        all_to_all(x, axis, split_dim=0, gather_dim=1),
        sum_grad(x, axis),
        sum_forward(x, axis),
    ):
        assert out is x


# -------------------------------------------------------------------------- sums sent in bf16


def summed_in_bf16():
    """Return what is off in a sum over ranks: of one, in the mean of many, and where it is not."""
    axis = world_axis()
    n, r = axis.count, axis.index
    xs = [drawn(n * 40, 3, seed=rank).float() for rank in range(n)]
    own = [x.chunk(n)[r].double() for x in xs]
    others = sum(x for rank, x in enumerate(own) if rank != r)
    most = sum(x.abs() for rank, x in enumerate(own) if rank != r) * 2.0**-7
    keys = range(400)
    found = [reduce_scatter_bf16(xs[r], axis, key=torch.tensor(key)) for key in keys]
    offs = torch.stack([y.double() - own[r] for y in found]) - others
    assert {y.dtype for y in found} == {torch.float32}
    assert (offs.abs() <= most + 1e-6).all()
    assert (offs.mean(0).abs() <= 5 * most / len(keys) ** 0.5 + 1e-6).all()
    nearest = sum(x.bfloat16().double() for rank, x in enumerate(own) if rank != r) - others
    assert not (nearest.abs() <= 5 * most / len(keys) ** 0.5 + 1e-6).all()
    again = reduce_scatter_bf16(xs[r], axis, key=torch.tensor(3))
    assert torch.equal(again, found[3])
    assert not torch.equal(found[3], found[4])
    # Numbers that bf16 holds, whose sum it does not: nothing may be lost.
    whole = torch.full((n, 1), 256.0 if r else 1 + 2.0**-7)
    assert reduce_scatter_bf16(whole, axis, key=torch.tensor(0)).item() == 1 + 2.0**-7 + 256 * (
        n - 1
    )
    # What a rank has itself is not rounded.
    fine = torch.full((n, 1), 1 + 2.0**-20 if r == 0 else 0.0)
    first = reduce_scatter_bf16(fine, axis, key=torch.tensor(0)).item()
    assert first == 1 + 2.0**-20 if r == 0 else first in (1, 1 + 2.0**-7)
    return True


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.only_all), 3])
def test_a_sum_that_is_sent_in_bf16_is_right_in_the_mean_and_bounded(world):
    assert run_ranks(summed_in_bf16, world) == [True] * world


def equal_summands():
    """Round the same numbers by the same key on two ranks, and send the difference to a third."""
    axis = world_axis()
    x = torch.full((axis.count * 1000,), (1 + 2.0**-8) * (0, 1, -1)[axis.index])
    return reduce_scatter_bf16(x, axis, key=torch.tensor(0)).count_nonzero().item()


def test_ranks_with_one_key_round_apart():
    assert 450 < run_ranks(equal_summands, 3)[0] < 550


def test_what_does_not_divide_is_not_sent():
    assert run_ranks(undivided, 2) == [True] * 2


def undivided():
    with pytest.raises(ValueError, match=r"reduce_scatter_bf16: dimension 0 .* does not divide"):
        reduce_scatter_bf16(torch.ones(3), world_axis(), key=torch.tensor(0))
    return True
