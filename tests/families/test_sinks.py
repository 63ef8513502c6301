"""Every sink takes (step, values); files have one whole line per step, after any kills."""

import contextlib
import functools
import io
import json
import math
import re
import sys
import time
import types
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import sinks
from trainkit.run.sinks.jsonl import repair_jsonl
from trainkit.run.sinks.named import named_sinks
from trainkit.types import ConfigError, Share


class Terminal(io.StringIO):
    def isatty(self):
        return True


VALUES = {"loss": 2.5, "tokens_per_second": 41234.5, "lr": 3e-4, "grad_norm": 1.234}


@contextlib.contextmanager
def a_tee(tmp_path):
    with (
        sinks.open_jsonl(tmp_path / "a.jsonl") as one,
        sinks.open_jsonl(tmp_path / "b.jsonl") as two,
    ):
        yield sinks.tee(one, two)


FAMILY = {
    "console, a terminal": lambda _: sinks.open_console(5, stream=Terminal()),
    "console, a pipe": lambda _: sinks.open_console(5, stream=io.StringIO()),
    "jsonl": lambda tmp_path: sinks.open_jsonl(tmp_path / "metrics.jsonl"),
    "tee": a_tee,
}


@pytest.mark.parametrize("name", FAMILY)
def test_a_sink_takes_steps_and_values_and_leaves_them_alone(tmp_path, name):
    values = VALUES | {"grad_norm": math.nan, "batch_hash": "0x1"}
    before = dict(values)
    with FAMILY[name](tmp_path) as sink:
        assert [sink(step, values) for step in range(1, 6)] == [None] * 5
        assert sink(6, {}) is None
    assert values == before or math.isnan(values["grad_norm"])
    assert list(values) == list(before)


# ------------------------------------------------------------------------------------ jsonl


def lines_of(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_lines_are_strict_json_and_hex_twins_hold_every_bit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1, "hash": 2**64 - 1, "note": "a"}
    with sinks.open_jsonl(path) as sink:
        sink(1, values | {f"{x}_hex": values[x].hex() for x in ("loss", "grad_norm", "lr")})
        (line,) = lines_of(path)  # it is on the disk before the sink is closed
    assert line == {
        "step": 1,
        "loss": None,
        "loss_hex": "nan",
        "grad_norm": None,
        "grad_norm_hex": "inf",
        "lr": 0.1,
        "lr_hex": (0.1).hex(),
        "hash": 2**64 - 1,
        "note": "a",
    }


def test_a_value_that_is_no_plain_number_is_refused_and_leaves_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with (
        sinks.open_jsonl(path) as sink,
        pytest.raises(ValueError, match=r"to_host.*'loss': '<object>'"),
    ):
        sink(1, {"loss": object()})
    assert path.read_bytes() == b""


def written(steps):
    return b"".join(orjson.dumps({"step": step, "loss": step / 7}) + b"\n" for step in steps)


@given(steps=st.integers(0, 12), cut=st.integers(0, 400), step=st.integers(0, 14))
def test_repair_keeps_the_whole_lines_up_to_the_step(steps, cut, step):
    text = written(range(1, steps + 1))
    torn = text[: max(0, len(text) - cut)]
    repaired = repair_jsonl(torn, step)
    whole = [n for n in range(1, steps + 1) if len(written(range(1, n + 1))) - 1 <= len(torn)]
    assert repaired == written(n for n in whole if n <= step)
    assert repair_jsonl(repaired, step) == repaired


@given(junk=st.lists(st.binary(max_size=30) | st.just(b"\0" * 9), max_size=6))
def test_repair_never_fails_and_drops_what_is_no_step(junk):
    text = b"\n".join([written([1])[:-1], *junk, written([2])])
    kept = repair_jsonl(text, 2)
    assert kept.startswith(written([1]))
    assert all(type(orjson.loads(line)["step"]) is int for line in kept.splitlines())


def test_repair_keeps_the_first_of_lines_that_tell_a_step_twice():
    assert repair_jsonl(written([1, 2, 2, 1, 3]), 3) == written([1, 2, 3])


def test_after_any_restarts_each_step_has_exactly_one_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for begin, end in ((0, 7), (5, 6), (5, 9), (0, 3), (3, 4)):
        with sinks.open_jsonl(path, step=begin) as sink:
            for step in range(begin + 1, end + 1):
                sink(step, {"loss": 1.0})
        with path.open("ab") as file:
            file.write(b'{"step": 99, "lo')  # killed here
    with sinks.open_jsonl(path, step=4):
        pass
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_events_are_appended_and_a_torn_one_is_dropped(tmp_path):
    path = tmp_path / "events.jsonl"
    with sinks.open_events(path) as event:
        event("save", step=1)
    with path.open("ab") as file:
        file.write(b'{"time": 1')
    with sinks.open_events(path) as event:
        event("resume", step=1, path="a")
    first, second = lines_of(path)
    assert (first["event"], second["event"], second["path"]) == ("save", "resume", "a")
    assert 0 <= second["time"] - first["time"] < 60


# ------------------------------------------------------------------------------------ console


def test_a_pipe_gets_the_first_and_the_last_step_and_few_between(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 4)
    stream = io.StringIO()
    with sinks.open_console(100, stream=stream) as sink:
        for step in range(1, 101):
            sink(step, VALUES)
    lines = stream.getvalue().splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    # 4 calls a second: a line every 2 seconds, and from 20 seconds on ever later ones.
    assert steps[:9] == [1, *range(9, 66, 8)]
    assert all(x <= y for x, y in pairwise(np.diff(steps[:-1])))
    assert steps[-1] == 100
    assert lines[1] == (
        "step 9/100  loss 2.5000  41.2k tok/s  lr 3.00e-04  norm 1.23  left 0:00:23"
    )
    assert lines[-1].endswith("left 0:00:00")


def test_the_last_step_is_shown_when_the_run_ends_early():
    stream = io.StringIO()
    with contextlib.suppress(KeyError), sinks.open_console(100, start=10, stream=stream) as sink:
        sink(11, {"loss": 3.0})
        sink(12, {"loss": 2.0})
        raise KeyError
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 11/100", "loss 3.0000"],
        ["step 12/100", "loss 2.0000"],
    ]


def test_a_log_of_a_day_stays_short(monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    with sinks.open_console(86_400, stream=stream) as sink:
        for step in range(1, 86_400):
            sink(step, VALUES)
    assert 700 < len(stream.getvalue().splitlines()) < 800  # 43,200 with one every two seconds


@pytest.mark.parametrize("more", [{}, {"overflowed": 1, "loss_scale": 65536.0}])
def test_a_line_of_a_log_has_at_most_80_columns_and_always_the_loss_and_the_time(more):
    values = {"loss": 12.3456, "tokens_per_second": 123.4e6, "mfu": 0.412, "lr": 3e-4}
    values |= {"grad_norm": 123.45, "load_over_mean": 12.34} | more
    stream = io.StringIO()
    with sinks.open_console(123_456_789, stream=stream) as sink:
        sink(12_345_678, values)
    [line] = stream.getvalue().splitlines()
    assert len(line) <= 80
    assert "loss 12.3456  " in line
    assert " left " in line
    assert ("overflow" in line) == bool(more)


def test_a_terminal_gets_two_lines_of_at_most_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    values = VALUES | {"mfu": 0.412, "memory_peak": 75 * 2**30, "load_over_mean": 1.32}
    with sinks.open_console(200, stream=stream) as sink:
        sink(1, values)
        sink(200, values)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).split("\r")[-1]
    bar, numbers = shown.rstrip("\n").splitlines()
    assert len(bar) <= 80
    assert bar.startswith("step 200/200 ")
    assert bar.rstrip().endswith("100%  left 0:00:00")
    assert numbers.rstrip() == (
        "loss 2.5000  lr 3.00e-04  norm 1.23  41.2k tok/s  mfu 41.2%  75.0 GiB  load 1.32"
    )


def test_numbers_that_do_not_fit_a_terminal_are_left_out_and_none_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    values = VALUES | {"mfu": 0.412, "memory_peak": 75 * 2**30, "load_over_mean": 1.32}
    with sinks.open_console(1, stream=stream) as sink:
        sink(1, values | {"overflowed": 1, "loss_scale": 65536.0})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).split("\r")[-1]
    assert shown.splitlines()[1].rstrip() == (
        "loss 2.5000  overflow: scale 32768  41.2k tok/s  mfu 41.2%  75.0 GiB  load 1.32"
    )


def test_both_lines_of_a_terminal_stand_before_the_first_step():
    # A message of the thread that trains cannot be written onto them while they are first drawn.
    stream = Terminal()
    with sinks.open_console(200, start=10, stream=stream):
        bar, numbers = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).split("\n")
    assert bar.startswith("step 10/200 ")
    assert numbers == ""


# ------------------------------------------------------------------------------------ tee


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ConfigError, match=r'pip install "trainkit-lm\[recipes\]"'):
        sinks.open_console(5, stream=Terminal()).__enter__()


def test_a_run_s_sinks_write_on_the_first_rank_alone(tmp_path, capsys):
    for index in (0, 1):
        folder = tmp_path / str(index)
        folder.mkdir()
        with sinks.open_run_sinks(folder, Share(index, 2), step=4, last=6) as (log, event):
            log(5, {"loss": 1.0})
            event("save", step=5)
    assert [line["step"] for line in sinks.read_jsonl(tmp_path / "0/metrics.jsonl")] == [5]
    events = sinks.read_jsonl(tmp_path / "0/events.jsonl")
    assert [line["event"] for line in events] == ["start", "save", "end"]
    assert (events[0]["step"], events[0]["ranks"], events[2]["step"]) == (4, 2, 5)
    assert list((tmp_path / "1").iterdir()) == []
    assert capsys.readouterr().out.count("step 5/6") == 1


# ------------------------------------------------------------------------------------ evaluations

EVALUATED = {"loss": 1.75, "loss/web": 1.5, "tokens": 40}


@pytest.fixture
def curves(monkeypatch):
    """Return what a stub of TensorBoard is told, each time that it is opened."""
    opened = []

    def make(*_, **options):
        scalars = []
        opened.append((options["purge_step"], scalars))
        return types.SimpleNamespace(add_scalar=lambda *x: scalars.append(x), close=lambda: None)

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = make
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return opened


@pytest.fixture
def page(monkeypatch):
    """Return the rows that a stub of wandb's server has; more of the last one joins it."""
    rows = {}

    def log(values, *, step):
        assert step >= max(rows, default=0)
        rows[step] = rows.get(step, {}) | values

    run = types.SimpleNamespace(log=log, finish=lambda **_: None, step=0)
    library = types.SimpleNamespace(init=lambda **_: run)
    monkeypatch.setitem(sys.modules, "wandb", library)
    return rows


def run_of(folder, steps, *, begin=0, evaluated=()):
    """Log some steps as a run does, and what is found after some of them."""
    extra = named_sinks(["tensorboard", "wandb"], folder)
    extra["lines"] = functools.partial(sinks.open_jsonl, folder / "extra.jsonl")
    with sinks.open_run_sinks(
        folder, Share(0, 1), step=begin, last=9, extra=extra, patience=30
    ) as (log, event):
        for step in steps:
            log(step, {"loss": 2.0 / step, "batch_hash": "00ff"})
            if step in evaluated:
                event("evaluation", step=step, **EVALUATED)
    return sinks.read_metrics(folder)


def test_what_an_evaluation_finds_reaches_every_sink_under_its_own_name(
    tmp_path, curves, page, capsys
):
    joined = run_of(tmp_path, (1, 2, 3), evaluated=(2,))
    found = {"eval/loss": 1.75, "eval/loss/web": 1.5}
    assert page == {
        1: {"train/loss": 2.0},
        2: {"train/loss": 1.0, **found},
        3: {"train/loss": 2 / 3},
    }
    values = [("train/loss", 2.0, 1), ("train/loss", 1.0, 2), *((*x, 2) for x in found.items())]
    assert curves == [(1, [*values, ("train/loss", 2 / 3, 3)])]
    hashes = {"train/batch_hash": "00ff"}
    assert [line | hashes for line in lines_of(tmp_path / "extra.jsonl")] == [
        {"step": step, **values, **hashes} for step, values in page.items()
    ]
    (event,) = [
        x for x in sinks.read_jsonl(tmp_path / "events.jsonl") if x["event"] == "evaluation"
    ]
    assert {name: event[name] for name in event.keys() - {"time", "event"}} == {
        "step": 2, "eval/tokens": 40, **found,
    }  # fmt: skip
    assert "eval" not in (tmp_path / "metrics.jsonl").read_text()
    assert [line.get("eval/loss") for line in joined] == [None, 1.75, None]
    assert [line["loss"] for line in joined] == [2.0, 1.0, 2 / 3]
    out = capsys.readouterr().out
    assert "loss 2.0000" in out
    assert "loss -" not in out


def test_a_step_that_is_done_again_takes_its_evaluation_with_it(tmp_path, curves, page):
    joined = run_of(tmp_path, (1, 2, 3, 2, 3, 4), evaluated=(1, 3))
    assert [line.get("eval/loss") for line in joined] == [1.75, None, 1.75, None]
    assert lines_of(tmp_path / "extra.jsonl")[2]["eval/loss"] == 1.75
    assert [purged for purged, _ in curves] == [1, 2]
    assert list(page) == [1, 2, 3, 4]
    joined = run_of(tmp_path, (2,), begin=1)  # after a restart
    assert [line.get("eval/loss") for line in joined] == [1.75, None]


def test_the_metrics_of_a_run_that_was_killed_are_read_up_to_the_torn_line(tmp_path):
    assert sinks.read_metrics(tmp_path) == []
    with sinks.open_events(tmp_path / "events.jsonl") as event:
        event("evaluation", step=0, **{"eval/loss": 5.5})
        event("evaluation", **{"eval/loss": 9.0})
    (tmp_path / "metrics.jsonl").write_bytes(written([1, 2]))
    whole = sinks.read_metrics(tmp_path)
    assert [(line["step"], line.get("eval/loss")) for line in whole] == [
        (0, 5.5),
        (1, None),
        (2, None),
    ]
    for torn in (b'{"step":3,"lo', b'{"step":3,"note":"\xc3', b"\0" * 5000, b'{"step":null}\n[3'):
        for name, text in (("metrics", written([1, 2])), ("events", b"")):
            before = (tmp_path / f"{name}.jsonl").read_bytes()
            (tmp_path / f"{name}.jsonl").write_bytes((text or before) + torn)
            assert sinks.read_metrics(tmp_path) == whole
            assert "2 steps" in sinks.summarize_run(tmp_path)
            (tmp_path / f"{name}.jsonl").write_bytes(before)
