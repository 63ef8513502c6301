"""A job that SLURM preempts and queues again: the same run goes on (srun's variables simulated)."""

import contextlib
import importlib.util
import io
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from trainkit.mesh import solo_parallel
from trainkit.run.lock import lock_run
from trainkit.tools.testing import run_ranks

SCRIPT = Path(__file__).with_name("stoppable.py")


@pytest.fixture
def free_port():
    def find():
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    return find


def load_script():
    """Import the recipe under its own name."""
    spec = importlib.util.spec_from_file_location("stoppable", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_as_task(out, stop_at, port, **slurm):
    """Run the recipe as a task of srun; SIGTERM comes to task 1 at a step. Return (code, said)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    os.environ.update(SLURM_PROCID=str(rank), SLURM_NTASKS=str(world), SLURM_LOCALID=str(rank))
    os.environ.update(SLURM_JOB_NODELIST="localhost", SLURM_JOB_ID="4711", MASTER_PORT=str(port))
    os.environ.update(slurm)

    def at(place, step):
        if (place, step, rank) == ("step", stop_at, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        return load_script().main([out, "10", "0"], at), said.getvalue()


def steps_of(out, rank):
    lines = (out / f"metrics_{rank}.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.case("E8", "L9")
def test_a_job_that_is_queued_again_goes_on_in_the_same_run(tmp_path, free_port):
    first = run_ranks(run_as_task, 2, tmp_path, 3, free_port())
    assert first == [(75, "")] * 2
    second = run_ranks(_again, 2, tmp_path, free_port())
    told = "note: SLURM has started this job again (SLURM_RESTART_COUNT=1)\n"
    assert second == [(0, told)] * 2
    for rank in range(2):
        assert steps_of(tmp_path, rank) == [*range(1, 11)]
        ends = (tmp_path / f"ends_{rank}").read_text().splitlines()
        assert [(end["code"], end["stop"]) for end in map(json.loads, ends)] == [
            (75, "SIGTERM on rank 1"),
            (0, None),
        ]


def _again(out, port):
    return run_as_task(out, None, port, SLURM_RESTART_COUNT="1")


@pytest.mark.case("L9")
def test_a_job_that_is_queued_again_before_its_first_checkpoint_begins_afresh(tmp_path, free_port):
    found = run_ranks(_again, 2, tmp_path, free_port())
    assert [code for code, _ in found] == [0, 0]
    assert "SLURM_RESTART_COUNT=1" in found[0][1]
    assert steps_of(tmp_path, 0) == [*range(1, 11)]


@pytest.mark.case("L12", "E8")
def test_a_second_job_in_the_directory_is_refused_by_the_number_of_the_first(tmp_path, free_port):
    (tmp_path / "state.json").write_text('{"step": 3}')
    assert run_ranks(_twice, 2, tmp_path, free_port()) == [64, 64]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors", "state.json"]
    said = (tmp_path / "errors" / "rank_00000.txt").read_text()
    assert "is in use by process" in said
    assert "job 41" in said


def _twice(out, port):
    """Run the recipe while rank 0 already holds the directory for another job."""
    os.environ["SLURM_JOB_ID"] = "41"
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(lock_run(out, solo_parallel().world))
        try:
            return run_as_task(out, None, port)
        except SystemExit as end:  # returned, so that no rank is killed before it has told why
            return end.code
