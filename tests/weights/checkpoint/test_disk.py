"""A disk that is full, slow or failing at any byte of a save."""

import errno
import hashlib
import os
import random
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit import files
from trainkit.types import DiskError
from trainkit.weights.checkpoint import (
    check_disk_space,
    list_checkpoints,
    snapshot,
    verify_checkpoint,
    write,
)
from trainkit.weights.checkpoint import save as checkpoint_save
from trainkit.weights.checkpoint.save import open_saver, save_checkpoint

SOLO = tk.solo_parallel()


def small_run(step):
    torch.manual_seed(step)
    model = nn.Linear(40, 40)
    return tk.TrainState(step=step), [model], torch.optim.SGD(model.parameters()), SOLO


def tree(folder):
    """Return the hash of every file under a folder, by name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def committed(run_dir):
    home = run_dir / "checkpoints"
    return [path.name for path in list_checkpoints(home) if not verify_checkpoint(path)]


def leftovers(run_dir):
    return [path.name for path in (run_dir / "checkpoints").iterdir() if path.name[0] == "."]


def failure_of(call):
    """Return the `DiskError` that a call ends with, or None."""
    try:
        call()
    except DiskError as error:
        return error
    return None


def failing(monkeypatch, name, code, *, call=None, after=None, text="injected"):
    """Let a system call fail the `call`-th time, or once `after` bytes have been written."""
    real = getattr(os, name)
    seen = {"calls": 0, "bytes": 0}

    def limited(*arguments, **options):
        if name == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **options)
        seen["calls"] += 1
        if seen["calls"] == call:
            raise OSError(code, text)
        if after is not None:
            room = after - seen["bytes"]
            if room <= 0:
                raise OSError(code, text)
            arguments = arguments[0], memoryview(arguments[1])[:room]  # a short write first
            seen["bytes"] += len(arguments[1])
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, limited)
    return seen


def bytes_of_a_save(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        seen = failing(patch, "write", 0)
        seen |= {"sizes": []}
        real = os.write
        patch.setattr(os, "write", lambda h, d: (seen["sizes"].append(len(d)), real(h, d))[1])
        save_checkpoint(tmp_path / "measure", *small_run(2))
    return seen["sizes"]


@pytest.mark.case("F1", "F2")
def test_a_disk_that_is_full_at_any_byte_changes_nothing(tmp_path, monkeypatch):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    save_checkpoint(tmp_path, *small_run(1))
    before = tree(tmp_path)
    sizes = bytes_of_a_save(tmp_path.parent / f"{tmp_path.name}-other", monkeypatch)
    total = sum(sizes)
    ends = [sum(sizes[:i]) for i in range(1, len(sizes))]
    quotas = {0, 1, total - 1, *ends, *(chance.randrange(total) for _ in range(100 - len(ends)))}
    for quota in sorted(quotas):
        with monkeypatch.context() as patch:
            failing(patch, "write", errno.ENOSPC, after=quota)
            with pytest.raises(DiskError, match=r"ENOSPC.* needs \d+ bytes; \d+ bytes are"):
                save_checkpoint(tmp_path, *small_run(2))
        assert tree(tmp_path) == before, quota
        assert leftovers(tmp_path) == []
    assert save_checkpoint(tmp_path, *small_run(2)).name == "step_00000002"


@pytest.mark.case("F1", "F2")
@pytest.mark.parametrize("part", [0.5, 0.999])
def test_control_without_the_staging_a_full_disk_leaves_a_torn_one(tmp_path, monkeypatch, part):
    total = sum(bytes_of_a_save(tmp_path, monkeypatch))
    bare = write.Destination(tmp_path, tmp_path / "checkpoints/step_00000002", 1)
    monkeypatch.setattr("trainkit.weights.checkpoint.save.Destination", lambda **_: bare)
    monkeypatch.setattr(
        "trainkit.weights.checkpoint.background_save.remove_staging", lambda _: None
    )
    failing(monkeypatch, "write", errno.ENOSPC, after=int(total * part))
    with pytest.raises(DiskError):
        save_checkpoint(tmp_path, *small_run(2))
    (torn,) = list_checkpoints(tmp_path / "checkpoints")
    assert verify_checkpoint(torn) != []


@pytest.mark.case("F5")
def test_control_staging_on_another_disk_cannot_be_renamed(tmp_path, monkeypatch):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk")
    elsewhere = write.Destination(tmp_path, other / f"staging-{os.getpid()}", 1)
    monkeypatch.setattr("trainkit.weights.checkpoint.save.Destination", lambda **_: elsewhere)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(DiskError, match="EXDEV"):
        save_checkpoint(tmp_path, *small_run(2))
    assert not elsewhere.staging.exists()


@pytest.mark.case("F2", "F4", "F8")
@pytest.mark.parametrize("name", ["fsync", "open", "posix_fallocate"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT])
def test_any_call_that_fails_is_named_and_nothing_is_committed(tmp_path, monkeypatch, name, code):
    save_checkpoint(tmp_path, *small_run(1))
    before, call, failures = tree(tmp_path), 0, 0
    while True:
        call += 1
        with monkeypatch.context() as patch:
            seen = failing(patch, name, code, call=call)
            error = failure_of(lambda: save_checkpoint(tmp_path, *small_run(2)))
        if error is None:
            assert seen["calls"] < call
            break
        failures += 1
        assert error.code == 74
        assert errno.errorcode[code] in str(error)
        assert re.search(r"cannot write \S*checkpoints", str(error))
        assert tree(tmp_path) == before, call
        assert leftovers(tmp_path) == []
    assert failures >= {"fsync": 6, "open": 5, "posix_fallocate": 1}[name]
    assert verify_checkpoint(tmp_path / "checkpoints/step_00000002") == []


@pytest.mark.case("F2", "F4")
@pytest.mark.parametrize("code", [errno.EROFS, errno.EMFILE, errno.EIO, errno.EXDEV])
def test_a_rename_that_fails_commits_nothing(tmp_path, monkeypatch, code):
    save_checkpoint(tmp_path, *small_run(1))
    before = tree(tmp_path)

    def refused(*_):
        raise OSError(code, "injected")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(DiskError, match=errno.errorcode[code]):
        save_checkpoint(tmp_path, *small_run(2))
    assert tree(tmp_path) == before
    assert leftovers(tmp_path) == []


@pytest.mark.case("F4")
def test_too_many_open_files_are_named(tmp_path):
    import resource

    save_checkpoint(tmp_path, *small_run(1))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 8, limit[1])
    )
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        with pytest.raises(DiskError, match="EMFILE"):
            save_checkpoint(tmp_path, *small_run(2))
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert committed(tmp_path) == ["step_00000001"]


@pytest.mark.case("F2")
def test_a_pointer_that_cannot_be_written_does_not_undo_a_commit(tmp_path, monkeypatch):
    messages = []

    def refused(_):
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(checkpoint_save, "point_to", refused)
    with open_saver(tmp_path, *small_run(1)[1:], log=messages.append) as (save, _):
        save(tk.TrainState(step=1))
    assert committed(tmp_path) == ["step_00000001"]
    assert "injected" in messages[0]


@pytest.mark.case("F1", "F2")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_small_disk_fills_up_and_keeps_what_was_committed(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        step, error = 0, None
        while error is None:
            step += 1
            run = small_run(step)
            error = failure_of(lambda run=run: save_checkpoint(disk, *run))
        assert "ENOSPC" in str(error)
        assert re.search(r"needs \d+ bytes; \d+ bytes are free", str(error))
        assert 5 < step < 199
        assert committed(disk) == [f"step_{s:08d}" for s in range(step - 1, 0, -1)]
        assert leftovers(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.case("F1", "F3")
def test_room_is_reserved_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_FILE_BYTES", 1)  # a file for each tensor
    written = failing(monkeypatch, "write", 0)
    failing(monkeypatch, "posix_fallocate", errno.ENOSPC, call=2)
    with pytest.raises(DiskError, match="ENOSPC"):
        save_checkpoint(tmp_path, *small_run(1))
    assert written["calls"] == 0


def test_a_file_system_that_cannot_reserve_is_written_to_all_the_same(tmp_path, monkeypatch):
    failing(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP, call=1)
    assert verify_checkpoint(save_checkpoint(tmp_path, *small_run(1))) == []


@pytest.mark.case("F3")
def test_room_for_one_is_told_and_room_for_none_is_refused(tmp_path, monkeypatch):
    needed = 3 * 41 * 40 * 4 * 1.1
    messages = []
    for factor in (0.9, 1.1, 2.1):
        usage = os.terminal_size((0, int(needed * factor)))
        monkeypatch.setattr(
            "shutil.disk_usage", lambda _, usage=usage: type("U", (), {"free": usage.lines})
        )
        if factor < 1:
            with pytest.raises(DiskError, match="needs about"):
                check_disk_space(tmp_path, small_run(1)[1])
        else:
            check_disk_space(tmp_path, small_run(1)[1], log=messages.append)
            assert len(messages) == 1
    assert "not for a second one" in messages[0]


def test_the_disk_is_told_to_begin_with_every_byte_before_the_last_fsync(tmp_path, monkeypatch):
    flushed, fsync = {}, os.fsync
    monkeypatch.setattr(write, "_FLUSH_BYTES", 1000)
    monkeypatch.setattr(write, "_CHUNK", 300)
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda handle, begin, size, _: flushed.setdefault(handle, []).append((begin, size)),
    )

    def synced(handle):
        if handle in flushed:
            spans = flushed.pop(handle)
            ends = [begin + size for begin, size in spans]
            assert [begin for begin, _ in spans] == [0, *ends[:-1]]
            assert ends[-1] == os.fstat(handle).st_size > 3000
            flushed["seen"] = len(spans)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    save_checkpoint(tmp_path, *small_run(1))
    assert flushed == {"seen": 6}


@pytest.mark.case("F6")
def test_a_slow_disk_holds_nobody_up_beside_the_training(tmp_path, monkeypatch):
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (time.sleep(0.1), fsync(handle))[1])
    with open_saver(tmp_path, *small_run(1)[1:]) as (save, saved):
        begin = time.monotonic()
        save(tk.TrainState(step=1))
        saved()
        stood_still = time.monotonic() - begin
        (outcome,) = saved(wait=True)
    assert outcome.seconds > 0.5
    assert max(outcome.blocked, stood_still) < 0.5


def test_a_disk_without_inodes_is_told_as_one(tmp_path, monkeypatch):
    own = os.statvfs

    def without_inodes(path):
        values = list(own(path))
        values[5:8] = [1000, 0, 0]  # files in all, free, and free for a user
        return os.statvfs_result(values)

    def fail():
        with files.convert_disk_errors(tmp_path / "a", by="save_checkpoint"):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert "no inode is" not in str(failure_of(fail))
    monkeypatch.setattr(files.os, "statvfs", without_inodes)
    assert str(failure_of(fail)).endswith(
        "bytes are free, but no inode is, which every file needs: delete some files"
    )
