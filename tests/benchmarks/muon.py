"""Time of Muon's step on two ranks over one rank's, on the same matrices.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/muon.py`; two free cores are needed. Two ranks hold
the halves of each matrix, as under FSDP2, or all of them, as under DDP; one rank steps whole
matrices while the other waits. Steps are timed in pairs, in turns, and a ratio is the median of the
pairs' ratios. At best it is 0.5; on a busy machine the
processor's time still tells. Beside it stand torch.optim.Muon's on the same two ranks, and the
time that ours takes per parameter. It exits with 1 where a ratio of ours is above its bound.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from trainkit.mesh import axis_from_group
from trainkit.optim import Muon
from trainkit.tools.testing import run_ranks

BOUND, PAIRS = 0.6, 7
# Layers, width, width of the MLP: a block's matrices, and a stack of 8 experts in each layer.
SIZES = {"4 layers, width 256": (4, 256, 704), "2 layers, width 512": (2, 512, 1408)}


def matrices(layers, width, inner):
    draw = torch.Generator().manual_seed(0)
    block = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner), (8, width // 4, width)]
    return [torch.randn(shape, generator=draw) for _ in range(layers) for shape in block]


def stepper(make, wholes, place):
    params = [nn.Parameter(place(x)) for x in wholes]
    optimizer = make(params)

    def step():
        for p, x in zip(params, wholes, strict=True):
            p.grad = place(x)
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        optimizer.step()
        return time.perf_counter() - start, time.process_time() - worked

    return step


def seconds(step, *, alone):
    """Return seconds of a step, and of the processor, of the rank that had most of them.

    Alone, the other one waits meanwhile.
    """
    if alone and dist.get_rank():
        dist.barrier()
        took = 0.0, 0.0
    else:
        took = step()
    most = torch.tensor(took)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def pairs(size):
    """Return the seconds of each pair: whole on one rank, in halves, as copies, and torch's."""
    mesh, axis = init_device_mesh("cpu", (2,)), axis_from_group(dist.group.WORLD)
    wholes = matrices(*SIZES[size])
    flat = [x for x in wholes if x.ndim == 2]

    def halves(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    steps = [
        stepper(lambda p: Muon(p, lr=0.01), wholes, torch.clone),
        stepper(lambda p: Muon(p, lr=0.01), wholes, halves),
        stepper(lambda p: Muon(p, lr=0.01, axis=axis), wholes, torch.clone),
        stepper(lambda p: Muon(p, lr=0.01, dtype="bfloat16"), flat, torch.clone),
        stepper(lambda p: torch.optim.Muon(p, lr=0.01), flat, halves),
    ]
    found = [
        [seconds(step, alone=i in (0, 3)) for i, step in enumerate(steps)] for _ in range(PAIRS + 1)
    ]
    return found[1:], sum(x.numel() for x in wholes)


def ratio(turns, one, other, *, clock=0):
    return statistics.median(turn[one][clock] / turn[other][clock] for turn in turns)


if __name__ == "__main__":
    too_slow = False
    for size in SIZES:
        (turns, count), _ = run_ranks(pairs, 2, size, timeout=300.0)
        halves, copies, torchs = ratio(turns, 1, 0), ratio(turns, 2, 0), ratio(turns, 4, 3)
        alone = 1e9 * statistics.median(turn[0][0] for turn in turns) / count
        print(f"{size}, {count / 1e6:.1f} million parameters, {alone:.0f} ns each on one rank")
        print(f"  two ranks over one: halves {halves:.2f}, copies {copies:.2f} (at most {BOUND})")
        work = [ratio(turns, i, 0, clock=1) for i in (1, 2)]
        print(f"  the processor's time alone: halves {work[0]:.2f}, copies {work[1]:.2f}")
        print(f"  torch.optim.Muon on halves over ours on one rank, both in bf16: {torchs:.2f}")
        too_slow |= max(halves, copies) > BOUND
    sys.exit(too_slow)
