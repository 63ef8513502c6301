"""Ranks that die, hang or fail: the others end in time and name them, and the run resumes."""

import harness
import pytest
import trials


@pytest.mark.case("R1", "R4", "R10")
@pytest.mark.parametrize(
    "name",
    ["kill_at", pytest.param("exit_at", marks=pytest.mark.only_all)],  # runtime/test_watchdog.py
)
def test_a_rank_that_is_gone_ends_all_and_is_named(name, arena):
    victim = arena.random.randrange(2)
    trial = trials.peer_trial(
        arena, ranks=2, fault=name, victim=victim, codes=[68], named=f"rank {victim}", within=10
    )
    assert trial.problems == (), trial


@pytest.mark.case("R1")
@pytest.mark.only_all  # three ranks: runtime/test_watchdog.py
def test_one_of_four_that_is_killed_is_named_by_all_others(arena):
    victim = arena.random.randrange(4)
    named = f"rank {victim}"
    trial = trials.peer_trial(
        arena, ranks=4, fault="kill_at", victim=victim, codes=[68], named=named, within=10
    )
    assert trial.problems == (), trial


@pytest.mark.case("R2")
def test_a_rank_that_hangs_is_named_at_the_steps_timeout(arena):
    victim, name = arena.random.randrange(2), arena.random.choice(["stop_at", "hang_at"])
    trial = trials.peer_trial(
        arena,
        "--step-timeout",
        4,
        ranks=2,
        fault=name,
        victim=victim,
        codes=[68],
        named=f"rank {victim}",
        within=4 + 5,
    )
    assert trial.problems == (), trial


@pytest.mark.case("R3", "R9")
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("fail_at", "a planned failure in step 3", marks=pytest.mark.only_all),
        ("memory_at", "had no memory left in phase"),
    ],
)
def test_the_cause_is_reported_by_the_rank_that_failed_and_by_its_peer(fault, cause, arena):
    faults = [[fault, {"at": 3, "rank": 1}]]
    with harness.running(arena.ground, arena.out, faults=faults) as job:
        codes = harness.finish(job)
    assert codes == [68, 70]
    assert cause in job.error(1)["what"]
    peers_cause = "MemoryError: all of it is taken (in phase 'step 3')"
    assert (cause if fault == "fail_at" else peers_cause) in job.error(0)["what"]
    assert "rank 1" in job.error(0)["what"]
    assert ("--microbatch" in job.error(1)["hint"]) == (fault == "memory_at")


@pytest.mark.case("R5", "R7")
def test_a_slow_rank_and_long_work_of_rank_0_alone_change_nothing(arena):
    faults = [["slow_at", {"at": [3, 4, 5], "rank": 1, "seconds": 0.2}]]
    faults += [["slow_at", {"at": 6, "rank": 0, "seconds": 1}]]
    flags = trials.saves(background=True)
    with harness.running(arena.ground, arena.out, *flags, faults=faults) as job:
        assert harness.finish(job) == [0, 0]
    assert harness.differences(arena.out, arena.wanted(2)) == []
