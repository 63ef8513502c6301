"""An error in the recipe's own code: what ranks hold alike is saved, and each ends as it would."""

import harness
import pytest
import trials


@pytest.mark.case("R3")
@pytest.mark.parametrize(
    ("background", "rank"), [(True, None), (True, 0), (True, 1), (False, None)]
)
def test_ranks_save_the_last_whole_step_before_an_error(background, rank, arena):
    """Of one rank alone, the other one waits in a collective meanwhile."""
    faults = [["fail_at", {"at": 7, "rank": rank}]]
    flags = trials.saves(background=background, every=4)
    with harness.running(arena.ground, arena.out, *flags, faults=faults) as job:
        codes = harness.finish(job)
    ends = [70 if rank in (None, own) else 68 for own in range(2)]
    assert codes == ends, (codes, *map(job.stderr, range(2)))
    assert harness.committed(arena.out)[-1] == "step_00000006"
    assert "step 6, the last one before the error, is saved in" in job.stderr(0) + job.stderr(1)
    assert "a planned failure in step 7" in job.error(rank or 0)["what"]
    assert not harness.is_saving(arena.out)  # nothing is left
    assert trials.resume(arena, *flags) == []


@pytest.mark.case("R1")
def test_nothing_is_begun_for_a_rank_that_was_killed(arena):
    faults = [["kill_at", {"at": 7, "rank": 1}]]
    flags = trials.saves(background=False, every=4)
    with harness.running(arena.ground, arena.out, *flags, faults=faults) as job:
        assert harness.finish(job) == [68, -9]
    assert harness.committed(arena.out) == ["step_00000004"]
    assert not harness.is_saving(arena.out)
