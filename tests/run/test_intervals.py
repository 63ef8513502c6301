"""Saves and evaluations by steps, tokens, seconds and epochs, after a resume and on all ranks."""

import importlib
import json
import time
import types
from functools import partial

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from recipe_runs import events

from trainkit.mesh import solo_parallel
from trainkit.run import Timeouts, intervals, open_run
from trainkit.run.intervals import IntervalClock
from trainkit.run.signals import open_step_vote
from trainkit.schedules import Counters, Interval, is_interval_due, parse_interval
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, Cursor, StepBatch, TrainState
from trainkit.weights.checkpoint import CheckpointOptions, list_checkpoints

pytestmark = pytest.mark.usefixtures("own_process")

PER_EPOCH = 2.5  # batches


# ------------------------------------------------------------------------------------ texts


@given(
    st.one_of(
        st.builds(Interval, st.integers(0, 2**62), st.sampled_from(["steps", "tokens", "seconds"])),
        st.builds(Interval, st.integers(1, 64).map(lambda n: n / 4), st.sampled_from(["epochs"])),
    )
)
@example(Interval(0, "tokens"))
@example(Interval(86400, "seconds"))
@example(Interval(10**6))
def test_an_interval_is_read_as_it_is_written(interval):
    assert parse_interval(str(interval)) == interval
    assert parse_interval(interval) is interval


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (200, 200, "steps"),
        ("200", 200, "steps"),
        ("2k-steps", 2000, "steps"),
        ("30min", 1800, "seconds"),
        ("1.5 hours", 5400, "seconds"),
        ("1d", 86400, "seconds"),
        ("90s", 90, "seconds"),
        ("100M-tokens", 10**8, "tokens"),
        ("1.5B_tokens", 1_500_000_000, "tokens"),
        ("2epochs", 2, "epochs"),
        ("0.5epoch", 0.5, "epochs"),
    ],
)
def test_units_and_letters(text, value, unit):
    assert parse_interval(text) == Interval(value, unit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("30m", "'30m' is no interval: 30min, or 30M-tokens for millions"),
        ("100M", "'100M' is no interval: write 200, 30min, 100M-tokens or 2epochs"),
        ("2.5", "is no interval"),
        ("", "is no interval"),
        ("3 weeks", "is no interval"),
        ("\u0663", "is no interval"),
        (True, "is no interval"),
        (None, "is no interval"),
        ("x" * 999, f"'{'x' * 100}' is no interval"),
        ("2.5steps", "is no whole number of steps"),
        ("0.3tokens", "is no whole number of tokens"),
        ("99999999999T-tokens", "must be below 2\\^63"),
    ],
)
def test_what_is_no_interval_is_refused_with_what_is(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_interval(text)


# ------------------------------------------------------------------------------------ counters


COUNTERS = {
    "steps": lambda x: Counters(steps=x),
    "tokens": lambda x: Counters(tokens=x),
    "seconds": lambda x: Counters(seconds=x),
    "epochs": lambda x: Counters(epochs=x),
}


@given(
    st.integers(1, 50),
    st.lists(st.integers(0, 120), min_size=1, max_size=30),
    st.sampled_from([*COUNTERS]),
)
def test_it_is_due_where_a_multiple_was_passed_however_often_it_is_considered(size, adds, unit):
    total = 0
    for add in adds:
        before, after = COUNTERS[unit](total), COUNTERS[unit](total + add)
        passed = any(x % size == 0 for x in range(total + 1, total + add + 1))
        assert is_interval_due(Interval(size, unit), before, after) == passed
        total += add


def test_tenths_of_epochs_are_not_lost_to_rounding_and_0_is_never():
    counts = [Counters(epochs=n / 100) for n in range(101)]
    every = parse_interval("0.1epochs")
    due = [n for n in range(1, 101) if is_interval_due(every, counts[n - 1], counts[n])]
    assert due == [*range(10, 101, 10)]
    assert not is_interval_due(Interval(0, "tokens"), Counters(), Counters(tokens=9))


# ------------------------------------------------------------------------------------ a loop


def train(out, steps, *, save="1000000", evaluate="0", batches_per_epoch=PER_EPOCH, pause=0.0):
    """Take steps of 7 tokens that change nothing; return the steps that were evaluated."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    evaluated = []
    with open_run(out, timeouts=Timeouts(start_timeout=60.0)) as run:
        state = run.resume([model], optimizer)
        with run.loop(
            state,
            [model],
            optimizer,
            steps=steps,
            replay=None,
            checkpoints=CheckpointOptions(save_every=save, background_saves=False),
            batches_per_epoch=batches_per_epoch,
        ) as loop:
            while state.step < steps:
                step = state.step + 1
                batch = StepBatch([{"labels": torch.zeros(2, 4)}], Cursor(state.cursor.batch + 1))
                state = attrs.evolve(
                    state, step=step, cursor=batch.cursor, tokens=torch.as_tensor(7 * step)
                )
                metrics = {"loss": 2.0, "grad_norm": 1.0, "tokens": 7}
                state = loop.record(state, metrics, batch)
                if loop.is_due(state, parse_interval(evaluate)):
                    evaluated.append(state.step)
                    state = loop.evaluate(state, lambda: {"loss": 1.5, "tokens": 1})
                loop.checkpoint(state)
                time.sleep(pause)
    return evaluated


def saved(out):
    return sorted(int(path.name[5:]) for path in list_checkpoints(out / "checkpoints"))


EXPECTED = {
    "3": [3, 6, 9, 10],
    "20-tokens": [3, 6, 9, 10],
    "35-tokens": [5, 10],
    "2epochs": [5, 10],
    "0.5epochs": [2, 3, 4, 5, 7, 8, 9, 10],
    "1h": [10],
}


@pytest.mark.parametrize("every", EXPECTED)
def test_saves_and_evaluations_come_at_their_intervals_and_at_the_end(every, tmp_path):
    assert train(tmp_path, 10, save=every, evaluate=every) == EXPECTED[every]
    assert saved(tmp_path) == EXPECTED[every]


@pytest.mark.parametrize("every", ["20-tokens", "2epochs"])
def test_a_resumed_run_does_the_same_after_the_same_steps(every, tmp_path):
    for last in range(1, 11):  # it ends and is resumed after each step, which is saved as the last
        train(tmp_path, last, save=every, evaluate=every)
    evaluated = [x["step"] for x in events(tmp_path, "evaluation")]
    at_the_end = {*range(1, 11)}
    assert set(EXPECTED[every]) <= {*evaluated} <= at_the_end
    # Without the last steps of each process, what is due is due by the counters alone.
    state, due = TrainState(), []
    for step in range(1, 11):
        clock = IntervalClock(
            run_dir=tmp_path,
            world=solo_parallel().world,
            batches_per_epoch=PER_EPOCH,
            state=state,
        )
        state = TrainState(step=step, tokens=7 * step, cursor=Cursor(step))
        due += [step] if clock.is_due(parse_interval(every), state) else []
    assert due == [step for step in EXPECTED[every] if step < 10 or every == "2epochs"]


@pytest.fixture
def four_seconds(monkeypatch):
    """Let every step take 4 seconds by the clock that intervals go by."""
    ticks = {"now": 1000.0}

    def tick():
        ticks["now"] += 4.0
        return ticks["now"]

    monkeypatch.setattr(intervals, "time", types.SimpleNamespace(monotonic=lambda: ticks["now"]))
    # The package has a function of the file's name.
    home = importlib.import_module("trainkit.run.open_run")
    monkeypatch.setattr(home, "open_step_vote", partial(open_step_vote, clock=tick))


@pytest.mark.usefixtures("four_seconds")
@pytest.mark.parametrize("every", ["10s", "20-tokens", "0.5epochs"])
def test_what_is_due_after_a_resume_is_what_was_due_without_it(every, tmp_path):
    expected = EXPECTED.get(every, [4, 6, 9, 10])  # of 10 s: known a step after 12, 20 and 32 s
    assert train(tmp_path / "whole", 10, save=every, evaluate=every) == expected
    parts = train(tmp_path / "parts", 5, save=every, evaluate=every)
    lines = (tmp_path / "parts/metrics.jsonl").read_text().splitlines()
    text = "".join(f"{json.dumps(json.loads(line) | {'seconds': 4.0})}\n" for line in lines)
    (tmp_path / "parts/metrics.jsonl").write_text(text)
    parts += train(tmp_path / "parts", 10, save=every, evaluate=every)
    assert parts == sorted({*expected, 5})  # and the last step of the first process
    assert saved(tmp_path / "parts") == parts


def test_an_interval_of_epochs_needs_their_length(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train(tmp_path / "save", 3, save="2epochs", batches_per_epoch=None)
    assert end.value.code == 64
    assert "an interval of 2epochs needs the length of an epoch" in capsys.readouterr().err
    assert saved(tmp_path / "save") == []
    with pytest.raises(SystemExit) as end:
        train(tmp_path / "evaluate", 3, evaluate="1epoch", batches_per_epoch=None)
    assert end.value.code == 64


# ------------------------------------------------------------------------------------ seconds


def train_on_hosts(out):
    """Train on ranks whose clocks have nothing to do with each other."""
    if dist.get_rank() == 1:
        intervals.time = types.SimpleNamespace(monotonic=lambda: 1e6)
    return train(out, 100, save="1s", evaluate="0.25s", pause=0.02)


def test_all_ranks_go_by_the_clock_of_rank_0(tmp_path):
    ranks = run_ranks(train_on_hosts, 2, tmp_path)
    assert ranks[0] == ranks[1]
    assert 4 <= len(ranks[0]) < 60  # 2 s and more of 100 steps, and the last one
    assert len(saved(tmp_path)) >= 2


def make_clock(folder, seconds=(), step=0):
    folder.mkdir(exist_ok=True)
    text = "".join(
        f"{json.dumps({'step': n, 'seconds': x})}\n" for n, x in enumerate(seconds, start=1)
    )
    (folder / "metrics.jsonl").write_text(text)
    world = solo_parallel().world
    state = TrainState(step=step)
    return IntervalClock(run_dir=folder, world=world, batches_per_epoch=None, state=state)


def due_at(clock, every, times):
    """Return at which times of the clock an interval is due, a step each."""
    interval, due = parse_interval(every), []
    for step, now in enumerate(times, start=clock.state.step + 1):
        state = TrainState(step=step)
        if clock.is_due(interval, state):
            due.append(step)
        clock.advance(state, clock._opened + now)
    return due


def test_seconds_count_from_the_steps_on_record(tmp_path):
    fresh = make_clock(tmp_path / "fresh")
    assert due_at(fresh, "10s", range(4, 44, 4)) == [4, 6, 9]  # passed at 12, 20 and 32
    # 16 s of steps are on record up to step 2, in which 10 were passed; a third was repeated.
    resumed = make_clock(tmp_path / "resumed", [9.0, 7.0, 103.0], step=2)
    assert due_at(resumed, "10s", [1, 3, 5, 9, 13, 15, 16]) == [3, 6, 9]  # 20 at 4 s, 30 at 14 s


def test_a_clock_that_stands_before_the_start_takes_nothing_back(tmp_path):
    clock = make_clock(tmp_path, [10.5], step=1)
    assert due_at(clock, "10s", [-5.0, -1.0, 1.0, 2.0, 9.6, 9.7]) == [2, 7]


# ------------------------------------------------------------------------------------ the device


@attrs.define(eq=False)
class OnDevice:
    """Tokens that wait for a device whenever they are read."""

    value: int
    reads: list

    def __int__(self):
        self.reads.append(self.value)
        return self.value


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(intervals, "_is_on_host", lambda _: False)


def count_reads(folder, tokens, every, labels):
    """Return the steps after which tokens on a device are due, and how often they were read."""
    clock = make_clock(folder)
    due, total, reads = {x: [] for x in every}, 0, []
    for step, more in enumerate(tokens, start=1):
        total += more
        state = TrainState(step=step, tokens=OnDevice(total, reads))
        clock.note_batch([{"labels": torch.empty(labels, 1)}], ranks=2)
        for x in (*every, *every):  # it may be considered twice in a step
            if clock.is_due(parse_interval(x), state) and step not in due[x]:
                due[x].append(step)
        clock.advance(state, 0.0)
    return due, len(reads)


def find_due(tokens, every):
    size, found, total = parse_interval(every).value, [], 0
    for step, more in enumerate(tokens, start=1):
        found += [step] if (total + more) // size > total // size else []
        total += more
    return found


@pytest.mark.usefixtures("on_device")
@given(st.lists(st.integers(40, 100), min_size=1, max_size=60))
@example([100] * 60)
@example([40] * 60)
def test_tokens_of_a_device_are_due_at_the_same_steps_with_few_reads(tmp_path_factory, tokens):
    folder = tmp_path_factory.getbasetemp() / "device"
    every = ("1k-tokens", "700tokens")
    due, _ = count_reads(folder, tokens, every, labels=50)
    assert due == {x: find_due(tokens, x) for x in every}


@pytest.mark.usefixtures("on_device")
def test_tokens_of_a_device_are_read_about_as_often_as_something_is_due(tmp_path):
    due, reads = count_reads(tmp_path, [98] * 1000, ["10k-tokens"], labels=50)
    assert len(due["10k-tokens"]) == 9
    assert reads <= 6 * 9  # twice in a step that reads


@pytest.mark.usefixtures("on_device")
def test_tokens_that_are_not_labels_are_read_at_every_step(tmp_path):
    due, _ = count_reads(tmp_path, [300] * 20, ["1k-tokens"], labels=1)
    assert due["1k-tokens"] == find_due([300] * 20, "1k-tokens")
