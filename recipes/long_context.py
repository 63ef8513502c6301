"""Train on documents of thousands of tokens, each spread over ranks by ring x Ulysses attention.

python recipes/long_context.py                       # one process, on Python's own library
torchrun --nproc-per-node 4 recipes/long_context.py --ring 2 --ulysses 2   # the same losses
torchrun --nproc-per-node 4 recipes/long_context.py --ring 4 --row-length 16384
"""

import functools
import itertools
import os
import time
from pathlib import Path

import attrs

import trainkit as tk
from trainkit import (
    checkpoint,
    config,
    corpora,
    data,
    health,
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
from trainkit.mesh import launch_notes
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


# What a run may be continued with another value of, because it changes nothing that is computed.
MAY_CHANGE = (
    *config.PLACE_FIELDS,
    "data",  # the content is kept, by its hash
    *("microbatch", "recompute"),
)
# What it may be continued with another value of if --allow-change says so.
NEEDS_FLAG = ("dtype", "lr", "warmup", "schedule_steps", "weight_decay", "max_norm")


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
        parallel.precision(parallel.DTYPES[cfg.dtype]),
        parallel.recompute(cfg.recompute, preserve_rng_state=False),
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


def make_train_step(cfg, ps, stages, optimizer, evidence):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params = tk.parameters_of(stages)
    lr_at = schedules.cosine(cfg.lr, warmup=cfg.warmup, total=cfg.schedule_steps)
    loss = losses.next_token_linear
    forward_backward = tk.bind_forward_backward(
        stages, loss, axis=ps.pp, schedule=cfg.schedule, reduce=cfg.reduce
    )

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = forward_backward(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        counted = {**sums, "processed": tk.count_tokens(batch.microbatches)}
        totals = tk.reduce_metrics(counted, ps.loss)
        processed = totals.pop("processed")
        terms = losses.mean_terms(totals, tokens)
        lr = lr_at(state.step)
        applies = health.step_test(terms["loss"], state.health, cfg.policy, tokens=tokens)
        norm = tk.clip_and_step(
            params,
            optimizer,
            lr=lr,
            max_norm=cfg.max_norm,
            axis=ps.pp,
            applies=applies,
            world=ps.world,
            evidence=evidence,
        )
        replay = functools.partial(forward_backward, batch.microbatches, denominator=tokens)
        evidence.update(sums, replay=replay)
        metrics = {
            **terms,
            "grad_norm": norm,
            "skipped": ~applies(norm),
            "lr": lr,
            "tokens": tokens,
            "tokens_processed": processed,
            "tokens_total": state.tokens + tokens,
            "batch_hash": tk.all_sum(tk.batch_hash(batch.microbatches), ps.loss),
        }
        moved = {"step": state.step + 1, "tokens": metrics["tokens_total"], "cursor": batch.cursor}
        return attrs.evolve(state, **moved), metrics

    return train_step


def train(cfg, ps, tokenizer, model, phase, stopping, say):
    """Go on from the last checkpoint, or begin, and train until `cfg.steps` or until a stop."""
    say(f"reading {cfg.data or 'the source of the standard library'}")
    corpus = open_documents(cfg, tokenizer)
    longest, tokens = corpus.lengths.max(), corpus.lengths.sum()
    say(f"{len(corpus.lengths)} documents of {tokens} tokens, the longest of {longest}")
    rows = tk.pack_bins(corpus.lengths, cfg.row_length, multiple_of=cfg.multiple_of, seed=cfg.seed)
    stages, optimizer = build(cfg, ps, model)
    say(parallel.start_lines(stages, ps, rows, rows_per_step=cfg.rows, dtype=cfg.dtype))
    checkpoint.require_space(cfg.out, stages, axis=ps.world, tell=say)
    facts = config.config_facts(cfg)
    facts |= {"model": attrs.asdict(model), "tokenizer": tokenizers.tokenizer_hash(tokenizer)}
    facts |= {"fingerprint": corpora.fingerprint(corpus), "rows": packing.bins_hash(rows)}
    told: list[str] = []
    state = tk.resume(
        cfg.out,
        tk.TrainState(),
        stages,
        optimizer,
        ps,
        request=cfg.resume,
        facts=facts,
        changes=checkpoint.Changes(MAY_CHANGE, NEEDS_FLAG, cfg.allow_change),
        tell=told.append,
    )
    say("\n".join(told) or "beginning afresh")
    if ps.world.index == 0:
        config.write_config(cfg.out / "config.toml", cfg)
    if state.step >= cfg.steps:
        say(f"the run in {cfg.out} is complete at step {state.step}; --steps takes it further")

    evidence = {}
    train_step = make_train_step(cfg, ps, stages, optimizer, evidence)
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
    others = sinks.named_sinks(cfg.sinks, cfg.out, config=config.plain_values(cfg))
    span, stop = {"step": state.step, "last": cfg.steps, "extra": others}, None
    with (
        sinks.run_sinks(cfg.out, ps.world.share, **span) as (log, event),
        data.prefetch(make_batch, state.cursor, device=ps.device) as next_batch,
        checkpoint.guarded_saves(
            cfg.out,
            stages,
            optimizer,
            ps,
            facts=facts,
            evidence=evidence,
            event=event,
            before_commit=functools.partial(sinks.sync_lines, cfg.out),
            tell=say,
            **cfg.safety,
        ) as (save, guard),
    ):
        event("resume", step=state.step, told=told)
        while state.step < cfg.steps and not stop:
            begin = time.perf_counter()
            state, metrics = train_step(state, next_batch(state.cursor))
            phase(f"step {state.step + 1}", allow=cfg.step_timeout)
            record = step_record(metrics, begin=begin)
            log(state.step, record)
            state = guard(state, record)
            stop = stopping()
            if stop or schedules.due(state.step, cfg.save_every, last=cfg.steps):
                save(state)
        if stop:
            event("stop", step=state.step, why=stop)
    if stop:
        say(f"stopped after step {state.step} ({stop}); the same command goes on from there")
        say(sinks.run_summary(cfg.out))
        return runtime.SAVED
    phase("the end", allow=cfg.start_timeout)
    checkpoint.write_final(cfg.out, state, stages, optimizer, ps)
    if ps.world.index == 0:
        sinks.plot_loss(cfg.out / "metrics.jsonl", cfg.out / "loss.png")
        say(f"the run is in {cfg.out}; its loss is drawn in {cfg.out / 'loss.png'}")
        say(sinks.run_summary(cfg.out))
    return 0


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    with runtime.report_errors():
        cfg = config.load_config(Config, argv)
        if cfg.deterministic:
            runtime.deterministic()
        cfg = attrs.evolve(cfg, dtype=parallel.choose_dtype(cfg.dtype))
        tokenizer = tokenizers.open_tokenizer(cfg.tokenizer)
        model = models.decoder_config(
            cfg.size,
            vocab_size=models.round_up_vocabulary(tokenizer.vocab_size),
            rope_theta=cfg.rope_theta,
        )
        rows = {"row_length": cfg.row_length, "rows": cfg.rows, "microbatch": cfg.microbatch}
        parallel.check_layout(model, world=tk.mesh.world_size(), **rows, **cfg.layout)
        facts = config.config_facts(cfg) | runtime.code_facts(__file__)
    with runtime.open_run(cfg.out, facts=facts, **cfg.session) as (ps, phase, stopping):
        say = sinks.printer(ps.world.share)
        for note in launch_notes(os.environ):
            say(note)
        return train(cfg, ps, tokenizer, model, phase, stopping, say)


if __name__ == "__main__":
    runtime.leave(main)
