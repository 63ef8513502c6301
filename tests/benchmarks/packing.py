"""Time and memory of `pack_bins`, corpus order and pieces included, on one core.

Run `python tests/benchmarks/packing.py`; with `--huge` it packs 10^8 documents instead, each
grouping in a process of its own, and prints the peak of the process' memory. Lengths are
log-normal, cut at 4,096, and so is the capacity. Each fit is timed alone, called again and again as
timeit does, and in turns with the others, which a busy machine disturbs all alike, but where each
call finds the memory as another fit has left it; the table has the best and the median of both.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

from trainkit.packing import balanced, best_fit, first_fit, pack_bins, sequential

CAPACITY, TURNS, MILLION = 4096, 21, 1_000_000
GROUPS = (100_000, 0)
HUGE = 100 * MILLION


def documents(count):
    lengths = np.random.default_rng(0).lognormal(6, 1.5, count)
    return np.clip(lengths, 1, CAPACITY, out=lengths).astype(np.int64)


def seconds(lengths, capacity=CAPACITY, **arguments):
    start = time.perf_counter()
    bins = pack_bins(lengths, capacity, **arguments)
    return time.perf_counter() - start, len(bins)


def table():
    lengths = documents(MILLION)
    print(f"{MILLION:,} documents, lower bound {-(-int(lengths.sum()) // CAPACITY):,} bins")
    cases = [
        (fit, size) for fit in (best_fit, first_fit, sequential, balanced(8)) for size in GROUPS
    ]

    def call(case):
        fit, size = cases[case]
        return seconds(lengths, fit=fit, group_size=size)

    num_bins = [call(case)[1] for case in range(len(cases))]  # compiled now
    alone = [[call(case)[0] for _ in range(TURNS)] for case in range(len(cases))]
    turns = zip(*([call(case)[0] for case in range(len(cases))] for _ in range(TURNS)), strict=True)
    print(
        f"{'ms':23} {'alone: best':>12} {'median':>8} {'turns: best':>12} {'median':>8} {'bins':>9}"
    )
    for case, beside in enumerate(turns):
        fit, size = cases[case]
        times = (1e3 * f(x) for x in (alone[case], beside) for f in (min, statistics.median))
        figures = "{:12.1f} {:8.1f} {:12.1f} {:8.1f}".format(*times)
        print(f"{fit.__name__:12} {size:10,} {figures} {num_bins[case]:9,}")


def growth():
    """Print 10^7 documents, the cost of four times the documents, and of 16 times the capacity.

    The allocator hands the memory of a million documents out again as it is; that of four million
    and more comes from the system, which clears it first, in the time that is measured.
    """
    large = documents(10 * MILLION)
    for size in GROUPS:
        ten = [seconds(large, group_size=size)[0] for _ in range(5)]
        print(f"best_fit, 10,000,000 documents, group_size {size:,}: {min(ten):.3f} s")
    del large
    counts = (MILLION, 4 * MILLION, 16 * MILLION)
    corpora = [documents(count) for count in counts]
    for fit in (best_fit, first_fit, sequential):
        for size in GROUPS:
            turns = [
                [seconds(lengths, fit=fit, group_size=size)[0] for lengths in corpora]
                for _ in range(7)
            ]
            one, four, sixteen = np.min(turns, 0)
            print(
                f"{fit.__name__}, group_size {size:,}: 4 million documents cost {four / one:.2f} x "
                f"one million, 16 million {sixteen / four:.2f} x 4 million"
            )
    lengths = corpora[0]
    for fit in (best_fit, first_fit, sequential):
        few = np.clip(lengths[: MILLION // 2] * 16, 1, CAPACITY * 16)
        pairs = [
            (seconds(few, CAPACITY * 16, fit=fit)[0], seconds(lengths[: MILLION // 2], fit=fit)[0])
            for _ in range(7)
        ]
        ratio = min(a for a, _ in pairs) / min(b for _, b in pairs)
        print(f"{fit.__name__}: 16 x the capacity and the lengths cost {ratio:.2f} x")


START = """
import time
start = time.perf_counter()
import numpy as np
from trainkit.packing import best_fit, first_fit, pack_bins, sequential
for fit in (best_fit, first_fit, sequential):
    pack_bins(np.array([5, 3, 2, 6]), 8, fit=fit)
print(time.perf_counter() - start)
"""


def second_start():
    """Print what a process pays that finds the compiled code on disk."""
    times = [float(subprocess.check_output([sys.executable, "-c", START])) for _ in range(4)][1:]
    print(
        f"a further process, import and first calls of three fits: {statistics.median(times):.2f} s"
    )


def huge(size):
    lengths = documents(HUGE)
    took, num_bins = seconds(lengths, group_size=size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{HUGE:,} documents, group_size {size:,}: {took:.1f} s, {num_bins:,} bins, "
        f"peak {peak:.2f} GB"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--huge", action="store_true", help="10^8 documents, and the memory")
    parser.add_argument("--huge-group", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.huge_group is not None:
        huge(options.huge_group)
    elif options.huge:
        for size in GROUPS:
            subprocess.run([sys.executable, __file__, f"--huge-group={size}"], check=True)
    else:
        table()
        growth()
        second_start()


if __name__ == "__main__":
    main()
