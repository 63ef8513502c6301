"""Runs that are killed at any moment lose an interval of work, and no bit of their numbers."""

import shutil

import harness
import pytest
import trials


@pytest.mark.case("X4", "X12")
@pytest.mark.only_all  # in the background: test_disk.py; in the foreground: what goes on, below
@pytest.mark.parametrize("background", [False, True])
def test_saving_or_not_changes_no_number(background, ground, wanted, tmp_path):
    out = tmp_path / "run"
    harness.complete(ground, out, *trials.saves(background=background, every=1), ranks=2)
    assert harness.differences(out, wanted(2)) == []
    assert harness.torn(out) == []


@pytest.mark.case("K1", "X4", "W4", "X5", "O3")
@pytest.mark.parametrize(
    ("ranks", "inside"),
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.only_all),  # around an update: below
        pytest.param(4, True, marks=pytest.mark.only_all),
        pytest.param(4, False, marks=pytest.mark.only_all),
    ],
    ids=["2-inside a save", "2-any moment", "4-inside a save", "4-any moment"],
)
def test_all_ranks_killed(ranks, inside, arena):
    background = arena.random.random() < 0.5
    trial = trials.kill_trial(arena, ranks=ranks, background=background, inside=inside)
    assert trial.problems == (), trial


@pytest.mark.case("K2", "R1")
def test_one_rank_killed_inside_a_save(arena):
    background = arena.random.random() < 0.5
    trial = trials.kill_trial(arena, ranks=2, background=background, inside=True, alone=True)
    assert trial.problems == (), trial


@pytest.mark.case("O3", "O4")
@pytest.mark.parametrize(
    "after",
    [pytest.param(False, marks=pytest.mark.only_all), True],  # before it is any moment: above
    ids=["before the update", "after it"],
)
def test_killed_around_an_update(after, arena):
    flags, faults = trials.saves(background=False), [["kill_at", {"at": 5, "after": after}]]
    with harness.running(arena.ground, arena.out, *flags, faults=faults) as job:
        assert harness.finish(job) == [-9, -9]
    assert trials.resume(arena, *flags) == []


@pytest.mark.case("K1", "W4")
def test_a_run_that_repeats_a_step_is_found(arena):
    shutil.copytree(arena.wanted(2), arena.out)
    assert harness.differences(arena.out, arena.wanted(2)) == []
    metrics = arena.out / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:3], *lines[2:]]))
    assert harness.differences(arena.out, arena.wanted(2))
