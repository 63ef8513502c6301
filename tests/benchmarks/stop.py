"""Cost of asking, at the end of each step, whether to stop; and its share of a step on two ranks.

    python tests/benchmarks/stop.py

`stopping()` reads a vote that was posted a step ago and posts the next one; `any_rank` posts and
waits. Ranks meet before the clock starts, as they do at the end of a step, and the three ways are
timed in turns. Between two of them lies a step of the default recipe's model (8 rows of 256 over
two ranks, FSDP), which is timed as well: the share is of that. Medians over all ranks are printed,
and the length of a step from which on the vote takes less than the bound, 0.5 % of it.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from canary import make

import trainkit as tk
from trainkit.collectives import any_rank
from trainkit.mesh.axes import open_gloo_axis
from trainkit.run.signals import open_stop_vote, trap_signals
from trainkit.tools.testing import run_ranks

TURNS, MAX_PART = 60, 0.005


def measure():
    """Return on this rank the seconds of steps, and those of each way, by the clock and CPU."""
    torch.set_num_threads(1)
    taken = {"step": []}
    with (
        trap_signals() as stop_reason,
        tk.parallel_session() as ps,
        open_gloo_axis(ps.world) as control,
        open_stop_vote(stop_reason, ps.world) as stopping,
    ):
        stages, optimizer, backward = make(ps, "tiny")
        params = tk.get_parameters(stages)
        ways = {
            "stop_reason() alone": stop_reason,
            "stopping()": stopping,
            "agree(stop_reason()), which waits": lambda: any_rank(
                stop_reason() is not None, control
            ),
        }
        for _ in range(TURNS):
            for name, way in ways.items():
                begin = time.perf_counter()
                backward()
                tk.clip_and_step(params, optimizer, lr=1e-9, max_norm=1.0, axis=ps.pp)
                taken["step"].append((time.perf_counter() - begin, 0.0))
                dist.barrier()
                begin, busy = time.perf_counter(), time.thread_time()
                way()
                busy, seconds = time.thread_time() - busy, time.perf_counter() - begin
                taken.setdefault(name, []).append((seconds, busy))
    return taken


def main():
    """Print the table; exit with 1 when the bound is missed."""
    found = run_ranks(measure, 2, timeout=500)

    def medians(name):
        columns = zip(*(pair for rank in found for pair in rank[name]), strict=True)
        return [statistics.median(column) for column in columns]

    step, vote = medians("step")[0], medians("stopping()")[0]
    print(f"a step of the default model, 8 x 256 over two ranks: {1e3 * step:.1f} ms")
    for name in found[0]:
        if name != "step":
            wall, busy = medians(name)
            share = f"{1e6 * wall:8.1f} us {wall / step:8.3%} of it"
            print(f"{name:28} {share}   CPU {1e6 * busy:6.1f} us")
    print(f"stopping() is below {MAX_PART:.1%} of steps of {1e3 * vote / MAX_PART:.0f} ms and more")
    kept = vote <= MAX_PART * step
    print(f"the bound is {MAX_PART:.1%}: {'kept' if kept else 'NOT KEPT'}")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
