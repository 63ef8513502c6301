"""`python -m trainkit launch`: torchrun's agent, and the exit code of its workers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes import free_port, start_command
from torch.distributed import run as torchrun

from trainkit.__main__ import _make_parser, main
from trainkit.tools.commands.launch import choose_exit_code

ROOT = Path(__file__).parents[3]
STOPPABLE = ROOT / "tests" / "run" / "stoppable.py"
TWO = ["launch", "--nproc-per-node", "2"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def launch(log, *arguments):
    """Run the command on two ranks to its end; return its exit code and what it printed."""
    process = start_command([*TWO, *arguments], log, ENV)
    process.join()
    return process.exitcode, log.read_text()


def wait_for(find):
    deadline = time.monotonic() + 60
    while not find():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_code_says_that_all_is_saved(number, tmp_path):
    flags = ["--max-restarts", "3", STOPPABLE, tmp_path, "2000", "0.02"]
    pids = [tmp_path / f"pid_{rank}" for rank in range(2)]
    process = start_command([*TWO, *flags], tmp_path / "log", ENV)
    try:
        metrics = tmp_path / "metrics_0.jsonl"
        wait_for(lambda: all(x.exists() for x in pids) and metrics.exists() and metrics.read_text())
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == 75, (tmp_path / "log").read_text()
    finally:
        for pid in (process.pid, *(int(x.read_text()) for x in pids if x.exists())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.join()
    assert (tmp_path / "state.json").exists()
    ends = [(tmp_path / f"ends_{rank}").read_text().splitlines() for rank in range(2)]
    assert [len(lines) for lines in ends] == [1, 1], "the agent has started the workers again"
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last == ("launch: exit code 75; the workers of this machine: 75 on rank 0, 75 on rank 1")


def test_what_a_recipe_refuses_is_64(tmp_path):
    recipe = ROOT / "recipes" / "pretrain.py"
    flags = [recipe, "--tp", "3", "--out", tmp_path / "run"]
    command = [sys.executable, "-m", "trainkit", *TWO, *flags]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stderr
    assert "launch: exit code 64; the workers of this machine: " in done.stderr


@pytest.mark.parametrize(
    ("ends", "code"),
    [("sys.exit(70)", 70), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)],
)
def test_a_crash_is_the_code_of_the_rank_that_crashed(ends, code, tmp_path):
    script = tmp_path / "crash.py"
    script.write_text(
        "import os, sys, time\n"
        f"if os.environ['RANK'] == '1':\n    {ends}\n"
        f"else:\n    time.sleep({3 if code else 0})\n"
    )
    # torchrun would take --run for an abbreviation of its own --run-path.
    assert launch(tmp_path / "log", script, "--run", tmp_path)[0] == code


def test_agents_that_do_not_meet_are_68(tmp_path):
    place = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    conf = ["--rdzv-conf", "join_timeout=1", "--local-addr", "127.0.0.1"]
    log, endpoint = tmp_path / "log", f"127.0.0.1:{free_port()}"
    code, printed = launch(log, *place, endpoint, *conf, STOPPABLE)
    assert code == 68
    assert "launch: the agents did not meet, or have lost one another: Rendezvous" in printed


def test_wrong_use_is_64_and_help_is_torchrun_s_under_our_name(capfd):
    assert main(["launch", "--nproc-per-nodes", "2"]) == 64
    assert "python -m trainkit launch: error: " in capfd.readouterr().err
    assert main(["launch", "--help"]) == 0
    out = capfd.readouterr().out
    assert "it ends with the exit code of its workers" in out
    assert "--max-restarts" in out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--nnodes", "1:2", "--rdzv-backend", "c10d"], "1"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], "1"),
        (["--nnodes", "2"], None),
        (["--standalone"], None),
    ],
)
def test_agents_may_join_later_where_there_can_be_several(flags, expected, monkeypatch):
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.setattr(os, "environ", {x: os.environ[x] for x in os.environ if x != name})
    found = []
    monkeypatch.setattr(torchrun, "run", lambda _: found.append(os.environ.get(name)))
    assert main(["launch", *flags, "a.py"]) == 0
    assert found == [expected]


def test_every_word_after_launch_is_torchrun_s():
    words = ["--max-restarts", "3", "a.py", "--help", "--json", "--", "-x"]
    assert _make_parser().parse_args(["launch", *words]).arguments == words


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([75, 75], 75),
        ([75, -15], 75),
        ([68, 70], 70),
        ([75, 1], 1),
        ([76, 75], 76),
        ([68, -9], 137),
        ([-15, -15], 143),
        ([68, -15], 68),
        ([-15, -11], 139),
        ([0, 75], 75),
    ],
)
def test_the_cause_comes_before_what_it_did_to_others(codes, code):
    assert choose_exit_code(dict(enumerate(codes))) == code
    assert choose_exit_code(dict(enumerate(reversed(codes)))) == code
