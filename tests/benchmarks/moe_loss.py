"""The loss of a mixture of experts beside that of a dense model with the same active arithmetic.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/moe_loss.py`. Both train on the same rows of Python's
own library for the same steps, and are evaluated on the same held-out rows. Layers of experts have
8, of which a token goes to 2, beside a shared one, each a third as wide as the dense MLP. It exits
with 1 when the mean of three seeds is higher for the mixture.
"""

import functools
import statistics
import sys

import attrs
import numpy as np
import torch

import trainkit as tk
from trainkit.types import SOLO, Cursor, DataShard

STEPS, ROWS, LENGTH, HELD, SEEDS = 400, 16, 128, 200, (0, 1, 2)
LR, BIAS_RATE = 4e-3, 0.01
DENSE = tk.models.DecoderConfig(
    vocab_size=272, width=64, layers=4, heads=4, kv_heads=4, mlp_width=192, tied=True
)
EXPERTS = tk.models.Experts(
    count=8, top_k=2, width=64, shared=64, first=1, scores="sigmoid", biased=True
)


def read():
    """Return the rows to train on, and about HELD rows that are held out."""
    tokenizer = tk.tokenizers.open_tokenizer("bytes")
    whole = tk.corpora.open_library_corpus(tokenizer)
    corpus, is_held = tk.corpora.hold_out(whole, one_in=40, piece=LENGTH)
    some = is_held & (np.cumsum(is_held * corpus.lengths) <= HELD * LENGTH)
    parts = np.where(is_held, 0, corpus.lengths), np.where(some, corpus.lengths, 0)
    return [tk.PackedCorpus(corpus, tk.pack_bins(lengths, LENGTH)) for lengths in parts]


def train(config, rows, seed):
    """Return a model after all steps."""
    model = tk.models.build_decoder(config, seed=seed)
    params = list(model.parameters())
    optimizer = tk.optim.adamw(
        tk.optim.decay_groups(dict(model.named_parameters()), weight_decay=0.1), lr=LR
    )
    at = functools.partial(tk.schedules.warmup_stable_decay, total=STEPS, decay=0.4)
    lr_at, rate_at = at(LR, warmup=30), at(BIAS_RATE, warmup=0)
    loss, call = tk.losses.next_token, tk.models.call_model
    if config.experts:
        loss, call = tk.losses.add_router_losses(loss), tk.models.call_routed
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=ROWS, seed=seed)
    for step in range(STEPS):
        batches = tk.make_step_batch(
            rows, rows_at, Cursor(step), data_shard=DataShard(), rows_per_microbatch=ROWS
        ).microbatches
        tokens = {"loss": tk.count_valid_tokens(batches)}
        sums = tk.forward_backward(model, batches, loss, denominator=tokens, call=call)
        tk.clip_and_step(params, optimizer, lr=lr_at(step), max_norm=1.0, axis=SOLO)
        if config.experts:
            tk.models.update_routers_([model], sums["load"], rate=rate_at(step))
    return model


def held_out_loss(model, held):
    call = tk.models.call_routed if model.config.experts else tk.models.call_model
    batches = tk.make_eval_batches(held, data_shard=DataShard(), rows_per_batch=8)
    return float(tk.evaluate(model, batches, tk.losses.next_token, axis=SOLO, call=call)["loss"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows, held = read()
    found = {"dense": [], "experts": []}
    for seed in SEEDS:
        for name, config in (("dense", DENSE), ("experts", attrs.evolve(DENSE, experts=EXPERTS))):
            found[name].append(held_out_loss(train(config, rows, seed), held))
            print(f"seed {seed}, {name}: {found[name][-1]:.4f} nats per token", flush=True)
    dense, experts = (statistics.mean(losses) for losses in found.values())
    print(
        f"after {STEPS} steps of {ROWS * LENGTH} tokens: dense {dense:.4f}, experts {experts:.4f}"
    )
    sys.exit(experts > dense)
