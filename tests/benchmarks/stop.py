"""Cost of asking, at the end of each step, whether to stop: beside a step of 20 ms on two ranks.

Run `python tests/benchmarks/stop.py`. `stopping()` reads a vote that was posted a step ago and
posts the next one; `agree` posts and waits. Ranks meet before the clock starts, as they do at the
end of a step, and the three ways are timed in turns; medians are printed.
"""

import statistics
import time

import torch
import torch.distributed as dist

from trainkit.collectives import agree
from trainkit.mesh import axis_from_group, twin_axis
from trainkit.runtime.signals import stop_votes, trap_signals
from trainkit.testing import run_ranks

STEP, STEPS, TURNS, REACH = 0.02, 25, 12, 0.5


def work(seconds):
    """Compute for so long, as a step does."""
    x, end = torch.randn(128, 128), time.perf_counter() + seconds
    while time.perf_counter() < end:
        x = torch.tanh(x @ x)


def microseconds(asking):
    """Return what `asking` takes at the end of each step, by the clock and of this thread's CPU."""
    taken = []
    for _ in range(STEPS):
        work(STEP)
        dist.barrier()
        begin, busy = time.perf_counter(), time.thread_time()
        asking()
        busy, seconds = time.thread_time() - busy, time.perf_counter() - begin
        taken.append((1e6 * seconds, 1e6 * busy))
    return taken


def measure():
    """Return the times of each way on this rank."""
    world = axis_from_group(dist.group.WORLD)
    taken = {}
    with (
        trap_signals() as asked,
        twin_axis(world) as control,
        stop_votes(asked, world) as stopping,
    ):
        ways = {
            "asked() alone": asked,
            "stopping()": stopping,
            "agree(asked()), which waits": lambda: agree(asked() is not None, control),
        }
        for _ in range(TURNS):
            for name, way in ways.items():
                taken.setdefault(name, []).extend(microseconds(way))
    return taken


def main():
    """Print the table."""
    found = run_ranks(measure, 2, timeout=300)
    print(f"a step of {STEP * 1e3:g} ms, two ranks, {STEPS * TURNS} steps each way; all ranks")
    for name in found[0]:
        columns = zip(*(pair for rank in found for pair in rank[name]), strict=True)
        wall, busy = map(statistics.median, columns)
        share = 100 * wall * 1e-6 / STEP
        reach = f"reach {REACH:g} %" if name == "stopping()" else ""
        print(f"{name:30} {wall:8.1f} us {share:7.3f} %   CPU {busy:6.1f} us   {reach}")


if __name__ == "__main__":
    main()
