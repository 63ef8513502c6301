"""Time of the gated delta rule: over its recurrence, attention, length, a ring, and of a token.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/delta.py` (three minutes). One core, fp32, forward
and backward, 8 heads of 64. Each ratio is the median of ratios of neighbouring turns. The bounds
stand beside the figures.
"""

import statistics
import sys
import time

import attrs
import numpy as np
import torch

from trainkit.attention import gated_delta, ring_gated_delta, sdpa
from trainkit.batch import batch_from_rows
from trainkit.mesh import parallel_session
from trainkit.models import Delta, KVCache, build_decoder, make_decoder_config
from trainkit.tools.testing import run_ranks
from trainkit.types import Spans

HEADS, SIZE, TURNS = 8, 64, 9


def make_inputs(tokens):
    """Return q, k, v, log_decay and beta that require gradients."""
    q, k, v = torch.randn(3, 1, tokens, HEADS, SIZE)
    log_decay, beta = -0.1 * torch.rand(1, tokens, HEADS), torch.rand(1, tokens, HEADS)
    tensors = q, torch.nn.functional.normalize(k, dim=-1), v, log_decay, beta
    return [x.requires_grad_() for x in tensors]


def spans_of(tokens):
    return Spans(torch.tensor([0, tokens]), np.array([tokens]), tokens)


def chunked(q, k, v, log_decay, beta):
    return gated_delta(q, k, v, log_decay=log_decay, beta=beta, spans=spans_of(q.shape[1]))


def attention(q, k, v, log_decay, beta):  # noqa: ARG001
    return sdpa(q, k, v, spans=spans_of(q.shape[1]))


def recurrence(q, k, v, log_decay, beta):
    """The rule written out, one token after another."""
    state = torch.zeros(HEADS, SIZE, SIZE)
    out = []
    for t in range(q.shape[1]):
        state = log_decay[0, t].exp()[:, None, None] * state
        error = v[0, t] - (k[0, t].unsqueeze(2) * state).sum(1)
        state = state + k[0, t].unsqueeze(2) * (beta[0, t][:, None] * error).unsqueeze(1)
        out.append((q[0, t].unsqueeze(2) * state).sum(1))
    return torch.stack(out)


def seconds(function, tensors):
    """Return the time of a forward and backward pass, with what it waits for another rank."""
    begin = time.perf_counter()
    torch.autograd.grad(function(*tensors).sum(), tensors, allow_unused=True)
    return time.perf_counter() - begin


def compare(name, new, old, bound, *, turns=TURNS):
    """Print the median ratio of two (function, inputs), timed in turns; return if it is met."""
    pairs = [(seconds(*new), seconds(*old)) for _ in range(turns + 1)][1:]
    ratio = statistics.median(a / b for a, b in pairs)
    times = [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]
    print(f"{name:44} {times[0]:8.1f} ms / {times[1]:9.1f} ms = {ratio:6.3f}  (at most {bound})")
    return ratio <= bound


def measure_ring(ranks):
    """Return the median time of a ring's rank over that of one rank with the whole row."""
    whole, shard = make_inputs(16384), make_inputs(16384 // ranks)
    with parallel_session(ring=ranks) as ps:
        delta = ring_gated_delta(ps.ring)

        def around(q, k, v, log_decay, beta):
            return delta(q, k, v, log_decay=log_decay, beta=beta, spans=spans_of(q.shape[1]))

        turns = [(seconds(around, shard), seconds(chunked, whole)) for _ in range(TURNS + 1)]
    return statistics.median(a / b for a, b in turns[1:])


def seconds_of_token(layers, length):
    """Return a function that times one more token after a text of `length`, of 4 such layers."""
    delta = Delta(key_heads=4, value_heads=4, key_size=32, value_size=32, full_every=5)
    options = {"delta": delta} if layers == "delta" else {}
    model = build_decoder(make_decoder_config("tiny", **options), seed=0)
    batch, slots = batch_from_rows(torch.ones(1, length, dtype=torch.int64)), torch.arange(length)
    last = torch.tensor([length - 1])
    cache = KVCache(length + 1, end=length, rows=0 * slots, slots=slots, last=last)

    def feed(batch, cache):
        model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans, cache=cache)

    token = batch_from_rows(torch.ones(1, 1, dtype=torch.int64))
    token = attrs.evolve(token, position_ids=torch.tensor([[length]]))
    with torch.no_grad():
        feed(batch, cache)
    cache = attrs.evolve(cache, end=length + 1, rows=None, slots=None, last=None)

    def measure():
        begin = time.process_time()
        with torch.no_grad():
            for _ in range(20):  # each writes the same slot, so the text has one length
                feed(token, cache)
        return (time.process_time() - begin) / 20

    return measure


def compare_tokens(layers, bound=None):
    """Print the cost of a token after 8,192 tokens and after 64; return if the bound is met."""
    long, short = seconds_of_token(layers, 8192), seconds_of_token(layers, 64)
    pairs = [(long(), short()) for _ in range(TURNS + 1)][1:]
    ratio = statistics.median(a / b for a, b in pairs)
    times = [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]
    name = f"a token after 8,192 over 64, {layers} layers"
    limit = "" if bound is None else f"  (at most {bound})"
    print(f"{name:44} {times[0]:8.2f} ms / {times[1]:9.2f} ms = {ratio:6.3f}{limit}")
    return bound is None or ratio <= bound


def main():
    """Print the figures; return 1 if a bound is missed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    short, long = make_inputs(4096), make_inputs(16384)
    new = chunked, short
    met = [
        compare(
            "chunks over the recurrence, 4,096 tokens", new, (recurrence, short), 0.15, turns=2
        ),
        compare("chunks over sdpa, 4,096 tokens", new, (attention, short), 1),
        compare("chunks over sdpa, 16,384 tokens", (chunked, long), (attention, long), 1, turns=2),
        compare("16,384 tokens over 4,096", (chunked, long), new, 4.4),
        compare_tokens("delta", 1.2),
        compare_tokens("attention"),
    ]
    ratios = run_ranks(measure_ring, 2, 2, timeout=600)
    print(f"{'a rank of two in a ring over one':44} {max(ratios):33.3f}  (at most 0.6)")
    return int(not all(met) or max(ratios) > 0.6)


if __name__ == "__main__":
    sys.exit(main())
