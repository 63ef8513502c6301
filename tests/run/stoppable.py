"""The smallest recipe that can be stopped: it counts, and its checkpoint is one file.

    torchrun --nproc-per-node 2 tests/run/stoppable.py OUT STEPS SECONDS

Every rank writes its process number to OUT/pid_N when it begins, and appends a line to OUT/ends_N
when it is done: its exit code, the step, and who stopped it.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

from trainkit.collectives import all_sum, any_rank
from trainkit.mesh import parallel_session
from trainkit.mesh.launch import describe_launch
from trainkit.run.errors import EXIT_SAVED, report_errors, run_main
from trainkit.run.lock import lock_run
from trainkit.run.signals import open_stop_vote, trap_signals


def nothing(place, step):
    """Do nothing at this place of the recipe; a test's fault may be here."""
    del place, step


def save(out, step, axis, at):
    """Save the step on the first rank, and return when all know that it is saved."""
    at("save", step)
    if axis.index == 0:
        new = out / "state.json.new"
        new.write_text(json.dumps({"step": step}))
        new.replace(out / "state.json")
    any_rank(True, axis)


def load(out):
    """Return the step that was saved last, 0 at the beginning."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((out / "state.json").read_text())["step"]
    return 0


def run_steps(out, ps, stopping, *, steps, seconds, save_every, at):
    """Count up to `steps`, or until told to stop; return (step, who stopped it)."""
    step = load(out)
    at("load", step)
    with (out / f"metrics_{ps.world.index}.jsonl").open("a") as metrics:
        while step < steps:
            at("step", step)
            time.sleep(seconds)
            assert int(all_sum(torch.tensor(step), ps.world)) == step * ps.world.count
            step += 1
            metrics.write(f'{{"step": {step}}}\n')
            metrics.flush()
            stop = stopping()
            if stop or step % save_every == 0:
                save(out, step, ps.world, at)
            if stop:
                return step, stop
    return step, None


def train(out, steps=10, seconds=0.0, *, save_every=1000, at=nothing):
    """Run the recipe in this process; return (exit code, step, who stopped it)."""
    with (
        trap_signals() as stop_reason,
        parallel_session() as ps,
        lock_run(out, ps.world),
        open_stop_vote(stop_reason, ps.world) as stopping,
    ):
        step, stop = run_steps(
            out, ps, stopping, steps=steps, seconds=seconds, save_every=save_every, at=at
        )
        return EXIT_SAVED if stop else 0, step, stop


def main(argv=None, further=nothing):
    """Read the command line and train."""
    out, steps, seconds = argv or sys.argv[1:]
    out, steps, seconds = Path(out), int(steps), float(seconds)
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))

    def at(place, step):
        further(place, step)
        if place == "load":
            (out / f"pid_{rank}").write_text(str(os.getpid()))

    with report_errors(out):
        for note in describe_launch(os.environ):
            print(f"note: {note}")
        code, step, stop = train(out, steps, seconds, at=at)
        with (out / f"ends_{rank}").open("a") as file:
            file.write(json.dumps({"code": code, "step": step, "stop": stop}) + "\n")
        return code


if __name__ == "__main__":
    run_main(main)
