"""Whatever ends a run: one line for people, one for programs, last, and the right exit code."""

import errno
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from trainkit.runtime import error_code, make_run_dir, needs_extra, report_errors
from trainkit.testing import run_ranks
from trainkit.types import CheckpointError, ConfigError, DataError, DiskError

FACTS = ["code", "what", "where", "rank", "step", "got", "want", "hint"]

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
    (MemoryError(), 70),
    (KeyError("layer"), 70),
    (DiskError("cannot write out"), 74),
    (OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl"), 74),
    (PermissionError(errno.EACCES, "Permission denied", "out"), 74),
    (KeyboardInterrupt(), 76),
]


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
    assert (caught.value.code, error_code(error), out) == (code, code, "")
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
    code = "from trainkit.runtime import report_errors\n"
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
        return error_code(error)
    return 0


@pytest.mark.parametrize("how", [dist.destroy_process_group, partial(time.sleep, 2)])
def test_gloos_own_errors_for_a_lost_or_stuck_peer_are_68(how):
    assert run_ranks(_lose_a_peer, 2, how) == [68, None]


def test_a_run_directory_is_made_and_probed(tmp_path):
    made = make_run_dir(tmp_path / "a" / "b")
    assert made.is_dir()
    assert list(made.iterdir()) == []
    assert make_run_dir(str(made)) == made


def test_a_run_directory_that_cannot_be_written_is_refused_by_name(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="file is a file"):
        make_run_dir(file)
    for path in (file / "below", "/proc/trainkit", "/dev/full/run"):
        with pytest.raises(DiskError, match=f"user {os.geteuid()} cannot write {path}"):
            make_run_dir(path)
    assert file.read_text() == "kept"


def test_a_probe_that_finds_the_disk_full_is_a_disk_error(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainkit.runtime.directory.os.fsync", full)
    with pytest.raises(DiskError, match="No space left on device"):
        make_run_dir(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_extra_that_is_there_imports():
    with needs_extra("recipes"):
        import tyro
    assert tyro


def test_a_reader_who_leaves_is_no_lost_peer():
    assert error_code(BrokenPipeError(32, "Broken pipe")) == 74
