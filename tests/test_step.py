"""forward_backward and evaluate: sums over microbatches, one denominator."""

import functools
import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainkit as tk
from trainkit import step
from trainkit.batch import make_padding_batch
from trainkit.losses import next_token, weighted_next_token
from trainkit.parallel.stage_ranks import attach_axes
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, ConfigError

WIDTH = 3


def call(model, batch):
    return model(batch["x"])


def squared(y, batch):
    total = ((y - batch["y"]) ** 2 * batch["weight"]).sum()
    return total, {"loss": total.detach()}


def linear():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 1, bias=False).double()


def data(rows, *, weight=None):
    torch.manual_seed(1)
    x, y = torch.randn(rows, WIDTH).double(), torch.randn(rows, 1).double()
    return {"x": x, "y": y, "weight": torch.ones(rows, 1) if weight is None else weight}


def part(batch, start, stop):
    return {name: value[start:stop] for name, value in batch.items()}


@given(st.lists(st.integers(0, 8), max_size=5))
def test_gradients_and_sums_are_additive_over_every_split(cuts):
    whole, bounds = data(8), sorted({0, 8, *cuts})
    one, many = linear(), linear()
    wanted = tk.forward_backward(one, [whole], squared, denominator=torch.tensor(8), call=call)
    pieces = [part(whole, a, b) for a, b in itertools.pairwise(bounds)]
    found = tk.forward_backward(many, pieces, squared, denominator=torch.tensor(8), call=call)
    assert torch.allclose(found["loss"], wanted["loss"], rtol=1e-13)
    assert torch.allclose(many.weight.grad, one.weight.grad, rtol=1e-13)


def test_it_adds_to_the_gradient_that_is_there():
    model, batch = linear(), data(4)
    for _ in range(2):
        tk.forward_backward(model, [batch], squared, denominator=torch.tensor(4), call=call)
    once = linear()
    tk.forward_backward(once, [batch], squared, denominator=torch.tensor(4), call=call)
    assert torch.allclose(model.weight.grad, 2 * once.weight.grad)


@pytest.mark.case("S1")
def test_a_step_without_a_valid_token_leaves_zero_gradients():
    model, batch = linear(), data(4, weight=torch.zeros(4, 1))
    sums = tk.forward_backward(model, [batch], squared, denominator=torch.tensor(0), call=call)
    assert sums["loss"] == 0
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))


def test_sums_are_detached():
    sums = tk.forward_backward(linear(), [data(2)], squared, denominator=torch.tensor(2), call=call)
    assert not sums["loss"].requires_grad


def test_no_microbatch_and_unknown_reductions_are_refused():
    with pytest.raises(ValueError, match="got no batch"):
        tk.forward_backward(linear(), [], squared, denominator=torch.tensor(1), call=call)
    with pytest.raises(ValueError, match='"last" or "each", got \'never\''):
        tk.forward_backward(
            linear(), [data(1)], squared, denominator=torch.tensor(1), call=call, reduce="never"
        )
    with pytest.raises(ValueError, match="make_forward_backward"):
        tk.make_forward_backward(linear(), squared, reduce="never")


def take(by, loss):
    """Call a function of `step` with a loss of two numbers."""
    model, batches = nn.Linear(1, 1), [{"x": torch.ones(2, 1), "labels": torch.ones(2, 1)}]
    if by == "evaluate":
        return step.evaluate(model, batches, loss, axis=SOLO, call=call)
    return step.forward_backward(model, batches, loss, denominator=torch.tensor(2), call=call)


NO_TERMS = {
    "a tensor of shape ()": lambda y, _: y.sum(),
    "a tensor of shape (2, 1)": lambda y, _: y,
    "(a tensor of shape (), a tensor of shape ())": lambda y, _: (y.sum(), y.sum()),
    "a `NoneType`": lambda *_: None,
}


@pytest.mark.parametrize("returned", NO_TERMS)
@pytest.mark.parametrize("by", ["forward_backward", "evaluate"])
def test_a_loss_that_returns_no_sum_with_its_terms_is_refused_with_the_cure(returned, by):
    cure = re.escape(f"this one returned {returned}. With one term: `return total, ")
    with pytest.raises(ValueError, match=f"^{by}: .*{cure}"):
        take(by, NO_TERMS[returned])


def test_a_loss_that_is_not_summed_is_refused():
    with pytest.raises(ValueError, match=r"one number; got a tensor of shape \(2, 1\)"):
        take("forward_backward", lambda y, _: (y, {"loss": y.detach().sum()}))


def test_the_bound_form_is_the_function():
    bound, free = linear(), linear()
    run = tk.make_forward_backward(bound, squared, call=call)
    run([data(3)], denominator=torch.tensor(3))
    tk.forward_backward(free, [data(3)], squared, denominator=torch.tensor(3), call=call)
    assert torch.equal(bound.weight.grad, free.weight.grad)


def test_an_unknown_schedule_or_too_many_stages_are_refused_without_a_pipeline():
    ps = tk.solo_parallel()
    with pytest.raises(ConfigError, match="no pipeline schedule 'fast'; there are gpipe, 1f1b"):
        tk.build_stages(linear, ps, [], weights=torch.zeros, schedule="fast")
    with pytest.raises(ValueError, match="one stage is needed, got 2"):
        tk.make_forward_backward(attach_axes([linear(), linear()], ps), squared)
    with pytest.raises(ConfigError, match="takes a module or a Stages, not a list"):
        tk.make_forward_backward([linear(), linear()], squared)


def test_a_loss_that_does_not_name_its_terms_is_refused_in_a_pipeline():
    stages = tk.Stages((linear(),), call=call, pp=tk.Axis("pp", tk.Share(0, 2)))
    with pytest.raises(ConfigError, match="loss squared has no attribute `terms`"):
        tk.make_forward_backward(stages, squared)


# ---------------------------------------------------------------- DDP


def ddp_gradients(*, reduce, repeats, summed=True):
    """Return the gradient on two ranks, each with half of the rows in two microbatches."""
    model = nn.parallel.DistributedDataParallel(linear())
    if summed:
        tk.sum_gradients_(model)
    rank, whole = torch.distributed.get_rank(), data(8)
    pieces = [part(whole, 4 * rank + i, 4 * rank + i + 2) for i in (0, 2)]
    for _ in range(repeats):
        tk.forward_backward(
            model, pieces, squared, denominator=torch.tensor(8), call=call, reduce=reduce
        )
    return model.module.weight.grad.numpy()


def every_ddp_gradient():
    return {
        (reduce, repeats): ddp_gradients(reduce=reduce, repeats=repeats)
        for reduce in ("last", "each")
        for repeats in (1, 2)
    }


def test_ddp_gives_the_gradient_of_one_process():
    model = linear()
    tk.forward_backward(model, [data(8)], squared, denominator=torch.tensor(8), call=call)
    for found in run_ranks(every_ddp_gradient, 2):
        for (reduce, repeats), grad in found.items():
            wanted = repeats * model.weight.grad
            assert torch.allclose(torch.from_numpy(grad), wanted, rtol=1e-13), (reduce, repeats)


def test_ddp_that_averages_is_refused():
    with pytest.raises(RuntimeError, match="averages"):
        run_ranks(functools.partial(ddp_gradients, reduce="last", repeats=1, summed=False), 2)


# ---------------------------------------------------------------- evaluation


class Bigram(nn.Module):
    """Logits that depend on the token alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(7, 7).double())
        self.drop = nn.Dropout(0.5)

    def forward(self, input_ids, **_):
        return self.drop(self.table[input_ids])


def text(rows, columns=5):
    torch.manual_seed(2)
    ids = torch.randint(0, 7, (rows, columns))
    labels = torch.randint(0, 7, (rows, columns)).masked_fill(torch.rand(rows, columns) < 0.3, -100)
    blank = make_padding_batch(rows, columns)
    return [
        {**blank, "input_ids": ids[r : r + 1], "labels": labels[r : r + 1]} for r in range(rows)
    ]


def evaluated(counts=(6,)):
    """Evaluate six batches dealt to ranks in the given numbers."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    start = sum(counts[:rank])
    with tk.parallel_session() as ps:
        own = text(6)[start : start + counts[rank]]
        found = tk.evaluate(Bigram(), iter(own), next_token, axis=ps.loss)
        weighed = [batch | {"weights": torch.full(batch["labels"].shape, 0.5)} for batch in own]
        of_column = tk.evaluate(Bigram(), iter(weighed), weighted_next_token, axis=ps.loss)
    assert float(of_column["loss"]) == pytest.approx(float(found["loss"]), rel=1e-6)
    return float(found["loss"]), int(found["tokens"])


def each_of(function, every):
    return [function(counts) for counts in every]


@pytest.mark.parametrize("every", [[(3, 3), (1, 5), (6, 0), (0, 6)], [(1, 2, 3)]], ids=str)
def test_evaluation_is_the_sum_of_losses_over_the_sum_of_tokens(every):
    loss, tokens = evaluated()
    for found in run_ranks(each_of, len(every[0]), evaluated, every):
        assert found == [(pytest.approx(loss, rel=1e-13), tokens)] * len(every)


def test_long_sums_of_an_evaluation_lose_nothing():
    terms = iter([2.0**24] + [1.0] * 40)

    def loss(_, __):
        return None, {"loss": torch.tensor(next(terms))}

    batches = [{"labels": torch.zeros(1, 1, dtype=torch.int64)}] * 41
    solo = tk.solo_parallel()
    found = tk.evaluate(nn.Identity(), batches, loss, axis=solo.loss, call=lambda *_: None)
    assert found["loss"] * 41 == 2**24 + 40


def test_evaluation_is_no_mean_of_means():
    model, solo = Bigram().eval(), tk.solo_parallel()
    each = [float(tk.evaluate(model, [b], next_token, axis=solo.loss)["loss"]) for b in text(6)]
    assert abs(sum(each) / 6 - evaluated()[0]) > 1e-3


def test_evaluation_leaves_the_training_state_alone():
    model = Bigram()
    model.drop.eval()
    batches = text(2)
    before, generator = model.table.detach().clone(), torch.get_rng_state()
    tk.evaluate(model, batches, next_token, axis=tk.solo_parallel().loss)
    assert model.training
    assert not model.drop.training
    assert model.table.grad is None
    assert torch.equal(model.table, before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_evaluating_nothing_is_refused():
    with pytest.raises(ValueError, match="no batch"):
        tk.evaluate(Bigram(), [], next_token, axis=tk.solo_parallel().loss)


def sharded_evaluation(counts):
    """Return losses before and after, and whether the parameters are shards again."""
    from whole_step import CAPACITY, Layout, build, corpus

    text_ = corpus()
    bins = tk.pack_bins(text_.lengths, CAPACITY)
    from trainkit.losses import next_token_linear

    with tk.parallel_session() as ps:
        stages, _ = build(Layout(), ps)
        rows = list(tk.make_eval_batches(tk.PackedCorpus(text_, bins), rows_per_batch=1))
        start = sum(counts[: ps.loss.index])
        own = rows[start : start + counts[ps.loss.index]]
        found = tk.evaluate(stages[0], own, next_token_linear, axis=ps.loss)
        shards = {type(p).__name__ for p in stages[0].parameters()}
    return float(found["loss"]), sorted(shards)


def test_a_sharded_model_evaluates_uneven_parts_and_shows_its_shards_afterwards():
    wanted, _ = sharded_evaluation((6,))
    every = [(3, 3), (5, 1), (6, 0)]
    for found in run_ranks(each_of, 2, sharded_evaluation, every):
        assert found == [(pytest.approx(wanted, rel=1e-12), ["DTensor"])] * len(every)


# ---------------------------------------------------------------- what must be refused or survive


def foreign_reduction(kind):
    """Wrap a model by something that averages, and try a step."""
    from torch.distributed._composable import replicate
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = linear()
    if kind == "hook":
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif kind == "static":
        model = nn.parallel.DistributedDataParallel(model, static_graph=True)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        replicate(model)
    tk.sum_gradients_(model)
    tk.forward_backward(model, [data(2)], squared, denominator=torch.tensor(2), call=call)


@pytest.mark.parametrize("kind", ["hook", "fsdp1", "replicate"])
def test_whatever_averages_is_refused_by_name(kind):
    with pytest.raises(RuntimeError, match="averages gradients"):
        run_ranks(foreign_reduction, 2, kind)


def parameters_of_what_averages():
    """Return what functions of gradients say to FSDP2 and DDP before these sum."""
    from torch.distributed.fsdp import fully_shard

    messages = []
    calls = [
        lambda model: tk.get_parameters([model]),
        tk.grad_norm,
        lambda model: tk.clip_grads_(model, max_norm=1.0),
    ]
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        model = wrap(linear())
        for call in calls:
            try:
                call(model)
            except ValueError as error:
                messages.append(str(error).partition(" averages")[0])
        tk.sum_gradients_(model)
        assert len(tk.get_parameters([model])) == 1
    return messages


def test_parameters_of_a_module_that_averages_are_refused():
    for messages in run_ranks(parameters_of_what_averages, 2):
        functions = ["get_parameters", "grad_norm", "clip_grads_"]
        assert [text.partition(": the module")[0] for text in messages] == functions * 2


def test_a_static_graph_is_refused():
    with pytest.raises(RuntimeError, match="static_graph=True"):
        run_ranks(foreign_reduction, 2, "static")


def step_after_a_failure():
    """Fail in the second microbatch, and say what the next step says."""
    from whole_step import Layout, build

    with tk.parallel_session() as ps:
        stages, _ = build(Layout(), ps)
        batch = tk.batch.make_padding_batch(1, 4)
        calls = []

        def fails_once(output, _):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("a bad sample")
            return output[0].sum(), {}

        messages = []
        for _ in range(2):
            try:
                tk.forward_backward(
                    stages[0], [batch, batch], fails_once, denominator=torch.tensor(1)
                )
            except (RuntimeError, ValueError) as error:
                messages.append(str(error))
        return messages


def test_a_step_after_one_that_broke_off_is_refused_and_not_wrong():
    for messages in run_ranks(step_after_a_failure, 2):
        assert messages[0] == "a bad sample"
        assert "an earlier call failed" in messages[1]


def evaluation_with(kind):
    rank = torch.distributed.get_rank()

    def batches():
        for i, batch in enumerate(text(6)):
            if i % 2 == rank or kind == "extra":
                yield {**batch, "gain": torch.tensor(1.0)}
            if kind.startswith("raises") and rank == 1 and i == 3:
                raise OSError("unreadable")
            if kind == "extra" and rank == 1 and i == 1:
                return

    def call_with_gain(model, batch):
        return model(batch["input_ids"]) * batch["gain"]

    with tk.parallel_session(tp=2 if kind == "raises under tp" else 1) as ps:
        try:
            tk.evaluate(attach_axes([Bigram()], ps), batches(), next_token, call=call_with_gain)
        except (OSError, RuntimeError) as error:
            return str(error)
    return "fine"


@pytest.mark.parametrize("kind", ["raises", "raises under tp"])
def test_an_unreadable_batch_on_one_rank_ends_the_evaluation_on_all(kind):
    found = run_ranks(evaluation_with, 2, kind)
    assert found == ["evaluate: another rank could not read its next batch", "unreadable"]


def test_a_rank_that_runs_out_computes_along_on_what_the_call_needs():
    assert run_ranks(evaluation_with, 2, "extra") == ["fine", "fine"]


def test_a_term_with_a_denominator_of_its_own_is_divided_by_it():
    def loss(output, batch):
        total, terms = next_token(output, batch)
        return total, {**terms, "aux": torch.tensor(6.0), "aux/count": torch.tensor(4.0)}

    found = tk.evaluate(Bigram(), text(3), loss, axis=tk.solo_parallel().loss)
    assert found["aux"] == 1.5
    assert "aux/count" not in found


def test_one_batch_in_place_of_a_sequence_is_refused():
    with pytest.raises(ValueError, match="must be a sequence of batches, got a single batch"):
        tk.forward_backward(linear(), data(1), squared, denominator=torch.tensor(1), call=call)


def test_forward_backward_of_stages_names_the_function_that_takes_them():
    stages = attach_axes([linear()], tk.solo_parallel())
    with pytest.raises(ConfigError, match="takes a module, not a Stages") as caught:
        tk.forward_backward(stages, [data(1)], squared, denominator=torch.tensor(1), call=call)
    assert "make_forward_backward" in caught.value.hint


def own_backward_after_a_step():
    """Return the reduction flags of each FSDP group after forward_backward has failed."""
    from torch.distributed.fsdp import FSDPModule
    from whole_step import Layout, build

    from trainkit.parallel.grad_reduction import fsdp_groups

    with tk.parallel_session() as ps:
        stages, _ = build(Layout(), ps)
        batch = tk.batch.make_padding_batch(1, 4)

        def fails(*_):
            raise RuntimeError("a bad sample")

        with pytest.raises(RuntimeError, match="a bad sample"):
            tk.forward_backward(stages[0], [batch] * 2, fails, denominator=torch.tensor(1))
        sharded = [m for m in stages[0].modules() if isinstance(m, FSDPModule)]
        groups = [group for module in sharded for group in fsdp_groups(module)]
        return [(g.reduce_grads, g.all_reduce_grads) for g in groups]


def test_the_reduction_of_a_module_is_switched_back_on_whatever_happens():
    for flags in run_ranks(own_backward_after_a_step, 2):
        assert flags
        assert all(flag == (True, True) for flag in flags)
