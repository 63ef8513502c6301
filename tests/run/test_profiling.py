"""Profiles: the steps that were asked for, a trace of each rank, and what is dear in it."""

import contextlib
import errno
import gzip
import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from recipe_runs import events
from torch.autograd import DeviceType

from trainkit.phases import measure_phase, record_phases
from trainkit.run import Timeouts, open_run
from trainkit.run.instruments import Instruments
from trainkit.run.log import fold_lines
from trainkit.run.profiling import measure_covered, profile, summarize_profile
from trainkit.run.sinks import LoggingOptions, read_jsonl
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, ConfigError, Cursor, DiskError, StepBatch

TIMEOUTS = Timeouts(start_timeout=60.0)


def read_trace(path):
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def run_steps(folder, steps, *, asked, first=0, capture=None, layers_every=0):
    """Take steps of a run that multiplies once in each."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters())
    metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = attrs.evolve(run.resume(model, optimizer), step=first)
        logging = LoggingOptions(profile=asked, capture=capture, layers_every=layers_every)
        with run.loop(state, model, optimizer, steps=99, replay=None, logging=logging) as loop:
            for _ in range(steps):
                state = attrs.evolve(state, step=state.step + 1)
                with measure_phase("forward"):
                    _ = torch.ones(8, 8) @ torch.ones(8, 8)
                state = loop.record(state, metrics, StepBatch([], Cursor(1)))
                loop.checkpoint(state)


def count_products(path):
    return sum(event["name"] == "aten::mm" for event in read_trace(path))


def test_the_steps_that_were_asked_for_are_profiled(tmp_path, capsys):
    run_steps(tmp_path, 6, asked="3:4")
    trace = tmp_path / "profiles" / "step_00000003" / "rank_00000.json.gz"
    assert count_products(trace) == 2
    names = {x["name"] for x in read_trace(trace) if x.get("cat") == "user_annotation"}
    assert {"forward", "log"} <= names  # phases are spans
    [event] = events(tmp_path, "profile")
    assert (event["first"], event["step"]) == (3, 4)
    assert "aten::mm" in {one["name"] for one in event["operations"]}
    assert 0 <= event["idle"] <= 1
    assert "profile of steps 3 to 4" in capsys.readouterr().out


def test_evaluations_and_samples_are_left_out_of_a_trace(tmp_path):
    found = []
    with record_phases(), profile(tmp_path, report=found.append):
        with measure_phase("forward"):
            _ = torch.ones(8, 8) @ torch.ones(8, 8)
        for name in ("evaluate", "sample"):
            with measure_phase(name), measure_phase("forward"), measure_phase("sample"):
                for _ in range(100):
                    _ = torch.ones(8, 8).tan()
                time.sleep(0.05)
        _ = torch.ones(8, 8).sin()
    trace = read_trace(tmp_path / "rank_00000.json.gz")
    names = [event["name"] for event in trace]
    assert "aten::tan" not in names
    assert [names.count(name) for name in ("aten::mm", "aten::sin", "evaluate")] == [1, 1, 1]
    [summary] = found
    assert summary.left_out > 0.1
    assert summarize_profile([], on="cpu", seconds=3.0, left_out=1.0).seconds == 2.0
    assert "evaluations and samples are left out of it, " in str(summary)


def test_the_first_step_can_be_profiled(tmp_path, capsys):
    run_steps(tmp_path, 2, asked="1")
    assert count_products(tmp_path / "profiles" / "step_00000001" / "rank_00000.json.gz") == 1
    assert "profile of step 1:" in capsys.readouterr().out


def test_a_run_that_ends_within_the_steps_keeps_what_was_profiled(tmp_path, capsys):
    run_steps(tmp_path, 3, asked="2:9")
    assert count_products(tmp_path / "profiles" / "step_00000002" / "rank_00000.json.gz") == 2
    [event] = events(tmp_path, "profile")
    assert (event["first"], event["step"]) == (2, 3)
    assert "profile of steps 2 to 3:" in capsys.readouterr().out


def test_a_run_that_resumes_within_the_steps_profiles_the_rest_of_them(tmp_path):
    run_steps(tmp_path, 3, asked="2:5", first=3)
    assert count_products(tmp_path / "profiles" / "step_00000004" / "rank_00000.json.gz") == 2
    [event] = events(tmp_path, "profile")
    assert (event["first"], event["step"]) == (4, 5)


def test_a_run_that_resumes_after_the_steps_profiles_nothing(tmp_path):
    run_steps(tmp_path, 2, asked="2:5", first=5)
    assert not (tmp_path / "profiles").exists()


def test_an_infinite_peak_is_refused_before_a_run_starts():
    with pytest.raises(ConfigError, match="peak_flops must be"):
        LoggingOptions(peak_flops=float("inf"))


def test_steps_after_the_last_one_are_not_awaited_in_silence(tmp_path, capsys):
    run_steps(tmp_path, 2, asked="100:103")
    assert "no profile: the run ends at step 99, before step 100" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "3:", "0:2", "4:3", "a:b", "1:2:3", "-1"])
def test_wrong_steps_are_refused_before_a_run_starts(text):
    with pytest.raises(ConfigError, match="profile must"):
        LoggingOptions(profile=text)


def test_a_block_is_profiled_without_a_run(tmp_path):
    found = []
    with profile(tmp_path, rank=3, report=found.append):
        _ = torch.ones(64, 64) @ torch.ones(64, 64)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00003.json.gz"]
    assert found[0].on == "cpu"
    assert "aten::mm" in str(found[0])


def test_an_error_in_the_block_leaves_the_recorder_as_it_was(tmp_path):
    with record_phases() as times:
        with pytest.raises(KeyError), profile(tmp_path, report=print):
            raise KeyError
        assert times.mark is None


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("fails", [None, "block", "snapshot"])
def test_the_memory_of_a_gpu_is_recorded_no_longer_than_the_block(fails, tmp_path, monkeypatch):
    calls = []

    def dump(path):
        calls.append("dump")
        if fails == "snapshot":
            raise OSError(errno.ENOSPC, "No space left on device")
        Path(path).touch()

    def record(enabled="all", *, max_entries=None):
        calls.append("off" if enabled is None else f"{max_entries:,}")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(str(device)))
    error = {"block": KeyError, "snapshot": DiskError}.get(fails)
    with (
        pytest.raises(error) if error else contextlib.nullcontext(),
        profile(tmp_path, device="cuda:0", report=lambda _: None),
    ):
        if fails == "block":
            raise KeyError
    within = [] if fails == "block" else ["cuda:0", "dump"]
    assert calls == ["200,000", *within, "off"]
    assert (tmp_path / "rank_00000.memory.pickle").exists() == (fails is None)


# ----------------------------------------------------------------------------- it cannot be written


def test_a_run_goes_on_without_what_it_cannot_write(tmp_path, capsys):
    for name in ("profiles", "captures"):
        (tmp_path / name).write_text("a file where the folder would be")
    (tmp_path / "layers.jsonl").mkdir()
    run_steps(tmp_path, 4, asked="2:3", capture="0", layers_every=1)
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    found = [event["what"] for event in events(tmp_path, "warning")]
    goes_on = "1 of 1 ranks could not write it, and training goes on; rank 0: "
    for text, start, path in zip(
        found,
        (
            "the statistics by layer are not written; ",
            f"capture of 0 in step 1: {goes_on}",
            f"profile of steps 2 to 3: {goes_on}",
        ),
        ("layers.jsonl", "captures/step_00000001/", "profiles/step_00000002/"),
        strict=True,
    ):
        assert text.startswith(start)
        assert f"cannot write {tmp_path / path}" in text
        assert re.search(r"\((EISDIR|ENOTDIR)\)", text)
    shown = capsys.readouterr()
    assert [shown.err.count(f"warning: {text}") for text in found] == [1, 1, 1]
    # What a profile shows is known all the same.
    [event] = events(tmp_path, "profile")
    assert (event["first"], event["step"], event["path"]) == (2, 3, None)
    assert "profile of steps 2 to 3: " in shown.out
    assert "a trace of each rank" not in shown.out
    assert not events(tmp_path, "capture")


def test_an_error_ends_the_run_also_where_its_profile_cannot_be_written(
    tmp_path, monkeypatch, capsys
):
    asked = []

    def fail(instruments, _):
        if instruments.step == 2:
            raise KeyError("the error")

    def gather(value, axis):
        asked.append(axis)
        return [value]

    monkeypatch.setattr(Instruments, "end_step", fail)
    monkeypatch.setattr("trainkit.run.instruments.all_gather_objects", gather)
    (tmp_path / "profiles").write_text("a file where the folder would be")
    with pytest.raises(KeyError, match="the error"):
        run_steps(tmp_path, 3, asked="1:9")
    assert asked == [SOLO]  # not with other ranks, which may be gone
    assert "warning: profile of step 1: 1 of 1 ranks could not write it" in capsys.readouterr().err
    [event] = events(tmp_path, "profile")
    assert (event["first"], event["step"]) == (1, 1)


def test_a_trace_for_which_the_temporary_folder_has_no_room_is_not_written(tmp_path, monkeypatch):
    def export_half(_, path):
        Path(path).write_text('{"traceEvents": [{"ph": "X"')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export_half)
    with (
        pytest.raises(DiskError, match=r"has no room for the trace \(ENOSPC\)"),
        profile(tmp_path, report=lambda _: None),
    ):
        pass
    assert [*tmp_path.iterdir()] == []


def profile_on_ranks(folder):
    for name in ("sound", "blocked"):
        run_steps(folder / name, 4, asked="2:3", capture="0")


def test_a_rank_that_cannot_write_is_named_and_no_rank_waits_for_it(tmp_path):
    for path in (
        "profiles/step_00000002/rank_00001.json.gz",
        "captures/step_00000001/rank_00001.safetensors",
    ):
        (tmp_path / "blocked" / path).mkdir(parents=True)
    run_ranks(profile_on_ranks, 2, tmp_path)

    assert not events(tmp_path / "sound", "warning")
    sound = tmp_path / "sound/profiles/step_00000002"
    assert [count_products(sound / f"rank_{rank:05d}.json.gz") for rank in (0, 1)] == [2, 2]
    blocked = tmp_path / "blocked"
    assert [line["step"] for line in read_jsonl(blocked / "metrics.jsonl")] == [1, 2, 3, 4]
    found = [event["what"] for event in events(blocked, "warning")]
    assert len(found) == 2
    for text, path in zip(found, ("captures", "profiles"), strict=True):
        assert "1 of 2 ranks could not write it, and training goes on; rank 1: " in text
        assert f"cannot write {blocked / path}" in text
    assert count_products(blocked / "profiles/step_00000002/rank_00000.json.gz") == 2
    [event] = events(blocked, "profile")
    assert event["path"] is None


# ------------------------------------------------------------------------------ what a trace shows


def make_event(name, start, end, *, on="cpu", mark=False):
    microseconds = end - start
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if on == "cuda" else DeviceType.CPU,
        is_user_annotation=mark,
        self_device_time_total=microseconds if on == "cuda" else 0,
        self_cpu_time_total=microseconds if on == "cpu" else 0,
        time_range=SimpleNamespace(start=start, end=end),
    )


def test_on_a_gpu_kernels_count_and_gaps_between_them_are_idle():
    found = summarize_profile(
        [
            make_event("forward", 0, 100, mark=True),
            make_event("aten::mm", 0, 90),
            make_event("gemm", 10, 30, on="cuda"),
            make_event("gemm", 50, 60, on="cuda"),
            make_event("nccl", 20, 40, on="cuda"),  # in another stream, over the first
        ],
        on="cuda",
        seconds=100e-6,
    )
    assert [(x.name, x.calls, x.seconds) for x in found.operations] == [
        ("gemm", 2, pytest.approx(30e-6)),
        ("nccl", 1, pytest.approx(20e-6)),
    ]
    assert found.idle == pytest.approx(0.6)


@pytest.mark.parametrize("kinds", [0, 3, 10, 14])
def test_the_ten_most_expensive_operations_are_shown_or_all_if_there_are_fewer(kinds):
    # Each for as many microseconds as its number, one after the other in the first half.
    starts = itertools.accumulate(range(kinds), initial=0)
    events = [make_event(f"op{n}", x, x + n) for n, x in zip(range(kinds), starts, strict=False)]
    busy = sum(range(kinds))
    found = summarize_profile(events, on="cpu", seconds=2e-6 * max(busy, 1))
    names = [f"op{n}" for n in reversed(range(kinds))][:10]
    assert [x.name for x in found.operations] == names
    header, *rows = str(found).splitlines()
    assert [row.split()[-1] for row in rows] == names
    share = 0.5 if kinds else 1.0
    assert found.idle == pytest.approx(share)
    assert header.endswith(f"of which nothing computed on the cpu in {share:.1%}")


def test_the_time_in_which_nothing_computes_is_that_of_a_pause(tmp_path):
    found = []
    with profile(tmp_path, report=found.append):
        begin = time.perf_counter()
        _ = torch.ones(8, 8) @ torch.ones(8, 8)
        time.sleep(0.2)
        _ = torch.ones(8, 8) @ torch.ones(8, 8)
        took = time.perf_counter() - begin
    [summary] = found
    assert 0.2 <= summary.seconds <= took
    assert summary.idle >= 0.2 / took


def test_a_row_of_the_table_is_one_line_however_long_a_kernel_s_name():
    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"
    )
    found = summarize_profile([make_event(kernel, 0, 90)], on="cpu", seconds=1e-4)
    assert found.operations[0].name == kernel
    header, row = str(found).splitlines()
    assert len(header) <= 80
    assert len(row) == 80
    assert row.endswith("…")
    assert fold_lines(row) == row


def test_intervals_that_overlap_count_once():
    assert measure_covered([]) == 0.0
    assert measure_covered([(5, 6), (0, 4), (1, 2)]) == 5.0
