"""The time of trainkit's step over that of a hand-written PyTorch loop.

    python tests/benchmarks/step.py

Both take the same model, optimizer settings and batches, in one process, by turns. Printed are the
medians, and the medians of the ratios and differences of neighbours. Bounds: 1.02 times for the
default model; 1.08 times and 25 microseconds for a tiny one.
"""

import argparse
import statistics
import sys
import time

import attrs
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its name everywhere)

import trainkit as tk
from trainkit import losses, models, optim, schedules
from trainkit.data import TokenCorpus

MAX_RATIO, MAX_TINY_RATIO, MAX_MICROSECONDS = 1.02, 1.08, 25.0


class Bigram(nn.Module):
    """An embedding and a linear layer: so little work that what stands around it shows."""

    def __init__(self, vocab_size=64, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids, **_):
        return self.head(self.embedding(input_ids))


def hand_written(model, optimizer, lr_at):
    """Return step(index, batch) as one writes it without a library."""
    params = list(model.parameters())

    def step(index, batch):
        labels = batch["labels"]
        tokens = (labels != -100).sum()
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], spans=batch["spans"])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / tokens).backward()
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(index)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / tokens, norm

    return step


def with_trainkit(model, optimizer, lr_at):
    """Return step(index, batch) as a recipe writes it."""
    ps = tk.solo_parallel()
    params = tk.get_parameters([model])
    forward_backward = tk.make_forward_backward(model, losses.next_token)

    def step(index, batch):
        microbatches = [batch]
        tokens = tk.all_sum(tk.count_valid_tokens(microbatches), ps.loss)
        sums = forward_backward(microbatches, denominator=tokens)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        norm = tk.clip_and_step(params, optimizer, lr=lr_at(index), max_norm=1.0, axis=ps.pp).norm
        sums = tk.reduce_metrics(sums, ps.loss)
        return sums["loss"] / tokens.clamp(min=1), norm

    return step


def batches(vocab_size, rows, length):
    """Return eight batches of random rows, whole and ready."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab_size, size=8 * rows * length)
    corpus = TokenCorpus(tokens, np.arange(0, len(tokens) + 1, length))
    bins = tk.pack_bins(corpus.lengths, length)
    order = np.arange(8 * rows).reshape(8, rows)
    return [tk.collate_bins(corpus, bins, chosen) for chosen in order]


def compare(make_model, data, *, pairs, warmup):
    """Return the seconds of each turn: {name: [seconds]}."""
    lr_at = schedules.constant(1e-3)
    steps = {}
    for name, make in (("hand-written", hand_written), ("trainkit", with_trainkit)):
        model = make_model()
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
        steps[name] = make(model, optim.adamw(groups, lr=1e-3), lr_at)
    seconds = {name: [] for name in steps}
    for index in range(warmup + pairs):
        # Who goes first changes, so that neither always finds the caches warm.
        for name in sorted(steps, reverse=bool(index % 2)):
            begin = time.perf_counter()
            steps[name](index, data[index % len(data)])
            if index >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def show(title, seconds):
    """Print the medians; return the median ratio and difference (microseconds) of neighbours."""
    ours, theirs = (statistics.median(seconds[name]) for name in ("trainkit", "hand-written"))
    pairs = list(zip(seconds["trainkit"], seconds["hand-written"], strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    more = statistics.median(a - b for a, b in pairs) * 1e6
    both = f"{theirs * 1e6:12.0f} us {ours * 1e6:12.0f} us"
    print(f"{title:24} {both} {ratio:8.3f} {more:+9.1f} us")
    return ratio, more


def main():
    """Run both cases; exit with 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="timed steps of the default model")
    parser.add_argument("--tiny-pairs", type=int, default=3000, help="timed steps of the tiny one")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'':24} {'hand-written':>15} {'trainkit':>15} {'ratio':>8} {'more':>12}")
    config = attrs.evolve(models.make_decoder_config("tiny"))
    default = compare(
        lambda: models.build_decoder(config, seed=0),
        batches(config.vocab_size, 8, 256),
        pairs=options.pairs,
        warmup=5,
    )
    ratio, _ = show("default model, 8 x 256", default)
    tiny = compare(Bigram, batches(64, 4, 16), pairs=options.tiny_pairs, warmup=300)
    tiny_ratio, more = show("tiny model, 4 x 16", tiny)
    missed = ratio > MAX_RATIO or tiny_ratio > MAX_TINY_RATIO or more > MAX_MICROSECONDS
    bounds = f"ratios {MAX_RATIO} and {MAX_TINY_RATIO}, {MAX_MICROSECONDS} us"
    print(f"bounds: {bounds}: {'MISSED' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
