"""The initial weights of a run are found again, or recognized by their saved hash."""

import shutil

import pytest
from weights.checkpoint.small import small_run

import trainkit as tk
from trainkit.tools.testing import faults
from trainkit.types import ConfigError
from trainkit.weights.checkpoint import find_initial_weights
from trainkit.weights.checkpoint.initial_weights import InitialWeights, hash_initial_weights


@pytest.fixture
def started(tmp_path):
    """Return a run of two checkpoints that began with the first checkpoint of another."""
    first = tk.save_checkpoint(tmp_path / "base", *small_run())
    facts = {"config.init": str(first), **KNOWN}
    for steps in (1, 2):
        tk.save_checkpoint(tmp_path / "run", *small_run(steps=steps), facts=facts)
    return tmp_path / "run", first


KNOWN = {"first weights": "1234", "tower": "gemma"}


def test_nothing_asked_for_is_what_the_run_has_recorded(started):
    run, first = started
    found = find_initial_weights(None, run_dir=run)
    assert (found, found.path) == (InitialWeights(first, run, KNOWN), run)
    assert hash_initial_weights(found, *small_run()[1::2]) == KNOWN
    path = run / "checkpoints" / "step_00000001"
    found = find_initial_weights(None, run_dir=run.parent / "fork", request=path)
    assert found == InitialWeights(first, path, KNOWN)
    assert find_initial_weights(None, run_dir=run, request="never") == InitialWeights(None)


def test_of_a_base_that_has_gone_on_the_same_checkpoint_is_compared(started):
    run, first = started
    base = first.parent.parent
    tk.save_checkpoint(base, *small_run(steps=2))
    assert find_initial_weights(base, run_dir=run) == InitialWeights(first)
    moved = base.rename(base.parent / "moved")
    found = find_initial_weights(moved, run_dir=run)
    assert found == InitialWeights(moved / "checkpoints" / first.name)
    with pytest.raises(ConfigError, match=r"there is no .*typo, and the run in .* began with"):
        find_initial_weights(run.parent / "typo", run_dir=run)


def test_a_base_that_was_deleted_leaves_its_run_alone(started):
    run, first = started
    shutil.rmtree(first)
    for named in (first, first.parent.parent):
        assert find_initial_weights(named, run_dir=run) == InitialWeights(first, run, KNOWN)


def test_damage_is_passed_over_as_resume_does(started):
    run, first = started
    faults.flip_bit(run / "checkpoints" / "step_00000002" / "state.json", 100)
    assert find_initial_weights(None, run_dir=run).source == first
    faults.flip_bit(run / "checkpoints" / "step_00000001" / "state.json", 100)
    assert find_initial_weights(None, run_dir=run) == InitialWeights(None)


def test_adapters_need_their_base(tmp_path):
    facts = {"base": "99", "base_from": "runs/base", "config.init": "runs/other"}
    tk.save_checkpoint(tmp_path, *small_run(), facts=facts)
    found = find_initial_weights(None, run_dir=tmp_path)
    assert (str(found.source), found.resume_from) == ("runs/base", None)


def test_the_hash_is_that_of_the_weights(tmp_path):
    _, stages, _, ps = small_run()
    found = hash_initial_weights(InitialWeights(tmp_path), stages, ps)
    assert found == hash_initial_weights(InitialWeights(tmp_path), small_run()[1], ps)
    assert found != hash_initial_weights(InitialWeights(tmp_path), small_run(steps=2)[1], ps)
