"""A grace that is too short: the processes are killed inside the save that a signal asked for."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from trainkit.mesh import parallel_session
from trainkit.optim import adamw
from trainkit.run.signals import open_stop_vote, trap_signals
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.ranks import RankError
from trainkit.types import TrainState
from trainkit.weights.checkpoint import list_checkpoints, open_saver, resume, verify_checkpoint

GRACE = 0.2  # seconds that are left when the commit begins, which would take a minute


def kill_soon():
    """Send this process SIGKILL when its grace is over."""
    threading.Timer(GRACE, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train_until_killed(out, background):
    """Save step 1; be asked to stop in step 2, and be killed while step 3 is saved."""
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 1.0)
    optimizer = adamw(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    commits = []

    def commit_slowly():
        commits.append(1)
        if len(commits) == 2:
            kill_soon()
            time.sleep(60)

    with (
        trap_signals() as asked,
        parallel_session(dp_replicate=2) as ps,
        open_stop_vote(asked, ps.world) as stopping,
        open_saver(
            out,
            [model],
            optimizer,
            ps,
            background=background,
            before_commit=commit_slowly,
        ) as (save, saved),
    ):
        save(TrainState(step=1))
        saved(wait=True)
        for step in range(2, 9):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            stop = stopping()
            if stop:
                save(TrainState(step=step))
                return stop
    return None


def resumed(out):
    """Return the step that a new start goes on from."""
    model = nn.Linear(4, 4)
    optimizer = adamw(model.parameters(), lr=0.1)
    with parallel_session(dp_replicate=2) as ps:
        return resume(out, TrainState(), [model], optimizer, ps).step


@pytest.mark.case("E4")
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_is_cut_off_leaves_the_checkpoint_before_it(background, tmp_path):
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(train_until_killed, 2, str(tmp_path), background)
    (kept,) = list_checkpoints(tmp_path / "checkpoints")
    assert (kept.name, verify_checkpoint(kept)) == ("step_00000001", [])
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert any("staging" in name for name in left)  # the kill has met the save
    assert run_ranks(resumed, 2, str(tmp_path)) == [1, 1]


def overwrite_until_killed(path):
    """Write over what is there, in place, and be killed half-way."""
    with contextlib.suppress(OSError), Path(path).open("w") as file:
        file.write('{"step": ')
        file.flush()
        kill_soon()
        time.sleep(60)


@pytest.mark.case("E4")
def test_what_is_written_in_place_is_lost(tmp_path):
    """The negative control."""
    path = tmp_path / "state.json"
    path.write_text('{"step": 1}')
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(overwrite_until_killed, 1, str(path))
    assert path.read_text() == '{"step": '
