"""Long runs, many saves and many ranks: nothing grows, and nothing is left open."""

import harness
import pytest
import trials


@pytest.mark.case("Z1")
def test_many_steps_leave_memory_files_and_threads_as_they_were(arena):
    flags = ["--save-every", 100_000, "--schedule-steps", 10_000, "--rows", 1]
    with harness.running(arena.ground, arena.out, *flags, ranks=1, steps=100_000) as job:
        early, late = harness.weights_at(job, 100, 250)
    assert late[0] - early[0] < 2**20
    assert late[1:] == early[1:]


@pytest.mark.case("Z2", "K8")
def test_many_saves_back_to_back_leave_no_more_than_one(arena):
    flags = [*trials.saves(background=True, every=1), "--keep", 2, "--rows", 2]
    with harness.running(arena.ground, arena.out, *flags, ranks=2, steps=100_000) as job:
        early, late = harness.weights_at(job, 10, 20)
        pending = list((arena.out / "checkpoints").glob(".staging-*"))
    assert late[0] - early[0] < 8 * 2**20
    assert len(pending) <= 1
    assert len(harness.committed(arena.out)) <= 4
    assert harness.torn(arena.out) == []


@pytest.mark.case("Z3")
@pytest.mark.only_all
def test_sixteen_ranks_on_two_cores(arena):
    harness.complete(arena.ground, arena.out, "--rows", 16, "--save-every", 2, ranks=16, steps=2)
    assert harness.committed(arena.out) == ["step_00000002"]
