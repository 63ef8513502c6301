"""Runs that are stopped: they save one step on all ranks, end with 75, and resume."""

import signal
import time

import harness
import pytest
import trials


@pytest.mark.case("E1", "E2", "E6", "E8")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.only_all)],  # test_signals.py
)
def test_a_stopped_run_is_saved_and_resumes(number, arena):
    background, to = arena.random.random() < 0.5, arena.random.choice([[0], [1], [0, 1]])
    trial = trials.stop_trial(arena, ranks=2, background=background, number=number, to=to)
    assert trial.problems == (), trial


@pytest.mark.case("E1")
@pytest.mark.only_all
def test_on_any_of_four_ranks(arena):
    trial = trials.stop_trial(arena, ranks=4, background=True)
    assert trial.problems == (), trial


@pytest.mark.case("E1")
def test_a_rank_that_stops_without_agreement_is_not_saved(arena):
    flags = [*trials.saves(background=False, every=1000), "--step-timeout", 3]
    faults = [["signal_at", {"at": 3, "rank": 1}]]
    with harness.running(
        arena.ground, arena.out, *flags, faults=faults, steps=900, stop_alone=True
    ) as job:
        codes = harness.finish(job)
    assert 75 not in codes, codes
    assert harness.committed(arena.out) == []


@pytest.mark.case("E1", "E3")
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.only_all), 50])
def test_in_the_first_step_or_fifty_times(times, arena):
    at = {"at": 1 if times == 1 else 3, "rank": 1, "times": times}
    flags = trials.saves(background=True, every=100)
    faults = [["signal_at", at]]
    with harness.running(arena.ground, arena.out, *flags, faults=faults, steps=100) as job:
        assert harness.finish(job) == [75, 75], job.stderr()
    assert trials.trained(arena.out) == trials.last_saved(arena.out)
    assert trials.trained(arena.out) - at["at"] in {0, 1}  # votes may be a step on their way


@pytest.mark.case("E1")
def test_during_a_save(arena):
    flags = trials.saves(background=True)
    with harness.running(
        arena.ground, arena.out, *flags, faults=trials.SLOW, slow_disk=0.02
    ) as job:
        harness.wait_for(lambda: harness.is_saving(arena.out), job)
        harness.kill(job, job.pids[1], signal.SIGTERM)
        assert harness.finish(job) == [75, 75], job.stderr()
    assert trials.trained(arena.out) == trials.last_saved(arena.out)
    assert harness.torn(arena.out) == []


@pytest.mark.case("E1")
def test_before_the_first_step(arena):
    flags = trials.saves(background=True)
    with harness.running(arena.ground, arena.out, *flags, steps=100) as job:
        harness.wait_for((arena.out / "ranks").exists, job)
        harness.kill_all(job, signal.SIGTERM)
        codes = harness.finish(job)
    assert set(codes) <= {75, 76}, job.stderr()
    assert trials.resume(arena, *flags) == []


@pytest.mark.case("E3")
def test_a_second_interrupt_ends_at_once_and_the_last_checkpoint_stands(arena):
    flags = trials.saves(background=False)
    with harness.running(arena.ground, arena.out, *flags, steps=5000, slow_disk=0.1) as job:
        harness.wait_for(lambda: harness.committed(arena.out), job)
        before = harness.committed(arena.out)
        harness.kill_all(job, signal.SIGINT)
        time.sleep(0.2)
        harness.kill_all(job, signal.SIGINT)
        assert set(harness.finish(job, 10)) <= {75, 76}, job.stderr()
    assert set(before) <= set(harness.committed(arena.out))
    assert harness.torn(arena.out) == []


@pytest.mark.case("E4")
def test_killed_before_the_save_is_done_the_last_one_stands(arena):
    flags = trials.saves(background=True)
    with harness.running(arena.ground, arena.out, *flags, faults=trials.SLOW, slow_disk=0.1) as job:
        harness.wait_for(lambda: harness.committed(arena.out), job)
        before = harness.committed(arena.out)
        harness.kill_all(job, signal.SIGTERM)
        time.sleep(0.1)
        harness.kill_all(job)
    assert set(before) <= set(harness.committed(arena.out))
    assert harness.torn(arena.out) == []


@pytest.mark.case("E7")
def test_stopped_while_a_peer_is_stuck(arena):
    flags = [*trials.saves(background=False), "--grace", 2]
    faults = [["stop_at", {"at": 5, "rank": 1}]]
    with harness.running(arena.ground, arena.out, *flags, faults=faults) as job:
        harness.wait_for(harness.reached(arena.out, 4), job)
        harness.wait_for(lambda: trials.is_stopped(job.pids[1]), job)
        harness.kill(job, job.pids[0], signal.SIGTERM)
        assert harness.finish(job, 40, ranks=[0])[0] in {75, 76}, job.stderr()
        assert "step 4" in job.stderr()
    assert harness.torn(arena.out) == []


@pytest.mark.case("E5", "K6")
@pytest.mark.parametrize(("every", "background"), [(1, True), (1000, False)])
def test_stopped_while_the_disk_hangs(every, background, arena):
    """The steps may take 600 s; the disk hangs in the first save, or in a later one."""
    flags = trials.saves(background=background, every=every)
    faults = [["signal_at", {"at": 3}]]
    calls = 0 if every == 1000 else 15
    with harness.running(
        arena.ground, arena.out, *flags, ranks=1, faults=faults, steps=900, hung_disk=calls
    ) as job:
        assert harness.finish(job, 60) == [76], job.stderr()
        assert "asked to stop (SIGTERM)" in job.stderr()
    assert harness.torn(arena.out) == []
    assert bool(harness.committed(arena.out)) == (every == 1)


STORM = [["nan_loss_at", {"at": list(range(3, 200))}], ["signal_at", {"at": 4, "rank": 1}]]


@pytest.mark.case("N7")
def test_stopped_during_a_storm_of_non_finite_numbers(arena):
    flags = trials.saves(background=True)
    with harness.running(arena.ground, arena.out, *flags, faults=STORM, steps=200) as job:
        assert harness.finish(job) == [75, 75], job.stderr()
    assert trials.every(arena.out)
    assert not any(map(trials.poisoned, trials.every(arena.out)))


@pytest.mark.case("N7")
def test_a_storm_whose_steps_do_not_check_ends_otherwise(arena):
    flags = trials.saves(background=True)
    with harness.running(
        arena.ground, arena.out, *flags, faults=STORM, steps=200, deaf=True
    ) as job:
        assert 75 not in harness.finish(job), job.stderr()


@pytest.mark.case("E9")
def test_signals_that_mean_nothing_to_a_run_change_nothing(arena):
    flags = trials.saves(background=True)
    faults = [
        ["signal_at", {"at": step, "signum": int(number)}]
        for step, number in enumerate((signal.SIGCHLD, signal.SIGCONT, signal.SIGPIPE), 2)
    ]
    with harness.running(arena.ground, arena.out, *flags, faults=faults) as job:
        assert harness.finish(job) == [0, 0], job.stderr()
    assert harness.differences(arena.out, arena.wanted(2)) == []
