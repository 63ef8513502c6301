"""Damaged checkpoints on the disk: they are found, named and skipped, and never trained on."""

import shutil

import harness
import pytest
import trials

from trainkit.weights.checkpoint.manifest import (
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)

KINDS = {"flip": 30, "truncate": 10, "zero": 10, "mix": 10, "pointer": 5}


@pytest.fixture(scope="module")
def checkpoints(ground, tmp_path_factory):
    """Return the `checkpoints/` of a run of two ranks, with several in it."""
    out = tmp_path_factory.mktemp("damage") / "run"
    harness.complete(ground, out, "--save-every", 3)
    return out / "checkpoints"


@pytest.fixture
def own(checkpoints, tmp_path):
    """Return a copy of them that a test may damage."""
    return shutil.copytree(checkpoints, tmp_path / "checkpoints")


@pytest.mark.case("K3", "K4", "K13")
def test_damage_of_any_file_is_found_and_another_checkpoint_taken(own, arena):
    found = trials.damage_trials(own, arena.random, KINDS)
    assert len(found) == sum(KINDS.values())
    assert [trial for trial in found if trial.problems] == []


@pytest.mark.case("K3", "K4")
def test_without_the_hashes_such_damage_is_not_found(own, arena):
    def sizes_only(path):
        return [x for x in verify_checkpoint(path) if "sha256" not in x]

    found = trials.damage_trials(own, arena.random, {"flip": 15, "zero": 5}, check=sizes_only)
    assert len([trial for trial in found if trial.problems]) > 10


@pytest.mark.case("K3", "K4", "K13")
def test_a_run_resumes_from_the_one_before_to_the_same_bits(arena):
    kind = arena.random.choice(["flip", "truncate", "zero", "mix"])
    trial = trials.damaged_run_trial(arena, ranks=2, kind=kind)
    assert trial.problems == (), trial


@pytest.mark.case("K3", "K13")
@pytest.mark.only_all  # the control of files alone: above
def test_without_the_hashes_a_run_resumes_from_a_damaged_one_to_other_bits(arena):
    flags = trials.saves(background=False)
    harness.complete(arena.ground, arena.out, *flags, steps=6)
    newest = list_checkpoints(arena.out / "checkpoints")[0]
    shard = next(newest.glob("rank_00001*"))
    trials.faults.flip_bit(shard, 8 * (shard.stat().st_size - 2))  # a moment of the last parameter
    with harness.running(arena.ground, arena.out, *flags, believe_files=True) as job:
        assert harness.finish(job) == [0, 0], job.stderr()
    assert harness.differences(arena.out, arena.wanted(2))


@pytest.mark.case("K3", "K13", "G6")
def test_a_damaged_one_is_refused_by_its_name(own, arena):
    out = own.parent
    newest = list_checkpoints(own)[0]
    trials.faults.flip_bit(next(newest.glob("rank_*")), 4000)
    with harness.running(arena.ground, out, "--resume", newest, steps=9) as job:
        assert harness.finish(job) == [66, 66]
        assert newest.name in job.error()["what"]
    with harness.running(arena.ground, out, "--resume", own / "step_99999999", steps=9) as job:
        assert harness.finish(job) == [66, 66]
    assert harness.lines(out) == []


@pytest.mark.case("K13")
def test_when_all_are_damaged_nothing_begins(own, arena):
    for checkpoint in list_checkpoints(own):
        trials.damage(checkpoint, arena.random, "flip")
    with harness.running(arena.ground, own.parent, steps=9) as job:
        assert harness.finish(job) == [66, 66]
    assert harness.lines(own.parent) == []


def missing(pointer, _):
    pointer.unlink(missing_ok=True)


def dangling(pointer, _):
    pointer.symlink_to("step_00000042")


def outside(pointer, _):
    pointer.write_text("../../elsewhere")


def a_directory(pointer, _):
    pointer.mkdir()


def older(pointer, names):
    pointer.write_text(names[-1])


def garbage(pointer, _):
    pointer.write_bytes(b"\xff\0\xfe" * 1000)


@pytest.mark.case("K9")
@pytest.mark.parametrize("lie", [missing, dangling, outside, a_directory, older, garbage])
def test_the_pointer_for_people_is_never_believed(lie, own):
    names = [path.name for path in list_checkpoints(own)]
    (own / "latest").unlink(missing_ok=True)
    lie(own / "latest", names)
    assert find_checkpoint(own.parent).name == names[0]
