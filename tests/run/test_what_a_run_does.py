"""A slow, a diverging and a stalled run, each made by an injector, and each found by what it shows.

docs/howto/what-is-my-run-doing.md walks through the same three.
"""

import re
from pathlib import Path

import harness
import pytest

from trainkit.run import control_run, read_run_status
from trainkit.run.compare_runs import compare_runs
from trainkit.run.sinks import read_jsonl
from trainkit.tools import report
from trainkit.types import PeerError

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "what-is-my-run-doing.md"
NAME = re.compile(r"`([^`]+)`")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return harness.write_text(tmp_path_factory.mktemp("ground"))


def mean_of(lines, name):
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


# ------------------------------------------------------------------------------------ what it says


def list_documented(heading):
    """Return the names in the first column of the page's table under a heading."""
    table = PAGE.read_text().partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in NAME.findall(row.split("|")[1])}


def list_row(event):
    """Return the row of an event in the page's tables, with `step`, which most events have."""
    [row] = [x for x in PAGE.read_text().splitlines() if x.startswith(f"| `{event}` |")]
    return f"{row} `step`"


def test_the_page_explains_every_field_of_a_run(ground, tmp_path):
    flags = "--save-every 3 --eval-every 3 --layers-every 2 --peak-flops 1e11 --profile 3:4"
    flags += " --compute fp16"
    harness.complete(ground, tmp_path, *flags.split(), ranks=1, steps=6)

    fields = {name for line in harness.lines(tmp_path) for name in line}
    phases = {name.removeprefix("seconds/") for name in fields if name.startswith("seconds/")}
    assert {"data", "forward", "backward", "step", "log", "save", "evaluate"} <= phases
    assert phases <= list_documented("`seconds/PHASE` | the host")
    general = {re.sub("^(rows|tokens)/.*", r"\1/CORPUS", name) for name in fields}
    general = {re.sub("^seconds/.*", "seconds/PHASE", name) for name in general}
    assert {"rows/CORPUS", "tokens/CORPUS", "mfu", "hfu", "loss_scale", "time"} <= general
    assert general <= list_documented("field")

    events = {event["event"] for event in read_jsonl(tmp_path / "events.jsonl")}
    assert {"start", "startup", "host", "save", "profile", "evaluation"} <= events
    assert events <= list_documented("event")
    explained = set(NAME.findall(PAGE.read_text().partition("`layers.jsonl`, with")[2]))
    lines = read_jsonl(tmp_path / "layers.jsonl")
    assert set(lines[0]) | {line["kind"] for line in lines} <= explained | {"time"}
    assert {"activation"} < {line["kind"] for line in lines}


# -------------------------------------------------------------------------------------- it is slow


@pytest.mark.case("R7")
def test_the_phases_of_a_step_name_a_slow_loader(ground, tmp_path):
    fault = ["slow_batches", {"start": 9, "seconds": 0.3}]
    harness.complete(ground, tmp_path, "--save-every", 1000, ranks=1, steps=15, faults=[fault])
    lines = harness.lines(tmp_path)
    before, after = lines[2:8], lines[8:]
    phases = {name for line in lines for name in line if name.startswith("seconds/")}

    waits = mean_of(after, "seconds/data") / mean_of(after, "seconds")
    assert waits > 0.6
    assert waits > 2 * mean_of(before, "seconds/data") / mean_of(before, "seconds")
    assert max(phases, key=lambda name: mean_of(after, name)) == "seconds/data"
    # Every other phase takes what it took: no kernel, no collective and no save is to blame.
    growth = {name: mean_of(after, name) - mean_of(before, name) for name in phases}
    assert max(growth, key=growth.get) == "seconds/data"
    assert growth.pop("seconds/data") > 3 * max(growth.values())


@pytest.mark.case("R7")
def test_the_wait_for_a_slow_rank_has_a_phase_and_the_rank_an_event(ground, tmp_path):
    fault = ["slow_batches", {"start": 5, "seconds": 0.5, "rank": 1}]
    # The watch judges after half a minute of samples at most, and here after 5 s of them.
    harness.complete(ground, tmp_path, "--save-every", 1000, ranks=2, steps=45, faults=[fault])
    lines = harness.lines(tmp_path)
    before, after = lines[1:4], lines[9:]

    assert mean_of(after, "seconds/wait") > 0.6 * mean_of(after, "seconds")
    assert mean_of(after, "seconds/wait") > 3 * mean_of(before, "seconds/wait")
    assert mean_of(after, "seconds/other") < 0.1 * mean_of(after, "seconds")
    [event] = [x for x in read_jsonl(tmp_path / "events.jsonl") if x["event"] == "straggler"]
    assert event["rank"] == 1
    assert event["busy"] > 3 * event["others"]
    assert "watch: rank 1 (process" in event["what"]
    assert event.keys() <= {"time", "event"} | set(NAME.findall(list_row("straggler")))


# -------------------------------------------------------------------------------------- it diverges


def test_statistics_by_layer_name_the_parameter_whose_rate_is_too_high(ground, tmp_path):
    wild, first, guilty = tmp_path / "wild", 13, "embedding.weight"
    fault = ["large_update_at", {"at": list(range(first, 60)), "factor": 1000.0, "name": guilty}]
    flags = ["--save-every", 1000, "--layers-every", 1, "--on-divergence", "stop"]
    with harness.running(
        ground, wild, *flags, ranks=1, steps=60, faults=[fault], no_pictures=True
    ) as job:
        assert harness.finish(job) == [67], job.stderr()

    [event] = [x for x in read_jsonl(wild / "events.jsonl") if x["event"] == "divergence"]
    assert first < event["step"] < 60
    assert "the smoothed training loss is" in event["why"]
    status = read_run_status(wild)
    assert (status.state, status.step) == ("died", event["step"])
    # A step ahead of the loss.
    ratios = {
        line["step"]: dict(zip(line["names"], line["rms"], strict=True))
        for line in read_jsonl(wild / "layers.jsonl")
        if line["kind"] == "update"
    }
    jumps = {name: ratios[first][name] / ratios[first - 1][name] for name in ratios[first]}
    assert max(jumps, key=jumps.get) == guilty
    assert jumps.pop(guilty) > 100 * max(jumps.values())
    assert max(ratios[first - 1].values()) < 1 < ratios[first][guilty]


def test_a_comparison_with_a_sound_run_has_the_step_after_the_fault(ground, tmp_path):
    runs = {"sound": [], "wild": [["large_update_at", {"at": 4, "factor": 100.0}]]}
    for name, faults in runs.items():
        flags = ["--save-every", 1000]
        harness.complete(ground, tmp_path / name, *flags, ranks=1, steps=6, faults=faults)
    steps = compare_runs(tmp_path / "sound", tmp_path / "wild")["steps"]
    # The update of step 4 is in the weights that step 5 starts with; its batch is the same.
    assert steps["equal_until"] == 4
    assert next(iter(steps["differs"]["fields"])) == "loss_hex"


# ---------------------------------------------------------------------------------- it stands still


@pytest.mark.case("R2")
@pytest.mark.parametrize(
    ("fault", "words"),
    [("hang_at", "is stuck, in phase 'step 4'"), ("stop_at", "has stopped: no sign of life")],
)
def test_the_rank_and_the_place_of_a_stall_are_named(fault, words, ground, tmp_path):
    flags = ["--save-every", 1000, "--step-timeout", 6]
    with harness.running(
        ground, tmp_path, *flags, ranks=2, steps=9, faults=[[fault, {"at": 4, "rank": 1}]]
    ) as job:
        assert harness.wait_for(harness.reached(tmp_path, 3), job)
        assert read_run_status(tmp_path).state == "running"
        with pytest.raises(PeerError) as silence:
            control_run(tmp_path, "save", patience=2.0)
        assert harness.finish(job)[0] == 68, job.stderr()

    text = str(silence.value)
    assert "no rank carried out save within 2 s; it was taken back. Last of all rank" in text
    assert "all_sum" in text  # where rank 0 waits, and where rank 1 is:
    assert ("hang (processes.py" in text) == (fault == "hang_at")
    assert "rank 1 was seen" in text
    # `runs` and the page have the words of the watch.
    status = read_run_status(tmp_path)
    assert (status.state, status.step) == ("died", 3)
    assert status.why.startswith("rank 1 (process ")
    assert words in status.why
    assert words in report.describe_run(report.read_run(tmp_path))["state"]["text"]
    assert harness.living(job) == []
