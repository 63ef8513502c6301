"""What torchrun does with signals, and what its workers make of it (FAULTS.md, facts 29 and 30)."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainkit.tools.testing import run_ranks

SCRIPT = Path(__file__).with_name("stoppable.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS = 2000
PATIENCE = 60.0  # the machine may be busy; the figures are printed


def load_script(path):
    """Import the recipe under its own name, so that ranks find it too."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def started(out, *flags, steps=STEPS):
    """Start the recipe with 20 ms per step; yield (torchrun, its workers) when both have begun."""
    command = [*TORCHRUN, *flags, str(SCRIPT), str(out), str(steps), "0.02"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (out / "log").open("a") as log:
        launcher = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    pids = []
    try:
        pids += [int(wait_for(read, out / f"pid_{rank}")) for rank in range(2)]
        wait_for(read, out / "metrics_0.jsonl")
        yield launcher, pids
    finally:
        for pid in (launcher.pid, *pids):
            if is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        launcher.wait()


def read(path):
    return path.read_text() if path.exists() else ""


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(find, *args):
    deadline = time.monotonic() + PATIENCE
    while not (found := find(*args)):
        assert time.monotonic() < deadline, (find, args)
        time.sleep(0.02)
    return found


def steps_of(metrics):
    """Return the steps of the lines that are complete."""
    return [json.loads(line)["step"] for line in read(metrics).split("\n")[:-1]]


def ends(out):
    """Return how each rank has ended."""
    return [json.loads(read(out / f"ends_{rank}").splitlines()[-1]) for rank in range(2)]


def assert_all_are_saved(out, launcher, pids, who):
    """Check that everybody is gone, at one step, saved; print how long it took."""
    begin = time.monotonic()
    launcher.wait(timeout=PATIENCE)
    wait_for(lambda: not any(map(is_alive, pids)))
    print(f"ended {time.monotonic() - begin:.2f} s after the signal")
    one, other = ends(out)
    assert one == other
    assert (one["code"], one["stop"]) in [(75, name) for name in who]
    assert json.loads(read(out / "state.json")) == {"step": one["step"]}
    for rank in range(2):
        assert steps_of(out / f"metrics_{rank}.jsonl") == [*range(1, one["step"] + 1)]
    assert not (out / "lock").exists()
    return one["step"]


def hang_up_and_pause(pids, out):
    """Send two workers what must change nothing: both go on."""
    os.kill(pids[0], signal.SIGHUP)
    os.kill(pids[1], signal.SIGTSTP)
    time.sleep(0.3)
    os.kill(pids[1], signal.SIGCONT)
    reached = steps_of(out / "metrics_0.jsonl")[-1]
    wait_for(lambda: steps_of(out / "metrics_1.jsonl")[-1] > reached + 2)


@pytest.mark.case("E1", "E5", "E8", "E9")
def test_sigterm_to_torchrun_saves_and_the_next_start_goes_on(tmp_path):
    with started(tmp_path) as (launcher, pids):
        hang_up_and_pause(pids, tmp_path)
        launcher.send_signal(signal.SIGTERM)
        both = [f"SIGTERM on rank{which}" for which in ("s 0, 1", " 0", " 1")]
        step = assert_all_are_saved(tmp_path, launcher, pids, both)
        assert launcher.returncode != 0
    script = load_script(SCRIPT)
    assert run_ranks(script.train, 2, tmp_path, step + 10) == [(0, step + 10, None)] * 2
    for rank in range(2):
        assert steps_of(tmp_path / f"metrics_{rank}.jsonl") == [*range(1, step + 11)]


@pytest.mark.case("E2", "L10")
@pytest.mark.only_all  # what workers make of either: test_signals.py
@pytest.mark.parametrize("is_handled", [True, False])
def test_sigusr1_to_torchrun(is_handled, tmp_path, monkeypatch):
    """Torchrun dies of what it was not told to handle; its workers notice."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # where a scheduler sends such signals
    flags = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"] if is_handled else []
    with started(tmp_path, *flags) as (launcher, pids):
        launcher.send_signal(signal.SIGUSR1)
        dead = f"torchrun (process {launcher.pid} on {socket.gethostname()}) has died: orphaned"
        name = "SIGUSR1" if is_handled else dead
        who = [f"{name} on rank{which}" for which in ("s 0, 1", " 0", " 1")]
        assert_all_are_saved(tmp_path, launcher, pids, who)
        assert (launcher.returncode == -signal.SIGUSR1) == (not is_handled)
    assert ("torchrun would die of a SIGUSR1" in read(tmp_path / "log")) == (not is_handled)
