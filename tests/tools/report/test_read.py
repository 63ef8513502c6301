"""What of a run is read, when its files are whole and when they are not."""

import pytest
import report_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.tools.report.describe import describe_run
from trainkit.tools.report.page import build_page
from trainkit.tools.report.read import read_run
from trainkit.types import DataError


def steps_of(run):
    return [line["step"] for line in run.metrics]


def test_a_whole_run_is_read_without_a_note(tmp_path):
    run = read_run(report_runs.healthy(tmp_path, 100))
    assert steps_of(run) == list(range(1, 101))
    assert run.notes == []
    assert run.status.state == "ended"


def test_each_kind_of_damage_is_counted_and_the_rest_is_read(tmp_path):
    run = read_run(report_runs.damaged(tmp_path))
    assert steps_of(run) == list(range(1, 31))  # 4.0 and "5" among them
    assert run.config == {}
    page = describe_run(run)
    expected = [
        "metrics.jsonl: 1 line left out (JSON, but no object)",
        "metrics.jsonl: 1 line left out (no JSON)",
        "metrics.jsonl: 1 line left out (zero bytes)",
        "metrics.jsonl: the last line is cut (16 bytes)",
        "metrics.jsonl: 1 line left out (no step; from another program or version)",
        "events.jsonl: 3 lines left out (no name or no time)",
        "config.toml: left out (Invalid value (at line 1, column 6))",
        "metrics.jsonl: values that are no numbers are gaps, in loss, lr",
        "layers.jsonl: 2 lines left out (no step, kind or names, or not a value for each name)",
    ]
    assert page["notes"] == expected
    assert page["series"]["loss"]["v"][4] is None
    assert page["numbers"]["ranks"] == 16  # "many" is no number


def test_a_step_that_stands_twice_counts_once_with_its_last_line(tmp_path):
    run = read_run(report_runs.repeated(tmp_path, 40))
    assert steps_of(run) == list(range(1, 101))
    again = report_runs.make_steps(100, seed=2, begin=report_runs.START + 5000)
    assert run.metrics[20]["loss"] == again[20]["loss"]
    assert run.notes == ["metrics.jsonl: 20 lines replaced by later ones of their step"]


@pytest.mark.parametrize(
    "line", [b'{"step": 3}\n', b"[1]\n", b"\n", b'"step"\n', b'{"step": true}\n', b'{"st', b"\0\n"]
)
def test_any_line_may_end_a_file(tmp_path, line):
    report_runs.write_run(tmp_path, report_runs.make_steps(2), [], tail=line)
    assert steps_of(read_run(tmp_path))[:2] == [1, 2]


def test_a_whole_last_line_needs_no_line_feed(tmp_path):
    report_runs.write_run(tmp_path, report_runs.make_steps(2), [], tail=b'{"step": 3}')
    run = read_run(tmp_path)
    assert (steps_of(run), run.notes) == ([1, 2, 3], [])


def test_evaluations_of_abandoned_steps_are_left_out(tmp_path):
    events = [
        {"time": 1.0, "event": "start", "step": 0, "ranks": 1},
        {"time": 2.0, "event": "evaluation", "step": 4, "eval/loss": 9.0},
        {"time": 3.0, "event": "start", "step": 2, "ranks": 1},
        {"time": 4.0, "event": "evaluation", "step": 3, "eval/loss": 2.0},
    ]
    report_runs.write_run(tmp_path, report_runs.make_steps(3), events)
    page = describe_run(read_run(tmp_path))
    assert page["evaluations"]["eval/loss"]["v"] == [2.0]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="no/such/run is no run directory"):
        read_run("no/such/run")
    with pytest.raises(DataError, match=r"holds none of metrics\.jsonl"):
        read_run(tmp_path)


def test_values_of_another_version_are_no_error(tmp_path):
    odd = [None, "text", [], {}, True, -1, 1e90, "0x1f"]
    lines = [{"step": n, "loss": x, "load": x, "lr": x, "time": x} for n, x in enumerate(odd)]
    events = [
        {"time": 1, "event": name, "step": 1} | dict.fromkeys(("hosts", "layout", "software"), x)
        for x in odd
        for name in ("start", "host", "save", "sample", "packing", "end", "stop", "rewind")
    ]
    layers = [{"step": 1, "kind": "weight", "names": ["a"], "rms": x} for x in odd]
    folder = report_runs.write_run(tmp_path, lines, events, layers=layers)
    page = describe_run(read_run(folder))
    build_page([page], title="a", written=0.0)
    assert page["series"]["loss"]["v"][5:7] == [-1.0, 1e90]


def test_integers_beyond_64_bits_are_text_or_no_steps(tmp_path):
    big = 10**30
    folder = report_runs.write_run(tmp_path, [{"step": 1}], [])
    (folder / "config.toml").write_text(f"seed = {big}\npp = {big}\nbetas = [{big}, 1.0]")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {big}, "loss": {big}}}\n{{"step": "{big}"}}\n{{"step": 1e300}}\n')
    run = read_run(folder)
    assert steps_of(run) == [1]
    page = describe_run(run)
    assert ["seed", str(big)] in page["config"]
    build_page([page], title="a", written=0.0)


WORDS = (
    "step time loss grad_norm loss_hex skipped lr load tokens_total tokens/web seconds memory_peak"
)
NAMES = (
    f"{WORDS} event ranks last repeated hosts layout software failure why names kind rms".split()
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
EVENTS = st.sampled_from(
    ["start", "end", "stop", "save", "evaluation", "host", "sample", "packing"]
)
LINES = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8), max_size=5)


@settings(max_examples=60)
@given(lines=LINES, events=LINES, layers=LINES, names=st.lists(EVENTS, min_size=5, max_size=5))
def test_whatever_stands_in_the_files_there_is_a_page(
    tmp_path_factory, lines, events, layers, names
):
    lines = [{"step": n, **line} for n, line in enumerate(lines)]
    events = [
        {"time": n, "event": x, **e} for n, (e, x) in enumerate(zip(events, names, strict=False))
    ]
    layers = [{"step": 1, "kind": "weight", "names": ["a"], **line} for line in layers]
    folder = tmp_path_factory.mktemp("run")
    run = read_run(report_runs.write_run(folder, lines, events, layers=layers))
    build_page([describe_run(run)], title="a", written=0.0)
