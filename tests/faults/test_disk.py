"""Disks that are full, slow or refuse: every committed checkpoint stands, and all ranks know."""

import contextlib
import shutil
import subprocess

import harness
import pytest
import trials


@pytest.mark.case("F1", "K6", "K7")
@pytest.mark.only_all  # a save at any byte: checkpoint/test_disk.py; a run on a real disk: below
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_at_any_byte(background, arena):
    whole = arena.wanted(2) / "checkpoints/step_00000008/rank_00001.safetensors"
    size = arena.random.randrange(4096, whole.stat().st_size)
    trial = trials.full_disk_trial(arena, ranks=2, size=size, background=background)
    assert trial.problems == (), trial


@pytest.mark.case("F6", "K8", "X4")
def test_a_slow_disk_changes_no_number(arena):
    flags = trials.saves(background=True, every=1)
    with harness.running(arena.ground, arena.out, *flags, slow_disk=0.02) as job:
        assert harness.finish(job) == [0, 0], job.stderr()
    assert harness.differences(arena.out, arena.wanted(2)) == []
    assert harness.torn(arena.out) == []


@contextlib.contextmanager
def small_disk(path, size):
    """Mount a disk of so many bytes at a path, or skip the test where that is not allowed."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    if shutil.which("mount") is None or subprocess.call(command):
        pytest.skip("needs to mount a disk of its own")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.case("F1", "F2", "W3")
def test_a_real_disk_that_is_full_names_what_is_needed_and_free(arena, tmp_path):
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        out = disk / "run"
        flags = ["--save-every", 1, "--keep", 100, "--no-background-saves"]
        with harness.running(arena.ground, out, *flags) as job:
            codes = harness.finish(job)
        assert set(codes) == {74}, job.stderr()
        assert "ENOSPC" in job.stderr()
        assert "free" in job.error()["what"]
        assert harness.torn(out) == []
        assert not harness.is_saving(out)
        assert harness.committed(out)


@pytest.mark.case("K5")
def test_a_step_that_is_saved_again_leaves_the_old_one_until_it_is_there(arena):
    flags = trials.saves(background=False)
    harness.complete(arena.ground, arena.out, *flags, steps=4)
    before = harness.tree_hash(arena.out / "checkpoints/step_00000002")
    old = arena.out / "checkpoints/step_00000002"
    with harness.running(
        arena.ground, arena.out, *flags, "--resume", old, steps=8, slow_disk=0.05
    ) as job:
        harness.wait_for(lambda: harness.is_saving(arena.out), job)
        harness.kill_all(job)
    assert harness.tree_hash(old) == before
    assert trials.resume(arena, *flags) == []
