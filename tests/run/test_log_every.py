"""Steps are looked at every n: later, and with the same lines, verdicts and weights to the bit."""

import contextlib
import json
import math
import signal
import sys

import attrs
import pytest
import torch
from recipe_runs import events, lines, without_pictures

import trainkit as tk
from trainkit import health
from trainkit.run import Timeouts, open_run
from trainkit.run.sinks import LoggingOptions
from trainkit.types import Cursor, StepBatch
from trainkit.weights.checkpoint import CheckpointOptions

pytestmark = pytest.mark.usefixtures("own_process")

TOLD = ("step", "loss_hex", "grad_norm_hex", "lr_hex", "tokens", "tokens_total", "skipped")
TIMEOUTS = Timeouts(start_timeout=60.0)
POLICY = health.Policy(spike_after=4)


def batch_at(cursor, wrong):
    """Return the batch at a cursor, spoiled or scaled where it is wrong."""
    generator = torch.Generator().manual_seed(cursor.batch)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return StepBatch([{"x": x * wrong.get(cursor.batch, 1.0)}], Cursor(cursor.batch + 1))


def make_step(model, optimizer, policy, overflows):
    """Return a train step, and what takes its passes again; gradients of `overflows` are inf."""
    params = list(model.parameters())

    def replay(microbatches, *, denominator):
        loss = model(microbatches[0]["x"]).square().sum()
        (loss / denominator).backward()
        return {"loss": loss.detach()}

    def step(state, batch):
        tokens = torch.tensor(8)
        precision = tk.Precision(compute="fp32" if overflows is None else "fp16")
        scale = health.get_loss_scale(state.health, precision)
        scaled = tk.batch.scale_denominator(tokens, scale)
        loss = replay(batch.microbatches, denominator=scaled)["loss"] / tokens
        if state.cursor.batch in (overflows or ()):
            params[0].grad.fill_(math.inf)
        applies = health.make_finite_check(loss, state.health, policy)
        update = tk.clip_and_step(
            params, optimizer, lr=0.1, max_norm=None, should_apply=applies, scale=scale
        )
        moved = {"step": state.step + 1, "cursor": batch.cursor, "tokens": state.tokens + tokens}
        metrics = {"loss": loss, **update.metrics, "lr": 0.1, "tokens": tokens}
        metrics |= {"tokens_total": moved["tokens"]}
        if scale is not None:
            moved["health"] = health.update_loss_scale(state.health, metrics)
        return attrs.evolve(state, **moved), metrics

    return step, replay


def train(
    out,
    steps,
    *,
    every,
    wrong=None,
    die_at=None,
    stop_at=None,
    seen=None,
    overflows=None,
    policy=POLICY,
):
    """Train a small model; return its parameters. With `overflows`, steps, the loss is scaled."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    stop = None
    step, replay = make_step(model, optimizer, policy, overflows)

    with open_run(out, timeouts=TIMEOUTS) as made:
        checkpoints = CheckpointOptions(save_every=8, background_saves=False)
        logging = LoggingOptions(log_every=every)
        state = made.resume([model], optimizer)
        with made.loop(
            state,
            [model],
            optimizer,
            steps=steps,
            replay=replay,
            policy=policy,
            checkpoints=checkpoints,
            logging=logging,
        ) as loop:
            while state.step < steps and not stop:
                batch = batch_at(state.cursor, wrong or {})
                state, metrics = step(state, batch)
                state = loop.record(state, metrics, batch)
                for x in metrics.values():  # who gave them may use their memory again
                    if isinstance(x, torch.Tensor) and x is not state.tokens:
                        x.zero_()
                if state.step == die_at:
                    optimizer.step(die)  # within a step nothing is whole that could be saved
                if state.step == stop_at:
                    signal.raise_signal(signal.SIGTERM)
                if state.step == 5 and seen is not None:
                    state = loop.evaluate(state, lambda: seen(out))
                stop = loop.checkpoint(state)
        with without_pictures():
            if not stop:
                made.finish(state, [model], optimizer)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def die():
    """Be interrupted."""
    raise KeyboardInterrupt


def told(out):
    """Return what the lines of a run say that the clock does not."""
    return [{name: line[name] for name in TOLD} for line in lines(out)]


def verdicts(out):
    kinds = ("apply", "skip", "rollback", "rolled back", "stop")
    return [(x["event"], x["step"], x["reason"]) for kind in kinds for x in events(out, kind)]


def final(out):
    return json.loads((out / "final.json").read_text())


@pytest.mark.parametrize("every", [3, 5, 100])
def test_lines_weights_and_the_end_are_those_of_looking_at_every_step(tmp_path, every):
    wrong = {3: 100.0, 6: math.nan, 10: math.nan}
    found = [train(tmp_path / str(n), 21, every=n, wrong=wrong) for n in (1, every)]
    assert torch.equal(*found)
    assert told(tmp_path / "1") == told(tmp_path / str(every))
    assert verdicts(tmp_path / "1") == verdicts(tmp_path / str(every))
    assert final(tmp_path / "1") == final(tmp_path / str(every))
    assert len(told(tmp_path / "1")) == 21
    assert [x["skipped"] for x in lines(tmp_path / "1")].count(1) == 2


def test_a_loss_scale_moves_with_each_step_however_late_they_are_looked_at(tmp_path):
    overflows = {2, 3, 8}
    found = [train(tmp_path / str(n), 12, every=n, overflows=overflows) for n in (1, 5)]
    assert torch.equal(*found)
    scales = [[x["loss_scale"] for x in lines(tmp_path / str(n))] for n in (1, 5)]
    assert scales[0] == scales[1] == [2.0**16] * 3 + [2.0**15] + [2.0**14] * 5 + [2.0**13] * 3
    assert final(tmp_path / "1") == final(tmp_path / "5")
    assert [x["step"] for x in lines(tmp_path / "5") if x["skipped"]] == [3, 4, 9]
    assert verdicts(tmp_path / "5") == []


def test_a_run_goes_back_late_and_then_does_what_it_had_done_at_once(tmp_path):
    storm = {9: math.nan, 10: math.nan, 11: math.nan}  # seen at step 15
    found = train(tmp_path / "a", 24, every=5, wrong=storm)
    assert torch.equal(found, train(tmp_path / "b", 24, every=1, wrong=storm))
    assert [x["step"] for x in lines(tmp_path / "a")] == list(range(1, 25))
    assert told(tmp_path / "a") == told(tmp_path / "b")
    assert final(tmp_path / "a") == final(tmp_path / "b")
    (rolled,) = events(tmp_path / "a", "rolled back")
    assert rolled["step"] == 8


def test_names_are_given_where_the_last_step_is_the_bad_one(tmp_path):
    train(tmp_path, 12, every=4, wrong={5: math.nan, 11: math.nan})
    named = {x["step"]: x["guilty"] for x in events(tmp_path, "skip")}
    assert named == {6: [], 12: ["the loss on rank 0"]}


def test_a_spike_is_skipped_by_the_limit_that_the_device_had(tmp_path):
    # Looks are after steps 1, 8 and 16: no limit was known to the device when it took step 6.
    policy = attrs.evolve(POLICY, on_spike="skip", max_skips=9)
    train(tmp_path, 16, every=8, wrong={5: 100.0, 12: 100.0}, policy=policy)
    assert [x["step"] for x in lines(tmp_path) if x["skipped"]] == [13]
    assert [x["step"] for x in events(tmp_path, "skip")] == [13]
    assert events(tmp_path, "apply") == []
    assert "above" in events(tmp_path, "skip")[0]["reason"]


def test_what_is_between_two_looks_is_lost_in_a_crash_and_done_again_once(tmp_path):
    with contextlib.suppress(SystemExit):
        train(tmp_path / "a", 24, every=5, die_at=14)
    assert [x["step"] for x in lines(tmp_path / "a")] == list(range(1, 11))
    found = train(tmp_path / "a", 24, every=7)
    assert torch.equal(found, train(tmp_path / "b", 24, every=1))
    assert told(tmp_path / "a") == told(tmp_path / "b")
    assert final(tmp_path / "a") == final(tmp_path / "b")


def test_a_stop_between_two_looks_loses_no_line_and_no_step(tmp_path):
    train(tmp_path / "a", 24, every=5, stop_at=12)
    assert [x["step"] for x in lines(tmp_path / "a")] == list(range(1, 13))
    assert (tmp_path / "a/checkpoints/step_00000012").is_dir()
    found = train(tmp_path / "a", 24, every=7)
    assert torch.equal(found, train(tmp_path / "b", 24, every=1))
    assert told(tmp_path / "a") == told(tmp_path / "b")
    assert final(tmp_path / "a") == final(tmp_path / "b")


def test_all_is_looked_at_before_an_evaluation_and_before_a_save(tmp_path):
    def seen(out):
        assert len(lines(out)) == 5
        return {"loss": 1.0, "tokens": 1}

    train(tmp_path, 16, every=100, seen=seen)
    assert [x["step"] for x in events(tmp_path, "evaluation")] == [5]
    saved = json.loads((tmp_path / "checkpoints/step_00000008/state.json").read_text())
    assert len(saved["state"]["health"]["losses"]) == 8
    assert len({x["seconds"] for x in lines(tmp_path)[1:5]}) == 1  # the mean of what one look saw


def test_between_two_looks_nothing_is_read_and_the_watch_allows_for_all_of_them(
    tmp_path, monkeypatch
):
    announced = []

    @contextlib.contextmanager
    def watch(*_, **__):
        yield lambda name, allow: announced.append((name, allow))

    monkeypatch.setattr(sys.modules[open_run.__module__], "watch_ranks", watch)
    batch, checkpoints = StepBatch([], Cursor()), CheckpointOptions(save_every=100)
    logging = LoggingOptions(log_every=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with open_run(tmp_path, timeouts=TIMEOUTS) as made:
        state = attrs.evolve(made.resume([model], optimizer), tokens=torch.tensor(0, device="meta"))
        with made.loop(
            state,
            [model],
            optimizer,
            steps=99,
            replay=None,
            checkpoints=checkpoints,
            logging=logging,
        ) as loop:
            for step in range(1, 5):
                device = "cpu" if step == 1 else "meta"  # whose numbers nobody can read
                metrics = {name: torch.ones((), device=device) for name in ("loss", "grad_norm")}
                looks = step == 4
                with pytest.raises(NotImplementedError) if looks else contextlib.nullcontext():
                    loop.record(attrs.evolve(state, step=step), metrics | {"tokens": 1}, batch)
                loop.checkpoint(attrs.evolve(state, step=step))
    steps = [(name, allow) for name, allow in announced if name.startswith("step")]
    assert steps == [("step 2", 4 * 600.0), ("step 5", 4 * 600.0)]


def test_of_steps_that_are_read_at_once_the_last_is_shown(tmp_path, monkeypatch, capfd):
    console = sys.modules["trainkit.run.sinks.console"]
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(console, "_LINE_GROWTH", 0.0)
    train(tmp_path, 21, every=5)
    shown = [line.split("/")[0] for line in capfd.readouterr().out.splitlines()]
    assert [x for x in shown if x.startswith("step")] == [
        f"step {x}" for x in (1, 5, 8, 10, 15, 16, 20, 21)
    ]
