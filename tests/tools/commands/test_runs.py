"""`python -m trainkit runs`: every state of a run from its files, in 80 columns and as JSON."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from trainkit.__main__ import main
from trainkit.run import control_run, open_run, status
from trainkit.run.status import find_runs, read_run_status
from trainkit.types import ConfigError, DataError

START = {"time": 1.0, "event": "start", "step": 0, "repeated": 0, "ranks": 2, "last": 9, "run": "a"}
END = {"time": 2.0, "event": "end", "step": 7, "failure": None}
STOP = {"time": 2.0, "event": "stop", "step": 7, "why": "SIGTERM on rank 0"}
SELF = {"host": socket.gethostname(), "pid": os.getpid(), "job": None, "since": "now", "token": "a"}
GONE = SELF | {"pid": 2**22 + 1}
AFAR = SELF | {"host": "gpu07", "pid": 412}
FAILURE = {"session": "a", "rank": 1, "what": "failed: ConfigError: no such corpus", "code": 64}


def write_run(folder, events=(START,), *, lock=None, silent=0.0, failure=None, lines=7):
    """Write a run directory: its events, its lines, and who holds its lock."""
    (folder / "ranks").mkdir(parents=True)
    metrics = [{"step": n, "loss": 9 / n} for n in range(1, lines + 1)]
    for name, records in {"events.jsonl": events, "metrics.jsonl": metrics}.items():
        (folder / name).write_text("".join(f"{compact(x)}\n" for x in records))
    (folder / "config.toml").write_text("pp = 1\ndp_shard = -1\ntp = 2\nlr = 0.1\n")
    beat = folder / "ranks" / "rank_00000.json"
    beat.write_text(json.dumps({"phase": "step 8", "state": "running"}))
    if failure:
        (folder / "ranks" / "failure.json").write_text(json.dumps(failure))
    if lock:
        (folder / "lock").write_text(json.dumps(lock))
        for path in (folder / "lock", beat):
            os.utime(path, (time.time() - silent,) * 2)
    return folder


def compact(record):
    return json.dumps(record, separators=(",", ":"))


STATES = {
    "running": (partial(write_run, lock=SELF), None),
    "running afar": (partial(write_run, lock=AFAR, silent=40), None),
    "stale": (
        partial(write_run, lock=AFAR, silent=300),
        "no sign of life of process 412 on gpu07 for 5m",
    ),
    "stale, and hanging here": (partial(write_run, lock=SELF, silent=300), "no sign of life"),
    "died of a kill": (
        partial(write_run, lock=GONE),
        f"process {GONE['pid']} on {GONE['host']} is gone",
    ),
    "died of a rank that hung": (
        partial(write_run, lock=GONE, failure=FAILURE | {"what": "is stuck, in phase 'step 8'"}),
        "rank 1 is stuck, in phase 'step 8'",
    ),
    "died without a lock": (write_run, 'it has left no event "end"'),
    "died of an error": (
        partial(write_run, events=[START, END | {"failure": "OSError"}]),
        "OSError",
    ),
    "died in the next start": (
        partial(write_run, events=[START, STOP, END], failure=FAILURE),
        "rank 1 failed: ConfigError: no such corpus",
    ),
    "stopped": (partial(write_run, events=[START, STOP, END]), "SIGTERM on rank 0"),
    "ended": (partial(write_run, events=[START, END]), None),
    "ended after a stop": (partial(write_run, events=[START, STOP, END, START, END]), None),
    "running after a stop": (partial(write_run, events=[START, STOP, END], lock=SELF), None),
    "stopped, and its next start was refused": (
        partial(write_run, events=[START, STOP, END], failure=FAILURE | {"refused": True}),
        "SIGTERM on rank 0; the last start was refused: ConfigError: no such",
    ),
    "died, and its next start was refused": (
        partial(write_run, events=[START], failure=FAILURE | {"refused": True}),
        "rank 1 failed: ConfigError: no such corpus",
    ),
    "stopped, and a rank was killed as its next start was refused": (
        partial(
            write_run, events=[START, STOP, END], failure=FAILURE | {"refused": True}, lock=GONE
        ),
        "the last start was refused",
    ),
    "unknown": (partial(write_run, events=[]), "it has no events"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_read_from_what_a_run_left(name, tmp_path):
    make, why = STATES[name]
    run = make(tmp_path / "run")
    if name == "unknown":
        (run / "ranks" / "rank_00000.json").unlink()
    found = read_run_status(tmp_path / "run")
    assert found.state == name.split()[0].strip(",")
    assert why is None or why in found.why
    assert (found.why is None) == (why is None)
    assert (found.step, found.loss) == (7, 9 / 7)
    if name != "unknown":
        assert (found.last, found.ranks, found.layout) == (9, 2, "tp 2")


@pytest.mark.parametrize(
    ("phase", "events", "error", "state"),
    [
        ("start", [START, END], ConfigError, "ended"),
        ("start", [START, STOP, END], ConfigError, "stopped"),
        ("start", [START, STOP, END], RuntimeError, "died"),
        ("step 8", [START, END], ConfigError, "died"),
        ("the end", [START, END], ConfigError, "died"),
    ],
)
def test_a_start_that_is_refused_does_not_change_the_state(phase, events, error, state, tmp_path):
    run = write_run(tmp_path / "run", events)
    with contextlib.suppress(error), open_run(run) as later:
        later.phase(phase, allow=60)
        raise error("other flags")
    assert (run / "errors" / "rank_00000.txt").exists()
    found = read_run_status(run)
    assert found.state == state
    assert ("the last start was refused" in found.why) == (state != "died")
    assert "other flags" in found.why


def test_a_first_start_that_is_refused_is_listed_as_such(tmp_path):
    run = tmp_path / "run"
    with contextlib.suppress(DataError), open_run(run):
        raise DataError("nowhere.jsonl: No such file")
    assert find_runs(tmp_path) == [run]
    found = read_run_status(run)
    assert found.state == "refused"
    assert found.why == "DataError: nowhere.jsonl: No such file"
    with pytest.raises(ConfigError, match=r"was refused: DataError: nowhere\.jsonl"):
        control_run(run, "save")


def test_the_end_of_a_long_file_of_events_is_enough(tmp_path, monkeypatch):
    warning = {"event": "warning", "what": '"event":"start"' + "x" * 300}
    run = write_run(tmp_path / "run", [START, *[warning] * 900, STOP, END])
    monkeypatch.setattr(status, "_TAIL", 1000)
    found = read_run_status(run)
    assert (found.state, found.last, found.ranks) == ("stopped", 9, 2)


def test_a_torn_line_and_a_loss_that_is_no_number_are_read(tmp_path):
    run = write_run(tmp_path / "run", [START, END])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":8,"loss":null,"loss_hex":"nan"}\n{"step":9,"lo')
    found = read_run_status(run)
    assert found.step == 8
    assert found.loss != found.loss


@pytest.mark.parametrize(
    ("name", "write", "why"),
    [
        ("config.toml", b"pp = [", "config.toml cannot be read: "),
        ("config.toml", b"pp = 0", "config.toml cannot be read: pp must be above 0, got 0"),
        ("config.toml", b"tp = 4", "the degrees multiply to 4"),
        ("config.toml", b"\xff\xfe", "config.toml cannot be read: "),
        ("metrics.jsonl", None, "metrics.jsonl cannot be read: Is a directory"),
        ("events.jsonl", None, "events.jsonl cannot be read: Is a directory"),
        ("metrics.jsonl", b'{"step":"9","loss":[]}\n', None),
        ("events.jsonl", b'{"event":"start","step":null,"ranks":"x","last":[]}\n', "killed"),
        ("ranks/failure.json", b"[1, 2]", None),
    ],
)
def test_a_broken_directory_is_listed_in_words(name, write, why, tmp_path):
    run = write_run(tmp_path / "run", [START, END])
    (run / name).unlink(missing_ok=True)
    if write is None:
        (run / name).mkdir()
    else:
        (run / name).write_bytes(write)
    found = read_run_status(run)
    assert why is None or why in found.why
    assert (found.state == "unknown") == (write is None)


def test_a_pipe_among_the_files_blocks_nothing(tmp_path):
    run = write_run(tmp_path / "run", [START, END])
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    found = read_run_status(run)
    assert (found.state, found.why) == (
        "unknown",
        "metrics.jsonl cannot be read: is no regular file",
    )


def test_runs_are_found_in_folders_of_folders_but_not_in_runs(tmp_path, monkeypatch):
    for name in ("a", "sweep/b", "sweep/deep/c", "a/copies/d", "sweep/deep/too/e"):
        write_run(tmp_path / name)
    (tmp_path / "cache").mkdir()
    (tmp_path / "notes.txt").write_text("")
    names = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]
    assert names == ["a", "sweep/b", "sweep/deep/c"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    listed = Path.iterdir

    def refuse(path):
        if path.name == "sweep":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert [path.name for path in find_runs(tmp_path)] == ["a", "sweep"]


def test_a_table_fits_into_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    write_run(tmp_path / "a", [START, STOP, END])
    long = write_run(tmp_path / f"{'long_' * 9}\x1b[31m", failure=FAILURE, lines=1)
    os.utime(long / "metrics.jsonl", (0, 0))
    os.utime(long / "events.jsonl", (0, 0))
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["RUN", "STATE", "STEP", "LOSS", "AGE", "LAYOUT", "WHY"]
    assert lines[1].startswith("a   ")
    assert lines[1].split()[1:4] == ["stopped", "7/9", "1.2857"]
    assert lines[2].startswith("long_long_")
    assert "\u2026" in lines[2]
    assert [line.index(x) for line, x in zip(lines, ("STATE", "stopped", "died"), strict=True)] == [
        lines[0].index("STATE")
    ] * 3
    assert "\x1b" not in "".join(lines)


def test_elsewhere_the_list_is_json_and_an_empty_folder_says_so(tmp_path, monkeypatch, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == []
    write_run(tmp_path / "a", [START, END])
    assert main(["runs", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["path"] == str(tmp_path / "a")
    assert (row["state"], row["step"], row["layout"], row["why"]) == ("ended", 7, "tp 2", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"no run in {tmp_path}/empty\n"
    assert main(["runs", str(tmp_path / "no")]) == 64
    assert "cannot be listed: No such file or directory" in capsys.readouterr().err


QUICK = """
import sys
from trainkit.__main__ import main
assert main(["runs", sys.argv[1]]) == 0
assert not {"torch", "numba", "tyro"} & {*sys.modules}
"""


def test_two_hundred_runs_are_listed_without_torch_from_the_ends_of_their_files(tmp_path):
    first = write_run(tmp_path / "0", [START, END], lines=20_000)
    for number in range(1, 200):
        (tmp_path / str(number)).mkdir()
        for path in first.glob("*.*"):
            (tmp_path / str(number) / path.name).hardlink_to(path)
    begin = time.monotonic()
    command = [sys.executable, "-c", QUICK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True)
    assert len(json.loads(done.stdout)) == 200
    assert time.monotonic() - begin < 20  # 1 s on an idle machine; all bytes would take minutes
