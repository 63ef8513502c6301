"""Time of each elementwise optimizer's step over that of torch's fused AdamW on as many numbers.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/optimizers.py`. torch steps parameters in fp32. Steps
are timed in turns, in seconds of the processor; a ratio is the median of the turns' ratios. The
second figure is what a step takes for each of 200 vectors of 64 numbers: nearly all of it is
Python. The last one is the first step, which compiles, when nothing is kept from an earlier run:
`NUMBA_CACHE_DIR` of its own. It exits with 1 when a ratio exceeds 1.5 (2 where parameters and
moments are in few bits), or a small parameter takes more than 10 µs.
"""

import os
import statistics
import sys
import tempfile
import time
from functools import partial

os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from torch import nn

from trainkit.optim import Lion, LowPrecisionAdamW, Momentum, ScheduleFree, SignSGD

TURNS, BOUND, BOUND_OF_BOTH, SMALL_BOUND = 15, 1.5, 2.0, 10e-6
LARGE, SMALL = [(2048, 2048)], [(64,)] * 200
FP32, BF16 = torch.float32, torch.bfloat16
ROWS = {
    "adamw, cautious": (partial(LowPrecisionAdamW, cautious=True), FP32),
    "lion": (Lion, FP32),
    "momentum": (Momentum, FP32),
    "signsgd": (SignSGD, FP32),
    "schedule-free": (ScheduleFree, FP32),
    "adamw, moments in bf16": (partial(LowPrecisionAdamW, moments="bf16"), FP32),
    "adamw, moments in 8 bits": (partial(LowPrecisionAdamW, moments="8bit"), FP32),
    "adamw, bf16, stochastic": (partial(LowPrecisionAdamW, rounding="stochastic"), BF16),
    "adamw, bf16, Kahan": (partial(LowPrecisionAdamW, rounding="kahan"), BF16),
    "adamw, bf16, stochastic, moments in bf16": (
        partial(LowPrecisionAdamW, rounding="stochastic", moments="bf16"),
        BF16,
    ),
    "adamw, bf16, stochastic, 8 bits": (
        partial(LowPrecisionAdamW, rounding="stochastic", moments="8bit"),
        BF16,
    ),
}


def make(optimizer, shapes, dtype):
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    names = [f"layers.{i}.weight" for i in range(len(params))]
    return optimizer([{"params": params, "param_names": names}], lr=1e-4, weight_decay=0.1)


def seconds(optimizer):
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def paired(one, other):
    """Return the medians of both in seconds, and that of their ratios."""
    turns = [(seconds(one), seconds(other)) for _ in range(TURNS)]
    medians = [statistics.median(x) for x in zip(*turns, strict=True)]
    return *medians, statistics.median(a / b for a, b in turns)


def main():
    torch.manual_seed(0)
    fused = {
        name: make(partial(torch.optim.AdamW, fused=True), shapes, FP32)
        for name, shapes in (("large", LARGE), ("small", SMALL))
    }
    for optimizer in fused.values():
        optimizer.step()
    good, million = True, 2048 * 2048 / 1e6
    for name, (optimizer, dtype) in ROWS.items():
        large, small = (make(optimizer, shapes, dtype) for shapes in (LARGE, SMALL))
        compiled = seconds(large)
        small.step()
        took, reference, ratio = paired(large, fused["large"])
        each, each_beside, _ = paired(small, fused["small"])
        both = dtype == BF16 and "moments" in optimizer.keywords
        good &= ratio <= (BOUND_OF_BOTH if both else BOUND) and each / 200 <= SMALL_BOUND
        print(
            f"{name}: time x {ratio:.2f} ({took / million * 1e3:.2f} and "
            f"{reference / million * 1e3:.2f} ns each), {each / 200 * 1e6:.0f} µs for a small "
            f"parameter (torch {each_beside / 200 * 1e6:.1f}), first step {compiled:.1f} s",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
