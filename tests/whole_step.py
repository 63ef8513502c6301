"""A few optimizer steps of a small decoder in any layout, for the tests that compare layouts."""

import attrs
import numpy as np
import torch

import trainkit as tk
from trainkit.data import TokenCorpus
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, DecoderConfig, call_with_noise, init_weights
from trainkit.optim import adamw, decay_groups
from trainkit.parallel import compile_blocks, ddp, fsdp, recompute
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.sampling import shuffle_epochs
from trainkit.types import Cursor

CAPACITY = 24
ROWS = 4
CONFIG = DecoderConfig(
    vocab_size=31, width=16, layers=2, heads=4, kv_heads=2, mlp_width=24, qk_norm=True
)


@attrs.frozen
class Layout:
    """What may differ between two runs that must give the same numbers."""

    world: int = 1
    dp_replicate: int = 1
    rows_per_microbatch: int = 1
    reduce: str = "last"
    recompute: str = "none"
    compiled: bool = False
    tied: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64
    pp: int = 1
    schedule: str = "1f1b"
    reshard: bool = True
    layers: int = CONFIG.layers
    rows: int = ROWS
    ring: int = 1
    ulysses: int = 1
    fold_sp: str = "all"
    multiple_of: int = 1
    tp: int = 1
    vocab_size: int = CONFIG.vocab_size
    kv_heads: int = CONFIG.kv_heads
    qkv_bias: bool = False
    ddp: bool = False


def corpus():
    """Return 40 documents of 1 to 60 tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 60, size=40)
    tokens = random.integers(0, CONFIG.vocab_size, size=lengths.sum())
    return TokenCorpus(tokens, np.concatenate([[0], np.cumsum(lengths)]))


def unequal(batch):
    """Mask labels by the global row: all tokens, none, three, half of them."""
    row, column = batch.token_index // CAPACITY, batch.token_index % CAPACITY
    kept = torch.tensor([CAPACITY, 0, 3, CAPACITY // 2])
    labels = torch.where(column < kept[row.clamp(min=0) % 4], batch.labels, -100)
    return attrs.evolve(batch, labels=labels)


def input_of(cursor, ps, layout, *, text, bins):
    """Return the step's microbatches on this rank, some labels masked, and the next cursor."""
    made = tk.make_step_batch(
        tk.PackedCorpus(text, bins),
        shuffle_epochs(len(bins), rows_per_step=layout.rows, seed=0),
        cursor,
        data_shard=ps.data_shard,
        rows_per_microbatch=layout.rows_per_microbatch,
        noise_seed=0,
    )
    return attrs.evolve(made, microbatches=list(map(unequal, made.microbatches)))


def model_config(layout):
    return attrs.evolve(
        CONFIG,
        tied=layout.tied,
        dropout=layout.dropout,
        layers=layout.layers,
        vocab_size=layout.vocab_size,
        kv_heads=layout.kv_heads,
        qkv_bias=layout.qkv_bias,
    )


def build(layout, ps):
    """Return stages and optimizer of a layout."""
    config = model_config(layout)
    plan = [
        tensor_parallel(),
        sequence_parallel(),
        *([ddp()] if layout.ddp else []),
        recompute(layout.recompute),
    ]
    plan += [compile_blocks(backend="aot_eager")] if layout.compiled else []
    plan += [fsdp(tk.Layout(reshard_after_forward=layout.reshard))]
    stages = tk.build_stages(
        lambda: Decoder(config, head="hidden").to(layout.dtype),
        ps,
        plan,
        weights=init_weights(config, seed=0),
        schedule=layout.schedule,
    )
    groups = decay_groups(tk.get_named_parameters(stages), weight_decay=0.1)
    return stages, adamw(groups, lr=1e-2, eps=1e-4)


def step_function(layout, ps, stages, optimizer):
    """Return train_step(state, batch), as a recipe writes it."""
    params = tk.get_parameters(stages)
    run = tk.make_forward_backward(
        stages, next_token_linear, call=call_with_noise, reduce=layout.reduce
    )

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = run(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        norm = tk.clip_and_step(params, optimizer, lr=1e-2, max_norm=0.5, axis=ps.pp).norm
        sums = tk.reduce_metrics(sums, ps.loss)
        metrics = {"loss": sums["loss"] / tokens.clamp(min=1), "grad_norm": norm}
        return attrs.evolve(
            state, step=state.step + 1, tokens=state.tokens + tokens, cursor=batch.cursor
        ), metrics

    return train_step


def full(tensor):
    """Return a whole tensor on every rank, as numpy."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().numpy().copy()


def run_steps(layout, *, steps=2, resume_from=None, save_to=None):
    """Train; return losses, norms, batch hashes, parameters and the state hash."""
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY, multiple_of=layout.multiple_of)
    ranks = tk.Layout(
        dp_replicate=layout.dp_replicate,
        pp=layout.pp,
        tp=layout.tp,
        ring=layout.ring,
        ulysses=layout.ulysses,
        fold_sp=layout.fold_sp,
    )
    with tk.parallel_session(ranks) as ps:
        stages, optimizer = build(layout, ps)
        state = tk.TrainState(cursor=Cursor())
        if resume_from is not None:
            messages = []
            state = tk.resume(resume_from, state, stages, optimizer, ps, log=messages.append)
        train_step = step_function(layout, ps, stages, optimizer)
        losses, norms, hashes = [], [], []
        while state.step < steps:
            batch = input_of(state.cursor, ps, layout, text=text, bins=bins)
            hashes.append(int(tk.all_sum(tk.batch_hash(batch.microbatches), ps.loss)))
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            if save_to is not None:
                tk.save_checkpoint(save_to, state, stages, optimizer, ps)
        named = tk.get_named_parameters(stages)
        return {
            "losses": losses,
            "norms": norms,
            "hashes": hashes,
            "tokens": int(state.tokens),
            "parameters": {name: full(p) for name, p in named.items()},
            "state_hash": tk.state_hash(state, stages, optimizer, ps),
        }


def joined(results):
    """Return what one rank returned, with the parameters of all pipeline stages."""
    whole = {}
    for result in results:
        assert {**result, "parameters": 0} == {**results[0], "parameters": 0}
        for name, value in result["parameters"].items():
            own = name.removesuffix(" (copy)")  # of a tied embedding
            assert np.array_equal(whole.setdefault(own, value), value)
    return {**results[0], "parameters": whole}


def difference(found, wanted):
    """Return max|a - b| / max|b|, the largest over losses, norms and every parameter."""
    pairs = [(found[key], wanted[key]) for key in ("losses", "norms")]
    pairs += [(found["parameters"][name], b) for name, b in wanted["parameters"].items()]
    assert found["parameters"].keys() == wanted["parameters"].keys()
    arrays = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in arrays)
