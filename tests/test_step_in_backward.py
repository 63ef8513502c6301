"""A parameter that is stepped as its gradient arrives ends where `clip_and_step` takes it."""

import functools
import math

import attrs
import pytest
import torch
from torch import nn
from whole_step import CAPACITY, Layout, build, corpus, difference, full, input_of

import trainkit as tk
from trainkit.grads import make_step_in_backward
from trainkit.losses import next_token_linear
from trainkit.models import call_routed, call_with_noise
from trainkit.parallel.parameters import get_local_box
from trainkit.tools.testing import LayoutCase, run_ranks
from trainkit.tools.testing.builtin import (
    SHALLOW,
    decoder_batch,
    decoder_plan,
    expert_loss,
    with_experts,
)
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.tools.testing.train import certificate_optimizer, certificate_weights
from trainkit.types import SOLO, Axis, ConfigError, Share


def train(layout, *, in_backward, rows_per_microbatch=4, exact=False):
    """Take three steps; return numbers and parameters, and bytes: the most of gradients, one's."""
    text, messages, most = corpus(), [], [0]
    bins = tk.pack_bins(text.lengths, CAPACITY)
    layout = attrs.evolve(layout, rows_per_microbatch=rows_per_microbatch)
    with tk.parallel_session(dp_replicate=layout.dp_replicate, tp=layout.tp) as ps:
        stages, optimizer = build(layout, ps)
        params = tk.get_parameters(stages)
        optimizer.param_groups[1]["lr_scale"] = 0.5
        run = tk.make_forward_backward(
            stages, next_token_linear, call=call_with_noise, reduce=layout.reduce
        )

        def weigh(_):
            held = sum(
                p.grad.to_local().nbytes if hasattr(p.grad, "to_local") else p.grad.nbytes
                for p in params
                if p.grad is not None
            )
            most[0] = max(most[0], held)

        for p in params:
            p.register_post_accumulate_grad_hook(weigh)
        step_in_backward = make_step_in_backward(
            stages,
            optimizer,
            axis=ps.pp,
            sp=ps.sp_unfolded,
            log=messages.append,
            reduce=layout.reduce,
        )
        cursor, last, losses, norms = tk.Cursor(), 1.0, [], []
        for _ in range(3):
            batch = input_of(cursor, ps, layout, text=text, bins=bins)
            cursor, count = batch.cursor, len(batch.microbatches)
            tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
            passes = functools.partial(run, batch.microbatches, denominator=tokens)
            if in_backward:
                if exact:
                    with step_in_backward(lr=None, microbatches=count) as measured:
                        passes()
                    assert not measured().applied
                    last = measured().norm
                with step_in_backward(
                    lr=1e-2, max_norm=0.5, norm=last, microbatches=count
                ) as updated:
                    sums = passes()
                norm = updated().norm
                assert updated().applied
            else:
                sums = passes()
                norm = tk.grad_norm(params)
                if not exact:  # by the last step's norm
                    for p in params:
                        p.grad.mul_(min(1.0, 0.5 / (last + 1e-6)))
                tk.clip_and_step(params, optimizer, lr=1e-2, max_norm=0.5 if exact else None)
            last = float(norm)
            losses.append(float(tk.reduce_metrics(sums, ps.loss)["loss"] / tokens))
            norms.append(float(norm))
        assert all(p.grad is None for p in params)
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len([p for p in params if (p.ndim < 2) == vectors]) for vectors in (False, True)
        ]
        assert len(messages) == 1
        assert "cannot be skipped" in messages[0]
        named = {name: full(p) for name, p in tk.get_named_parameters(stages).items()}
        largest = max(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in params)
        return {"losses": losses, "norms": norms, "parameters": named}, most[0], largest


@pytest.mark.parametrize("exact", [True, False], ids=["measured", "by the last norm"])
@pytest.mark.parametrize("rows", [4, 1], ids=["one microbatch", "four"])
def test_one_process_ends_bit_for_bit_where_clip_and_step_does(rows, exact):
    for tied in (False, True):
        (found, most, largest), (wanted, whole, _) = (
            train(Layout(tied=tied), in_backward=x, rows_per_microbatch=rows, exact=exact)
            for x in (True, False)
        )
        assert difference(found, wanted) == 0.0
        assert most <= (largest if rows == 4 else whole)
        assert whole > 3 * largest  # what the gradients take otherwise


LAYOUTS = {
    "sharded": Layout(2),
    "sharded, each": Layout(2, reduce="each"),
    "tensor, summed at the end": Layout(4, dp_replicate=2, ddp=True, tp=2, vocab_size=32),
    "hybrid": Layout(4, dp_replicate=2),
}


def trained(layout, counts):
    """Return what steps in the backward pass come to, by rows a microbatch."""
    return {
        rows: train(layout, rows_per_microbatch=rows, in_backward=True, exact=True)
        for rows in counts
    }


@functools.cache
def alone(vocab_size, rows):
    return train(
        Layout(vocab_size=vocab_size), in_backward=False, rows_per_microbatch=rows, exact=True
    )[0]


@pytest.mark.parametrize(
    "name",  # what the last of them chooses is chosen above
    [pytest.param(x, marks=pytest.mark.only_all if x == "hybrid" else ()) for x in LAYOUTS],
)
def test_every_layout_ends_where_one_process_does(name):
    layout = LAYOUTS[name]
    counts = (2, 1) if name == "sharded" else (1,)
    for rows, (found, most, _) in run_ranks(trained, layout.world, layout, counts)[-1].items():
        assert difference(found, alone(layout.vocab_size, rows)) < 1e-12
        if name == "sharded":  # an FSDP unit at a time
            assert most < 0.7 * sum(x.nbytes for x in found["parameters"].values()) / 2


def train_experts(layout, *, in_backward):
    """Take three steps of a decoder with experts; return norms and this rank's parameters."""
    with tk.parallel_session(layout) as ps:
        make_model = functools.partial(with_experts, SHALLOW)
        plan = decoder_plan(ps, LayoutCase(layout))
        stages = tk.build_stages(make_model, ps, plan, weights=certificate_weights)
        optimizer, params = certificate_optimizer(stages, ps.pp), tk.get_parameters(stages)
        run = tk.make_forward_backward(stages, expert_loss, call=call_routed)
        step_in_backward = make_step_in_backward(
            stages, optimizer, axis=ps.pp, sp=ps.sp_unfolded, log=lambda _: None
        )
        norms = []
        for step in range(3):
            batches = distribute_batch(decoder_batch(step), ps.data_shard, rows_per_microbatch=1)
            tokens = tk.all_sum(tk.count_valid_tokens(batches), ps.loss)
            if in_backward:
                with step_in_backward(lr=1e-2, microbatches=len(batches)) as updated:
                    run(batches, denominator=tokens)
                norms.append(updated().norm)
            else:
                run(batches, denominator=tokens)
                norms.append(tk.clip_and_step(params, optimizer, lr=1e-2, max_norm=None).norm)
        return [float(x) for x in norms], [get_local_box(p).local.clone() for p in params]


@pytest.mark.only_all
@pytest.mark.parametrize(
    "layout", [tk.Layout(dp_shard=2, ep=2), tk.Layout(dp_shard=2, tp=2, ep=2)], ids=str
)
def test_experts_that_are_dealt_end_bit_for_bit_where_clip_and_step_takes_them(layout):
    found, wanted = (
        run_ranks(functools.partial(train_experts, layout, in_backward=x), layout.world)
        for x in (True, False)
    )
    for (norms, own), (others, plain) in zip(found, wanted, strict=True):
        assert norms == others
        assert all(map(torch.equal, own, plain))


def small(optimizer=torch.optim.AdamW, **options):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    made = optimizer(model.parameters(), lr=0.1, **options)
    return model, made, make_step_in_backward([model], made, axis=SOLO, sp=SOLO, log=str)


@pytest.mark.case("N2")
@pytest.mark.parametrize(
    "make", [functools.partial(torch.optim.AdamW, fused=True), torch.optim.SGD]
)
def test_a_norm_that_is_not_finite_steps_nothing_and_one_that_comes_late_does(make):
    model, _, step_in_backward = small(make)
    for lr, norm, applied in ((None, None, False), (0.1, math.nan, False), (0.1, 1.0, True)):
        before = [p.detach().clone() for p in model.parameters()]
        max_norm = None if norm is None else 1.0
        with step_in_backward(lr=lr, max_norm=max_norm, norm=norm) as updated:
            (model(torch.ones(1, 2)) * math.inf).sum().backward()
        assert not updated().norm.isfinite()
        assert bool(updated().applied) == applied
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert same == [not applied] * 2
    state, record = tk.TrainState(step=5), {"loss": 1.0, "grad_norm": math.inf, "skipped": False}
    action, _ = tk.health.judge_step(state, record, tk.health.Policy())
    assert action.kind == "rollback"  # at once: the step has damaged the run


@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scale_leaves_and_an_overflow_that_was_measured_is_skipped(overflows):
    scale = torch.tensor(2.0**16)

    def backward(model, scale=1.0):
        (model(torch.ones(1, 2)).sum() * scale * (math.inf if overflows else 1.0)).backward()

    (plain, sgd, _), (model, _, step_in_backward) = (small(torch.optim.SGD) for _ in range(2))
    backward(plain)
    wanted = tk.clip_and_step(plain.parameters(), sgd, lr=0.1, max_norm=0.5)
    with step_in_backward(lr=None, scale=scale) as measured:
        backward(model, scale)
    norm = measured().norm
    with step_in_backward(lr=0.1, max_norm=0.5, norm=norm, scale=scale) as updated:
        backward(model, scale)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    for update in (measured(), updated()):
        assert torch.equal(update.norm, wanted.norm) or overflows
        assert bool(update.overflowed) == overflows
        assert float(update.metrics["loss_scale"]) == 2.0**16
    assert bool(updated().applied) == bool(wanted.applied) == (not overflows)


def test_more_gradients_than_announced_are_an_error_and_a_failed_block_gives_the_groups_back():
    model, optimizer, step_in_backward = small()

    def twice():
        with step_in_backward(lr=0.1):
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RuntimeError, match=r"arrived after its parameter .* microbatches=1"):
        twice()
    assert len(optimizer.param_groups[0]["params"]) == 2
    for p in model.parameters():
        p.grad = None
    model(torch.ones(1, 2)).sum().backward()  # no hook is left
    assert all(p.grad is not None for p in model.parameters())


def test_what_cannot_be_is_refused_by_name():
    model, optimizer, step_in_backward = small()
    two = Axis("pp", Share(0, 2), group=object())
    for axis, sp in ((two, SOLO), (SOLO, two)):
        with pytest.raises(ConfigError, match="a layout with pp = 2; call clip_and_step"):
            make_step_in_backward([model], optimizer, axis=axis, sp=sp, log=str)
    for wrong in (
        torch.optim.SGD(list(model.parameters())[:1]),
        torch.optim.SGD([{"params": model.parameters(), "max_norm": 1.0}]),
    ):
        with pytest.raises(
            ValueError, match=r"lacks 1 parameters, of shapes \[\(1, 2\)\]|clips by"
        ):
            make_step_in_backward([model], wrong, axis=SOLO, sp=SOLO, log=str)
    for lr, max_norm, norm in ((-1.0, None, None), (0.1, 1.0, None), (0.1, 0.0, 1.0)):
        with pytest.raises(ValueError, match=r"in_backward: (lr|max_norm) must"):
            step_in_backward(lr=lr, max_norm=max_norm, norm=norm).__enter__()
