"""Replicas whose gradients are summed at the end, voted on, or that meet as parameters at times."""

import math

import pytest
import torch
from torch import nn
from whole_step import Layout, difference, joined, run_steps

import trainkit as tk
from trainkit.parallel import average_parameters, ddp, fsdp, mixed_precision, vote_signs
from trainkit.parallel.transforms import check_plan
from trainkit.tools.testing import count_collectives, run_ranks
from trainkit.types import SOLO, ConfigError


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, dp_replicate=2, ddp=True),
        Layout(4, dp_replicate=2, ddp=True, tp=2, vocab_size=32),
        Layout(4, dp_replicate=2, ddp=True, reduce="each"),
        Layout(4, dp_replicate=2, ddp=True, pp=2, tied=True),
    ],
    ids=["plain", "tensor", "sharded", "pipeline"],
)
def test_replicas_summed_at_the_end_give_the_numbers_of_one_process(layout):
    wanted = run_steps(Layout(tied=layout.tied, vocab_size=layout.vocab_size))
    assert difference(joined(run_ranks(run_steps, layout.world, layout)), wanted) < 1e-12


class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 1, bias=False)})

    def forward(self, x):
        return self.layers["0"](x)


def what_replicas_send(sums_them):
    """Return the kinds of parameters, the collectives of a backward pass, and the gradients."""
    with tk.parallel_session(dp_replicate=2) as ps:
        stages = tk.build_stages(
            OneBlock,
            ps,
            [ddp(sums=sums_them), mixed_precision(torch.bfloat16), fsdp()],
            weights=lambda _, shape, __: torch.ones(tuple(shape)),
        )
        inputs = [{"x": torch.full((1, 2), 1.0 + ps.world.index)}] * 2
        run = tk.make_forward_backward(
            stages,
            lambda y, _: (y.sum(), {"wide": torch.tensor(y.dtype != torch.bfloat16)}),
            call=lambda model, batch: model(batch["x"]),
        )
        sums = []
        ledger = count_collectives(
            lambda: sums.append(run(inputs, denominator=torch.tensor(1))), ps
        )
        assert not sums[0]["wide"]  # what FSDP does not gather is cast where it is
        (p,) = params = tk.get_parameters(stages)
        own = p.grad.flatten().tolist()
        if not sums_them:
            tk.sync_sp_grads(params, ps.dp_replicate)
        return type(p.data).__name__, len(ledger.rows), own, p.grad.flatten().tolist()


def test_without_fsdp_parameters_stay_plain_and_one_sum_is_sent_or_none():
    for rank, found in enumerate(run_ranks(what_replicas_send, 2, True)):
        assert found == ("Tensor", 1, [6.0, 6.0], [6.0, 6.0]), rank
    for rank, found in enumerate(run_ranks(what_replicas_send, 2, False)):
        assert found == ("Tensor", 0, [2.0 + 2.0 * rank] * 2, [6.0, 6.0])


def test_a_plan_puts_replicas_before_what_asks_for_them():
    check_plan([ddp(), fsdp()], tk.solo_parallel())
    with pytest.raises(ConfigError, match="ddp must come before fsdp"):
        check_plan([fsdp(), ddp()], tk.solo_parallel())


def averaged():
    """Return means by weight of plain and of sharded parameters, and what equal ones became."""
    from torch.distributed.tensor import Shard, distribute_tensor

    with tk.parallel_session(dp_replicate=2) as ps:
        own = 1.0 + 2.0 * ps.dp_replicate.index
        shards = distribute_tensor(torch.full((3,), own), ps.mesh["fsdp"], [Shard(0)])
        params = [nn.Parameter(torch.full((2,), own).double()), nn.Parameter(shards)]
        found, weight = [], torch.tensor([3, 5])[ps.dp_replicate.index]  # tokens
        for weights in (weight, torch.tensor(0), 1.0):
            copies = [nn.Parameter(p.detach().clone()) for p in params]
            average_parameters([*copies, copies[0]], ps.dp_replicate, weight=weights)
            found += [copies[0][0].item(), copies[1].full_tensor()[2].item()]
        torch.manual_seed(0)
        equal = nn.Parameter(torch.randn(1000))
        before = equal.detach().clone()
        average_parameters([equal], ps.dp_replicate, weight=123457 + 7 * weight)
        return found, torch.equal(equal, before)


def test_parameters_are_averaged_by_the_weight_of_each_replica():
    for found, same in run_ranks(averaged, 4):
        assert found == [2.25, 2.25, 2.0, 2.0, 2.0, 2.0]
        assert same


def step_on(model, row, step):
    """Take a step of a linear model on one of two rows."""
    x = (1.0 + step) * torch.tensor([[1.0, 2.0], [0.5, -1.0]][row : row + 1]).double()
    (0.01 * model(x).square()).sum().backward()
    sgd = torch.optim.SGD(model.parameters())
    tk.clip_and_step(model.parameters(), sgd, lr=0.1, max_norm=None)


def linear(values):
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data.copy_(values)
    return model


def local_steps():
    """Return parameters after steps on a row of one's own, averaged every second step."""
    with tk.parallel_session(dp_replicate=2) as ps:
        model = linear(torch.ones(1, 2))
        for step in range(4):
            step_on(model, ps.dp_replicate.index, step)
            if tk.schedules.is_due(step + 1, 2):
                average_parameters(tk.get_parameters([model]), ps.dp_replicate)
        return model.weight.flatten().tolist()


def test_local_steps_with_averages_are_those_of_replicas_by_hand():
    whole = linear(torch.ones(1, 2))
    for begin in (0, 2):
        replicas = [linear(whole.weight) for _ in range(2)]
        for row, model in enumerate(replicas):
            step_on(model, row, begin)
            step_on(model, row, begin + 1)
        whole = linear((replicas[0].weight + replicas[1].weight) / 2)
    wanted = pytest.approx(whole.weight.flatten().tolist(), rel=1e-14)
    assert run_ranks(local_steps, 2) == [wanted] * 2


def voted():
    """Return what is left of gradients after votes, by how they are counted."""
    from torch.distributed.tensor import Shard, distribute_tensor

    with tk.parallel_session(dp_replicate=3, dp_shard=1) as ps:
        values = torch.tensor(
            [[1e-3, -9.0, 4.0, 0.0], [5.0, 8.0, -1.0, 0.0], [0.5, -2.0, 0.0, 0.0]]
        )
        found = {}
        for count in ("majority", "mean"):
            whole, absent, unused = (nn.Parameter(torch.zeros(4)) for _ in range(3))
            sharded = nn.Parameter(distribute_tensor(torch.zeros(4), ps.mesh["fsdp"], [Shard(0)]))
            whole.grad = values[ps.world.index].clone()
            sharded.grad = distribute_tensor(whole.grad, ps.mesh["fsdp"], [Shard(0)])
            absent.grad = torch.ones(4) if ps.world.index == 1 else None
            params = [whole, sharded, absent, unused]
            vote_signs(params, ps.dp_replicate, count=count)
            found[count] = (
                whole.grad.tolist(),
                sharded.grad.to_local().tolist(),
                absent.grad.tolist(),
            )
            assert unused.grad is None
        whole.grad = torch.tensor([1.0, math.inf if ps.world.index == 2 else 1.0, 1.0, 1.0])
        vote_signs([whole], ps.dp_replicate)
        ledger = count_collectives(lambda: vote_signs([whole], ps.dp_replicate), ps)
        return found, bool(whole.grad.isnan().all()), ledger.rows[0].bytes


def test_votes_are_counted_once_for_each_replica_and_a_bad_one_spoils_the_step():
    for found, spoiled, sent in run_ranks(voted, 3):
        majority, mean = [1.0, -1.0, 0.0, 0.0], pytest.approx([1.0, -1 / 3, 0.0, 0.0])
        assert found["majority"] == (majority, majority, [1.0] * 4)
        assert found["mean"] == (mean, mean, pytest.approx([1 / 3] * 4))
        assert spoiled
        assert sent == 4 + 1 + 1  # a byte an element, one for who has it, one for whether it is bad


def test_a_count_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"vote_signs: .*count"):
        vote_signs([], SOLO, count="median")
