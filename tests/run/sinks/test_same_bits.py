"""What a run tells, evaluates or fetches ahead changes no bit of what it computes."""

import contextlib
import threading

import attrs
import pytest
from whole_step import CAPACITY, Layout, build, corpus, input_of, step_function

import trainkit as tk
from trainkit import data, sinks, step
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor, StepBatch

LAYOUT = Layout(world=2, dropout=0.2)
RELEASED = threading.Event()


@contextlib.contextmanager
def broken(*, step):
    def sink(at, values):
        raise OSError(f"no network at step {at} of {sorted(values)}, after {step}")

    yield sink


@contextlib.contextmanager
def stuck(*, step):
    del step
    yield lambda *line: RELEASED.wait(60 * len(line))


@contextlib.contextmanager
def left_evaluating(stages):
    """`use_eval_mode` without its second half."""
    for stage in stages:
        stage.eval()
    yield


def tell_nobody(*args, **facts):
    del args, facts


def train(ps, run_dir, *, extra=None, last=3, evaluate=False, ahead=0, told=True):
    """Train for some steps from the beginning; return every bit that they gave."""
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY)
    stages, optimizer = build(LAYOUT, ps)
    train_step = step_function(LAYOUT, ps, stages, optimizer)
    state, losses, cursors = tk.TrainState(cursor=Cursor()), [], []

    def make_batch(cursor):
        return input_of(cursor, ps, LAYOUT, text=text, bins=bins)

    with contextlib.ExitStack() as stack:
        opened = contextlib.nullcontext((tell_nobody, tell_nobody))
        if told:
            opened = sinks.open_run_sinks(
                run_dir, ps.world.share, step=0, last=last, extra=extra, patience=0.2
            )
        log, event = stack.enter_context(opened)
        fetch = None
        if ahead:
            fetch = stack.enter_context(
                data.prefetch_batches(make_batch, state.cursor, ahead=ahead)
            )
        while state.step < last:
            batch = fetch() if fetch else make_batch(state.cursor)
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]).hex())
            cursors.append(attrs.astuple(state.cursor))
            log(state.step, tk.to_host(metrics))
            if evaluate:
                batches = make_batch(Cursor()).microbatches
                found = tk.evaluate(
                    stages, batches, tk.losses.next_token_linear, axis=ps.loss,
                    call=tk.call_with_noise,
                )  # fmt: skip
                event("evaluation", step=state.step, loss=float(found["loss"]))
    return losses, cursors, tk.state_hash(state, stages, optimizer, ps)


def several_runs(tmp_path):
    """Train in several ways on the same ranks."""
    with tk.parallel_session(dp_replicate=1) as ps:
        found = {}

        def run(name, **options):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            found[name] = train(ps, folder, **options)

        run("no sinks", told=False)
        run("sinks, one ahead", ahead=1)
        run("broken sinks, four ahead", ahead=4, extra={"broken": broken, "stuck": stuck})
        run("evaluation", evaluate=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "use_eval_mode", left_evaluating)
            run("evaluation that stays on", evaluate=True)
        RELEASED.set()
    return found


@pytest.mark.case("W6", "W1", "X6", "X10", "X12")
def test_sinks_evaluation_and_fetching_ahead_change_no_bit(tmp_path):
    first, second = run_ranks(several_runs, 2, tmp_path)
    harmed = "evaluation that stays on"
    assert first == second
    for name, bits in first.items():
        assert (bits == first["no sinks"]) == (name != harmed), name
    for name in first.keys() - {"no sinks"}:
        lines = sinks.read_jsonl(tmp_path / name / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
    told = sinks.read_jsonl(tmp_path / "broken sinks, four ahead" / "events.jsonl")
    warnings = [event["what"] for event in told if event["event"] == "warning"]
    assert [text.split("'")[1] for text in warnings] == ["broken", "stuck"]


@pytest.mark.case("X6")
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_run_that_goes_on_uses_the_batches_after_the_last_one_used(ahead):
    made_ahead, made = threading.Event(), []

    def make_batch(cursor):
        made.append(cursor.batch)
        if cursor.batch == 2 + ahead:
            made_ahead.set()
        return StepBatch([], Cursor(cursor.batch + 1))

    def go_on(cursor):
        with data.prefetch_batches(make_batch, cursor, ahead=5 - ahead) as fetch:
            return [fetch().cursor.batch for _ in range(3)]

    with data.prefetch_batches(make_batch, Cursor(), ahead=ahead) as fetch:
        used = [fetch().cursor for _ in range(3)]
        assert made_ahead.wait(60)
    assert go_on(used[-1]) == [4, 5, 6]
    assert go_on(Cursor(3 + ahead)) != [4, 5, 6]  # as a loader does that counts what it has made
