"""Tokens to their experts and back: the same on one rank and on several, whatever is uneven."""

from functools import partial

import pytest
import torch

from trainkit.collectives import all_to_all_rows
from trainkit.mesh import axis_from_group
from trainkit.models.dispatch import ep_combine, ep_dispatch, ep_dispatch_keys
from trainkit.models.routers import count_choices
from trainkit.noise import split_keys
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO

WIDE = torch.float64


def drawn(*shape, seed):
    return torch.randn(*shape, dtype=WIDE, generator=torch.Generator().manual_seed(seed))


def choices(tokens, experts, chosen, *, seed):
    """Return choices of distinct experts; every fourth token is padding."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)]
    indices = torch.stack(found) if tokens else torch.zeros(0, chosen, dtype=torch.int64)
    return indices.masked_fill(torch.arange(tokens).unsqueeze(1) % 4 == 3, experts)


def world_axis():
    assert torch.distributed.group.WORLD is not None
    return axis_from_group(torch.distributed.group.WORLD, name="ep")


def through_experts(x, indices, weights, scales, axis, *, wire_dtype=None):
    """Multiply each row with its expert's number, and add up; `scales` are those of all experts."""
    counts = count_choices(indices, len(scales))
    rows, own, route = ep_dispatch(x, indices, counts, axis, wire_dtype=wire_dtype)
    assert len(rows) == own.sum()
    mine = scales.chunk(axis.count)[axis.index].repeat_interleave(own, output_size=len(rows))
    products = rows * mine.unsqueeze(1).to(rows.dtype)
    return ep_combine(products, weights, route, axis, wire_dtype=wire_dtype), own


def check_keys(indices, axis, *, first=0):
    """Check that a row has the key of its token at its expert; rows hold their token's number."""
    tokens = torch.arange(first, first + len(indices))
    keys = split_keys(tokens, indices)
    counts = count_choices(indices, 8)
    rows, own, route = ep_dispatch(tokens.double().unsqueeze(1) + 1, indices, counts, axis)
    expert = (torch.arange(8).chunk(axis.count)[axis.index]).repeat_interleave(own)
    got, real = ep_dispatch_keys(keys, route, axis), rows[:, 0] > 0  # what is nobody's is zeros
    assert got.shape == expert.shape
    want = split_keys(rows[:, 0].long() - 1, expert.unsqueeze(1))[:, 0]
    assert torch.equal(got[real], want[real])


def test_a_key_comes_with_its_row():
    check_keys(choices(9, 8, 3, seed=1), SOLO)
    check_keys(choices(0, 8, 3, seed=1), SOLO)
    with pytest.raises(TypeError, match=r"the route is a str, .* give expert_parallel\(\) its own"):
        ep_dispatch_keys(torch.zeros(1, 1), "mine")


def test_on_one_rank_rows_stand_in_the_order_of_experts_and_come_back():
    x, indices = drawn(6, 3, seed=0).requires_grad_(), choices(6, 4, 2, seed=1)
    counts = count_choices(indices, 4)
    rows, own, route = ep_dispatch(x, indices, counts)
    order, padding = indices.flatten().argsort(stable=True), (indices == 4).all(1)
    assert torch.equal(rows[:-2], x[order // 2][:-2])
    assert not rows[-2:].any()
    assert own.tolist() == [*counts[:3].tolist(), counts[3] + 2]  # padding goes with the last one's
    back = ep_combine(rows, torch.full((6, 2), 0.5, dtype=WIDE), route)
    assert torch.equal(back, x.masked_fill(padding.unsqueeze(1), 0))

    def there_and_back(x, weights):
        weights = weights.masked_fill(padding.unsqueeze(1), 0)
        return through_experts(x, indices, weights, torch.arange(1.0, 5, dtype=WIDE), SOLO)[0]

    weights = torch.rand(6, 2, dtype=WIDE).requires_grad_()
    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_no_tokens_and_one_choice_are_no_special_case():
    for tokens, chosen in ((0, 2), (5, 1)):
        x, indices = drawn(tokens, 3, seed=0).requires_grad_(), choices(tokens, 4, chosen, seed=1)
        indices = indices.clamp(max=3)  # no padding
        rows, _, route = ep_dispatch(x, indices, count_choices(indices, 4))
        y = ep_combine(rows, torch.ones(tokens, chosen, dtype=WIDE), route)
        y.sum().backward()
        assert torch.equal(y, x)
        assert torch.equal(x.grad, torch.ones_like(x))


TOKENS = {"uneven": (7, 3, 12, 5), "none on a rank": (4, 0, 6, 0)}


def against_one_process(tokens, idle):
    """Return the worst difference of values and gradients on this rank from one process's."""
    axis, experts = world_axis(), 8
    tokens = tokens[: axis.count]
    xs = [drawn(n, 3, seed=r).requires_grad_() for r, n in enumerate(tokens)]
    chosen = [choices(n, experts - idle, 2, seed=10 + r) for r, n in enumerate(tokens)]
    chosen = [x.masked_fill(x == experts - idle, experts) for x in chosen]
    weights = [drawn(n, 2, seed=20 + r) for r, n in enumerate(tokens)]
    weights = [w.masked_fill(i == experts, 0) for w, i in zip(weights, chosen, strict=True)]
    scales = torch.arange(1.0, experts + 1, dtype=WIDE).requires_grad_()
    r, cost = axis.index, [drawn(n, 3, seed=30 + r) for r, n in enumerate(tokens)]
    check_keys(chosen[r], axis, first=100 * r)

    own = scales.detach().clone().requires_grad_()
    y, counts = through_experts(xs[r], chosen[r], weights[r], own, axis)
    got = torch.autograd.grad((y * cost[r]).sum(), [xs[r], own])

    alone = through_experts(*(torch.cat(x) for x in (xs, chosen, weights)), scales, SOLO)[0]
    (d_scales,) = torch.autograd.grad((alone * torch.cat(cost)).sum(), scales, retain_graph=True)
    (d_x,) = torch.autograd.grad((alone * torch.cat(cost)).sum(), xs[r])
    wanted = alone.split(tokens)[r], d_x, d_scales.chunk(axis.count)[r]
    found = y, got[0], got[1].chunk(axis.count)[r]
    assert counts.sum() == sum(
        ((x // (experts // axis.count) == r) & (x < experts)).sum() for x in chosen
    )
    far = [
        (a - b).abs().max().item() if a.numel() else 0 for a, b in zip(found, wanted, strict=True)
    ]
    return max(far)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("idle", [0, 5], ids=["all chosen", "most experts idle"])
def test_over_ranks_values_and_gradients_are_those_of_one_process(world, tokens, idle):
    assert max(run_ranks(partial(against_one_process, tokens, idle), world)) < 1e-13


def checked_numerically():
    """Check gradients numerically, in step on all ranks: what a token costs comes back to it."""
    axis = world_axis()
    indices, scales = choices(5, 4, 2, seed=axis.index), torch.arange(1.0, 5, dtype=WIDE)

    def there_and_back(x, weights):
        return through_experts(x, indices, weights, scales, axis)[0]

    x, weights = drawn(5, 2, seed=axis.index), drawn(5, 2, seed=5 + axis.index)
    return torch.autograd.gradcheck(there_and_back, (x.requires_grad_(), weights.requires_grad_()))


def test_gradients_over_ranks_are_the_numerical_ones():
    assert run_ranks(checked_numerically, 2) == [True, True]


def with_a_row_left_over():
    axis = world_axis()
    table = torch.tensor([[1, 3], [0, 2]])  # rows from rank r to rank c
    sent, received = table[axis.index].tolist(), table[:, axis.index].tolist()
    x = drawn(5, 2, seed=axis.index).requires_grad_()
    y = all_to_all_rows(x, axis, sent=sent, received=received, length=sum(received) + 1)
    assert not y[sum(received) :].any()
    (d_x,) = torch.autograd.grad((y * (axis.index + 1)).sum(), x)
    return d_x.tolist()


def test_a_row_that_is_not_sent_gets_no_gradient():
    first, second = run_ranks(with_a_row_left_over, 2)
    assert first == [[1.0, 1.0]] + [[2.0, 2.0]] * 3 + [[0.0, 0.0]]
    assert second == [[2.0, 2.0]] * 2 + [[0.0, 0.0]] * 3


def error_of_the_wire():
    axis, experts = world_axis(), 8
    x, indices = drawn(64, 16, seed=axis.index).float(), choices(64, experts, 2, seed=axis.index)
    weights = torch.full((64, 2), 0.5).masked_fill(indices == experts, 0)
    found = []
    for wire_dtype in (None, torch.bfloat16):
        leaf = x.clone().requires_grad_()
        y, _ = through_experts(
            leaf, indices, weights, torch.ones(experts), axis, wire_dtype=wire_dtype
        )
        assert y.dtype == torch.float32
        y.sum().backward()
        found.append((y.detach(), leaf.grad))
    return [((a - b).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]


def test_rows_that_travel_in_bf16_lose_its_rounding_alone():
    for values, gradient in run_ranks(error_of_the_wire, 2):
        assert 1e-4 < values < 2**-8  # sent there and, as they are, back: rounded once
        assert gradient < 2**-8


def test_rows_in_16_bits_are_weighed_and_summed_in_fp32():
    x, indices = drawn(50, 8, seed=0).bfloat16(), choices(50, 8, 8, seed=1)
    weights = torch.rand(50, 8, generator=torch.Generator().manual_seed(2))
    y = ep_combine(*_rows_and(x, indices, weights))
    parts = x.float().unsqueeze(1) * weights.unsqueeze(-1)
    padding = (indices == 8).all(1)
    assert torch.equal(y[~padding], parts.sum(1).bfloat16()[~padding])
    assert not torch.equal(parts.bfloat16().sum(1)[~padding], y[~padding])


def _rows_and(x, indices, weights):
    rows, _, route = ep_dispatch(x, indices, count_choices(indices, 8))
    return rows, weights, route


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_goes_nowhere_may_be_anything(value):
    x, indices = drawn(6, 3, seed=0), choices(6, 4, 2, seed=1)
    indices[0, 1] = 4  # a choice that found its expert full
    padding = (indices == 4).all(1)
    x[padding] = value
    weights = torch.ones(6, 2, dtype=WIDE).masked_fill(indices == 4, 0)
    scales = torch.arange(1.0, 5, dtype=WIDE).requires_grad_()
    leaf = x.requires_grad_()
    y, _ = through_experts(leaf, indices, weights, scales, SOLO)
    y.sum().backward()
    assert y.isfinite().all()
    assert scales.grad.isfinite().all()
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[padding].any()
