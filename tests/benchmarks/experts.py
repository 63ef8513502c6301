"""Time of a layer of experts over a dense layer with the same active arithmetic, there and back.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/experts.py`. Layers are timed in turns, and a ratio
is the median of the turns' ratios. It exits with 1 when a ratio exceeds its bound.
"""

import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

from trainkit.models import Experts, Tape
from trainkit.models.experts import ExpertMlp
from trainkit.models.layers import Mlp
from trainkit.types import Spans

CHOSEN, TURNS, BOUND, GROWTH = 2, 9, 1.5, 1.3
SIZES = {  # tokens, width, inner width of an expert, numbers of experts
    "4,096 tokens, width 512": (4096, 512, 512, (8, 32)),
    "1,024 tokens, width 64, in the cache": (1024, 64, 64, (8, 32)),
}


def filled(layer):
    with torch.no_grad():
        for p in layer.parameters():
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return layer


def experts_of(count, width, inner):
    how = Experts(count=count, chosen=CHOSEN, width=inner)
    return filled(ExpertMlp(width, how, name="mlp", number=0, balance="batch"))


def seconds(layer, x, known):
    x = x.detach().requires_grad_()
    start = time.perf_counter()
    y = layer(x, **known, tape=Tape())[0] if known else layer(x)
    y.backward(torch.ones_like(y))
    return time.perf_counter() - start


def ratios(tokens, width, inner, counts):
    """Return the median time of each number of experts over that of the dense layer."""
    x = torch.randn(1, tokens, width)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    is_token = torch.ones(1, tokens, dtype=torch.bool)
    known = {"spans": Spans(ends, np.array([tokens]), tokens), "is_token": is_token}
    dense = filled(Mlp(width, CHOSEN * inner))
    layers = [experts_of(count, width, inner) for count in counts]
    turns = [
        [seconds(dense, x, {}), *(seconds(layer, x, known) for layer in layers)]
        for _ in range(TURNS + 1)
    ][1:]
    return [statistics.median(turn[i + 1] / turn[0] for turn in turns) for i in range(len(counts))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    too_slow = False
    for name, size in SIZES.items():
        found = ratios(*size)
        growth = found[1] / found[0]
        told = ", ".join(f"{n} experts {r:.2f}" for n, r in zip(size[-1], found, strict=True))
        print(f"{name}: {told} of the dense layer's time; 4 times the experts {growth:.2f}")
        too_slow |= max(found) > BOUND or growth > GROWTH
    sys.exit(too_slow)
