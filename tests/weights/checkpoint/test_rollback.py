"""Roll-backs: an earlier state, later data, and a maximum number."""

import functools
import json

import attrs
import pytest
import torch
from weights.checkpoint.small import live, quiet, same, small_run

import trainkit as tk
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, Cursor, NumericsError
from trainkit.weights.checkpoint import list_checkpoints
from trainkit.weights.checkpoint.rollback import roll_back


def run_to(run_dir, *, saves=(2, 4), until=7):
    """Train and save; the cursor is ahead of the step, as after an earlier rollback."""
    state, stages, optimizer, ps = small_run(steps=0)
    states = {}
    for step in range(1, until + 1):
        for p in stages[0].parameters():
            p.grad = torch.full_like(p, step)
        optimizer.step()
        state = attrs.evolve(state, step=step, tokens=10 * step, cursor=Cursor(step + 5))
        state = attrs.evolve(state, health={"losses": [float(step)], "norms": [1.0]})
        if step in saves:
            tk.save_checkpoint(run_dir, state, stages, optimizer, ps)
            states[step] = live(stages, optimizer)
    memory = {**state.health, "skips": 3.0, "first_bad": 5.0, "bad_steps": [5.0, 6.0, 7.0]}
    return attrs.evolve(state, health=memory), stages, optimizer, ps, states


@pytest.mark.case("N5")
def test_the_state_goes_back_and_the_data_does_not(tmp_path):
    *run, states = run_to(tmp_path, saves=(2, 4, 6))
    messages = []
    found = roll_back(tmp_path, *run, before=4, log=messages.append)
    assert (found.step, found.tokens, found.cursor) == (4, 40, Cursor(12))
    assert found.health["losses"] == [4.0]
    assert (found.health["rollbacks"], found.health["rolled_back"]) == (1.0, [5.0])
    assert same(live(run[1], run[2]), states[4])
    assert "rolled back from step 7 to" in messages[0]
    directory = tmp_path / "checkpoints"
    names = [path.name for path in list_checkpoints(directory)]
    assert names == ["step_00000004-1", "step_00000004", "step_00000002"]
    assert (directory / "abandoned-1/step_00000006").is_dir()


@pytest.mark.case("N5")
def test_a_run_that_is_killed_after_a_rollback_goes_on_from_it(tmp_path):
    *run, _ = run_to(tmp_path)
    found = roll_back(tmp_path, *run, before=4, log=quiet)
    rest = small_run(steps=0)[1:]
    state = tk.resume(tmp_path, tk.TrainState(), *rest, log=quiet)
    assert (state.step, state.cursor, state.health) == (4, found.cursor, found.health)
    assert same(live(*rest[:2]), live(run[1], run[2]))


@pytest.mark.case("N5")
def test_a_checkpoint_of_the_bad_steps_or_a_damaged_one_is_not_taken(tmp_path):
    *run, _ = run_to(tmp_path, saves=(2, 3, 4, 6))
    shard = tmp_path / "checkpoints/step_00000003/rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert roll_back(tmp_path, *run, before=3, log=quiet).step == 2


@pytest.mark.case("N5")
def test_after_so_many_rollbacks_it_ends_with_the_list(tmp_path):
    state, *rest, _ = run_to(tmp_path)
    for count, first_bad in enumerate((5.0, 6.0)):
        state = attrs.evolve(state, health={**state.health, "first_bad": first_bad})
        state = roll_back(tmp_path, state, *rest, before=4, max_rollbacks=2, log=quiet)
        assert state.health["rollbacks"] == count + 1
    before = live(*rest[:2])
    with pytest.raises(NumericsError, match=r"may roll back 2 times.*before step 5, 6") as error:
        roll_back(tmp_path, state, *rest, before=4, max_rollbacks=2, log=quiet)
    assert error.value.code == 67
    assert same(before, live(*rest[:2]))


@pytest.mark.case("N5")
def test_without_an_earlier_checkpoint_it_says_so(tmp_path):
    *run, _ = run_to(tmp_path, saves=(6,))
    with pytest.raises(CheckpointError, match="no checkpoint at or before step 4 that verifies"):
        roll_back(tmp_path, *run, before=4, log=quiet)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000006"]


@pytest.mark.case("N5")
def test_without_it_auto_would_go_on_from_the_bad_branch(tmp_path):
    """The negative control: the newest checkpoint is one of the steps that went wrong."""
    run_to(tmp_path, saves=(2, 4, 6))
    rest = small_run(steps=0)[1:]
    assert tk.resume(tmp_path, tk.TrainState(), *rest, log=quiet).step == 6


def roll_back_on_two(run_dir):
    state, stages, optimizer, _ = small_run(steps=1)
    with tk.parallel_session() as ps:
        tk.save_checkpoint(run_dir, state, stages, optimizer, ps)
        later = attrs.evolve(state, step=3, cursor=Cursor(9))
        found = roll_back(run_dir, later, stages, optimizer, ps, before=2, log=quiet)
        failing = functools.partial(roll_back, run_dir, later, stages, optimizer, ps, log=quiet)
        with pytest.raises(CheckpointError):
            failing(before=0)
        return found.step, found.cursor.batch


@pytest.mark.case("N5")
def test_all_ranks_go_back_together(tmp_path):
    assert run_ranks(roll_back_on_two, 2, tmp_path) == [(1, 9), (1, 9)]
    manifest = json.loads((tmp_path / "checkpoints/step_00000001-1/manifest.json").read_text())
    assert manifest["step"] == 1
