"""docs/launch/ray_train.py on a cluster of two simulated nodes; `.ci/ray` starts it by hand.

Each part is a line of output, or a failed assertion. The launcher starts in a folder, and --out is
relative to it:
a worker that is killed comes back, and the run ends with the bits of one that nobody disturbed;
`control stop` ends it with 75, and the same command resumes; `control abort` ends that with 76;
a flag that is refused ends it with 64 at the first attempt.
"""

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster

from trainkit.run import control_run

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "pretrain.py"
LAUNCHER = ROOT / "docs" / "launch" / "ray_train.py"
FLAGS = "--cache None --row-length 128 --rows 4 --microbatch 2 --save-every 10 --eval-every 0"
STEPS = 120
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(launcher, out, *flags):
    command = [*launcher, RECIPE, f"--out={out.name}", *FLAGS.split(), *flags]
    return subprocess.Popen(
        [*map(str, command)],
        cwd=out.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, code):
    """Wait for a process; return what it has printed."""
    output, _ = process.communicate(timeout=900)
    assert process.returncode == code, (process.returncode, output[-5000:])
    return output


def read_lines(out):
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return []


def read_events(out):
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def bits_of(out):
    """Return the bits of each line, and the hash of the state at the end."""
    lines = [
        (line["step"], line["batch_hash"], line["loss_hex"], line["grad_norm_hex"])
        for line in read_lines(out)
    ]
    final = json.loads((out / "final.json").read_text())
    return lines, final["state_hash"]


def assert_reported(out, output):
    """Assert that `result.metrics` of Ray has the bits of the last line."""
    [reported] = re.findall(r"^reported to Ray: (.*)$", output, re.MULTILINE)
    reported, last = ast.literal_eval(reported), read_lines(out)[-1]
    for name in ("step", "loss", "loss_hex", "batch_hash", "tokens_total"):
        assert reported[name] == last[name], (name, reported, last)


def wait_for_step(out, step, process):
    while len(read_lines(out)) < step:
        assert process.poll() is None, process.communicate()[0][-5000:]
        time.sleep(0.1)


def kill_a_worker(folder, launcher):
    out = folder / "killed"
    process = start(launcher, out, "--steps", STEPS)
    wait_for_step(out, 25, process)
    victim = json.loads((out / "ranks" / "rank_00001.json").read_text())["pid"]
    os.kill(victim, signal.SIGKILL)
    seen = len(read_lines(out))
    output = finish(process, 0)
    assert find_deaths(output), output  # what the other parts look for, and must not find
    assert_reported(out, output)
    starts = [event for event in read_events(out) if event["event"] == "start"]
    assert len(starts) == 2, starts
    print(
        f"a worker was killed at step {seen}; Ray started all again, from step {starts[1]['step']}"
    )
    whole = folder / "whole"
    finish(start(TORCHRUN, whole, "--steps", STEPS), 0)
    assert bits_of(out) == bits_of(whole)
    print(f"{STEPS} lines and the state have the bits of a run under torchrun: {bits_of(out)[1]}")
    print(f"Ray has the metrics of step {STEPS}, and their bits")


def stop_by_request(folder, launcher):
    out = folder / "stopped"
    for request, code in (("stop", 75), ("abort", 76)):
        seen = len(read_lines(out))
        process = start(launcher, out, "--steps", 100_000, "--sinks", "ray")
        wait_for_step(out, seen + 5, process)
        control_run(out, request)
        output = finish(process, code)
        assert not find_deaths(output), output
        assert_reported(out, output)
        events = read_events(out)
        assert not [line for line in events if line["event"] == "warning"]  # of the sink
        start_of_run = [line for line in events if line["event"] == "start"][-1]
        assert start_of_run["step"] == seen, start_of_run
        print(f"control {request}: from step {seen} to {len(read_lines(out))}, exit code {code}")


def find_deaths(output):
    """Return what Ray says of workers that died, or were started again."""
    return re.findall(r"^.*(?:died|FailurePolicy|WorkerGroupError).*$", output, re.MULTILINE)


def refuse(folder, launcher):
    output = finish(start(launcher, folder / "refused", "--steps", 2, "--tp", 3), 64)
    assert '"code":64' in output, output
    assert "reported to Ray: {}" in output, output
    assert not find_deaths(output), output
    print("a layout that does not fit: refused once, exit code 64")


def main():
    print(f"Ray {ray.__version__}, torch {torch.__version__}, two nodes of one worker each")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    launcher = [sys.executable, LAUNCHER, 2]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in (kill_a_worker, stop_by_request, refuse):
                part(Path(folder), launcher)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
