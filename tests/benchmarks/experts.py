"""Time of a layer of experts over a dense layer with the same active arithmetic, there and back.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/experts.py`. Layers are timed in turns, and a ratio
is the median of the turns' ratios; gradients are new, as in the first microbatch of a step. Beside
it stands what the grouped products alone take of the dense ones' time, which is torch's. It exits
with 1 when a ratio, or the number of copies, exceeds its bound.
"""

import statistics
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.models import Experts, RoutingTape, softmax_topk
from trainkit.models.dispatch import ep_combine, ep_dispatch
from trainkit.models.experts import ExpertMlp
from trainkit.models.layers import Mlp
from trainkit.types import Spans

CHOSEN, TURNS, BOUND, GROWTH, COPIES = 2, 9, 1.5, 1.3, 3
# Tokens, width (of an expert too), numbers of experts, and those that BOUND is for; GROWTH is for
# sizes where it is for all. An expert gets 64 tokens or more. Of widths that are powers of two, 256
# is the largest at which `mebibytes` of 8 experts are in the third cache (35.8 MiB where this was
# measured), and 128 that of 32.
SIZES = (
    (4096, 512, (8, 32), (8, 32)),
    (1024, 256, (8, 32), (8,)),
    (1024, 128, (8, 32), ()),
    (1024, 64, (8, 32), ()),
)


def mebibytes(tokens, width, count):
    """Return what forward and backward keep: weights and gradients, tokens, rows, and products."""
    weights = 2 * 3 * count * width**2
    return 4 * (weights + (2 + CHOSEN * 6) * tokens * width) / 2**20


def filled(layer):
    with torch.no_grad():
        for p in layer.parameters():
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return layer


def experts_of(count, width, inner):
    how = Experts(count=count, top_k=CHOSEN, width=inner)
    return filled(ExpertMlp(width, how, name="mlp", number=0, balance="batch"))


def seconds(call, layer, x):
    x = x.detach().requires_grad_()
    layer.zero_grad()
    start = time.perf_counter()
    y = call(layer, x)
    y.backward(torch.ones_like(y))
    return time.perf_counter() - start


class Products(nn.Module):
    """One product there and back: of all rows with one weight, or of each expert's with its own."""

    def __init__(self, width, count, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) * width**-0.5)
        self.ends = torch.arange(1, count + 1, dtype=torch.int32) * (rows // count)

    def forward(self, rows):
        if len(self.weight) == CHOSEN:  # the dense layer is CHOSEN experts wide
            return rows.view(len(rows) // CHOSEN, -1) @ self.weight.flatten(0, 1)
        return nn.functional.grouped_mm(rows, self.weight.transpose(-2, -1), offs=self.ends)


def call_plain(layer, x):
    return layer(x)


def ratios_of(layers, x, call=call_plain):
    """Return the median times of all layers but the first over those of the first."""
    turns = [
        [seconds(call if i else call_plain, layer, x) for i, layer in enumerate(layers)]
        for _ in range(TURNS + 1)
    ][1:]
    found = range(1, len(layers))
    return [statistics.median(turn[i] / turn[0] for turn in turns) for i in found]


def ratios(tokens, width, counts):
    """Return the time of each number of experts over the dense layer's, and of the products."""
    x = torch.randn(1, tokens, width)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    is_token = torch.ones(1, tokens, dtype=torch.bool)
    spans = Spans(ends, np.array([tokens]), tokens)

    def call_routed(layer, x):
        return layer(x, spans=spans, is_token=is_token, tape=RoutingTape())[0]

    layers = [filled(Mlp(width, CHOSEN * width))]
    whole = ratios_of([*layers, *(experts_of(n, width, width) for n in counts)], x, call_routed)
    rows = torch.randn(CHOSEN * tokens, width)
    products = [Products(width, n, len(rows)) for n in (CHOSEN, *counts)]
    return whole, ratios_of(products, rows)


class Bytes(TorchDispatchMode):
    """Counts the bytes of floating-point numbers that operators write to memory of their own."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves
        held = {x.untyped_storage()._cdata for x in leaves((args, kwargs)) if torch.is_tensor(x)}
        for x in leaves(out):
            if torch.is_tensor(x) and x.is_floating_point():
                self.made += x.nbytes * (x.untyped_storage()._cdata not in held)
        return out


def copies():
    """Return how many copies of the tokens dispatch and combine make, there and back."""
    x = torch.randn(1024, 256, requires_grad=True)
    routing = softmax_topk(torch.randn(1024, 8), CHOSEN)
    with Bytes() as there:
        rows, _, route = ep_dispatch(x, routing.indices, routing.counts)
        y = ep_combine(rows, routing.weights, route)
    with Bytes() as back:
        y.backward(y.detach())
    return there.made / x.nbytes, back.made / x.nbytes


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    too_slow = False
    for tokens, width, counts, bounded in SIZES:
        found, products = ratios(tokens, width, counts)
        print(f"{tokens} tokens, width {width}; 4 times the experts {found[1] / found[0]:.2f}")
        too_slow |= bounded == counts and found[1] / found[0] > GROWTH
        for n, ratio, alone in zip(counts, found, products, strict=True):
            size = f"{mebibytes(tokens, width, n):.0f} MiB"
            print(f"  {n} experts, {size}: {ratio:.2f} of the dense layer's, products {alone:.2f}")
            too_slow |= n in bounded and ratio > BOUND
    there, back = copies()
    print(f"dispatch and combine: {there:.2f} copies of the tokens, and {back:.2f} in backward")
    sys.exit(too_slow or there > COPIES)
