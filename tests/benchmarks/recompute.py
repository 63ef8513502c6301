"""What recomputation keeps of the blocks of a model, and what it costs.

    python tests/benchmarks/recompute.py

Bytes are those of every tensor that lives between forward and backward, without parameters; times
are of forward and backward together, on one thread, by turns with no recomputation at all. Bounds:
"selective" keeps at most 0.6 of the bytes in at most 1.12 of the time.
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import attrs
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import measured_step`

from measured_step import StorageCount, make_batch

import trainkit as tk
from trainkit.models import Decoder, init_weights, make_decoder_config
from trainkit.parallel import recompute

MODES = ("none", "selective", "attention+products/2", "0.4", "full")
MAX_BYTES, MAX_TIME = 0.6, 1.12


def passes(config, batch, mode):
    """Return a model that recomputes so, and forward() -> its output."""
    (model,) = tk.build_stages(
        lambda: Decoder(config, head="hidden"),
        tk.solo_parallel(),
        [recompute(mode, preserve_rng_state=False)],
        weights=init_weights(config, seed=0),
    )
    return (
        model,
        lambda: model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans).hidden,
    )


def kept_bytes(model, forward):
    """Return the bytes that live between forward and backward, after a first forward pass."""
    forward()  # in which a choice by cost is made
    counter = StorageCount()
    for x in model.parameters():
        counter.see(x.detach())
    before = counter.now
    with counter:
        output = forward()
    gc.collect()
    held = counter.now - before
    del output
    return held


def seconds_of(forward):
    """Return the processor time of one forward and backward pass."""
    begin = time.process_time()
    forward().sum().backward()
    return time.process_time() - begin


def main():
    """Print a line for each mode; exit with 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="60m", help="a named size (60m)")
    parser.add_argument("--layers", type=int, default=4, help="layers in place of the size's (4)")
    parser.add_argument("--tokens", type=int, default=512, help="of one row (512)")
    parser.add_argument("--pairs", type=int, default=5, help="timed passes of each mode (5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = attrs.evolve(make_decoder_config(options.size), layers=options.layers)
    batch = make_batch(config, 1, options.tokens, 1)
    models = {mode: passes(config, batch, mode) for mode in MODES}
    kept = {mode: kept_bytes(*both) for mode, both in models.items()}
    seconds = {mode: [] for mode in MODES}
    for turn in range(options.pairs + 1):
        for mode, (_, forward) in models.items():
            took = seconds_of(forward)
            if turn:
                seconds[mode].append(took)
    print(f"torch {torch.__version__}; {options.size}, {options.layers} layers, {options.tokens}")
    print(f"{'mode':<22} {'MB kept':>8} {'of none':>8} {'time of none':>13}")
    ratios = {}
    for mode in MODES:
        pairs = zip(seconds[mode], seconds["none"], strict=True)
        ratios[mode] = kept[mode] / kept["none"], statistics.median(a / b for a, b in pairs)
        print(f"{mode:<22} {kept[mode] / 1e6:8.1f} {ratios[mode][0]:8.3f} {ratios[mode][1]:13.3f}")
    missed = ratios["selective"][0] > MAX_BYTES or ratios["selective"][1] > MAX_TIME
    print(
        f"bounds: {MAX_BYTES} of the bytes, {MAX_TIME} of the time: {'MISSED' if missed else 'met'}"
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
