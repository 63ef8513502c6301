"""What each lever on memory takes off a step's peak, what the planner says, and what it costs.

    OMP_NUM_THREADS=1 python tests/benchmarks/memory.py [--markdown]

One model, in fp32 with AdamW, a row on each rank. The peak is of the bytes of all storages that
live at once, parameters and optimizer state among them, in the rank that has most; of what a lever
moves to the host it is left out, though on a CPU both are one memory. The last line is no peak, but
what `offload_state` frees between steps. The estimate is that of `planning.estimate_memory`. Times
are medians over pairs of steps, the lever's and that of the line that it is compared with, taken by
turns. Exits with 1 where an estimate is not within 10 % of what was measured.
"""

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import measured_step`

import attrs
import torch.distributed as dist
from measured_step import first_state, measure_choices, step_of

import trainkit as tk
from trainkit import parallel
from trainkit.models import DecoderConfig
from trainkit.tools.planning import Job, estimate_memory
from trainkit.tools.testing import run_ranks
from trainkit.types import Layout, Precision

BOUND, PAIRS, ROWS = 0.1, 3, 1
FP32 = Precision(compute="fp32")
CONFIG = DecoderConfig(vocab_size=16_384, width=256, layers=4, heads=8, kv_heads=8, mlp_width=768)


PLAIN = Job(config=CONFIG, row_length=512, rows=ROWS, microbatch=ROWS, precision=FP32)
job_with = functools.partial(attrs.evolve, PLAIN)


@attrs.frozen
class Lever:
    """A line: a layout, a job for one rank of it, and the line that it is compared with."""

    layout: Layout = attrs.field(factory=Layout)
    job: Job = PLAIN
    compared_with: str = "none"
    in_backward: bool = False

    @property
    def work(self):
        """The job, with as many rows on each data-parallel rank as it has."""
        return attrs.evolve(self.job, rows=self.job.rows * self.layout.count("dp"))


ON_TWO, ON_FOUR = "FSDP, 2 ranks", "FSDP, 4 ranks"
IN_FOUR = "4 microbatches, reduce last"
LATER = job_with(rows=4, microbatch=1)
LEVERS = {
    "none": Lever(),
    "logits whole, not in chunks": Lever(job=job_with(loss="plain")),
    "recompute selective": Lever(job=job_with(recompute="selective")),
    "recompute attention+products/2": Lever(job=job_with(recompute="attention+products/2")),
    "recompute 0.4": Lever(job=job_with(recompute="0.4")),
    "recompute full": Lever(job=job_with(recompute="full")),
    "the same, step in backward": Lever(
        job=job_with(recompute="full"), compared_with="recompute full", in_backward=True
    ),
    "activation offload, 4 MiB stay": Lever(job=job_with(offload_activations=2**22)),
    "moments in bf16": Lever(job=job_with(optimizer_options={"moments": "bf16"})),
    "moments in 8 bits": Lever(job=job_with(optimizer_options={"moments": "8bit"})),
    "a mean of the weights": Lever(job=job_with(mean=True)),
    "optimizer offload": Lever(job=job_with(offload_optimizer=True)),
    ON_TWO: Lever(Layout(dp_shard=2), compared_with=ON_TWO),
    "ends apart": Lever(Layout(dp_shard=2, separate_ends=True), compared_with=ON_TWO),
    "3 blocks ahead": Lever(Layout(dp_shard=2, prefetch=3), compared_with=ON_TWO),
    "all offloaded": Lever(Layout(dp_shard=2, cpu_offload=True), compared_with=ON_TWO),
    IN_FOUR: Lever(Layout(dp_shard=2), LATER, compared_with=IN_FOUR),
    "4 microbatches, reduce each": Lever(
        Layout(dp_shard=2, reduce="each"), LATER, compared_with=IN_FOUR
    ),
    ON_FOUR: Lever(Layout(dp_shard=4), compared_with=ON_FOUR),
    "reshard over 2 of 4": Lever(Layout(dp_shard=4, reshard_over=2), compared_with=ON_FOUR),
}


def peaks(names):
    """Return what a rank measures of some lines, which have one number of ranks."""
    found = []
    for name in names:
        lever = LEVERS[name]
        with tk.parallel_session(lever.layout) as ps:
            one = measure_choices(lever.work, lever.layout, ps, in_backward=lever.in_backward)
        found.append(one.peak)
    return found


def ratios(names):
    """Return the median of the times of steps over those of the line that each is compared with."""
    found = []
    for name in names:
        lever = LEVERS[name]
        pair = lever, LEVERS[lever.compared_with]
        if pair[0] is pair[1]:
            found.append(1.0)
            continue
        with tk.parallel_session(lever.layout) as ps:
            steps = [one_step(each, ps) for each in pair]
            turns = [[seconds(step, ps) for step in steps] for _ in range(PAIRS + 1)]
        found.append(statistics.median(own / other for own, other in turns[1:]))
    return found


def one_step(lever, ps):
    """Return a function that takes a step as a line says."""
    _, optimizer, backward, finish = step_of(
        lever.work, lever.layout, ps, in_backward=lever.in_backward
    )
    first_state(optimizer, finish)

    def step():
        backward()
        finish()

    return step


def seconds(step, ps):
    if ps.world.count > 1:
        dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


@functools.cache
def found_on(world):
    """Return (peak in bytes, ratio of times) of each line of so many ranks, by name."""
    names = [name for name, lever in LEVERS.items() if lever.layout.world == world]
    if world == 1:
        return dict(zip(names, zip(peaks(names), ratios(names), strict=True), strict=True))
    most = map(max, zip(*run_ranks(peaks, world, names, timeout=900.0), strict=True))
    times = run_ranks(ratios, world, names, timeout=900.0)[0]
    return dict(zip(names, zip(most, times, strict=True), strict=True))


def line_of(name):
    """Return the cells of a line, and the estimate over the peak."""
    lever = LEVERS[name]
    peak, times = found_on(lever.layout.world)[name]
    planned = estimate_memory(
        lever.work, lever.layout, fused_norms=False, in_backward=lever.in_backward
    )
    return format_line(
        name, peak, planned.peak, "-" if name == lever.compared_with else f"{times:.2f}"
    )


def format_line(name, found, planned, times="-"):
    ratio = planned / found
    return [name, f"{found:,}", f"{planned:,}", f"{ratio:.3f}", times], ratio


def line_of_sleep():
    """Return the same of what is freed between steps."""
    lever = LEVERS["none"]
    with tk.parallel_session(lever.layout) as ps:
        stages, optimizer, _, finish = step_of(lever.work, lever.layout, ps)
        first_state(optimizer, finish)
        with parallel.offload_state(stages, optimizer) as freed:
            planned = estimate_memory(lever.work, lever.layout).between_steps
    return format_line("asleep between steps: freed", freed, planned)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print a table of a page")
    is_markdown = parser.parse_args().markdown
    header = ["lever", "peak, bytes", "planned", "planned / peak", "time"]
    lines, off = [header], []
    for cells, ratio in (*map(line_of, LEVERS), line_of_sleep()):
        lines.append(cells)
        off += [cells[0]] if abs(ratio - 1) > BOUND else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for i, cells in enumerate(lines):
        first, *rest = cells
        padded = [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]
        print(f"| {' | '.join(padded)} |" if is_markdown else "  ".join(padded))
        if is_markdown and not i:
            print(f"|{'---|' * len(header)}")
    if off:
        print(f"not within {BOUND:.0%}: {', '.join(off)}")
    sys.exit(bool(off))
