"""Train a decoder from scratch; by default a small one, on the source of Python's own library.

python recipes/pretrain.py                                   # one process
torchrun --nproc-per-node 2 recipes/pretrain.py              # two, and the same losses
torchrun --nproc-per-node 4 recipes/pretrain.py --pp 2 --tp 2   # four, and the same losses
python recipes/pretrain.py --data FOLDER --size 10m          # your text, a larger model
python recipes/pretrain.py --data a.tokens b.tokens --weights 3 1    # a mixture of two corpora
"""

import functools
import os
import time
from pathlib import Path

import attrs
import numpy as np

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
    sampling,
    schedules,
    sinks,
    tokenizers,
)
from trainkit.mesh import launch_notes
from trainkit.metrics import step_record
from trainkit.parallel.generation import bind_call
from trainkit.types import ConfigError


@attrs.frozen(kw_only=True)
class Config(config.RunConfig):
    """Train a decoder from scratch; by default a small one, on the source of Python's library."""

    out: Path = Path("runs/pretrain")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = attrs.field(default=650, validator=config.positive)
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    schedule_steps: int = attrs.field(default=650, validator=config.positive)
    """The length of the learning rate's schedule; past it the last rate holds."""
    data: tuple[Path, ...] = ()
    """Corpora: text files, directories of them, .jsonl, .tokens and others; by default Python's."""
    field: str = "text"
    """The field of JSON lines, parquet or arrow files that holds the text."""
    weights: tuple[float, ...] = ()
    """How many of a step's rows each corpus gives, in proportion; by default as many as it has."""
    anneal_step: int = attrs.field(default=0, validator=config.non_negative)
    """From this step on the anneal-weights and the anneal-lr hold; 0 for never."""
    anneal_weights: tuple[float, ...] = ()
    """What the weights become at the anneal-step."""
    anneal_lr: float = attrs.field(default=1.0, validator=config.positive)
    """What the learning rate is multiplied with from the anneal-step on."""
    tokenizer: str | None = None
    """bytes, or a tokenizer.json; by default that beside the data (of n.tokens), or bytes."""
    cache: Path | None = Path("runs/cache")
    """Where the plans of rows are kept for the next run; None keeps none."""
    size: str = "tiny"
    """A named model size; see trainkit.models.decoder_sizes."""
    row_length: int = attrs.field(default=256, validator=config.positive)
    """Tokens in a row; documents are packed into rows, longer ones are split."""
    rows: int = attrs.field(default=8, validator=config.positive)
    """Rows in a step, over all ranks."""
    microbatch: int = attrs.field(default=4, validator=config.positive)
    """Rows that go through the model at once, on each rank."""
    lr: float = attrs.field(default=4e-3, validator=config.positive)
    """The peak learning rate."""
    warmup: int = attrs.field(default=30, validator=config.non_negative)
    """Steps in which the learning rate rises."""
    weight_decay: float = attrs.field(default=0.1, validator=config.non_negative)
    """Decay of matrices; vectors have none."""
    max_norm: float = attrs.field(default=1.0, validator=config.positive)
    """Gradients above this norm are scaled down to it."""
    recompute: str = attrs.field(
        default="none", validator=config.one_of("none", "selective", "full")
    )
    """What is computed again in the backward pass, to save memory."""
    compiled: bool = False
    """Compile the blocks with torch.compile."""
    eval_every: int = attrs.field(default=325, validator=config.non_negative)
    """Evaluate on held-out documents every so many steps, and at the end; 0 for never."""
    sample: int = attrs.field(default=200, validator=config.positive)
    """How many tokens the model writes at the end, for you to read."""


# What a run may be continued with another value of, because it changes nothing that is computed.
MAY_CHANGE = (
    *config.PLACE_FIELDS,
    *("data", "field", "cache"),  # the content is kept, by its hash
    *("anneal_step", "anneal_weights", "anneal_lr"),  # the phases that have begun are kept
    *("microbatch", "recompute", "compiled", "eval_every", "sample"),
)
# What it may be continued with another value of if --allow-change says so.
NEEDS_FLAG = ("dtype", "lr", "warmup", "schedule_steps", "weight_decay", "max_norm")


def open_corpora(cfg, tokenizer):
    """Return the corpora by name."""
    if not cfg.data:
        library, keep = corpora.standard_library(), corpora.is_library_source
        return {"library": tk.open_corpus(library, tokenizer=tokenizer, keep=keep)}
    if len(set(cfg.data)) < len(cfg.data):
        raise ConfigError(f"--data names a corpus twice: {', '.join(map(str, cfg.data))}")
    stems = {path: path.stem for path in cfg.data}
    names = stems if len(set(stems.values())) == len(stems) else {x: str(x) for x in cfg.data}
    how = {"tokenizer": tokenizer, "field": cfg.field}
    return {names[path]: tk.open_corpus(path, **how) for path in cfg.data}


def pack(cfg, ps, opened, say):
    """Return the rows to train on and those held out (no token is in both), and reports."""
    train, held, reports = {}, {}, {}
    for name, whole in opened.items():
        corpus, is_held = corpora.hold_out(whole, one_in=40, piece=cfg.row_length)
        bins_of = functools.partial(
            data.cached_bins,
            cfg.cache,
            capacity=cfg.row_length,
            multiple_of=cfg.multiple_of,
            content=corpora.fingerprint(corpus),
            seed=cfg.seed,
            axis=ps.world,
            tell=say,
        )
        lengths = np.where(is_held, 0, corpus.lengths)
        train[name] = corpus, bins_of(lengths=lengths)
        held[name] = corpus, bins_of(lengths=corpus.lengths - lengths)
        reports[name] = {
            **packing.packing_report(train[name][1], lengths),
            "empty_documents": int((corpus.lengths == 0).sum()),
            "held_out_documents": int(is_held.sum()),
        }
    mix, held = data.join_packed(train), data.join_packed(held)
    if any(part.trained is not None for part in mix.corpus.parts):
        say("where a corpus says which of its tokens are trained on, the others are only read")
    if not len(held.bins):
        say("nothing is held out of so little, so there is nothing to evaluate on")
    return mix, held, reports


def make_phases(cfg, num_rows):
    """Return how much of each corpus is drawn when: from the start, and while annealing."""

    def by_name(weights, flag):
        if len(weights) not in (0, len(num_rows)):
            raise ConfigError(f"{flag} has {len(weights)} numbers for {len(num_rows)} corpora")
        return dict(zip(num_rows, weights, strict=False))

    phases = [sampling.Phase(0, by_name(cfg.weights, "--weights") or num_rows)]
    if not cfg.anneal_step and (cfg.anneal_weights or cfg.anneal_lr != 1):
        raise ConfigError("--anneal-weights and --anneal-lr do nothing without --anneal-step")
    if cfg.anneal_step:
        weights = by_name(cfg.anneal_weights, "--anneal-weights")
        phases.append(sampling.Phase(cfg.anneal_step, weights, cfg.anneal_lr))
    return sampling.make_phases(*phases)


def bind_batches(cfg, ps, mix, phases, tokenizer):
    """Return make_batch(cursor): this rank's part of the global batch at a cursor."""
    return functools.partial(
        tk.step_batch,
        mix.corpus,
        mix.bins,
        rows=cfg.rows,
        seed=cfg.seed,
        share=ps.dp.share,
        ring=ps.ring.share,
        ulysses=ps.ulysses.share,
        rows_per_microbatch=cfg.microbatch,
        rows_at=functools.partial(
            sampling.rows_of_mixture,
            rows_per_step=cfg.rows,
            num_rows=mix.num_rows,
            phases=phases,
            seed=cfg.seed,
        ),
        source_of_row=mix.source_of_row,
        costs=packing.row_costs(mix.bins),
        pad_id=tokenizer.pad_id or 0,
    )


def build(cfg, ps, model):
    """Return this rank's stages of the model and their optimizer."""
    plan = [
        parallel.tensor(),
        parallel.sequence(),
        parallel.precision(parallel.DTYPES[cfg.dtype]),
        parallel.recompute(cfg.recompute, preserve_rng_state=False),
        *([parallel.compiled()] if cfg.compiled else []),
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


def make_train_step(cfg, ps, stages, optimizer, phases, loss, evidence):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params = tk.parameters_of(stages)
    lr_at = schedules.warmup_stable_decay(
        cfg.lr, warmup=cfg.warmup, total=cfg.schedule_steps, decay=0.4
    )
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
        lr = lr_at(state.step) * sampling.phase_at(state.step, phases).lr_scale
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


def bind_evaluation(cfg, ps, held, stages, loss, tokenizer):
    """Return evaluate(), which gives the loss over the rows that are held out."""

    def evaluate():
        batches = tk.eval_batches(
            held.corpus,
            held.bins,
            ps.dp.share,
            ring=ps.ring.share,
            ulysses=ps.ulysses.share,
            rows_per_batch=cfg.microbatch,
            source_of_row=held.source_of_row,
            pad_id=tokenizer.pad_id or 0,
            device=ps.device,
        )
        return tk.to_host(tk.evaluate(stages, batches, loss, axis=ps.loss, pp=ps.pp, tp=ps.tp))

    return evaluate


def make_facts(cfg, model, tokenizer, opened, mix, phases):
    """Return facts_at(step): what a run that has come to a step must be continued with."""
    facts = config.config_facts(cfg)
    facts |= {"model": attrs.asdict(model), "tokenizer": tokenizers.tokenizer_hash(tokenizer)}
    facts |= {"rows": packing.bins_hash(mix.bins)}
    facts |= {f"files of {name}": corpus.sources for name, corpus in opened.items()}
    facts |= {f"fingerprint of {name}": corpora.fingerprint(x) for name, x in opened.items()}

    def facts_at(step):
        begun = {str(p.start): attrs.asdict(p) for p in phases if p.start < max(step, 1)}
        return {**facts, "phases": begun}

    return facts_at


def finish(cfg, ps, state, stages, optimizer, tokenizer, say):
    """Write how the run has ended, draw its loss, and show what the model writes."""
    checkpoint.write_final(cfg.out, state, stages, optimizer, ps)
    prompt = tokenizer.encode("def ")
    drawn = models.generate(
        stages[0],
        [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *prompt],
        max_new_tokens=cfg.sample,
        context=cfg.row_length,
        temperature=0.7,
        seed=cfg.seed,
        stop_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        call=bind_call(stages, ps),
    )
    if ps.world.index == 0:
        sinks.plot_loss(cfg.out / "metrics.jsonl", cfg.out / "loss.png")
        say(f"\n{sinks.printable(tokenizer.decode([*prompt, *drawn]))}\n")
        say(f"the run is in {cfg.out}; its loss is drawn in {cfg.out / 'loss.png'}")
        say(sinks.run_summary(cfg.out))


def train(cfg, ps, tokenizer, model, phase, stopping, say):
    """Go on from the last checkpoint, or begin, and train until `cfg.steps` or until a stop."""
    say(f"reading {', '.join(map(str, cfg.data)) or 'the source of the standard library'}")
    opened = open_corpora(cfg, tokenizer)
    mix, held, reports = pack(cfg, ps, opened, say)
    phases = make_phases(cfg, mix.num_rows)
    stages, optimizer = build(cfg, ps, model)
    say(parallel.start_lines(stages, ps, mix.bins, rows_per_step=cfg.rows, dtype=cfg.dtype))
    checkpoint.require_space(cfg.out, stages, axis=ps.world, tell=say)
    facts_at = make_facts(cfg, model, tokenizer, opened, mix, phases)
    told: list[str] = []
    state = tk.resume(
        cfg.out,
        tk.TrainState(),
        stages,
        optimizer,
        ps,
        request=cfg.resume,
        facts=facts_at,
        changes=checkpoint.Changes(MAY_CHANGE, NEEDS_FLAG, cfg.allow_change),
        tell=told.append,
    )
    say("\n".join(told) or "beginning afresh")
    if ps.world.index == 0:
        config.write_config(cfg.out / "config.toml", cfg)
    if state.step >= cfg.steps:
        say(f"the run in {cfg.out} is complete at step {state.step}; --steps takes it further")

    loss = losses.next_token_linear
    loss = losses.by_source(mix.names, loss) if len(mix.names) > 1 else loss
    evidence = {}
    train_step = make_train_step(cfg, ps, stages, optimizer, phases, loss, evidence)
    make_batch = bind_batches(cfg, ps, mix, phases, tokenizer)
    evaluate = bind_evaluation(cfg, ps, held, stages, loss, tokenizer)

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
            facts=facts_at,
            evidence=evidence,
            event=event,
            before_commit=functools.partial(sinks.sync_lines, cfg.out),
            tell=say,
            **cfg.safety,
        ) as (save, guard),
    ):
        event("resume", step=state.step, told=told)
        for name, report in reports.items():
            event("packing", step=state.step, corpus=name, **report)
        while state.step < cfg.steps and not stop:
            begin = time.perf_counter()
            state, metrics = train_step(state, next_batch(state.cursor))
            phase(f"step {state.step + 1}", allow=cfg.step_timeout)
            record = step_record(metrics, begin=begin)
            log(state.step, record)
            state = guard(state, record)
            if len(held.bins) and schedules.due(state.step, cfg.eval_every, last=cfg.steps):
                phase("evaluation", allow=cfg.start_timeout)
                found = evaluate()
                state = health.refuse_divergence(state, found["loss"])
                event("evaluation", step=state.step, **found)
                say(f"held out: {found['loss']:.4f} nats per token, {found['tokens']} tokens")
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
    finish(cfg, ps, state, stages, optimizer, tokenizer, say)
    return 0


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    with runtime.report_errors():
        cfg = config.load_config(Config, argv)
        if cfg.deterministic:
            runtime.deterministic()
        cfg = attrs.evolve(cfg, dtype=parallel.choose_dtype(cfg.dtype))
        cfg = attrs.evolve(cfg, tokenizer=tokenizers.find_tokenizer(cfg.tokenizer, cfg.data))
        tokenizer = tokenizers.open_tokenizer(cfg.tokenizer)
        vocab_size = models.round_up_vocabulary(tokenizer.vocab_size)
        model = models.decoder_config(cfg.size, vocab_size=vocab_size)
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
