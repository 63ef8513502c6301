"""metrics.jsonl: exactly one line of strict JSON per step, whatever kills, disks and values do."""

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainkit import sinks
from trainkit.run.sinks.jsonl import Rewound, fsync_jsonl, open_jsonl, repair_jsonl, rewind_jsonl
from trainkit.run.sinks.open_run_sinks import open_run_sinks
from trainkit.types import DiskError, Share

lines_file = sys.modules[open_jsonl.__module__]  # not the function of the same name
run_file = sys.modules[open_run_sinks.__module__]


def written(steps):
    return b"".join(orjson.dumps({"step": step, "loss": step / 7}) + b"\n" for step in steps)


def steps_of(path):
    """Return the steps of a file in which every line has to be strict JSON."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=pytest.fail)["step"] for line in text.splitlines()]


def warnings_of(folder):
    told = sinks.read_jsonl(folder / "events.jsonl")
    return [event["what"] for event in told if event["event"] == "warning"]


# ------------------------------------------------------------------------------------ rewinding

TAIL = st.sampled_from([b"", b'{"step":99,"lo', b"\0" * 5000, b'\n\0\0\n{"a":1}\n', b'{"step":9}'])
MIDDLE = st.sampled_from([[], [3], [2, 2], [3, 4, 5, 1]])


@pytest.mark.case("W4", "W3")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(0, 40), tail=TAIL, again=MIDDLE, hole=st.booleans(), step=st.integers(0, 45)
)
@example(count=40, tail=b"\0" * 5000, again=[3, 4], hole=True, step=39)
def test_rewinding_a_file_does_what_repairing_all_of_it_does(
    tmp_path, *, count, tail, again, hole, step
):
    text = written([*range(1, count // 2), *again, *range(max(1, count // 2), count + 1)])
    if hole and len(text) > 200:
        text = text[:70] + bytes(60) + text[130:]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text + tail)
    found = rewind_jsonl(path, step)
    assert path.read_bytes() == repair_jsonl(text + tail, step)
    kept = steps_of(path)
    assert found.retained == len(kept)
    if kept:
        assert found.missing == len(set(range(kept[0], step + 1)) - set(kept))
    assert rewind_jsonl(path, step) == Rewound(found.retained, 0, found.missing)


def test_a_file_that_is_whole_is_not_rewritten_to_begin_a_run(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(written(range(1, 20_001)) + b'{"step":20001,"l')
    monkeypatch.setattr(
        lines_file, "atomic_write", lambda *_, **__: pytest.fail("all of it is rewritten")
    )
    assert rewind_jsonl(path, 19_990) == Rewound(19_990, 10, 0)
    assert path.read_bytes() == written(range(1, 19_991))


@pytest.mark.case("W4")
def test_a_step_without_a_line_is_told_when_the_run_goes_on(tmp_path, capfd):
    (tmp_path / "metrics.jsonl").write_bytes(written([1, 2, 3, 5, 6, 7]))
    with open_run_sinks(tmp_path, Share(0, 1), step=6, last=7) as (log, _):
        log(7, {"loss": 1.0})
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 5, 6, 7]
    assert warnings_of(tmp_path) == ["metrics.jsonl has no line for 1 of the steps up to 6"]
    assert "no line for 1" in capfd.readouterr().err


def roll_back(folder):
    """Log 8 steps, roll back to 5 as a run does within one process, twice, and go on to 12."""
    for begin, end, note in ((0, 8, "a"), (5, 8, "b"), (5, 12, "c")):
        with open_run_sinks(folder, Share(0, 1), step=begin, last=12) as (log, event):
            for step in range(begin + 1, end + 1):
                log(step, {"note": note, "seconds": 1.0})
            event("rollback", step=end)
    return sinks.read_jsonl(folder / "metrics.jsonl")


@pytest.mark.case("W4", "E8")
def test_a_rollback_within_a_process_leaves_one_line_per_step_of_the_last_branch(tmp_path):
    lines = roll_back(tmp_path)
    assert [(line["step"], line["note"]) for line in lines] == [
        *((step, "a") for step in range(1, 6)),
        *((step, "c") for step in range(6, 13)),
    ]
    told = sinks.read_jsonl(tmp_path / "events.jsonl")
    starts = [event for event in told if event["event"] == "start"]
    assert [(start["step"], start["repeated"]) for start in starts] == [(0, 0), (5, 3), (5, 3)]


@pytest.mark.case("W4")
def test_a_step_that_comes_again_takes_the_place_of_all_from_it_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=9) as (log, _):
        for count, step in enumerate((1, 2, 3, 4, 3, 4, 5, 2, 3)):
            log(step, {"count": count})
        assert steps_of(path) == [1, 2, 3]
    assert [line["count"] for line in sinks.read_jsonl(path)] == [0, 7, 8]
    told = sinks.read_jsonl(tmp_path / "events.jsonl")
    rewinds = [(x["step"], x["repeated"]) for x in told if x["event"] == "rewind"]
    assert rewinds == [(2, 2), (1, 4)]
    assert "3 steps, 6 repeated, 1 starts" in run_file.summarize_run(tmp_path)


@pytest.mark.case("W4")
def test_a_roll_back_on_a_failing_disk_is_told_and_writes_into_no_other_file(
    tmp_path, monkeypatch, capfd
):
    other = tmp_path / "other"
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=9) as (log, _):
        for step in (1, 2, 3):
            log(step, {})
        monkeypatch.setattr(
            lines_file, "_truncate", raising(OSError(errno.EIO, "Input/output error"))
        )
        log(2, {})
        with other.open("wb"):  # takes the number of the file that was closed
            log(3, {})
    assert other.read_bytes() == b""
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert "Input/output error" in capfd.readouterr().err


def raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.case("W4")
def test_without_the_repair_a_rollback_tells_steps_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_file, "rewind_jsonl", lambda *_: Rewound())
    monkeypatch.setattr(run_file, "rewind_jsonl", lambda *_: Rewound())
    steps = [line["step"] for line in roll_back(tmp_path)]
    assert len(steps) > len(set(steps))


KILLED = """
    import importlib, sys, time
    from pathlib import Path
    lines_file = importlib.import_module("trainkit.run.sinks.jsonl")
    folder, last, repair = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
    if not repair:
        lines_file.rewind_jsonl = lambda path, step: None
    checkpoint = folder / "checkpoint"
    begin = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with lines_file.open_jsonl(folder / "metrics.jsonl", step=begin) as sink:
        for step in range(begin + 1, last + 1):
            sink(step, {"loss": 1 / step, "text": "x" * 300})
            if step % 40 == 0 and repair:
                new = folder / "new"
                new.write_text(str(step))
                new.replace(checkpoint)
            if step % 10 == 0 and last > 1000:
                time.sleep(0.001)
"""


def kill_and_go_on(folder, *, kills, last, repair):
    """Kill a writer at random moments, then let it finish; without repair it begins anew."""
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    seed = time.time_ns() % 10**6
    print(f"seed {seed}")
    chance = random.Random(seed)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder)]
    for _ in range(kills):
        goal = chance.uniform(2e3, 9e4) + (metrics.stat().st_size if metrics.exists() else 0)
        with subprocess.Popen([*command, str(10**9), str(repair)]) as process:
            while not metrics.exists() or metrics.stat().st_size < goal:
                assert process.poll() is None
                time.sleep(0.001)
            process.kill()
    checkpoint = folder / "checkpoint"
    done = last + (int(checkpoint.read_text()) if checkpoint.exists() else 0)
    subprocess.run([*command, str(done), str(repair)], check=True, timeout=60)
    return steps_of(metrics), list(range(1, done + 1))


@pytest.mark.case("W4")
def test_a_writer_that_is_killed_and_goes_on_leaves_one_line_per_step(tmp_path):
    found, wanted = kill_and_go_on(tmp_path / "run", kills=3, last=57, repair=True)
    assert found == wanted


@pytest.mark.case("W4")
def test_without_the_repair_a_killed_writer_leaves_steps_twice(tmp_path):
    with contextlib.suppress(ValueError):  # a torn line is no JSON
        found, wanted = kill_and_go_on(tmp_path / "run", kills=1, last=57, repair=False)
        assert found != wanted


# ------------------------------------------------------------------------------------ disks


def path_of(file):
    return str(Path(f"/proc/self/fd/{file}").readlink())


@pytest.fixture
def quota(monkeypatch):
    """A disk with room for some bytes: `quota["room"]`; a write takes what still fits."""
    write, disk = os.write, {"room": 10**9, "error": errno.ENOSPC}

    def limited(file, data):
        if "jsonl" not in path_of(file):
            return write(file, data)
        if disk["room"] <= 0:
            raise OSError(disk["error"], os.strerror(disk["error"]))
        done = write(file, bytes(data[: disk["room"]]))
        disk["room"] -= done
        return done

    monkeypatch.setattr(os, "write", limited)
    return disk


@pytest.mark.case("W3", "F4")
@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_a_disk_that_fills_up_inside_a_line_gets_every_line_when_it_has_room(
    error, tmp_path, quota, capfd
):
    quota["error"] = getattr(errno, error)
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=60) as (log, event):
        for step in range(1, 61):
            if step in (11, 31):
                quota["room"] = 25  # less than a line
            if step in (21, 41):
                assert steps_of_whole_lines(tmp_path / "metrics.jsonl") == list(range(1, step - 10))
                quota["room"] = 10**9
            log(step, {"loss": 1 / step})
            event("tick", step=step)
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 61))
    told = sinks.read_jsonl(tmp_path / "events.jsonl")
    assert [event["step"] for event in told if event["event"] == "tick"] == list(range(1, 61))
    (warning,) = warnings_of(tmp_path)
    assert warning.startswith(f"sinks: cannot write {tmp_path / 'metrics.jsonl'}: ")
    assert os.strerror(quota["error"]) in warning
    assert warning.endswith("bytes are free; lines wait in memory until there is room")
    err = capfd.readouterr().err
    assert err.count("metrics.jsonl: ") == err.count("events.jsonl: ") == 1


def steps_of_whole_lines(path):
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line)["step"] for line in lines[:-1]]


@pytest.mark.case("W3", "W4")
def test_a_disk_that_stays_full_leaves_a_torn_line_and_the_next_run_goes_on_from_it(
    tmp_path, quota, capfd
):
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=20) as (log, _):
        for step in range(1, 21):
            quota["room"] = 7 if step == 12 else quota["room"]
            log(step, {"loss": 1 / step})
    assert "metrics.jsonl lacks its last 9 lines" in capfd.readouterr().err
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    quota["room"] = 10**9
    with open_run_sinks(tmp_path, Share(0, 1), step=10, last=20) as (log, _):
        for step in range(11, 21):
            log(step, {"loss": 1 / step})
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 21))


@pytest.mark.case("W3")
def test_lines_that_wait_are_bounded(tmp_path, quota, monkeypatch, capfd):
    monkeypatch.setattr(lines_file, "_MAX_WAITING", 1000)
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=100) as (log, _):
        quota["room"] = 0
        for step in range(1, 101):
            log(step, {"loss": 0.5})
        quota["room"] = 10**9
    kept = steps_of(tmp_path / "metrics.jsonl")
    assert kept == list(range(1, len(kept) + 1))
    assert 0 < len(kept) < 50
    assert f"lacks its last {100 - len(kept)} lines" in capfd.readouterr().err


@pytest.mark.case("W3")
def test_a_real_device_that_is_always_full(tmp_path, capfd):
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=3) as (log, event):
        for step in range(1, 4):
            log(step, {"loss": 0.5})
        event("save", step=3)
    err = capfd.readouterr().err
    assert err.count("metrics.jsonl: No space left on device") == 1
    assert "metrics.jsonl lacks its last 3 lines" in err


def test_an_event_from_a_thread_comes_whole_or_too_late(tmp_path):
    def log(count):
        for _ in range(count):
            event("tick", text="x" * 2000)

    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=1) as (_, event):
        threads = [threading.Thread(target=log, args=(200,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    other = tmp_path / "other"
    with other.open("wb"):  # takes the number of a file that was closed
        event("too late")
    assert other.read_bytes() == b""
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "tick" for line in lines) == 800


def test_used_alone_a_sink_raises_what_is_wrong_with_its_disk(tmp_path, quota):
    def write_two_lines():
        with open_jsonl(tmp_path / "metrics.jsonl") as sink:
            for step in (1, 2):
                quota["room"] = 5
                with pytest.raises(DiskError, match=r"No space left.*wait in memory"):
                    sink(step, {"loss": 0.5})

    with pytest.raises(DiskError, match="lacks its last 2 lines"):
        write_two_lines()
    with pytest.raises(DiskError, match="Is a directory"), open_jsonl(tmp_path):
        pass


@pytest.mark.case("W3")
def test_a_run_whose_directory_is_removed_says_so_and_goes_on_in_a_new_one(tmp_path, capfd):
    out = tmp_path / "run"
    out.mkdir()
    with open_run_sinks(out, Share(0, 1), step=0, last=4) as (log, _):
        for step in range(1, 5):
            log(step, {"loss": 0.5})
            if step == 2:
                shutil.rmtree(out)
    assert steps_of(out / "metrics.jsonl") == [3, 4]
    said = capfd.readouterr().err
    for name in ("metrics", "events"):
        assert said.count(f"{name}.jsonl was removed while the run goes on") == 1
    with open_jsonl(out / "alone.jsonl") as sink:
        (out / "alone.jsonl").unlink()
        with pytest.raises(DiskError, match="its lines up to now are lost"):
            sink(1, {})
        sink(2, {})
    assert steps_of(out / "alone.jsonl") == [1, 2]


def test_lines_reach_the_disk_before_a_checkpoint_does(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=1) as (log, _):
        log(1, {"loss": 0.5})

        def seen(file):
            synced.append((path_of(file), os.fstat(file).st_size > 0))
            fsync(file)

        monkeypatch.setattr(os, "fsync", seen)
        fsync_jsonl(tmp_path)
        fsync_jsonl(tmp_path / "missing")
    assert synced == [(f"{tmp_path}/{name}.jsonl", True) for name in ("metrics", "events")]


# ------------------------------------------------------------------------------------ values


@pytest.mark.case("W7")
def test_every_value_becomes_strict_json_that_every_reader_takes(tmp_path, capfd):
    values = {
        "nan": float("nan"), "inf": [float("inf"), {"deep": -float("inf")}], "none": None,
        "huge": 10**5000, "negative": -(2**70), "unsigned": 2**64 - 1, "bool": True,
        "text": "Grüße, 世界 🌍\n\0", "half": "a\ud800b", "float32": np.float32(0.5),
        "int8": np.int8(-3), "float64": np.float64(0.1), "key \ud800": 1, "object": object(),
    }  # fmt: skip
    with open_run_sinks(tmp_path, Share(0, 1), step=0, last=2) as (log, event):
        for step in (1, 2):
            log(step, {**values, 7: "key"})
        event("odd", value=values, path=tmp_path)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2]
    line = json.loads(metrics.splitlines()[0], parse_constant=pytest.fail)
    assert line == orjson.loads(metrics.splitlines()[0])
    assert line == {
        "step": 1, "nan": None, "inf": [None, {"deep": None}], "none": None,
        "huge": hex(10**5000), "negative": hex(-(2**70)), "unsigned": 2**64 - 1, "bool": True,
        "text": "Grüße, 世界 🌍\n\0", "half": "a?b", "float32": 0.5, "int8": -3, "float64": 0.1,
        "key ?": 1, "object": "<object>", "7": "key",
    }  # fmt: skip
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told[-2]["path"].startswith("<PosixPath")
    (warning,) = warnings_of(tmp_path)
    assert warning.endswith("(see trainkit.to_host), got {'object': '<object>'}")
    assert capfd.readouterr().err.count("warning: ") == 2
