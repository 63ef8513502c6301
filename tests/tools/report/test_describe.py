"""What the page draws of a run: curves without lost spikes, events in words, states, pictures."""

import json
import math
import re
from importlib import resources
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import report_runs

from trainkit.run.status import RunStatus, State
from trainkit.tools.report.describe import describe_run
from trainkit.tools.report.read import RunFiles, read_run
from trainkit.tools.report.thin import make_buckets, thin_axis, thin_values


def describe(folder):
    return describe_run(read_run(folder))


# ------------------------------------------------------------------------------------ thinning


@pytest.mark.parametrize("at", [0, 1, 49_999, 50_000, 99_998, 99_999])
def test_no_spike_of_one_step_is_lost(at):
    values = np.sin(np.arange(100_000.0))
    values[at] = 50.0
    buckets = make_buckets(len(values), limit=2000)
    points, means = thin_values(values, buckets)
    assert (len(points), len(means)) == (4000, 2000)
    assert points.max() == 50.0
    where = thin_axis(np.arange(100_000), buckets)[points.argmax()]
    assert abs(where - at) <= 50


def test_the_points_of_a_bucket_come_in_their_order():
    values = np.array([5.0, 1.0, 2.0, 1.0, 9.0, 3.0])
    points, means = thin_values(values, make_buckets(6, limit=2))
    assert points.tolist() == [5.0, 1.0, 1.0, 9.0]
    assert means.tolist() == [8 / 3, 13 / 3]


def test_values_that_are_not_finite_are_no_points():
    values = np.array([math.nan, 2.0, math.inf, math.nan, math.nan, math.nan, 4.0, 6.0])
    points, means = thin_values(values, make_buckets(8, limit=3))
    np.testing.assert_array_equal(points, [2.0, 2.0, math.nan, math.nan, 4.0, 6.0])
    np.testing.assert_array_equal(means, [2.0, math.nan, 5.0])


def test_few_lines_are_not_thinned(tmp_path):
    page = describe(report_runs.write_run(tmp_path, report_runs.make_steps(50), []))
    assert (page["every"], len(page["series"]["loss"]["v"])) == (1, 50)
    assert "m" not in page["series"]["loss"]


def test_a_long_run_becomes_a_small_page(tmp_path):
    lines = [{"step": n, "loss": 2.0, "seconds": 0.1} for n in range(1, 30_001)]
    lines[17_000]["loss"] = 40.0
    page = describe(report_runs.write_run(tmp_path, lines, []))
    assert page["every"] == 15
    assert max(page["series"]["loss"]["v"]) == 40.0
    assert page["x"]["step"][-1] == 30_000
    assert len(json.dumps(page)) < 400_000


# ------------------------------------------------------------------------------------ axes


def test_every_axis_rises_and_events_stand_on_it(tmp_path):
    page = describe(report_runs.healthy(tmp_path, 400))
    for x in page["x"].values():
        assert len(x) == 400
        assert all(a <= b for a, b in pairwise(x))
    save = next(event for event in page["events"] if event["kind"] == "save")
    step, tokens, seconds = save["x"]
    row = page["x"]["step"].index(step)
    assert tokens == pytest.approx(page["x"]["tokens"][row])
    assert seconds == pytest.approx(page["x"]["time"][row], abs=1)


def test_a_file_without_times_counts_the_seconds_of_its_steps(tmp_path):
    lines = [{"step": n, "loss": 1.0, "seconds": 2.0} for n in range(1, 6)]
    events = [{"time": 100.0, "event": "save", "step": 3, "path": "a/b"}]
    page = describe(report_runs.write_run(tmp_path, lines, events))
    assert page["x"]["time"] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert page["x"]["tokens"] is None
    assert page["events"][0]["x"] == (3, None, 6.0)


def test_an_axis_never_falls_and_has_no_gap(tmp_path):
    times = [100.0, 101.0, None, 99.0, 104.0]  # a clock that was set back
    lines = [{"step": n, "time": t} for n, t in enumerate(times, 1)]
    page = describe(report_runs.write_run(tmp_path, lines, []))
    assert page["x"]["time"] == [0.0, 1.0, 1.0, 1.0, 4.0]


def test_a_phase_that_a_line_lacks_took_no_time_and_other_values_are_gaps(tmp_path):
    first = {"step": 1, "seconds/save": 2.0, "mfu": 0.5}
    lines = [first, {"step": 2, "loss": 1.0}, {"step": 3, "mfu": 1e200}]
    series = describe(report_runs.write_run(tmp_path, lines, []))["series"]
    assert series["seconds/save"]["v"] == [2.0, 0.0, 0.0]
    assert series["mfu"]["v"] == [0.5, None, None]


# ------------------------------------------------------------------------------------ states


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("running", None),
        ("ended", None),
        ("stopped", "SIGTERM on rank 0"),
        ("died", "NumericsError"),
        ("refused", "rank 0 failed: ConfigError"),
        ("stale", "no sign of life for 3 min"),
        ("unknown", "it has no events"),
    ],
)
def test_the_state_of_a_run_has_the_words_of_its_status(tmp_path, state, why):
    assert state in get_args(State)
    status = RunStatus(path=tmp_path, state=state, why=why)
    run = RunFiles(tmp_path, [{"step": 1, "loss": 1.0}], status=status)
    text = f"{state}: {why}" if why else state
    assert describe_run(run)["state"] == {"kind": state, "text": text}


def test_the_page_has_a_color_for_each_state_but_those_without_news():
    style = resources.files("trainkit.tools.report").joinpath("assets/style.css").read_text()
    colored = set(re.findall(r"\.pill\.(\w+)::before", style))
    assert colored == {*get_args(State)} - {"stopped", "unknown"}


def test_the_state_is_that_of_the_directory(tmp_path):
    assert describe(report_runs.healthy(tmp_path / "a", 40))["state"]["kind"] == "ended"
    assert describe(report_runs.slow(tmp_path / "b", 40))["state"]["kind"] == "running"
    assert describe(report_runs.diverging(tmp_path / "c", 40))["state"] == {
        "kind": "died",
        "text": "died: NumericsError",
    }


# ------------------------------------------------------------------------------------ figures


def test_the_figures_at_the_top_are_those_of_the_lines(tmp_path):
    assert describe(report_runs.known(tmp_path))["numbers"] == {
        "step": 150,
        "last": 200,
        "ranks": 4,
        "loss": 2.0,
        "evaluation": 2.5,
        "tokens": 150_000,
        "seconds": 0.5,  # the median of the last 100 steps; that of all is 1
        "tokens_per_second": 2000.0,
        "mfu": 0.4,
        "hfu": 0.5,
        "memory": 3 * 2**30,
        "memory_rank": 2,
        "wall": 105.0 + 144.0,  # of two processes
        "share": 0.5,  # of those 249 s: 99 steps of 1 s, and 51 of half a second
        "starts": 2,
        "repeated": 10,
        "saves": 1,
    }


def test_a_run_without_a_line_has_a_page(tmp_path):
    page = describe(report_runs.write_run(tmp_path, [], []))
    assert (page["x"]["step"], page["series"], page["numbers"]["step"]) == ([], {}, 0)
    one = describe(report_runs.write_run(tmp_path, report_runs.make_steps(1), []))
    assert len(one["series"]["loss"]["v"]) == 1


# ------------------------------------------------------------------------------------ events


def test_bad_steps_are_marked_with_what_they_were(tmp_path):
    page = describe(report_runs.diverging(tmp_path, 60))
    marks = [mark for mark in page["marks"] if mark["kind"] == "nonfinite"]
    assert [mark["x"][0] for mark in marks] == [57, 58, 59, 60]
    assert marks[0]["values"] == {"loss": "nan", "grad_norm": "nan"}
    page = describe(report_runs.healthy(tmp_path, 400))
    skipped = [mark["x"][0] for mark in page["marks"] if mark["kind"] == "skipped"]
    assert skipped == [73, 149, 265]  # a step that took two is marked once


def test_events_are_in_words(tmp_path):
    page = describe(report_runs.healthy(tmp_path, 400))
    by_kind = {event["kind"]: event["text"] for event in page["events"]}
    assert by_kind["start"] == "on 8 ranks"
    assert by_kind["ranks"] == "8 ranks, then 16; 38 steps are repeated"
    assert by_kind["stop"] == "SIGTERM"
    assert by_kind["save"] == "step_00000400 · seconds 11.8 · blocked 0.4"
    control = "save · a checkpoint is saved after this step · by ada · ranks 16 · verdict done"
    assert by_kind["control"] == control
    assert by_kind["straggler"] == ("rank 7 works 98% of the time, the others 31%, and wait for it")


def test_what_is_measured_before_the_first_step_stands_at_the_start(tmp_path):
    events = [
        {"time": 50.0, "event": "start", "step": 20, "ranks": 1},
        {"time": 58.0, "event": "startup", "phases": {"imports": 3.25, "model": 4.0}},
    ]
    lines = [{"step": n, "loss": 1.0, "time": 60.0 + n} for n in range(1, 41)]
    startup = describe(report_runs.write_run(tmp_path, lines, events))["events"][1]
    assert startup["x"][0] == 20
    assert startup["text"] == "phases: imports 3.25, model 4"


def test_hosts_say_what_they_have_in_common_and_memory_in_gib(tmp_path):
    hosts = [
        {"host": name, "device": "H100", "memory": 512 << 30, "ranks": [n], "device_indices": [0]}
        for n, name in enumerate(["a", "b"])
    ]
    events = [{"time": 1.0, "event": "host", "hosts": hosts}]
    page = describe(report_runs.write_run(tmp_path, [], events))
    assert page["software"] == [["host", "a, b"], ["device", "H100"], ["memory", "512 GiB"]]
    assert ["hosts", "2"] in page["facts"]


def test_the_last_profile_is_shown(tmp_path):
    events = [report_runs.make_profile(1.0, 10), report_runs.make_profile(2.0, 30)]
    page = describe(
        report_runs.write_run(tmp_path, [], [*events, {"time": 3.0, "event": "profile"}])
    )
    (profile,) = page["profiles"]
    assert (profile["first"], profile["step"], profile["idle"]) == (27, 30, 0.074)
    assert profile["operations"][0]["seconds"] == pytest.approx(1.66 * 0.312)
    assert "operations" not in page["events"][0]["text"]


def test_many_events_are_thinned_but_never_the_rare_ones(tmp_path):
    events = [{"time": float(n), "event": "save", "step": n} for n in range(4000)]
    events.insert(2000, {"time": 2000.0, "event": "rolled back", "step": 2000, "reason": "nan"})
    page = describe(report_runs.write_run(tmp_path, [{"step": 4000}], events))
    kinds = [event["kind"] for event in page["events"]]
    assert (len(kinds), kinds.count("rollback")) == (1500, 1)
    assert page["events"][-1]["x"][0] == 3999
    assert page["notes"] == ["events: 2,501 of 4,001 left out, of kinds that repeat"]


# ------------------------------------------------------------------------------------ pictures


def test_the_layout_is_drawn_from_the_last_host_event(tmp_path):
    page = describe(report_runs.healthy(tmp_path, 40))
    rows = {row["name"]: row["cells"] for row in page["layout"]["rows"]}
    assert page["layout"]["title"] == "pp 2 x dp_shard 4 x tp 2"
    assert rows["pp"] == [("0", 8, 0), ("1", 8, 1)]
    assert [len(rows[name]) for name in ("dp_shard", "tp", "rank")] == [8, 16, 16]
    assert [text for text, _, _ in rows["tokens"][:4]] == ["0", "0", "1", "1"]


def test_the_layout_of_a_configuration_takes_the_rest_of_the_ranks(tmp_path):
    events = [{"time": 1.0, "event": "start", "step": 0, "ranks": 12}]
    page = describe(report_runs.write_run(tmp_path, [], events))
    assert page["layout"]["title"] == "pp 2 x dp_shard 3 x tp 2"


def test_a_layout_that_cannot_be_is_left_out(tmp_path):
    page = describe(report_runs.write_run(tmp_path, [], [], config={"pp": 0}))
    assert page["layout"] is None
    assert page["notes"] == ["layout: not drawn (pp must be above 0, got 0)"]


def test_a_column_of_layers_holds_the_largest_of_its_steps(tmp_path):
    layers = [
        {
            "step": n,
            "kind": "gradient",
            "names": ["a", "b"],
            "rms": [1.0, 50.0 if n == 333 else 2.0],
        }
        for n in range(1, 1001)
    ]
    page = describe(report_runs.write_run(tmp_path, [{"step": 1000}], [], layers=layers))
    (found,) = page["layers"]
    assert len(found["x"]) == len(found["stats"]["rms"]) == 240
    assert max(row[1] for row in found["stats"]["rms"]) == 50.0
    # A column stands at its last step, so that the newest has a place on the page.
    assert [found["x"][i][0] for i in (0, -1)] == [4, 1000]
    assert "zeros" not in found["stats"]


def test_a_load_is_relative_to_the_mean_of_its_layer(tmp_path):
    lines = [{"step": n, "load": [[30, 10], [5, 5]]} for n in (1, 2)]
    page = describe(report_runs.write_run(tmp_path, lines, []))
    assert page["experts"]["load"] == [[[1.5, 0.5], [1.0, 1.0]]] * 2
