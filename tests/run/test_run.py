"""What stands around a run is opened whole, and nothing of it is left."""

import contextlib
import gc
import json
import math
import os
import signal
import sys
import threading
import time
from functools import partial

import attrs
import pytest
import torch
from own_process import own_process
from recipe_runs import events, lines

from trainkit import health
from trainkit.data import PackedCorpus, make_corpus
from trainkit.mesh import solo_parallel
from trainkit.metrics import decoder_flops, recomputed_flops
from trainkit.models import build_decoder, make_decoder_config
from trainkit.packing import pack_bins
from trainkit.parallel import recompute
from trainkit.phases import measure_phase
from trainkit.run import EXIT_SAVED, Run, Timeouts, make_run_dir, open_run, startup, watchdog
from trainkit.run.config import RunConfig
from trainkit.run.lock import lock_run
from trainkit.run.open_run import gather_facts
from trainkit.run.sinks import LoggingOptions
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, Cursor, DataError, DiskError, StepBatch
from trainkit.weights.checkpoint import (
    CheckpointOptions,
    find_checkpoint,
    list_checkpoints,
    read_facts,
    snapshot,
)
from trainkit.weights.checkpoint.initial_weights import InitialWeights
from trainkit.weights.checkpoint.manifest import parse_step

TIMEOUTS = Timeouts(start_timeout=60.0)
pytestmark = pytest.mark.usefixtures("own_process")


def test_a_signal_is_heard_inside_and_all_is_put_back(tmp_path):
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        run.phase("a step", allow=60)
        assert run.stopping() is None
        signal.raise_signal(signal.SIGTERM)
        assert run.stopping() == "SIGTERM on rank 0"
        assert run.ps.world.count == 1
    assert signal.getsignal(signal.SIGTERM) == before
    assert threading.active_count() == threads
    with lock_run(tmp_path, solo_parallel().world):
        pass


def test_an_error_ends_with_its_code_and_keeps_its_traceback_in_the_directory(tmp_path, capsys):
    with pytest.raises(SystemExit) as end, open_run(tmp_path, timeouts=TIMEOUTS):
        raise DataError("document 7 is torn")
    assert end.value.code == 65
    last = capsys.readouterr().err.splitlines()[-1]
    assert json.loads(last.removeprefix("TRAINKIT_ERROR "))["what"] == "document 7 is torn"
    assert "DataError" in (tmp_path / "errors" / "rank_00000.txt").read_text()


def test_a_directory_in_use_is_refused_with_a_code_before_anything_is_written(tmp_path, capsys):
    with lock_run(make_run_dir(tmp_path), solo_parallel().world):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as end, open_run(tmp_path, timeouts=TIMEOUTS):
            pytest.fail("it was opened")
    assert end.value.code == 64
    assert "in use" in capsys.readouterr().err
    assert sorted(path for path in before if path.exists()) == sorted(tmp_path.rglob("*"))


@pytest.mark.case("L12")
def test_a_directory_that_is_moved_away_is_made_anew_and_locked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    run = tmp_path / "run"
    with open_run(run, timeouts=TIMEOUTS):
        run.rename(tmp_path / "aside")
        while not (run / "lock").exists():
            time.sleep(0.01)
        with pytest.raises(SystemExit), open_run(run, timeouts=TIMEOUTS):
            pytest.fail("it was opened")
    said = capsys.readouterr().err
    assert "was removed or moved" in said
    assert "in use by process" in said


def test_the_best_checkpoint_is_that_of_the_lowest_score_or_else_loss_and_stays(tmp_path):
    found = [
        {"loss": 3.0, "score": -0.5},
        {"loss": 2.0, "score": -0.9},
        {"loss": 1.0},
        {"loss": 0.5},
    ]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoints = CheckpointOptions(save_every=1, keep=2, keep_best=1, background_saves=False)
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume([model], optimizer, facts={})
        with run.loop(
            state, [model], optimizer, steps=4, replay=None, checkpoints=checkpoints
        ) as loop:
            for step, values in enumerate(found, start=1):
                state = loop.evaluate(
                    attrs.evolve(state, step=step), lambda v=values: v | {"tokens": 1}
                )
                loop.checkpoint(state)
    assert find_checkpoint(tmp_path, best=True).name == "step_00000002"
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert sorted(names) == [f"step_0000000{step}" for step in (2, 3, 4)]


def evaluate_each_step(folder, losses, *, keep_best, first=1):
    """Go on with a run that saves every 100 steps, with an evaluation after each step."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoints = CheckpointOptions(
        save_every=100, keep=2, keep_best=keep_best, background_saves=False
    )
    last = first + len(losses) - 1
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume([model], optimizer, facts={})
        with run.loop(
            state, [model], optimizer, steps=last, replay=None, checkpoints=checkpoints
        ) as loop:
            for step, loss in enumerate(losses, start=first):
                state = loop.evaluate(
                    attrs.evolve(state, step=step), lambda x=loss: {"loss": x, "tokens": 1}
                )
                loop.checkpoint(state)
    saved = [line["step"] for line in events(folder, "save")]
    kept = list_checkpoints(folder / "checkpoints")
    return saved, sorted(parse_step(path) for path in kept)


def test_an_evaluation_that_is_the_best_so_far_saves_though_no_save_is_due(tmp_path):
    found = evaluate_each_step(tmp_path, [3.0, 2.0, 2.5, 1.0, 1.5, 1.6, 1.7], keep_best=1)
    assert found == ([1, 2, 4, 7], [4, 7])
    found = evaluate_each_step(tmp_path, [1.2, 0.9, 1.1, 1.0], keep_best=1, first=8)
    assert found[0] == [1, 2, 4, 7, 9, 11]  # it remembers the best over a restart


def test_of_two_best_evaluations_both_are_saved_and_stay(tmp_path):
    found = evaluate_each_step(tmp_path, [3.0, 1.0, 2.0, 2.5, 2.6, 2.7, 2.8], keep_best=2)
    assert found == ([1, 2, 3, 7], [2, 3, 7])
    assert find_checkpoint(tmp_path, best=True).name == "step_00000002"


def test_an_evaluation_that_ends_the_run_is_on_record(tmp_path):
    with pytest.raises(SystemExit) as end:
        evaluate_each_step(tmp_path, [3.0, float("nan")], keep_best=0)
    assert end.value.code == 67
    assert [event["step"] for event in events(tmp_path, "evaluation")] == [1, 2]


def test_without_keep_best_evaluations_save_nothing(tmp_path):
    assert evaluate_each_step(tmp_path, [3.0, 2.0, 1.0, 4.0], keep_best=0) == ([4], [4])


def record_step(folder, rows, *, peak_flops=None, frozen=False, recomputed="none"):
    """Record one step of 4 tokens, as if trained; return its line of metrics.jsonl."""
    model = build_decoder(make_decoder_config("tiny"), seed=0).requires_grad_(not frozen)
    recompute(recomputed)(model, solo_parallel())
    optimizer = torch.optim.SGD(model.parameters())
    logging = LoggingOptions(peak_flops=peak_flops)
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer, model=make_decoder_config("tiny"), rows=rows)
        with run.loop(state, model, optimizer, steps=1, replay=None, logging=logging) as loop:
            metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 3, "tokens_processed": 4}
            loop.record(attrs.evolve(state, step=1), metrics, StepBatch([], Cursor(1)))
    return lines(folder)[0]


def test_a_step_has_the_share_of_the_peak_that_its_model_flops_are(tmp_path):
    rows = PackedCorpus(make_corpus([[1, 2, 3], [4]]), pack_bins([3, 1], 4))
    line = record_step(tmp_path / "cpu", rows, peak_flops=1e9)
    flops = decoder_flops(make_decoder_config("tiny"), [3, 1])  # the means of 4 tokens, times 4
    assert line["mfu"] == pytest.approx(flops / line["seconds"] / 1e9)
    assert line["hfu"] == line["mfu"]
    again = record_step(tmp_path / "again", rows, peak_flops=1e9, recomputed="full")
    repeated = recomputed_flops(make_decoder_config("tiny"), [3, 1], "full")
    assert again["hfu"] / again["mfu"] == pytest.approx(1 + repeated / flops)
    by_cost = record_step(tmp_path / "by cost", rows, peak_flops=1e9, recomputed="0.4")
    assert "mfu" in by_cost
    assert "hfu" not in by_cost
    assert "mfu" not in record_step(tmp_path / "unknown peak", rows)
    assert "mfu" not in record_step(tmp_path / "unknown rows", None, peak_flops=1e9)
    frozen = record_step(tmp_path / "frozen", rows, peak_flops=1e9, frozen=True)
    forward = decoder_flops(make_decoder_config("tiny"), [3, 1], trained={})
    assert frozen["mfu"] * frozen["seconds"] * 1e9 == pytest.approx(forward)


def test_an_unknown_peak_is_named_once(tmp_path, capsys):
    record_step(tmp_path / "run", PackedCorpus(make_corpus([[1]]), pack_bins([1], 4)))
    assert capsys.readouterr().out.count("no mfu: the peak of this processor is not known") == 1


def test_a_run_has_the_times_of_its_start_and_what_it_runs_on(tmp_path):
    record_step(tmp_path, None)
    [start] = events(tmp_path, "startup")
    assert {"imports", "connect", "resume", "other"} <= start["phases"].keys()
    assert all(seconds >= 0 for seconds in start["phases"].values())
    [host] = events(tmp_path, "host")
    assert [entry["ranks"] for entry in host["hosts"]] == [[0]]
    assert host["hosts"][0]["torch"] == torch.__version__
    assert host["layout"]["tp"] == 1


def test_a_line_has_the_seconds_of_what_came_since_the_line_before(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        logging = LoggingOptions(log_every=2)
        with run.loop(state, model, optimizer, steps=9, replay=None, logging=logging) as loop:
            for _ in range(3):
                state = attrs.evolve(state, step=state.step + 1)
                with measure_phase("forward"):
                    time.sleep(0.02)
                state = loop.record(state, metrics, StepBatch([], Cursor(1)))
                loop.evaluate(state, lambda: time.sleep(0.05) or {"loss": 1.0, "tokens": 1})
                loop.checkpoint(state)
    first, second, third = lines(tmp_path)
    for line in (first, second, third):
        assert line["seconds/forward"] >= 0.02
    assert "seconds/evaluate" not in first  # it came after the line
    assert second["seconds/evaluate"] >= 0.05
    assert second["seconds/forward"] < second["time"] - first["time"]


def test_a_pause_of_the_collector_in_a_step_and_a_slow_save_have_their_seconds(
    tmp_path, monkeypatch
):
    copy, fsync = snapshot._copy, os.fsync
    monkeypatch.setattr(snapshot, "_copy", lambda *each: (time.sleep(0.02), copy(*each))[1])
    monkeypatch.setattr(os, "fsync", lambda handle: (time.sleep(0.02), fsync(handle))[1])

    def pause(phase, _):
        time.sleep(0.02 if phase == "start" else 0.0)

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        with run.loop(state, model, optimizer, steps=3, replay=None) as loop:
            gc.callbacks.append(pause)
            for step in range(1, 4):
                with measure_phase("forward"):
                    if step == 2:
                        gc.collect()
                state = attrs.evolve(state, step=step)
                state = loop.record(state, metrics, StepBatch([], Cursor(1)))
                loop.checkpoint(state)
            gc.callbacks.remove(pause)
    assert [line.get("seconds/garbage", 0.0) >= 0.02 for line in lines(tmp_path)] == [
        *(False, True, False)
    ]
    [save] = events(tmp_path, "save")
    assert save["blocked"] >= 0.02
    assert save["seconds"] >= save["blocked"] + 0.04  # of more than two files
    times = [events(tmp_path, name)[0]["time"] for name in ("start", "save", "end")]
    assert times == sorted(times)


def test_what_the_watch_warned_of_becomes_an_event(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        with run.loop(state, model, optimizer, steps=9, replay=None) as loop:
            run.notices.append(("warning", {"what": "watch: the run directory was removed"}))
            run.notices.append(("straggler", {"rank": 1, "busy": 0.9, "others": 0.2}))
            state = loop.record(attrs.evolve(state, step=1), metrics, StepBatch([], Cursor(1)))
            loop.checkpoint(state)
            run.notices.append(("warning", {"what": "after the last line"}))
    first, last = events(tmp_path, "warning")
    assert (first["step"], first["what"]) == (1, "watch: the run directory was removed")
    assert (last["step"], last["what"]) == (1, "after the last line")
    [event] = events(tmp_path, "straggler")
    assert (event["step"], event["rank"], event["busy"], event["others"]) == (1, 1, 0.9, 0.2)


def diverge(folder, on_divergence, losses):
    """Take a step of each loss; return the steps that were saved, and the exit code."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    policy = health.Policy(on_divergence=on_divergence, spike_after=999)
    code = 0
    try:
        with open_run(folder, timeouts=TIMEOUTS) as run:
            state = run.resume(model, optimizer)
            with run.loop(
                state, model, optimizer, steps=len(losses), replay=None, policy=policy
            ) as loop:
                for loss in losses[state.step :]:
                    state = attrs.evolve(state, step=state.step + 1)
                    metrics = {"loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
                    state = loop.record(state, metrics, StepBatch([], Cursor(1)))
                    if loop.checkpoint(state):
                        break
    except SystemExit as end:
        code = end.code
    return [event["step"] for event in events(folder, "save")], code


LOSSES = [3.0] * 12 + [9.0] * 4


def test_a_training_loss_that_stays_high_saves_and_stops_or_only_stops_or_neither(tmp_path):
    # The smoothed loss is a nat above its minimum from step 13 on, which is high three times by 15.
    assert diverge(tmp_path / "save", "save", LOSSES) == ([15], 67)
    assert diverge(tmp_path / "stop", "stop", LOSSES) == ([], 67)
    assert diverge(tmp_path / "ignore", "ignore", LOSSES) == ([16], 0)
    [event] = events(tmp_path / "save", "divergence")
    assert event["step"] == 15
    assert "the smoothed training loss is" in event["why"]


def test_one_high_loss_is_no_divergence(tmp_path):
    losses = [3.0] * 12 + [6.5] + [3.0] * 3
    assert diverge(tmp_path, "stop", losses) == ([16], 0)


def test_the_window_of_a_diverging_loss_goes_on_after_a_restart(tmp_path):
    assert diverge(tmp_path, "stop", LOSSES[:14]) == ([14], 0)
    assert diverge(tmp_path, "stop", LOSSES)[1] == 67
    assert [event["step"] for event in events(tmp_path, "divergence")] == [15]


class Remembers(torch.optim.SGD):
    """An optimizer that remembers what no checkpoint can hold."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["path"] = [1, 2]
        return super().step(closure)


def train_with(folder, optimizer_class, steps):
    """Train a tiny model with an optimizer in a run that saves after 200 steps."""
    model = torch.nn.Linear(1, 1)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume([model], optimizer, facts={})
        with run.loop(state, [model], optimizer, steps=steps, replay=None) as loop:
            for step in range(1, steps + 1):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
                state = attrs.evolve(state, step=step)
                state = loop.record(state, metrics, StepBatch([], Cursor(step)))


def test_state_that_cannot_be_saved_is_refused_after_the_first_step(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train_with(tmp_path, Remembers, steps=2)
    assert end.value.code == 64
    said = capsys.readouterr().err
    assert "the optimizer keeps 'path' of weight as a `list`" in said
    assert "keep a tensor there" in said
    assert events(tmp_path, "end")[-1]["step"] == 0  # before the line of step 1


def _only_rank_0_can_write(folder):
    """Return how a run ends whose directory one rank cannot write."""
    if os.environ["RANK"] == "1":

        def refuse(path):
            raise DiskError(f"make_run_dir: user 7 cannot write {path}")

        sys.modules[open_run.__module__].make_run_dir = refuse
    try:
        with own_process(), open_run(folder, timeouts=TIMEOUTS):
            return "opened"
    except SystemExit as end:
        return end.code


@pytest.mark.case("K6")
def test_a_directory_that_one_rank_cannot_write_ends_all_ranks(tmp_path):
    assert run_ranks(_only_rank_0_can_write, 2, tmp_path) == [74, 74]


def _start(folder, monkeypatch, capsys, *, recipe, text, version="1.0", facts=None):
    """Begin or go on with a run of one more step; return what it said, and its event."""
    recipe.write_text(text)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(recipe), raising=False)
    monkeypatch.setattr(startup, "read_version", lambda: version)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoints = CheckpointOptions(save_every=1, background_saves=False)
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume([model], optimizer, facts=facts)
        recipe.write_text("edited while it runs")
        with run.loop(
            state, [model], optimizer, steps=state.step + 1, replay=None, checkpoints=checkpoints
        ) as loop:
            loop.checkpoint(attrs.evolve(state, step=state.step + 1))
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    event = [line for line in lines if line["event"] == "resume"][-1]
    return capsys.readouterr().out, event


@pytest.mark.parametrize("facts", [None, {"seed": 1}, lambda batches: {"batches": batches}])
def test_other_code_is_told_in_one_line_and_an_event_and_goes_on(
    tmp_path, monkeypatch, capsys, facts
):
    given = tmp_path / "run", monkeypatch, capsys
    _, event = _start(*given, text="decay = 0.4", recipe=tmp_path / "recipe.py", facts=facts)
    saved = event["software"]
    assert (event["step"], event["messages"]) == (0, [])
    said, event = _start(*given, text="decay = 0.4", recipe=tmp_path / "recipe.py", facts=facts)
    assert (event["step"], event["software"], len(event["messages"])) == (1, saved, 1)
    assert "software" not in said
    said, event = _start(
        *given, text="decay = 0.9", version="2.0", recipe=tmp_path / "recipe.py", facts=facts
    )
    now = event["software"]
    names = ["recipe source", "trainkit"]
    assert [name for name in saved if saved[name] != now[name]] == sorted(names, reverse=True)
    line = "; ".join(f"software: {x} was changed from {saved[x]} to {now[x]}" for x in names)
    assert (event["step"], event["messages"][1:]) == (2, [line])
    assert line in " ".join(said.split())  # a log folds it


def test_a_run_gathers_its_facts_and_a_bare_module_serves_as_the_stages(tmp_path):
    rows = PackedCorpus(make_corpus([[1, 2, 3], [4]]), pack_bins([3, 1], 4))
    model, cfg = torch.nn.Linear(1, 1), RunConfig(seed=3, steps=4)
    optimizer = torch.optim.SGD(model.parameters())
    resume = partial(
        Run.resume,
        stages=model,
        optimizer=optimizer,
        config=cfg,
        model=make_decoder_config("tiny"),
        tokenizer=make_byte_tokenizer(),
        rows=rows,
        corpora={"web": rows.corpus},
        first=InitialWeights(None),
        context=4,
        template="chatml",
        facts={"own": 1},
    )
    with open_run(tmp_path, config=cfg, timeouts=TIMEOUTS) as run:
        state = resume(run)
        with run.loop(state, model, optimizer, steps=4, replay=None) as loop:
            loop.checkpoint(attrs.evolve(state, step=4))
        assert run.finish(state, model, optimizer, stop="a signal") == EXIT_SAVED
        assert not (tmp_path / "final.json").exists()
    facts = read_facts(find_checkpoint(tmp_path))
    assert {"config.seed": 3, "own": 1, "context": 4}.items() <= facts.items()
    assert facts["model"]["width"] == make_decoder_config("tiny").width
    names = {"tokenizer", "rows", "files", "fingerprint", "fingerprint of web", "template"}
    assert {*names, "first weights", "software"} <= facts.keys()
    assert "config.steps" not in facts  # which says nothing of the run
    with open_run(tmp_path, config=cfg, timeouts=TIMEOUTS) as run:
        assert resume(run, context=9).step == 4  # with which a run may be continued
        with pytest.raises(CheckpointError, match="model"):
            resume(run, model=make_decoder_config("tiny", layers=2))
        with pytest.raises(CheckpointError, match="own"):
            resume(run, facts={"own": 2})


def test_facts_that_depend_on_the_batches_are_asked_for_at_each_save():
    facts_at = gather_facts(context=3, facts=lambda batches: {"phases": batches})
    assert facts_at(7) == {"context": 3, "phases": 7}


def test_a_loop_says_what_is_due_and_writes_events_and_a_result(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        with run.loop(state, model, optimizer, steps=7, replay=None) as loop:
            due = [s for s in range(1, 8) if loop.is_due(attrs.evolve(state, step=s), 3)]
            late = [s for s in range(3, 8) if loop.is_due(attrs.evolve(state, step=s), 2, since=3)]
            never = [s for s in range(1, 8) if loop.is_due(attrs.evolve(state, step=s), 0)]
            loop.event("packing", step=0, facts={"rows": 2})
            for step, loss in ((1, 3.0), (2, 2.0)):
                found = {"loss": loss, "tokens": 1}
                loop.evaluate(attrs.evolve(state, step=step), lambda x=found: x)
            loop.result("eval/loss")
    assert (due, late, never) == ([3, 6, 7], [3, 5, 7], [])
    assert events(tmp_path, "packing")[0]["rows"] == 2
    (result,) = events(tmp_path, "result")
    assert result["metric"] == "eval/loss"


def test_a_sink_of_one_s_own_gets_metrics_and_evaluations(tmp_path):
    model, received = torch.nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters())

    @contextlib.contextmanager
    def open_page(step):
        yield lambda at, values: received.append((step, at, *values))

    with open_run(tmp_path, timeouts=TIMEOUTS) as run:
        state = run.resume(model, optimizer)
        sinks = {"page": open_page}
        with run.loop(state, model, optimizer, steps=1, replay=None, extra_sinks=sinks) as loop:
            state = attrs.evolve(state, step=1)
            metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
            state = loop.record(state, metrics, StepBatch([], Cursor(1)))
            loop.evaluate(state, lambda: {"loss": 2.0, "tokens": 1})
            loop.evaluate(state, lambda: {"loss": 2.0, "pairs": 1})
    assert (0, 1, "eval/loss", "eval/perplexity") in received
    assert (0, 1, "eval/loss", "eval/pairs") in received  # no loss per token
    assert [event.get("eval/perplexity") for event in events(tmp_path, "evaluation")] == [
        math.exp(2),
        None,
    ]
    assert any({"train/loss", "train/perplexity"} < {*names} for _, _, *names in received)
