"""Whatever ends a run: one line for people, one for programs, last, and the right exit code."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainkit.files import redirect_to_devnull
from trainkit.run.directory import make_run_dir
from trainkit.run.errors import (
    EXIT_SAVED,
    format_last_words,
    get_exit_code,
    report_errors,
    run_main,
)
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.ranks import RankError
from trainkit.types import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    NumericsError,
    PeerError,
    PreemptedError,
    needs_extra,
)

FACTS = ["code", "what", "where", "rank", "step", "got", "want", "hint"]


def caused_by(error, cause):
    """Return an error that another one has become."""
    error.__cause__ = cause
    return error


CASES = [
    (ConfigError("lr must be above 0", where="lr", got=-1, want="above 0", hint="try 3e-4"), 64),
    (ValueError("pack_bins: capacity must be at least 1, got 0"), 64),
    (DataError("corpus.tok: 3 bytes short", where="corpus.tok"), 65),
    (CheckpointError("none of 2 verifies"), 66),
    (dist.DistBackendError("NCCL error"), 68),
    (dist.DistStoreError("wait timeout after 1000ms"), 68),
    (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4"), 68),
    (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), 68),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 68),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 70),
    (OSError(errno.EMFILE, "Too many open files", "out/metrics.jsonl"), 64),
    (RuntimeError("[gloo/transport/tcp/device.cc:1] socket: Too many open files"), 64),
    (caused_by(PeerError("rank 1 is not there"), OSError(errno.EMFILE, "Too many open files")), 64),
    (RuntimeError("can't start new thread"), 64),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 64),  # of a fork
    (caused_by(ConfigError("in use"), BlockingIOError(errno.EAGAIN, "held")), 64),
    (MemoryError(), 70),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), 70),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 70),
    (KeyError("layer"), 70),
    (DiskError("cannot write out"), 74),
    (OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl"), 74),
    (PermissionError(errno.EACCES, "Permission denied", "out"), 74),
    (KeyboardInterrupt(), 76),
    (NumericsError("layers.0.wq.weight is not finite"), 67),
    (PeerError("rank 1 is gone"), 68),
    (PreemptedError("not saved, the last checkpoint is step 4"), 76),
]


ASKED = {
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total": "20.00 GiB",
    "can't allocate memory: you tried to allocate 1024 bytes. Error code 12": "1024 bytes",
    "CUDA error: out of memory": None,
}


@pytest.mark.case("R9")
@pytest.mark.parametrize("text", ASKED)
def test_out_of_memory_says_what_was_asked_for_and_what_to_do(text, capsys):
    with pytest.raises(SystemExit) as end, report_errors():
        raise RuntimeError(text)
    facts = json.loads(capsys.readouterr().err.rpartition("TRAINKIT_ERROR ")[2])
    assert (end.value.code, facts["got"]) == (70, ASKED[text])
    assert "--microbatch" in facts["hint"]
    assert "python -m trainkit plan" in facts["hint"]
    with pytest.raises(SystemExit), report_errors():
        raise RuntimeError("index out of range")
    assert "this is a bug" in capsys.readouterr().err


def test_what_a_compiler_has_to_say_is_cut_and_whole_in_the_traceback(tmp_path, capsys):
    with pytest.raises(SystemExit), report_errors(tmp_path):
        raise RuntimeError("warning: overflow " * 5000)
    assert len(capsys.readouterr().err) < 6000
    assert len((tmp_path / "errors/rank_00003.txt").read_text()) > 80_000


@pytest.fixture(autouse=True)
def _rank_three(monkeypatch):
    monkeypatch.setenv("RANK", "3")


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda case: repr(case)[:40])
@pytest.mark.parametrize("has_run_dir", [True, False])
def test_every_error_ends_with_its_code_and_its_last_words(
    error, code, has_run_dir, tmp_path, capsys
):
    run_dir = tmp_path if has_run_dir else None
    (tmp_path / "metrics.jsonl").write_text('{"step":6,"loss":1.0}\n{"step":7,"loss":2.0}\n{"st')
    with pytest.raises(SystemExit) as caught, report_errors(), report_errors(run_dir):
        raise error
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (caught.value.code, get_exit_code(error), out) == (code, code, "")
    assert lines[-1].startswith("TRAINKIT_ERROR ")
    facts = json.loads(lines[-1].removeprefix("TRAINKIT_ERROR "))
    assert list(facts) == FACTS
    assert (facts["code"], facts["rank"], facts["step"]) == (code, 3, 7 if has_run_dir else None)
    assert facts["what"] in err
    assert sum(line.startswith("error: ") for line in lines) == 1
    kept = tmp_path / "errors" / "rank_00003.txt"
    assert kept.exists() == has_run_dir
    if has_run_dir:
        assert "Traceback" in kept.read_text()
        assert str(kept) in err
    assert ("Traceback" in err) == (code in {68, 70} and not has_run_dir)
    if isinstance(error, PreemptedError):
        assert "hint: run the same command again to resume from the last checkpoint" in lines


def test_on_a_terminal_it_stands_once_and_in_words(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit), report_errors():
        raise CASES[0][0]
    assert capsys.readouterr().err == "error: lr must be above 0\nhint: try 3e-4\n"
    assert format_last_words(76, "left at once").count(b"left at once") == 1
    monkeypatch.setattr(sys, "stderr", None)
    assert b"TRAINKIT_ERROR" in format_last_words(76, "left at once")


def test_what_the_error_knows_is_passed_on(capsys):
    with pytest.raises(SystemExit), report_errors():
        raise CASES[0][0]
    line = capsys.readouterr().err.splitlines()[-1]
    facts = json.loads(line.removeprefix("TRAINKIT_ERROR "))
    assert [facts[name] for name in ("what", "where", "got", "want", "hint")] == [
        "lr must be above 0",
        "lr",
        -1,
        "above 0",
        "try 3e-4",
    ]


def test_facts_that_are_no_json_and_lines_in_lines_still_make_one_line(capsys):
    with pytest.raises(SystemExit), report_errors():
        raise ConfigError("two\nlines", got={1, 2}, want=float("nan"), where=b"\xff")
    *_, first, last = capsys.readouterr().err.splitlines()
    assert first == "error: two lines"
    assert json.loads(last.removeprefix("TRAINKIT_ERROR "))["got"] == "{1, 2}"


def test_success_and_other_exits_pass_unchanged(tmp_path, capsys):
    with report_errors(tmp_path):
        pass
    with pytest.raises(SystemExit) as caught, report_errors(tmp_path):
        sys.exit(75)
    assert caught.value.code == 75
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_that_cannot_be_kept_goes_to_stderr(tmp_path, capsys):
    (tmp_path / "errors").write_text("in the way")
    with pytest.raises(SystemExit), report_errors(tmp_path):
        raise KeyError("layer")
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("TRAINKIT_ERROR ")


def test_a_process_ends_with_the_code():
    code = "from trainkit.run.errors import report_errors\n"
    code += "with report_errors(): open('/dev/full', 'w', 1).write('x\\n')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 74
    assert done.stderr.splitlines()[-1].startswith('TRAINKIT_ERROR {"code":74,')


def _lose_a_peer(how):
    """Return the exit code that the error of this rank, whose peer is lost, would have."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        how()
        return None
    try:
        dist.barrier(group)
    except Exception as error:  # noqa: BLE001 -- whatever gloo raises is what is tested
        return get_exit_code(error)
    return 0


@pytest.mark.parametrize("how", [dist.destroy_process_group, partial(time.sleep, 2)])
def test_gloos_own_errors_for_a_lost_or_stuck_peer_are_68(how):
    assert run_ranks(_lose_a_peer, 2, how) == [68, None]


@pytest.mark.case("L13")
@pytest.mark.parametrize("extra", ["recipes", "hf", "data"])
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    command = rf'pip install "trainkit-lm\[{extra}\]"'
    with pytest.raises(ConfigError, match=command) as missing, needs_extra(extra):
        import tyro  # noqa: F401
    assert get_exit_code(missing.value) == 64


def test_an_extra_that_is_there_imports():
    with needs_extra("recipes"):
        import tyro
    assert tyro


def test_a_reader_who_leaves_is_no_lost_peer():
    assert get_exit_code(BrokenPipeError(32, "Broken pipe")) == 74


def test_what_a_process_says_that_ends_where_it_stands_is_what_all_say():
    first, hint, last = format_last_words(76, "left at once").decode().splitlines()
    assert first == "error: left at once"
    assert hint.startswith("hint: run the same command again")
    facts = json.loads(last.removeprefix("TRAINKIT_ERROR "))
    assert list(facts) == FACTS
    assert (facts["code"], facts["what"], facts["rank"]) == (76, "left at once", 3)


# ------------------------------------------------------------------------------------ leaving


def leave_with(how):
    """Leave in one of several ways, with a thread that would keep the interpreter for a minute."""
    if how == "no leave":
        threading.Thread(target=time.sleep, args=(60,)).start()
        return
    if how == "a peer is stuck":
        group = dist.new_group(timeout=timedelta(seconds=60))
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            threading.Thread(target=work.wait).start()
    threading.Thread(target=time.sleep, args=(60,)).start()
    run_main(
        {"saved": lambda: EXIT_SAVED, "failed": fail, "a peer is stuck": fail, "text": bye}[how]
    )


def bye():
    sys.exit("bye")


def fail():
    with report_errors():
        raise DiskError("cannot write out")


@pytest.mark.case("R10")
@pytest.mark.parametrize(
    ("how", "world", "code"),
    [("saved", 1, 75), ("failed", 1, 74), ("a peer is stuck", 2, 74), ("text", 1, 1)],
)
def test_a_process_that_leaves_is_gone_whatever_is_stuck(how, world, code):
    begin = time.monotonic()
    with pytest.raises(RankError, match=f"exited with code {code}"):
        run_ranks(leave_with, world, how)
    assert time.monotonic() - begin < 30


@pytest.mark.case("R10")
def test_without_leaving_a_thread_keeps_the_process(monkeypatch):
    monkeypatch.setattr("trainkit.tools.testing.ranks._EXIT_GRACE", 0.5)
    with pytest.raises(RankError, match="returned, but did not exit"):
        run_ranks(leave_with, 1, "no leave")


LEAVE = """
import atexit, multiprocessing, os, sys, time
from trainkit.run.errors import run_main
def main():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    print(child.pid)
    {end}
run_main(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("return None", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise KeyError('layer')", 70, "KeyError: 'layer'"),
        ("raise KeyboardInterrupt", 76, "error: interrupted"),
        ("os.close(1)", 0, ""),
    ],
)
def test_leaving_prints_what_is_left_and_ends_the_children(end, code, said):
    command = [sys.executable, "-c", LEAVE.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, said in done.stderr) == (code, True)
    if "close" not in end:
        deadline = time.monotonic() + 20
        while lives(int(done.stdout)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_crash_leaves_the_stacks():
    script = "import os; from trainkit.run.errors import run_main; run_main(os.abort)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("Fatal Python error: Aborted")


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_goes_nowhere_stays_open():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        redirect_to_devnull(stream)
        print("read by nobody", file=stream, flush=True)


HELP = """
import os, sys
from trainkit.run.errors import run_main, report_errors
def main():
    with report_errors():
        for _ in range(9999):
            print("--a-flag")
run_main(main)
"""


def test_help_whose_reader_has_left_ends_quietly():
    command = f"{sys.executable} -c '{HELP}' | head -3; echo ${{PIPESTATUS[0]}} >&2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("--a-flag\n" * 3, "141\n")


CLOSED = """
import sys
from trainkit.run.errors import run_main, report_errors
from trainkit.types import ConfigError
def main():
    assert not sys.stderr.isatty()  # as libraries ask
    with report_errors():
        with open(sys.argv[1], "w") as file:
            assert file.fileno() > 2, file.fileno()
        raise ConfigError("lr must be above 0")
run_main(main)
"""


def test_a_closed_stderr_changes_no_exit_code(tmp_path):
    command = [sys.executable, "-c", CLOSED, str(tmp_path / "file")]
    line = "exec " + " ".join(f"'{word}'" for word in command) + " 2>&-"
    assert subprocess.run(["bash", "-c", line], check=False).returncode == 64


def test_too_many_open_files_are_told_with_the_cure(capsys):
    with pytest.raises(SystemExit), report_errors():
        raise OSError(errno.EMFILE, "Too many open files", "out/metrics.jsonl")
    assert "ulimit -n" in capsys.readouterr().err


def reported(error, capsys, run_dir=None):
    """Return what is said of an error, and its last line for programs."""
    with pytest.raises(SystemExit), report_errors(run_dir):
        raise error
    said = capsys.readouterr().err
    return said, json.loads(said.splitlines()[-1].removeprefix("TRAINKIT_ERROR "))


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (caused_by(PeerError("x", hint="y"), RuntimeError("Too many open files")), "ulimit -n"),
    ],
)
def test_a_limit_of_the_system_is_no_bug_and_told_with_the_cure(error, hint, capsys):
    said, told = reported(error, capsys)
    assert hint in told["hint"]
    assert "bug" not in said


def test_a_lock_that_is_held_is_no_limit(capsys):
    _, told = reported(caused_by(ConfigError("in use"), BlockingIOError(11, "held")), capsys)
    assert told["hint"] is None


@pytest.mark.parametrize("kind", [ValueError, DataError, RuntimeError, KeyError])
def test_a_long_error_is_cut_in_every_place(kind, tmp_path, capsys):
    said, told = reported(kind("x" * 10**7), capsys, tmp_path)
    assert len(said) < 50_000
    assert len(told["what"]) < 10_000
    assert " ..." in told["what"]
    assert sum(path.stat().st_size for path in (tmp_path / "errors").iterdir()) < 2_000_000
    _, told = reported(DataError("short", got="x" * 10**7, hint="y" * 10**7), capsys)
    assert len(told["got"]) + len(told["hint"]) < 50_000


class MuteError(ValueError):
    """An error that cannot say what it is."""

    def __str__(self):
        raise KeyError("colour")


def test_an_error_that_cannot_be_shown_ends_with_its_code_and_a_word(tmp_path, capsys):
    said, told = reported(MuteError(), capsys, tmp_path)
    assert told["code"] == 64
    assert said.startswith("error: (its text cannot be shown: __str__ raised KeyError)")


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "lock"])
def test_a_pipe_where_a_run_writes_is_refused_and_never_waited_for(name, tmp_path, capsys):
    os.mkfifo(tmp_path / name)
    with pytest.raises(SystemExit) as end, report_errors(tmp_path):
        make_run_dir(tmp_path)
    assert end.value.code == 64
    assert f"{name} is no regular file" in capsys.readouterr().err
