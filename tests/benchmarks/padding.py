"""Time of attention over rows of padding, against a full row: forward and backward.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/padding.py`. The rows are timed in turns, and a ratio
is the median of the turns' ratios. It exits with 1 when a blank row costs more than the bound.
"""

import statistics
import sys
import time

import numpy as np
import torch

from trainkit.attention import sdpa
from trainkit.attention.blocks import BlockSpans, cpu_flash, matmul
from trainkit.batch import collate_bins, make_padding_batch
from trainkit.data import TokenCorpus
from trainkit.packing import pack_bins

TOKENS, HEADS, DIM, TURNS, BOUND = 4096, 8, 64, 7, 0.1


def row_of(size):
    """The spans of a row with one document of some tokens."""
    corpus = TokenCorpus(np.zeros(size, np.int64), np.array([0, size]))
    return collate_bins(corpus, pack_bins(corpus.lengths, TOKENS), [0]).spans


def by_sdpa(qkv, d_out, spans):
    """What runs without a ring."""
    qkv = [x[None].requires_grad_() for x in qkv]
    torch.autograd.grad(sdpa(*qkv, spans=spans), qkv, d_out[None])


def by_kernel(kernel):
    """What runs in a ring, on a rank's own keys."""

    def run(qkv, d_out, spans):
        block = BlockSpans(spans, spans, causal=True, scale=0.125)
        kernel.backward(d_out, qkv, kernel.forward(qkv, block), block)

    return run


def seconds(run, spans):
    *qkv, d_out = torch.randn(4, TOKENS, HEADS, DIM)
    start = time.perf_counter()
    run(tuple(qkv), d_out, spans)
    return time.perf_counter() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = {
        "full": row_of(TOKENS),
        "3 tokens": row_of(3),
        "blank": make_padding_batch(1, TOKENS).spans,
    }
    runs = {"sdpa": by_sdpa, "cpu_flash": by_kernel(cpu_flash), "matmul": by_kernel(matmul)}
    worst = 0.0
    for name, run in runs.items():
        turns = [[seconds(run, spans) for spans in rows.values()] for _ in range(TURNS + 1)][1:]
        full = statistics.median(turn[0] for turn in turns)
        ratios = [statistics.median(turn[i] / turn[0] for turn in turns) for i in (1, 2)]
        worst = max(worst, ratios[1])
        print(
            f"{name:10} full {1e3 * full:7.1f} ms, 3 tokens {ratios[0]:.3f}, blank {ratios[1]:.3f}"
        )
    sys.exit(worst > BOUND)
