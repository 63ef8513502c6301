"""What a rank does in the tests of the watch and of the meeting: a few steps, and one fault.

It is run as a script in a process of its own, with the values that `processes.py` gives it.
"""

import mmap
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import torch

import trainkit as tk
from trainkit.run import clocks, watchdog
from trainkit.run.errors import report_errors, run_main
from trainkit.run.startup import check_ranks_agree, make_code_facts
from trainkit.run.watchdog import watch_ranks

GIVEN = globals()["given"]
FAULT, FOLDER, RANK = GIVEN["fault"], GIVEN["folder"], GIVEN["rank"]
GUILTY, STEP, LAST = 1, 3, 6


def cut_off(folder):
    """Read from a mapped file that is truncated meanwhile."""
    path = folder / "tokens"
    path.write_bytes(bytes(100_000))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        os.truncate(path, 0)
        return mapped[50_000]


def fill_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    return torch.ones(2**30)


def fail(text):
    raise ValueError(text)


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), SIGKILL),
    "bare": lambda: os.kill(os.getpid(), SIGKILL),
    "stop": lambda: os.kill(os.getpid(), SIGSTOP),
    "term": lambda: os.kill(os.getpid(), SIGSTOP),
    "hang": lambda: time.sleep(1000),
    "alone": lambda: time.sleep(1000),
    "raise": lambda: fail("bad sample 7"),
    "raise0": lambda: fail("cannot prune"),
    "exit": lambda: sys.exit(0),
    "memory": fill_memory,
    "mapped": lambda: cut_off(Path(FOLDER)),
}


def train(ps, phase):
    rank, guilty = ps.world.index, 0 if FAULT in ("raise0", "alone", "prune") else GUILTY
    for step in range(1, LAST + 1 if FAULT != "slow" else 15):
        phase(f"step {step}", allow=30 if FAULT in ("slow", "term") else 4)
        time.sleep(0.5 if FAULT == "slow" and rank == GUILTY else 0.1)
        if step == STEP and rank == guilty:
            time.sleep(0.5)  # so that the phase has been told
            if FAULT == "return":
                return
            if FAULT == "prune":
                phase("prune", allow=60)
                time.sleep(7)
            FAULTS.get(FAULT, lambda: None)()
        tk.all_sum(torch.ones(3), ps.world)


def main():
    started = time.monotonic()
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(GIVEN["world"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(GIVEN["port"])}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said = os.open(f"{FOLDER}/said_{RANK}_{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    start = timedelta(seconds=GIVEN["start_timeout"])
    with (
        report_errors(FOLDER),
        tk.parallel_session(timeout=timedelta(seconds=60), start_timeout=start) as ps,
    ):
        if FAULT == "differ":
            check_ranks_agree(ps.world, {"seed": RANK % 2, "width": 8} | make_code_facts())
        if FAULT == "bare":
            train(ps, lambda *_, **__: None)
            return 0
        if FAULT == "slow":
            clocks._FEWEST = 5
            watchdog._LOOKS = 2

        def asked():
            return "SIGTERM" if FAULT == "term" and time.monotonic() > started + 2 else None

        with watch_ranks(FOLDER, ps.world, stop_reason=asked, allow=60, grace=3) as phase:
            train(ps, phase)
    return 0


if __name__ == "__main__":
    run_main(main)
