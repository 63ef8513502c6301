"""Time of trainkit's attention over a hand-written loop over documents, forward and backward.

Run `python tests/benchmarks/attention.py`. The functions are timed in turns, and the ratio is the
median of the turns' ratios, so that a busy machine disturbs all alike. Windows are compared with
attention written out, by the processor's time.
"""

import statistics
import time
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from trainkit.attention import sdpa
from trainkit.attention.blocks import attend_spans
from trainkit.types import Spans

TOKENS, DOCUMENTS, HEADS, DIM, TURNS = 4096, 64, 8, 64, 15


def loop(q, k, v, lengths):
    """The hand-written loop: one split, one call per document, one cat."""
    documents = zip(*(x.transpose(1, 2).split(lengths, 2) for x in (q, k, v)), strict=True)
    out = [scaled_dot_product_attention(*d, is_causal=True).transpose(1, 2) for d in documents]
    return torch.cat(out, 1)


def slices(q, k, v, lengths):
    """The loop most people write first: a slice per document."""
    edges, out = np.cumsum([0, *lengths]).tolist(), []
    for a, b in pairwise(edges):
        document = (x[:, a:b].transpose(1, 2) for x in (q, k, v))
        out.append(scaled_dot_product_attention(*document, is_causal=True).transpose(1, 2))
    return torch.cat(out, 1)


def mask(q, k, v, lengths):
    """A block-diagonal mask over the whole row."""
    documents = torch.repeat_interleave(torch.tensor(lengths))
    allowed = (documents[:, None] == documents[None, :]).tril()
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, attn_mask=allowed).transpose(1, 2)


def trainkit_sdpa(q, k, v, lengths):
    """What this benchmark is about."""
    offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return sdpa(q, k, v, spans=Spans(offsets, np.array(lengths), max(lengths)))


def seconds(function, lengths):
    q, k, v = torch.randn(3, 1, TOKENS, HEADS, DIM, requires_grad=True)
    grad = torch.randn(1, TOKENS, HEADS, DIM)
    start = time.perf_counter()
    torch.autograd.grad(function(q, k, v, lengths), (q, k, v), grad)
    return time.perf_counter() - start


def windows(name, tokens, lengths, window, dtype):
    """Print the time of a window in torch's kernel over that of attention written out."""
    q, k, v = (torch.randn(1, tokens, h, DIM, dtype=dtype, requires_grad=True) for h in (8, 2, 2))
    offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    spans = Spans(offsets, np.array(lengths), max(lengths))
    turns = []
    for _ in range(TURNS):
        times = [time.process_time()]
        for attend in (attend_spans, sdpa):
            torch.autograd.grad(
                attend(q, k, v, spans=spans, window=window, scale=0.1).sum(), (q, k, v)
            )
            times.append(time.process_time())
        turns.append(np.diff(times))
    old, new = 1e3 * np.median(turns[1:], 0)
    ratio = statistics.median(b / a for a, b in turns[1:])
    print(f"{name:40} {old:8.1f} ms written out, sdpa {new:8.1f} ms {ratio:8.2f}")


def table(name, lengths):
    functions = (loop, trainkit_sdpa, slices, mask)
    for function in functions:
        seconds(function, lengths)
    turns = [[seconds(function, lengths) for function in functions] for _ in range(TURNS)]
    for i, function in enumerate(functions):
        milliseconds = 1e3 * statistics.median(turn[i] for turn in turns)
        ratio = statistics.median(turn[i] / turn[0] for turn in turns)
        print(f"{name:8} {function.__name__:14} {milliseconds:8.1f} ms {ratio:8.2f} x loop")


if __name__ == "__main__":
    torch.set_num_threads(1)
    cuts = np.random.default_rng(0).choice(np.arange(1, TOKENS), DOCUMENTS - 1, replace=False)
    table("random", np.diff([0, *np.sort(cuts), TOKENS]).tolist())
    table("equal", [TOKENS // DOCUMENTS] * DOCUMENTS)
    for dtype in (torch.float32, torch.bfloat16):
        for row in (
            ("256 tokens, window 8", 256, [256], 8),
            ("64 documents of 4, window 8", 256, [4] * 64, 8),
            ("20 documents of 100, window 64", 2000, [100] * 20, 64),
            ("2,048 tokens, window 16", 2048, [2048], 16),
            ("2,048 tokens, window 128", 2048, [2048], 128),
            ("4,096 tokens, window 1,024", 4096, [4096], 1024),
        ):
            windows(*row, dtype)
