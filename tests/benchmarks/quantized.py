"""Time of a linear layer in few bits over a plain one, there and back, and the bytes of each.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/quantized.py`. Layers are timed in turns, with 2048
tokens; a ratio is the median of the turns' ratios. The plain layer is frozen too. It exits with 1
when a ratio exceeds its bound.
"""

import statistics
import sys
import time

import torch
from torch import nn

from trainkit.mesh import solo_parallel
from trainkit.post.adapters import quantized

WIDTH, TOKENS, TURNS = 1024, 2048, 9
BOUNDS = {"nf4": (1.6, 0.132), "int8": (1.6, 0.26), "fp8": (1.6, 0.26)}


def seconds(layer, x):
    x = x.detach().requires_grad_()
    start = time.perf_counter()
    y = layer(x)
    y.backward(torch.ones_like(y))
    return time.perf_counter() - start


def layers_of(form):
    plain, few = (nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(2))
    quantized(form, modules="0")(nn.Sequential(few), solo_parallel())
    return plain, few


def main():
    torch.manual_seed(0)
    good = True
    for form, (slowest, largest) in BOUNDS.items():
        plain, few = layers_of(form)
        held = sum(p.nbytes for p in few.parameters()) / plain.weight.nbytes
        for dtype in (torch.float32, torch.bfloat16):
            x, same = torch.randn(TOKENS, WIDTH, dtype=dtype), plain.to(dtype)
            ratio = statistics.median(seconds(few, x) / seconds(same, x) for _ in range(TURNS))
            good &= held <= largest and (ratio <= slowest or dtype != torch.float32)
            print(f"{form} {str(dtype)[6:]}: time x {ratio:.2f}, bytes of fp32 x {held:.3f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
