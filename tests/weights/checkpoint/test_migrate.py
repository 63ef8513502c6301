"""Every older format stays readable; a later one names the trainkit that it needs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from weights.checkpoint.small import quiet, reseal

import trainkit as tk
from trainkit.types import CheckpointError, Cursor
from trainkit.weights.checkpoint import verify_checkpoint
from trainkit.weights.checkpoint.manifest import VERSION
from trainkit.weights.checkpoint.staging import migrate

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = range(1, VERSION + 1)
STATE_HASH = "53de7c09723c159b"
"""Of the state in every fixture, health included."""


class Lm(nn.Module):
    """The model of the fixtures; it never changes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 7, bias=False)


def fresh():
    model = Lm()
    return [model], torch.optim.AdamW(model.parameters(), lr=0.1), tk.solo_parallel()


@pytest.fixture(params=VERSIONS, ids="v{}".format)
def old(request, tmp_path):
    """A run directory with a checkpoint of an old format."""
    shutil.copytree(FIXTURES / f"v{request.param}", tmp_path / "checkpoints")
    return request.param, tmp_path


@pytest.mark.case("K15")
def test_a_checkpoint_of_every_format_is_read(old):
    _, run_dir = old
    stages, optimizer, ps = fresh()
    state = tk.resume(run_dir, tk.TrainState(), stages, optimizer, ps, log=quiet)
    assert (state.step, state.tokens, state.cursor) == (3, 30, Cursor(3, (1, 2)))
    assert state.health == {"skips": 1.0}
    assert tk.state_hash(state, stages, optimizer, ps) == STATE_HASH
    path = tk.save_checkpoint(run_dir, state, stages, optimizer, ps)
    assert json.loads((path / "manifest.json").read_text())["version"] == VERSION


@pytest.mark.case("K15")
def test_reading_an_old_format_does_not_change_it(old):
    version, run_dir = old
    path = run_dir / "checkpoints/step_00000003"
    tk.resume(run_dir, tk.TrainState(), *fresh(), log=quiet)
    for file in (FIXTURES / f"v{version}/step_00000003").iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.case("K15")
def test_without_migration_an_old_format_could_not_be_read():
    """The negative control: version 1 lacks what the present one requires."""
    state = json.loads((FIXTURES / "v1/step_00000003/state.json").read_text())
    assert "machine" not in state
    described = migrate(state, 1)
    assert described["machine"] is None
    assert migrate(described, VERSION) == described


@pytest.mark.case("K15")
def test_a_later_format_says_what_it_needs(old):
    _, run_dir = old
    path = run_dir / "checkpoints/step_00000003"
    reseal(path, version=VERSION + 1, trainkit="9.8.7")
    wanted = rf"version {VERSION + 1}, written by trainkit 9\.8\.7; .* upgrade trainkit"
    with pytest.raises(CheckpointError, match=wanted) as error:
        tk.resume(run_dir, tk.TrainState(), *fresh(), log=quiet)
    assert error.value.code == 66
    assert verify_checkpoint(path)
