"""Non-finite numbers, anywhere, on any rank: none reaches a parameter or a moment."""

import math

import harness
import pytest
import trials

SKIPPED = [
    ("nan_gradient_at", {"name": "layers.0.mlp.down.weight"}),
    ("nan_loss_at", {}),
]
STOPPED = [("nan_moment_at", {}), ("nan_parameter_at", {})]


def numbers_of(sites):
    """Return the first place of each kind, and the others for --all: test_bad_steps has them."""
    first, *others = (pytest.param(*site, id=site[0]) for site in sites)
    return [first, *(pytest.param(*x.values, id=x.id, marks=pytest.mark.only_all) for x in others)]


@pytest.mark.case("N1", "N2", "N3", "N6", "O2")
@pytest.mark.parametrize(("fault", "given"), numbers_of(SKIPPED))
def test_a_step_is_skipped_on_all_ranks_alike(fault, given, arena):
    step = arena.random.choice([2, 3, 4])  # 2 and 4 are steps of a save
    value = arena.random.choice([math.nan, math.inf, -math.inf])
    given = {"at": step, "rank": arena.random.randrange(2), "value": value, **given}
    trial = trials.number_trial(arena, ranks=2, fault=fault, given=given, allowed=(0,))
    assert trial.problems == (), trial
    assert [line["skipped"] for line in harness.lines(arena.out)] == [
        i == step for i in range(1, trials.STEPS + 1)
    ]


@pytest.mark.case("N4", "N6")
@pytest.mark.parametrize(("fault", "given"), numbers_of(STOPPED))
def test_a_parameter_or_moment_that_is_not_finite_is_never_saved(fault, given, arena):
    given = {"at": 4, "rank": arena.random.randrange(2), **given}
    trial = trials.number_trial(arena, ranks=2, fault=fault, given=given)
    assert trial.problems == (), trial


@pytest.mark.case("N5")
def test_a_storm_ends_with_67_after_its_rollbacks_and_all_that_is_saved_is_sound(arena):
    flags = trials.saves(background=False)
    storm = [["nan_loss_at", {"at": list(range(4, 1000)), "rank": 1}]]
    with harness.running(arena.ground, arena.out, *flags, faults=storm, steps=900) as job:
        assert harness.finish(job) == [67, 67], job.stderr()
    assert trials.every(arena.out)
    assert not any(map(trials.poisoned, trials.every(arena.out)))


@pytest.mark.case("N9")
def test_a_replica_that_drifts_by_one_bit_is_named(arena):
    faults = [["flip_bit_at", {"at": 2, "rank": 1, "name": "layers.0.mlp.down.weight"}]]
    flags = ["--dp-replicate", 2, "--save-every", 1000]
    with harness.running(arena.ground, arena.out, *flags, faults=faults, steps=12, often=5) as job:
        assert harness.finish(job) == [67, 67], job.stderr()
    assert "rank 1" in job.error()["what"]
    assert trials.trained(arena.out) <= 7


@pytest.mark.only_all
@pytest.mark.case("N1", "N5")
def test_ranks_that_look_at_several_steps_at_once_come_to_what_they_come_to_one_by_one(arena):
    storm = [["nan_loss_at", {"at": [2, 5, 6, 7], "rank": 1}]]
    flags = ["--save-every", 4, "--no-background-saves", "--log-every"]
    results = {}
    for every, out in {4: arena.out, 1: arena.out.with_name("one by one")}.items():
        with harness.running(arena.ground, out, *flags, every, faults=storm, steps=12) as job:
            assert harness.finish(job) == [67, 67], job.stderr()  # back to 4 and into it again
            records = [
                [x[name] for name in ("step", "loss_hex", "batch_hash")] for x in harness.lines(out)
            ]
            results[every] = job.error()["what"], records
    assert results[4] == results[1]
