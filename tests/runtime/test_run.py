"""What stands around a run is opened whole, and nothing of it is left."""

import json
import os
import signal
import threading
import time

import attrs
import pytest
import torch

from trainkit import runtime
from trainkit.checkpoint import Keeping, find_checkpoint, list_checkpoints
from trainkit.mesh import solo_parallel
from trainkit.runtime import Limits, make_run_dir, open_run, watchdog
from trainkit.runtime.lock import run_lock
from trainkit.testing import run_ranks
from trainkit.types import DataError, DiskError

HOW = {"limits": Limits(start_timeout=60.0)}


def test_a_signal_is_heard_inside_and_all_is_put_back(tmp_path):
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with open_run(tmp_path, **HOW) as run:
        run.phase("a step", allow=60)
        assert run.stopping() is None
        signal.raise_signal(signal.SIGTERM)
        assert run.stopping() == "SIGTERM on rank 0"
        assert run.ps.world.count == 1
    assert signal.getsignal(signal.SIGTERM) == before
    assert threading.active_count() == threads
    with run_lock(tmp_path, solo_parallel().world):
        pass


def test_an_error_ends_with_its_code_and_keeps_its_traceback_in_the_directory(tmp_path, capsys):
    with pytest.raises(SystemExit) as end, open_run(tmp_path, **HOW):
        raise DataError("document 7 is torn")
    assert end.value.code == 65
    last = capsys.readouterr().err.splitlines()[-1]
    assert json.loads(last.removeprefix("TRAINKIT_ERROR "))["what"] == "document 7 is torn"
    assert "DataError" in (tmp_path / "errors" / "rank_00000.txt").read_text()


def test_a_directory_in_use_is_refused_with_a_code_before_anything_is_written(tmp_path, capsys):
    with run_lock(make_run_dir(tmp_path), solo_parallel().world):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as end, open_run(tmp_path, **HOW):
            pytest.fail("it was opened")
    assert end.value.code == 64
    assert "in use" in capsys.readouterr().err
    assert sorted(path for path in before if path.exists()) == sorted(tmp_path.rglob("*"))


@pytest.mark.case("L12")
def test_a_directory_that_is_moved_away_is_made_anew_and_locked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    run = tmp_path / "run"
    with open_run(run, **HOW):
        run.rename(tmp_path / "aside")
        while not (run / "lock").exists():
            time.sleep(0.01)
        with pytest.raises(SystemExit), open_run(run, **HOW):
            pytest.fail("it was opened")
    said = capsys.readouterr().err
    assert "was removed or moved" in said
    assert "in use by process" in said


def test_the_best_checkpoint_is_that_of_the_lowest_score_or_else_loss_and_stays(tmp_path):
    found = [
        {"loss": 3.0, "score": -0.5},
        {"loss": 2.0, "score": -0.9},
        {"loss": 1.0},
        {"loss": 0.5},
    ]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    keeping = Keeping(save_every=1, keep=2, keep_best=1, background_saves=False)
    with open_run(tmp_path, **HOW) as run:
        state = run.resume([model], optimizer, facts={})
        around = {"steps": 4, "replay": None, "keeping": keeping}
        with run.loop(state, [model], optimizer, **around) as loop:
            for step, values in enumerate(found, start=1):
                state = loop.evaluated(
                    attrs.evolve(state, step=step), lambda v=values: v | {"tokens": 1}
                )
                loop.keep(state)
    assert find_checkpoint(tmp_path, best=True).name == "step_00000002"
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert sorted(names) == [f"step_0000000{step}" for step in (2, 3, 4)]


def _only_rank_0_can_write(folder):
    """Return how a run ends whose directory one rank cannot write."""
    if os.environ["RANK"] == "1":

        def refuse(path):
            raise DiskError(f"make_run_dir: user 7 cannot write {path}")

        runtime.run.make_run_dir = refuse
    try:
        with open_run(folder, **HOW):
            return "opened"
    except SystemExit as end:
        return end.code


@pytest.mark.case("K6")
def test_a_directory_that_one_rank_cannot_write_ends_all_ranks(tmp_path):
    assert run_ranks(_only_rank_0_can_write, 2, tmp_path) == [74, 74]
