"""fp16: the scale of the loss leaves no trace in a step, is one on all ranks, and is kept."""

import json
import math

import attrs
import pytest
import torch
from recipe_runs import SMALL, column, events, here, lines, nano_config
from whole_step import CAPACITY, CONFIG, Layout, corpus, input_of

import trainkit as tk
from trainkit import health, losses
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, init_weights
from trainkit.optim import make_optimizer
from trainkit.parallel import make_decoder_plan
from trainkit.parallel.parameters import get_local_box
from trainkit.tools.testing import run_ranks

FP16 = tk.Precision(compute="fp16")
MODEL = attrs.evolve(CONFIG, vocab_size=32)
POLICY = health.Policy()
LAYOUTS = tk.Layout(dp_shard=1, dp_replicate=2), tk.Layout(pp=2)
MORE = tk.Layout(dp_shard=2), tk.Layout(tp=2)


def test_the_scale_moves_as_that_of_torch():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    p = torch.nn.Parameter(torch.zeros(1))
    sgd, memory = torch.optim.SGD([p]), {}
    for overflows in map(int, "1000010000000110"):
        metrics = {"loss_scale": health.get_loss_scale(memory, FP16)}
        assert float(metrics["loss_scale"]) == scaler.get_scale()
        metrics["overflowed"] = torch.tensor(bool(overflows))
        memory = health.update_loss_scale(memory, metrics, interval=3)
        scaler.scale(p.sum() * (math.inf if overflows else 1.0)).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
    assert float(memory["loss_scale"]) == scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_scaled_step_is_the_step_bit_for_bit(max_norm):
    def stepped(scale):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
        for p in params:
            p.grad = torch.randn(5) * (scale or 1.0)
        sgd = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "max_norm": 0.1}])
        update = tk.clip_and_step(params, sgd, lr=0.1, max_norm=max_norm, scale=scale)
        return update, [p.detach() for p in params]

    (plain, wanted), (update, found) = stepped(None), stepped(2.0**16)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(update.norm, plain.norm)
    assert plain.metrics.keys() == {"grad_norm", "skipped"}
    assert update.metrics.keys() == {"grad_norm", "skipped", "loss_scale", "overflowed"}


def test_every_denominator_is_scaled():
    found = tk.batch.scale_denominator({"loss": torch.tensor(8), "balance": torch.tensor(2.0)}, 4.0)
    assert found == {"loss": torch.tensor(2.0), "balance": torch.tensor(0.5)}


def record(loss=2.0, norm=math.inf, scale=8.0, **more):
    metrics = {"loss": loss, "grad_norm": norm, "skipped": 1, "tokens": 9}
    return metrics | {"loss_scale": scale, "overflowed": 1} | more


def test_an_overflow_is_no_bad_step_and_what_no_scale_mends_is_one():
    state = tk.TrainState(step=5, health={"skips": 2.0, "first_bad": 3.0, "losses": [2.0]})
    for metrics in (record(), record(norm=math.nan), record(norm=1.0)):  # of another rank's norm
        action, after = health.judge_step(state, metrics, POLICY)
        assert (action.kind, action.reason) == ("skip", "")
        assert after.health == state.health
    for metrics in (record(loss=math.nan), record(scale=1.0), record(overflowed=0, norm=math.nan)):
        action, after = health.judge_step(state, metrics, POLICY)
        assert (action.kind, after.health["skips"]) == ("rollback", 3.0)
    taken, _ = health.judge_step(state, record(skipped=0), POLICY, damage=lambda: ["weight"])
    assert taken.kind == "rollback"


def steps_of(layout, spoiled=(1,), steps=4):
    """Train in fp16; in some steps the last rank has an infinite gradient. Return all decisions."""
    text = corpus()
    bins, history = tk.pack_bins(text.lengths, CAPACITY), []
    with tk.parallel_session(layout) as ps:
        plan, weights = make_decoder_plan(tk.Layout(), precision=FP16), init_weights(MODEL, seed=0)
        stages = tk.build_stages(lambda: Decoder(MODEL, head="hidden"), ps, plan, weights=weights)
        optimizer = make_optimizer(stages, lr=1e-2, precision=FP16, axis=ps.pp)
        params = tk.get_parameters(stages)
        run = tk.make_forward_backward(stages, next_token_linear)
        state = tk.TrainState(health={"scale_held": 1999.0})
        while state.step < steps:
            batch = input_of(state.cursor, ps, Layout(), text=text, bins=bins)
            tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
            scale = health.get_loss_scale(state.health, FP16)
            sums = run(batch.microbatches, denominator=tk.batch.scale_denominator(tokens, scale))
            terms = losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
            if state.step in spoiled and ps.world.index == ps.world.count - 1:
                get_local_box(params[0].grad).local.view(-1)[:1] = math.inf
            before = [get_local_box(p).local.clone() for p in params]
            update = tk.clip_and_step(
                params,
                optimizer,
                lr=1e-2,
                max_norm=0.5,
                axis=ps.pp,
                world=ps.world,
                scale=scale,
            )
            same = all(
                torch.equal(x, get_local_box(p).local) for x, p in zip(before, params, strict=True)
            )
            metrics = {**terms, **update.metrics, "tokens": tokens}
            state, metrics = tk.advance(state, batch, metrics, axis=ps.loss)
            names = ("loss", "grad_norm", "loss_scale", "overflowed", "skipped")
            history.append(([float(metrics[name]) for name in names], same))
        return history, float(state.health["loss_scale"]), float(state.health["scale_held"])


def in_every_layout(layouts):
    return [steps_of(layout) for layout in layouts]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.only_all)])
def test_an_overflow_on_one_rank_skips_on_all_and_all_have_one_scale(layouts):
    alone, scale, held = steps_of(tk.Layout())
    assert ([x[2] for x, _ in alone], scale, held) == (
        [2.0**16, 2.0**17, 2.0**16, 2.0**16],
        2.0**16,
        2,
    )
    first, second = run_ranks(in_every_layout, 2, layouts)
    for one, other, layout in zip(first, second, layouts, strict=True):
        assert (one[1], one[2]) == (other[1], other[2]) == (scale, held), layout
        for (mine, same), (theirs, too), (solo, _) in zip(one[0], other[0], alone, strict=True):
            assert mine[2:] == theirs[2:] == solo[2:], layout
            assert same == too == bool(solo[4]), layout  # skipped: not a bit has changed
            assert mine[0] == pytest.approx(solo[0], rel=2e-2), layout
            if not solo[3]:
                assert mine[1] == theirs[1] == pytest.approx(solo[1], rel=5e-2), layout


def test_a_run_finds_its_scale_without_bad_steps_and_goes_on_bit_for_bit(tmp_path, monkeypatch):
    own = health.get_loss_scale
    begin = lambda memory, precision: own({"loss_scale": 2.0**26} | memory, precision)  # noqa: E731
    monkeypatch.setattr(health, "get_loss_scale", begin)
    (tmp_path / "a.txt").write_text("".join(f"word{i % 17} = {i}\n" for i in range(600)))
    flags = ["--data", tmp_path / "a.txt", *SMALL.split(), "--compute", "fp16"]
    flags += ["--prompt", "a", "--sample", 1, "--save-every", 4]
    monkeypatch.setattr("trainkit.models.make_decoder_config", nano_config)
    for name, *steps in (("whole", 12), ("cut", 8, 12)):
        for last in steps:
            code, output = here(["--out", tmp_path / name, "--steps", last, *flags])
            assert code == 0, output
            assert name == "cut" or "overflow: scale 3.35544e+07" in output
            assert "norm inf" not in output
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    scales, skipped = column(whole, "loss_scale"), column(whole, "skipped")
    assert 3 < sum(skipped) < 12
    assert scales == [2.0**26 / 2 ** sum(skipped[:i]) for i in range(12)]
    assert not events(whole, "skip")
    assert not events(whole, "rollback")
    assert [x is None for x in column(whole, "grad_norm")] == column(whole, "overflowed")
    assert max(x for x in column(whole, "grad_norm") if x is not None) < 100  # unscaled
    for name in ("loss_hex", "grad_norm_hex", "loss_scale", "overflowed"):
        assert column(cut, name) == column(whole, name)
    ends = [json.loads((out / "final.json").read_text())["state_hash"] for out in (whole, cut)]
    assert ends[0] == ends[1]
    assert "in fp16 (parameters fp32, sums fp32, moments fp32)" in output
    assert len(lines(cut)) == 12
