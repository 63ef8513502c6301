"""Train on documents of thousands of tokens, each spread over ranks by ring x Ulysses attention.

python recipes/long_context.py                       # one process, on Python's own library
torchrun --nproc-per-node 4 recipes/long_context.py --ring 2 --ulysses 2   # the same losses
torchrun --nproc-per-node 4 recipes/long_context.py --ring 4 --row-length 16384
"""

import functools
import itertools
import sys
import time
from pathlib import Path

import attrs
import torch

import trainkit as tk
from trainkit import (
    config,
    corpora,
    data,
    losses,
    models,
    optim,
    packing,
    parallel,
    runtime,
    schedules,
    sinks,
    tokenizers,
)
from trainkit.corpora.text import directory_texts
from trainkit.metrics import step_record
from trainkit.types import DataError


@attrs.frozen(kw_only=True)
class Config(config.RunConfig):
    """Train on long documents; by default the packages of Python's library, each in one piece.

    The tokens of a row are spread over ring x ulysses ranks, and the losses stay those of one
    process. Set ulysses to a divisor of the number of heads, and split longer rows with ring:

    torchrun --nproc-per-node 4 recipes/long_context.py --ring 2 --ulysses 2
    """

    out: Path = Path("runs/long_context")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = attrs.field(default=30, validator=config.positive)
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    schedule_steps: int = attrs.field(default=30, validator=config.positive)
    """The length of the learning rate's schedule; past it the last rate holds."""
    data: Path | None = None
    """A directory: the text below each entry is one document; by default Python's library."""
    tokenizer: str = "bytes"
    """bytes, or a tokenizer.json."""
    size: str = "tiny"
    """A named model size; see trainkit.models.decoder_sizes."""
    rope_theta: float = attrs.field(default=500_000.0, validator=config.positive)
    """The base of the rotary wavelengths: long contexts need long waves."""
    row_length: int = attrs.field(default=4096, validator=config.positive)
    """Tokens in a row, over the ranks of ring x ulysses; longer documents are split."""
    rows: int = attrs.field(default=2, validator=config.positive)
    """Rows in a step, over all ranks."""
    microbatch: int = attrs.field(default=1, validator=config.positive)
    """Rows that go through the model at once, on each rank."""
    recompute: str = attrs.field(
        default="none", validator=config.one_of("none", "selective", "full")
    )
    """What is computed again in the backward pass, to save memory."""
    lr: float = attrs.field(default=2e-3, validator=config.positive)
    """The peak learning rate."""
    warmup: int = attrs.field(default=5, validator=config.non_negative)
    """Steps in which the learning rate rises."""
    weight_decay: float = attrs.field(default=0.1, validator=config.non_negative)
    """Decay of matrices; vectors have none."""
    max_norm: float = attrs.field(default=1.0, validator=config.positive)
    """Gradients above this norm are scaled down to it."""


# What a run may be continued with another value of: it changes nothing that is computed.
MAY_CHANGE = (
    *config.PLACE_FIELDS,
    "data",  # the content is kept, by its hash
    *("microbatch", "recompute"),
)


def open_documents(cfg, tokenizer):
    """Return the corpus: one document for all text below each entry of the directory."""
    keep = corpora.is_library_source if cfg.data is None else None
    folder = cfg.data or corpora.standard_library()
    texts = directory_texts(folder, suffixes=(".py", ".md", ".txt"), keep=keep)
    entries = itertools.groupby(texts, key=lambda named: named[0].partition("/")[0])
    documents = {name: "\n".join(text for _, text in parts) for name, parts in entries}
    if not documents:
        raise DataError(f"{folder}: no documents: it has no .py, .md or .txt files", where=folder)
    samples = (tokenizers.encode_document(tokenizer, text) for text in documents.values())
    return corpora.memory_corpus(samples, vocab_size=tokenizer.vocab_size, names=list(documents))


def build(cfg, ps, model):
    """Return this rank's stages of the model and their optimizer."""
    plan = [
        parallel.tensor(),
        parallel.sequence(),
        parallel.recompute(cfg.recompute),
        parallel.fsdp(reshard_after_forward=cfg.reshard_after_forward, cpu_offload=cfg.cpu_offload),
    ]
    stages = tk.build_stages(
        lambda: models.Decoder(model, head="hidden"),
        ps,
        plan,
        weights=models.init_weights(model, seed=cfg.seed),
        schedule=cfg.schedule,
    )
    groups = optim.decay_groups(tk.named_parameters_of(stages), weight_decay=cfg.weight_decay)
    return stages, optim.adamw(groups, lr=cfg.lr)


def make_train_step(cfg, ps, stages, optimizer):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params = tk.parameters_of(stages)
    lr_at = schedules.cosine(cfg.lr, warmup=cfg.warmup, total=cfg.schedule_steps)
    loss = parallel.next_token_linear(ps.tp)
    forward_backward = tk.bind_forward_backward(stages, loss, axis=ps.pp, schedule=cfg.schedule)

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = forward_backward(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        lr = lr_at(state.step)
        norm = tk.clip_and_step(params, optimizer, lr=lr, max_norm=cfg.max_norm, axis=ps.pp)
        metrics = {
            **losses.mean_terms(tk.reduce_metrics(sums, ps.loss), tokens),
            "grad_norm": norm,
            "skipped": ~torch.isfinite(norm),
            "lr": lr,
            "tokens": tokens,
            "tokens_total": state.tokens + tokens,
            "batch_hash": tk.all_sum(tk.batch_hash(batch.microbatches), ps.loss),
        }
        moved = {"step": state.step + 1, "tokens": metrics["tokens_total"], "cursor": batch.cursor}
        return attrs.evolve(state, **moved), metrics

    return train_step


def train(cfg, ps, tokenizer, model):
    """Go on from the last checkpoint, or begin, and train until `cfg.steps`."""
    say = print if ps.world.index == 0 else lambda _: None
    run_dir = runtime.make_run_dir(cfg.out)
    say(f"reading {cfg.data or 'the source of the standard library'}")
    corpus = open_documents(cfg, tokenizer)
    longest, tokens = corpus.lengths.max(), corpus.lengths.sum()
    say(f"{len(corpus.lengths)} documents of {tokens} tokens, the longest of {longest}")
    rows = tk.pack_bins(corpus.lengths, cfg.row_length, multiple_of=cfg.multiple_of, seed=cfg.seed)
    stages, optimizer = build(cfg, ps, model)
    tk.checkpoint.require_space(run_dir, stages)
    facts = config.bound_values(cfg, may_change=MAY_CHANGE)
    facts |= {"model": attrs.asdict(model), "tokenizer": tokenizers.tokenizer_hash(tokenizer)}
    facts |= {"fingerprint": corpora.fingerprint(corpus), "rows": packing.bins_hash(rows)}
    state = tk.resume(
        run_dir, tk.TrainState(), stages, optimizer, ps, request=cfg.resume, facts=facts, tell=say
    )
    if ps.world.index == 0:
        config.write_config(run_dir / "config.toml", cfg)
    if state.step >= cfg.steps:
        say(f"the run in {run_dir} is complete at step {state.step}; --steps takes it further")

    train_step = make_train_step(cfg, ps, stages, optimizer)
    make_batch = functools.partial(
        tk.step_batch,
        corpus,
        rows,
        rows=cfg.rows,
        seed=cfg.seed,
        share=ps.dp.share,
        ring=ps.ring.share,
        ulysses=ps.ulysses.share,
        rows_per_microbatch=cfg.microbatch,
        costs=packing.row_costs(rows),
        pad_id=tokenizer.pad_id or 0,
    )
    with (
        sinks.run_sinks(run_dir, ps.world.share, step=state.step, last=cfg.steps) as (log, event),
        data.prefetch(make_batch, state.cursor, device=ps.device) as next_batch,
    ):
        while state.step < cfg.steps:
            begin = time.perf_counter()
            state, metrics = train_step(state, next_batch())
            log(state.step, step_record(metrics, seconds=time.perf_counter() - begin))
            if schedules.due(state.step, cfg.save_every, last=cfg.steps):
                path = tk.save_checkpoint(run_dir, state, stages, optimizer, ps, facts=facts)
                event("save", step=state.step, path=str(path))
    tk.checkpoint.write_final(run_dir, state, stages, optimizer, ps)
    if ps.world.index == 0:
        sinks.plot_loss(run_dir / "metrics.jsonl", run_dir / "loss.png")
        print(f"the run is in {run_dir}; its loss is drawn in {run_dir / 'loss.png'}")


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    with runtime.report_errors():
        cfg = config.load_config(Config, argv)
        tokenizer = tokenizers.open_tokenizer(cfg.tokenizer)
        model = models.decoder_config(
            cfg.size,
            vocab_size=models.round_up_vocabulary(tokenizer.vocab_size),
            rope_theta=cfg.rope_theta,
        )
        rows = {"row_length": cfg.row_length, "rows": cfg.rows, "microbatch": cfg.microbatch}
        parallel.check_layout(model, world=tk.mesh.world_size(), **rows, **cfg.layout)
    session = tk.parallel_session(**cfg.degrees, fold_sp=cfg.fold_sp)
    with runtime.report_errors(cfg.out), session as ps:
        train(cfg, ps, tokenizer, model)


if __name__ == "__main__":
    sys.exit(main())
