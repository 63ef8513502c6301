"""What Python's garbage collection adds to single steps, and what is left of it by hand.

    python tests/benchmarks/pauses.py [STEPS]

A small decoder's step with all that stands around it on the host, as it is and beside a loader that
makes and keeps Python objects (2,000 a step, the last 200,000 of them). Both ways in turns, by
blocks of steps. In CPU milliseconds of the thread, so that other work of the machine does not
count: the median step, the 99th percentile, the longest, and the sum of all pauses over the time.
"""

import collections
import contextlib
import gc
import sys
import time

import attrs
import numpy as np
import torch

import trainkit as tk
from trainkit import losses, models
from trainkit.batch import make_padding_batch
from trainkit.metrics import make_step_record
from trainkit.run import collect_manually

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1200
BLOCK, EVERY = 300, 100


def make_step():
    config = models.make_decoder_config("tiny", vocab_size=256, width=32, layers=1)
    model = models.Decoder(config, head="hidden")
    params = tk.get_parameters([model])
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    batch = make_padding_batch(1, 32)
    batch = attrs.evolve(batch, labels=batch.input_ids)

    def step():
        tokens = tk.count_valid_tokens([batch])
        sums = tk.forward_backward(model, [batch], losses.next_token_linear, denominator=tokens)
        update = tk.clip_and_step(params, optimizer, lr=1e-3, max_norm=1.0)
        metrics = {**sums, "grad_norm": update.norm, "tokens": tokens}
        return make_step_record(metrics, begin=time.perf_counter())

    return step


@contextlib.contextmanager
def as_python_does():
    yield lambda: None


def timed(step, way, times, pauses):
    """Take a block of steps; the collections between steps count to the step before them."""
    started = [0.0]

    def note(phase, _):
        now = time.thread_time()
        started[0] = now if phase == "start" else pauses.append(now - started[0]) or 0.0

    gc.collect()
    gc.callbacks.append(note)
    with way as collect:
        for _ in range(BLOCK):
            begin = time.thread_time()
            step()
            inside = time.thread_time() - begin
            collect()
            times.append((inside, time.thread_time() - begin))
    gc.callbacks.remove(note)


def main():
    plain, kept = make_step(), collections.deque(maxlen=200_000)

    def with_objects():
        kept.extend([i] for i in range(2000))
        plain()

    ways = {"as Python does": as_python_does, "by hand": lambda: collect_manually(every=EVERY)}
    for name, step in {"a recipe's step": plain, "with a loader's objects": with_objects}.items():
        for _ in range(20):
            step()
        times, pauses = ({way: [] for way in ways} for _ in "tp")
        for turn in range(STEPS // BLOCK):
            for way in (list(ways), list(ways)[::-1])[turn % 2]:
                timed(step, ways[way](), times[way], pauses[way])
        for way in ways:
            inside, whole = 1e3 * np.array(times[way]).T
            share = 1e3 * sum(pauses[way]) / whole.sum()
            text = f"median {np.median(inside):.2f} ms, 99 % {np.quantile(inside, 0.99):.2f}"
            text += f", longest {inside.max():.2f}, longest with what follows {whole.max():.2f}"
            print(f"{name}, {way}: {text}; {len(pauses[way])} pauses, {share:.2%} of the time")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
