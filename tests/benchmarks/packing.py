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

from trainkit.packing import best_fit, first_fit, make_balanced_fit, next_fit, pack_bins

CAPACITY, TURNS, MILLION = 4096, 21, 1_000_000
GROUPS = (100_000, 0)
HUGE = 100 * MILLION
BY_NAME = {fit.__name__: fit for fit in (best_fit, first_fit, next_fit)}


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
        (fit, size)
        for fit in (best_fit, first_fit, next_fit, make_balanced_fit(8))
        for size in GROUPS
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
    for case, together in enumerate(turns):
        fit, size = cases[case]
        times = (1e3 * f(x) for x in (alone[case], together) for f in (min, statistics.median))
        figures = "{:12.1f} {:8.1f} {:12.1f} {:8.1f}".format(*times)
        print(f"{fit.__name__:12} {size:10,} {figures} {num_bins[case]:9,}")


def ten_million():
    large = documents(10 * MILLION)
    for size in GROUPS:
        ten = [seconds(large, group_size=size)[0] for _ in range(5)]
        print(f"best_fit, 10,000,000 documents, group_size {size:,}: {min(ten):.3f} s")


def first_call(name, size, count):
    """Print the time of the one packing of a process, in seconds; a tiny one loads the code."""
    fit = BY_NAME[name]
    seconds(documents(1000), fit=fit, group_size=size)
    print(seconds(documents(count), fit=fit, group_size=size)[0])


def growth(turns=5):
    """Print what four times the documents cost, each packing the first and only one of a process.

    That is how plans are made: a run packs a corpus once. Every size then gets its memory from the
    system, which clears it in the time that is measured. Called again and again, as in `table`, a
    million documents come out several times cheaper by the document, since the allocator hands out
    blocks of up to 32 MiB again as they are, and only those: the ratio would be that of used memory
    to new. Sizes take turns, and the best of each counts.
    """
    counts = [MILLION, 4 * MILLION]
    for name in BY_NAME:
        for size in GROUPS:
            command = [sys.executable, __file__, "--first-call", name, str(size)]
            times = [
                [float(subprocess.check_output([*command, str(count)])) for count in counts]
                for _ in range(turns)
            ]
            one, four = np.min(times, 0)
            print(
                f"{name}, group_size {size:,}, first call of a process: {1e3 * one:.0f} ms; "
                f"4 million documents cost {four / one:.2f} x one million"
            )


def capacities():
    """Print the cost of 16 times the capacity, with documents 16 times as long."""
    lengths = documents(MILLION // 2)
    few = np.clip(lengths * 16, 1, CAPACITY * 16)
    for fit in BY_NAME.values():
        pairs = [
            (seconds(few, CAPACITY * 16, fit=fit)[0], seconds(lengths, fit=fit)[0])
            for _ in range(7)
        ]
        ratio = min(a for a, _ in pairs) / min(b for _, b in pairs)
        print(f"{fit.__name__}: 16 x the capacity and the lengths cost {ratio:.2f} x")


START = """
import time
start = time.perf_counter()
import numpy as np
from trainkit.packing import best_fit, first_fit, next_fit, pack_bins
for fit in (best_fit, first_fit, next_fit):
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
    parser.add_argument("--first-call", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call is not None:
        name, size, count = options.first_call
        first_call(name, int(size), int(count))
    elif options.huge_group is not None:
        huge(options.huge_group)
    elif options.huge:
        for size in GROUPS:
            subprocess.run([sys.executable, __file__, f"--huge-group={size}"], check=True)
    else:
        table()
        ten_million()
        growth()
        capacities()
        second_start()


if __name__ == "__main__":
    main()
