"""One run per directory; a second one learns who is there, and a dead one is in nobody's way."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from threads import run_threads

from trainkit.collectives import all_gather_objects
from trainkit.mesh import axis_from_group, solo_parallel
from trainkit.run import lock
from trainkit.run.errors import get_exit_code
from trainkit.run.lock import lock_run
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.ranks import RankError
from trainkit.types import ConfigError, DiskError

SOLO = solo_parallel().world
DEAD = 2**22 + 1  # no process has such a number


def written(path):
    return json.loads(path.read_text())


def holder(pid=DEAD, host=None, **facts):
    told = {"host": host or socket.gethostname(), "pid": pid, "job": "41", "since": "yesterday"}
    return json.dumps(told | facts)


@pytest.fixture
def told():
    return []


@pytest.mark.case("L12")
def test_the_holder_is_named_and_the_file_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with lock_run(tmp_path, SOLO):
        facts = written(tmp_path / "lock")
        assert (facts["host"], facts["pid"]) == (socket.gethostname(), os.getpid())
        assert (facts["job"], facts["since"][:2]) == ("4711", "20")
        names = f"in use by process {os.getpid()} on {socket.gethostname()}, job 4711, since 20"
        with pytest.raises(ConfigError, match=names) as refused, lock_run(tmp_path, SOLO):
            pass
        assert get_exit_code(refused.value) == 64
        assert "--out" in refused.value.hint
        assert written(tmp_path / "lock") == facts
    assert list(tmp_path.iterdir()) == []
    with lock_run(tmp_path, SOLO):
        pass


@pytest.mark.case("L12")
def test_without_the_lock_two_runs_are_in_one_directory(tmp_path, monkeypatch, told):
    """The negative control."""
    monkeypatch.setattr(lock, "_try_lock", lambda _: True)
    with lock_run(tmp_path, SOLO), lock_run(tmp_path, SOLO, log=told.append):
        assert "taken over" in told[0]


LEFT = {"gone": holder(), "elsewhere": holder(host="node07"), "alive": holder(os.getpid())}


@pytest.mark.case("L12")
@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_what_a_dead_process_has_left_is_taken_over_and_told(text, tmp_path, told):
    (tmp_path / "lock").write_text(text)
    with lock_run(tmp_path, SOLO, log=told.append):
        assert written(tmp_path / "lock")["since"] != "yesterday"
    facts = json.loads(text)
    who = f"process {facts['pid']} on {facts['host']}, job 41, since yesterday"
    assert told == [f"{tmp_path / 'lock'}: taken over; {who}, has ended without releasing it"]


HOSTILE = ["", "{", "[]", "null", '{"host": 1}', "{" * 5000, holder(pid="x"), holder(job=None) * 2]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_file_of_nonsense_is_written_over(text, tmp_path, told):
    (tmp_path / "lock").write_text(text)
    with lock_run(tmp_path, SOLO, log=told.append):
        assert written(tmp_path / "lock")["pid"] == os.getpid()
    assert told == []


@pytest.mark.case("L12")
@pytest.mark.parametrize("lost", ["moved", "removed"])
def test_a_directory_that_is_lost_is_made_anew_with_its_lock(lost, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with lock_run(run, SOLO) as hold:
        hold()
        run.rename(tmp_path / "aside") if lost == "moved" else shutil.rmtree(run)
        hold()
        with pytest.raises(ConfigError, match="in use"), lock_run(run, SOLO, patience=0):
            pass
    assert not list(run.iterdir())


@pytest.mark.case("L12")
def test_the_place_of_a_lost_directory_may_be_another_runs_by_now(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with lock_run(run, SOLO) as hold:
        run.rename(tmp_path / "aside")
        run.mkdir()
        with lock_run(run, SOLO) as other:
            with pytest.raises(ConfigError, match="in use"):
                hold()
            other()
            assert written(run / "lock")["pid"] == os.getpid()
    assert not (run / "lock").exists()


def _lock_of_its_own(folder):
    own = Path(folder) / os.environ["RANK"]
    own.mkdir()
    (own / "lock").write_text(holder())  # of a run before
    try:
        with lock_run(own, axis_from_group(dist.group.WORLD), patience=0.3):
            return "held"
    except ConfigError as error:
        return str(error)


@pytest.mark.case("L7")
def test_ranks_that_do_not_share_the_directory_are_named_with_their_hosts(tmp_path):
    for told in run_ranks(_lock_of_its_own, 2, tmp_path):
        assert f"rank 1 on {socket.gethostname()} does not see the run directory of rank 0" in told


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(DiskError, match=r"cannot write .*lock"), lock_run(tmp_path / "run", SOLO):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_directory_that_is_gone_is_named(tmp_path):
    with pytest.raises(DiskError, match="gone/lock"), lock_run(tmp_path / "gone", SOLO):
        pass


@pytest.mark.case("L12")
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_holder_that_leaves_while_we_look_leaves_us_no_removed_file(
    is_checked, tmp_path, monkeypatch
):
    """Without the check there are two holders, one of a file that nobody else can open."""
    path, is_locked = tmp_path / "lock", lock._try_lock
    first = lock._open_locked(path, 0)

    def is_locked_after_the_holder_has_left(file):
        if not first.closed:
            path.unlink()
            first.close()
        return is_locked(file)

    monkeypatch.setattr(lock, "_try_lock", is_locked_after_the_holder_has_left)
    if not is_checked:
        monkeypatch.setattr(lock, "_is_same_file", lambda *_: True)
    with lock._open_locked(path, 20) as second:
        is_there = path.exists() and os.path.samestat(os.fstat(second.fileno()), path.stat())
        assert is_there == is_checked
        if is_checked:
            with pytest.raises(ConfigError):
                lock._open_locked(path, 0)
        else:
            lock._open_locked(path, 0).close()


@pytest.mark.parametrize(
    ("text", "is_free"),
    [("", True), (LEFT["gone"], True), (LEFT["alive"], False), (LEFT["elsewhere"], False)],
    ids=["nothing", *LEFT],
)
def test_where_there_are_no_locks_what_is_written_counts(text, is_free, tmp_path, monkeypatch):
    def without_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    (tmp_path / "lock").write_text(text)
    if is_free:
        with lock_run(tmp_path, SOLO):
            pass
        return
    with pytest.raises(ConfigError, match="in use"), lock_run(tmp_path, SOLO):
        pass


def hold_on_ranks(axis, folder):
    """Return the names in the directory, or what was refused."""
    try:
        with lock_run(folder, axis):
            names = sorted(path.name for path in Path(folder).iterdir())
            return all_gather_objects(names, axis)[axis.index]
    except ConfigError as error:
        return str(error)


@pytest.mark.case("L12")
def test_all_ranks_are_refused_alike(tmp_path):
    assert run_threads(hold_on_ranks, 3, tmp_path) == [["lock"]] * 3
    with lock_run(tmp_path, SOLO):
        told = run_threads(hold_on_ranks, 3, tmp_path)
    assert all("in use by process" in text for text in told)


def die_with_the_lock(folder):
    with lock_run(folder, axis_from_group(dist.group.WORLD)):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.case("L12")
def test_a_run_that_was_killed_is_followed_at_once(tmp_path, told):
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(die_with_the_lock, 1, tmp_path)
    assert (tmp_path / "lock").exists()
    with lock_run(tmp_path, SOLO, log=told.append, patience=0):
        assert "has ended without releasing it" in told[0]


@pytest.mark.case("L12")
def test_children_of_a_dead_holder_are_waited_for(tmp_path, told):
    with lock._open_locked(tmp_path / "lock", 0) as file:
        file.write(holder().encode())
        shared = os.dup(file.fileno())  # what a forked child has
    with pytest.raises(ConfigError, match="has ended, but a child process still has the lock"):
        lock._open_locked(tmp_path / "lock", 0)
    thread = threading.Timer(0.2, os.close, (shared,))
    thread.start()
    with lock_run(tmp_path, SOLO, log=told.append, patience=20):
        assert "has ended without releasing it" in told[0]
    thread.join()


@pytest.mark.case("W8")
def test_nothing_secret_is_written(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "canary-7c1f")
    with lock_run(tmp_path, SOLO):
        assert set(written(tmp_path / "lock")) == {"host", "pid", "job", "since", "token"}
        assert "canary" not in (tmp_path / "lock").read_text()
