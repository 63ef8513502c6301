"""Start runs of the recipes that tests kill, stop, starve and damage, and examine the results.

`running` starts a recipe on some ranks, each in its own process, and `finish` waits for its end;
between the two a test does harm. `differences` compares two runs by every bit of their numbers,
`committed` lists the checkpoints that verify, `torn` those that do not.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path

import attrs
from faulty_rank import Order, run_rank
from rank_processes import free_port, warm_server

from trainkit.weights.checkpoint.manifest import list_checkpoints, verify_checkpoint

FLAGS = "--row-length 32 --microbatch 1 --warmup 2 --schedule-steps 16 --cache None"
FLAGS += " --sample 1 --eval-every 0"
SAME_FIELDS = ("step", "loss_hex", "grad_norm_hex", "lr_hex", "batch_hash", "tokens_total")
_STEP = re.compile(rb'^\{"step":(\d+),.*\}$', re.MULTILINE)
PATIENCE = 120.0  # seconds; on a quiet machine a run takes one or two


def fault_seed():
    """Return the seed of this run's random choices: TRAINKIT_FAULT_SEED, or a new one."""
    given = os.environ.get("TRAINKIT_FAULT_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(10**6)
    os.environ["TRAINKIT_FAULT_SEED"] = str(seed)  # the same for all files of one run
    return seed


# -------------------------------------------------------------------------------------- processes


def write_text(ground):
    """Write a small corpus that a model can learn, where runs look for it."""
    folder = ground / "text"
    folder.mkdir()
    for i in range(40):
        words = [f"word{(i * j) % 17} = {j}" for j in range(3 + i % 7)]
        (folder / f"{i}.txt").write_text("\n".join(words))
    return ground


@attrs.frozen(eq=False)
class Job:
    """One start of a recipe: its processes and log files by rank."""

    out: Path
    processes: list
    logs: list

    @property
    def pids(self):
        return [process.pid for process in self.processes]

    def codes(self):
        """Return the exit codes by rank; None for a rank that runs, -9 for a killed one."""
        return [process.exitcode for process in self.processes]

    def stderr(self, rank=0):
        """Return the stderr of a rank."""
        return self.logs[rank].with_suffix(".err").read_text(errors="replace")

    def printed(self, rank=0):
        """Return what a rank has printed."""
        return self.logs[rank].with_suffix(".out").read_text(errors="replace")

    def error(self, rank=0):
        """Return the error record of a rank, or {}."""
        records = [x for x in self.stderr(rank).splitlines() if x.startswith("TRAINKIT_ERROR ")]
        return json.loads(records[-1].removeprefix("TRAINKIT_ERROR ")) if records else {}


@contextlib.contextmanager
def running(
    ground, out, *flags, ranks=2, steps=8, faults=(), recipe="pretrain", environ=None, **around
):
    """Start a recipe on some ranks, and kill those that still run at the end of the block.

    `faults` are pairs (name of an injector, its arguments). `around` has the changes around the
    recipe; see SURROUNDINGS in faulty_rank.py.
    """
    given = ["--out", out, "--data", ground / "text", "--steps", steps, "--rows", max(ranks, 2)]
    given += [*FLAGS.split(), *flags]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": free_port()} if ranks > 1 else {}
    logs = Path(tempfile.mkdtemp(dir=ground))
    job = Job(Path(out), [], [logs / str(rank) for rank in range(ranks)])
    try:
        for rank in range(ranks):
            own = {**world, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            own |= {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""} | (environ or {})
            order = Order(
                recipe=recipe,
                flags=[str(flag) for flag in given],
                environ={**os.environ, **{key: str(value) for key, value in own.items()}},
                log=job.logs[rank],
                faults=list(faults),
                surroundings={"no_pictures": True} | around,
            )
            job.processes.append(warm_server().Process(target=run_rank, args=(order,)))
            job.processes[-1].start()
        yield job
    finally:
        for pid in job.pids:
            kill(job, pid, signal.SIGCONT)
        kill_all(job)
        finish(job, 20)


def kill(job, pid, number=signal.SIGKILL):
    """Send a signal to a process of a job, if it still runs."""
    if job.codes()[job.pids.index(pid)] is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(job, number=signal.SIGKILL):
    """Send a signal to all ranks of a job."""
    for pid in job.pids:
        kill(job, pid, number)


def finish(job, patience=PATIENCE, *, ranks=None):
    """Wait for the end of a job, or of some ranks; return all codes, None for ranks that run."""
    deadline = time.monotonic() + patience
    chosen = job.processes if ranks is None else [job.processes[rank] for rank in ranks]
    for process in chosen:
        process.join(max(0.0, deadline - time.monotonic()))
    return job.codes()


def complete(ground, out, *flags, **options):
    """Run a recipe to its end, and check that it succeeds."""
    with running(ground, out, *flags, **options) as job:
        codes = finish(job)
        assert set(codes) == {0}, (codes, *map(job.stderr, range(len(codes))))
        return job


def undisturbed(ground, folder):
    """Return a function from ranks and steps to the directory of an undisturbed run."""
    directories = {}

    def wanted(ranks, steps=8):
        if (ranks, steps) not in directories:
            directories[ranks, steps] = out = Path(folder) / f"undisturbed_{ranks}_{steps}"
            complete(ground, out, "--save-every", steps, ranks=ranks, steps=steps)
        return directories[ranks, steps]

    return wanted


def wait_for(condition, job, patience=PATIENCE, every=0.004):
    """Wait until a condition holds; return whether it did before all of a job had ended."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited for {condition}: {job.stderr()}"
        if None not in job.codes():
            return bool(condition())
        time.sleep(every)
    return True


def is_saving(out):
    """Return whether a save is pending: its staging directory exists."""
    with contextlib.suppress(FileNotFoundError):
        return any(x.name.startswith(".staging") for x in (Path(out) / "checkpoints").iterdir())
    return False


def reached(out, step):
    """Return a condition: a step is in the metrics of a run."""
    metrics = Path(out) / "metrics.jsonl"

    def condition():
        with contextlib.suppress(OSError, IndexError), metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 8192))
            return int(_STEP.findall(file.read())[-1]) >= step
        return False

    return condition


# ------------------------------------------------------------------------------ what a run has left


def lines(out):
    """Return the records of a run's metrics, without a last line that a kill has truncated."""
    path = Path(out) / "metrics.jsonl"
    if not path.exists():
        return []
    complete_lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in complete_lines]


def steps_of(out):
    """Return the steps of a run's metrics."""
    return [line["step"] for line in lines(out)]


def differences(found, wanted):
    """Return the differences of two runs: none if all numbers of all steps are bitwise equal."""
    problems = []
    a, b = lines(found), lines(wanted)
    if [line["step"] for line in a] != list(range(1, len(b) + 1)):
        problems.append(f"steps {[line['step'] for line in a]}, wanted 1 to {len(b)}")
    for x, y in zip(a, b, strict=False):
        problems += [
            f"step {y['step']}: {name} is {x.get(name)}, not {y.get(name)}"
            for name in SAME_FIELDS
            if x.get(name) != y.get(name)
        ]
    ends = [Path(out) / "final.json" for out in (found, wanted)]
    if not all(end.exists() for end in ends) or ends[0].read_text() != ends[1].read_text():
        problems.append("final.json differs")
    return problems


def committed(out):
    """Return the names of the checkpoints that verify, oldest first."""
    every = list_checkpoints(Path(out) / "checkpoints")
    return sorted(path.name for path in every if not verify_checkpoint(path))


def torn(out):
    """Return the names of the checkpoints that do not verify: false commits."""
    every = list_checkpoints(Path(out) / "checkpoints")
    return sorted(path.name for path in every if verify_checkpoint(path))


def tree_hash(folder):
    """Return a hash of all files below a directory, their names and their bytes."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def living(job):
    """Return the pids of a job that still exist."""
    return [pid for pid in job.pids if Path(f"/proc/{pid}").exists()]


def weight_of(pid):
    """Return a process's resident bytes, open files and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(facts["VmRSS"].split()[0]) * 1024, files, int(facts["Threads"])


def weights_at(job, *steps, patience=PATIENCE):
    """Return the `weight_of` rank 0 at each of some steps."""
    found = []
    for step in steps:
        assert wait_for(reached(job.out, step), job, patience, every=0.02), job.stderr()
        found.append(weight_of(job.pids[0]))
    return found
