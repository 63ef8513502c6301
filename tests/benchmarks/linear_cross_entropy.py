"""Print what linear_cross_entropy costs over the plain path, forward and backward.

    python tests/benchmarks/linear_cross_entropy.py

Times are paired in one process, one after the other, and the median of the pairs' ratios counts.
Peak memory is the growth of the resident set beyond the inputs, of a process that runs one path
once. Bounds: 0.8 of the plain path's time and a tenth of its memory; the exit code is 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

from trainkit.losses import linear_cross_entropy


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = nn.functional.linear(hidden, weight)
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


PATHS = {"plain": plain, "linear": linear_cross_entropy}


def inputs(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).requires_grad_()
    weight = torch.empty(vocabulary, width).normal_(std=0.05, generator=draw).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=draw)


def seconds(path: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    hidden.grad = weight.grad = None
    gc.collect()
    start = time.perf_counter()
    PATHS[path](hidden, weight, labels).backward()
    return time.perf_counter() - start


def print_peak(path: str, shape: tuple[int, int, int]) -> None:
    """Print the growth of this process's peak resident set, in MiB, when it runs one path once."""
    seconds(path, *inputs(8, 8, 8))  # loads the libraries
    arguments = inputs(*shape)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds(path, *arguments)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def peak_mib(path: str, threads: int, shape: tuple[int, int, int]) -> float:
    words = [sys.executable, __file__, "--peak", path, "--threads", str(threads)]
    names = ("--tokens", "--width", "--vocabulary")
    words += [word for name, size in zip(names, shape, strict=True) for word in (name, str(size))]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", choices=sorted(PATHS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = (args.tokens, args.width, args.vocabulary)
    if args.peak:
        print_peak(args.peak, shape)
        return
    peak = {path: peak_mib(path, args.threads, shape) for path in PATHS}
    arguments = inputs(*shape)
    pairs = [[seconds(path, *arguments) for path in PATHS] for _ in range(args.pairs + 1)][1:]
    times = dict(zip(PATHS, map(statistics.median, zip(*pairs, strict=True)), strict=True))
    time_ratio = statistics.median(linear / plain for plain, linear in pairs)
    memory_ratio = peak["linear"] / peak["plain"]
    print(f"{shape[0]} tokens, width {shape[1]}, vocabulary {shape[2]}, {args.threads} threads")
    for path in PATHS:
        print(f"{path:>7}: {times[path]:6.2f} s {peak[path]:8.0f} MiB")
    print(f"  ratio: {time_ratio:6.3f}   {memory_ratio:8.3f}   (at most 0.800 and 0.100)")
    sys.exit(time_ratio > 0.8 or memory_ratio > 0.1)


if __name__ == "__main__":
    main()
