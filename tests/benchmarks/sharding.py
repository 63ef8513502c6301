"""Cost of dealing out a sequence over a plain copy, and of summing gradients over its ranks.

Run `python tests/benchmarks/sharding.py`. The functions are timed in turns, and the ratio is the
median of the turns' ratios, so that a busy machine disturbs all alike. Bound: `shard_batch` takes
at most 3 copies of its result.
"""

import functools
import statistics
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trainkit.batch import make_padding_batch, split_batch
from trainkit.batch.shards import contiguous_shard, shard_batch, spans_of_runs, zigzag_shard
from trainkit.grads import sync_sp_grads
from trainkit.mesh import parallel_session
from trainkit.tools.testing import run_ranks
from trainkit.types import Share

TOKENS, DOCUMENTS, RING, REPEATS, TURNS = 131_072, 128, 8, 20, 25
TENSORS, SIZE = 300, 4096
SHARE = Share(3, RING)
MAX_COPIES = 3.0


def lengths():
    """Return random lengths that divide by two chunks for each rank."""
    unit = 2 * RING
    random = np.random.default_rng(0)
    cuts = random.choice(np.arange(1, TOKENS // unit), DOCUMENTS - 1, replace=False)
    return unit * np.diff([0, *np.sort(cuts), TOKENS // unit])


def microseconds(function, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return 1e6 * (time.perf_counter() - start) / repeats


def compare(name, function, copy, repeats=REPEATS):
    turns = [(microseconds(function, repeats), microseconds(copy, repeats)) for _ in range(TURNS)]
    ours, plain = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(a / b for a, b in turns)
    print(f"{name:34} {ours:9.1f} us {plain:9.1f} us {ratio:6.2f} x")
    return ratio


def shards():
    bounds = np.append(0, np.cumsum(lengths()))
    print(f"{TOKENS} tokens, {DOCUMENTS} documents, ring of {RING}; the copy is of the result")
    for name, x in {
        "zigzag_shard int64 [1, S]": torch.arange(TOKENS)[None],
        "zigzag_shard int64 [S, 8]": torch.arange(8 * TOKENS).view(TOKENS, 8),
        "zigzag_shard fp32 [1, S, 64]": torch.randn(1, TOKENS, 64),
        "zigzag_shard bf16 [1, S, 64]": torch.randn(1, TOKENS, 64).bfloat16(),
    }.items():
        dim = 0 if x.shape[0] == TOKENS else 1
        result = zigzag_shard(x, SHARE, dim=dim, cu_seqlens=bounds)
        compare(
            name,
            lambda x=x, dim=dim: zigzag_shard(x, SHARE, dim=dim, cu_seqlens=bounds),
            result.clone,
        )


def batches():
    """Return how many copies of its result each split of a batch takes, at most."""
    document = np.repeat(np.arange(DOCUMENTS), lengths())[None]
    import attrs

    batch = attrs.evolve(make_padding_batch(1, TOKENS), spans=spans_of_runs(document))
    ratios = []
    for name, split in {"zigzag": zigzag_shard, "contiguous": contiguous_shard}.items():
        result = shard_batch(batch, SHARE, split=split)

        def copy(result=result):
            return [x.clone() for x in result.values() if isinstance(x, torch.Tensor)]

        cut = functools.partial(shard_batch, batch, SHARE, split=split)
        ratios.append(compare(f"shard_batch {name}", cut, copy))
    assert len(split_batch(batch, 1)) == 1
    return max(ratios)


def reductions():
    """Return milliseconds of (flat buckets, one call per tensor), in turns."""
    with parallel_session(ring=2, fold_sp="none") as ps:
        params = [nn.Parameter(torch.ones(SIZE)) for _ in range(TENSORS)]
        for p in params:
            p.grad = torch.ones(SIZE)

        def one_by_one():
            for p in params:
                dist.all_reduce(p.grad, group=ps.sp_unfolded.group)

        def flat():
            sync_sp_grads(params, ps.sp_unfolded)

        both = flat, one_by_one
        [function() for function in both]
        return [[microseconds(function, 1) / 1e3 for function in both] for _ in range(11)]


def main():
    torch.set_num_threads(1)
    shards()
    missed = batches() > MAX_COPIES
    print(f"bound: {MAX_COPIES} copies: {'MISSED' if missed else 'met'}")
    turns = run_ranks(reductions, 2, timeout=120)[0]
    flat, single = (statistics.median(column) for column in zip(*turns, strict=True))
    print(f"{TENSORS} gradients of {SIZE} on 2 ranks: sync_sp_grads {flat:.1f} ms, one call each")
    print(f"{single:.1f} ms, ratio {statistics.median(b / a for a, b in turns):.0f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
