"""Time of ring attention on two ranks over plain attention on one, forward and backward.

Run `python tests/benchmarks/ring.py`. One row of one long document, and one of many documents; one
thread per rank, so two free cores are needed. Each rank computes half of the work of the whole: at
best the ratio is 0.5; on a busy machine the processor's time still tells. The table ends with the
work of each rank of larger rings, counted in scores.
"""

import time

import numpy as np
import torch
import torch.distributed as dist

from trainkit.attention import sdpa
from trainkit.attention.ring import _make_views, ring
from trainkit.batch.shards import zigzag_shard
from trainkit.mesh import parallel_session
from trainkit.tools.testing import run_ranks
from trainkit.types import Axis, Share, Spans

TOKENS, HEADS, KV_HEADS, DIM, TURNS = 4096, 8, 2, 64, 5
ROWS = {"1 document": [TOKENS], "16 documents": [TOKENS // 32] * 8 + [3 * TOKENS // 32] * 8}


def spans_of(lengths):
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return Spans(bounds, np.array(lengths), max(lengths))


def seconds(attend, qkv, d_out, spans):
    """Return seconds of forward and backward between two barriers, and of this process's work."""
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    torch.autograd.grad(attend(*qkv, spans=spans), qkv, d_out)
    worked = time.process_time() - worked
    dist.barrier()
    return np.array([time.perf_counter() - start, worked])


def turns(lengths):
    """Return [ring, plain] times, in turns; the plain one runs on rank 0 while rank 1 waits."""
    with parallel_session(ring=2) as ps:
        bounds = np.cumsum([0, *lengths])
        make = torch.Generator().manual_seed(0)
        whole = [
            torch.randn(1, TOKENS, heads, DIM, generator=make)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        part = [zigzag_shard(x, ps.ring.share, cu_seqlens=bounds) for x in whole]
        for x in (*whole[:3], *part[:3]):
            x.requires_grad_()
        local = spans_of([length // 2 for length in lengths])

        def nothing(q, k, v, *, spans):
            del spans
            return q + k.sum() + v.sum()

        def both():
            alone = sdpa if ps.ring.index == 0 else nothing
            ring_ = seconds(ring(ps.ring), part[:3], part[3], local)
            return np.stack([ring_, seconds(alone, whole[:3], whole[3], spans_of(lengths))])

        both()
        return np.stack([both() for _ in range(TURNS)])


def scores(count, lengths):
    """Return how many scores each rank of a ring computes."""

    def of_rank(rank):
        axis = Axis("ring", Share(rank, count))
        views = _make_views(spans_of([n // count for n in lengths]), axis, scale=1.0)
        total = 0
        for view in views:
            q, k = view.block.queries.lengths, view.block.keys.lengths
            total += int((q * (q + 1) // 2 if view.block.causal else q * k).sum())
        return total

    return [of_rank(rank) for rank in range(count)]


def main():
    print(f"{TOKENS} tokens, {HEADS} heads over {KV_HEADS} key heads of {DIM}, fp32")
    for name, lengths in ROWS.items():
        timed = 1e3 * run_ranks(turns, 2, lengths, timeout=300)[0]
        ratios = np.median(timed[:, 0] / timed[:, 1], axis=0)
        (ring_, _), (plain, _) = np.median(timed, axis=0)
        print(
            f"{name:14} ring of 2 {ring_:8.1f} ms   plain {plain:8.1f} ms   ratio {ratios[0]:5.2f}"
            f"   of the processor's time on a rank {ratios[1]:5.2f}"
        )
    for count in (2, 4, 8):
        work = scores(count, ROWS["16 documents"])
        whole = sum(n * (n + 1) // 2 for n in ROWS["16 documents"])
        print(
            f"ring of {count}: a rank computes {max(work) / whole:.4f} of the scores, the least "
            f"{min(work) / max(work):.4f} of the most"
        )


if __name__ == "__main__":
    main()
