"""Teach a decoder to answer: loss on the assistant's words alone, one token like another.

python recipes/sft.py                            # from a function's signature to what it does
python recipes/sft.py --init runs/pretrain       # the same, from what pretrain.py has learnt
torchrun --nproc-per-node 2 recipes/sft.py --data chats.jsonl
"""

import functools
import os
import time
from collections import Counter
from pathlib import Path

import attrs
import numpy as np

import trainkit as tk
from trainkit import (
    chat,
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
from trainkit.mesh import launch_notes
from trainkit.metrics import step_record
from trainkit.parallel.generation import bind_call
from trainkit.types import CheckpointError, DataError


@attrs.frozen(kw_only=True)
class Config(config.RunConfig):
    """Teach a decoder to answer; by default a small one, what functions of Python's library do."""

    out: Path = Path("runs/sft")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = attrs.field(default=550, validator=config.positive)
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    schedule_steps: int = attrs.field(default=550, validator=config.positive)
    """The length of the learning rate's schedule; past it the last rate holds."""
    data: Path | None = None
    """Conversations: a .jsonl or .parquet file with a field messages, or a .tokens file."""
    init: Path | None = None
    """A run directory, or a checkpoint, whose weights to begin with; by default none."""
    size: str = "tiny"
    """A named model size, where there is no init; see trainkit.models.decoder_sizes."""
    tokenizer: str = "bytes"
    """bytes, or a tokenizer.json."""
    template: str = attrs.field(default="chatml", validator=config.one_of(*chat.TEMPLATES))
    """How a conversation is written down."""
    train_on: str = attrs.field(default="assistant", validator=config.one_of("assistant", "last"))
    """Which turns are trained on: all of the assistant's, or only the last; .tokens files say."""
    cache: Path | None = Path("runs/cache")
    """Where the plans of rows are kept for the next run; None keeps none."""
    row_length: int = attrs.field(default=256, validator=config.positive)
    """Tokens in a row; conversations are packed into rows, longer ones lose their last turns."""
    rows: int = attrs.field(default=8, validator=config.positive)
    """Rows in a step, over all ranks."""
    microbatch: int = attrs.field(default=4, validator=config.positive)
    """Rows that go through the model at once, on each rank."""
    lr: float = attrs.field(default=3e-3, validator=config.positive)
    """The peak learning rate."""
    warmup: int = attrs.field(default=30, validator=config.non_negative)
    """Steps in which the learning rate rises."""
    weight_decay: float = attrs.field(default=0.1, validator=config.non_negative)
    """Decay of matrices; vectors have none."""
    max_norm: float = attrs.field(default=1.0, validator=config.positive)
    """Gradients above this norm are scaled down to it."""
    eval_every: int = attrs.field(default=275, validator=config.non_negative)
    """Evaluate on held-out conversations every so many steps, and at the end; 0 for never."""
    ask: tuple[str, ...] = (
        "def is_open(self)",
        "def get_version(name)",
        "def remove_file(path, force=False)",
    )
    """What the model is asked at the end, for you to read its answers."""


# What a run may be continued with another value of, because it changes nothing that is computed.
MAY_CHANGE = (
    *config.PLACE_FIELDS,
    *("data", "init", "cache"),  # the content is kept, by its hash
    *("microbatch", "eval_every", "ask"),
)
# What it may be continued with another value of if --allow-change says so.
NEEDS_FLAG = ("dtype", "lr", "warmup", "schedule_steps", "weight_decay", "max_norm")


def open_conversations(cfg, tokenizer):
    """Return the conversations, the assistant's tokens marked, and a count of what was cut."""
    counts = Counter()
    encode = chat.chat_encoder(
        tokenizer,
        template=chat.TEMPLATES[cfg.template],
        train=cfg.train_on,
        max_length=cfg.row_length,
        overlong="drop",
        counts=counts,
    )
    if cfg.data and cfg.data.suffix == ".tokens":
        corpus = tk.open_corpus(cfg.data, tokenizer=tokenizer)
        if corpus.trained is None:
            raise DataError(
                f"{cfg.data}: nothing says which of its tokens the assistant said; write it with "
                "python -m trainkit prepare --messages",
                where=cfg.data,
            )
        return corpus, counts
    if cfg.data:
        return tk.open_corpus(cfg.data, encode=encode), counts
    names, records = zip(*corpora.docstring_conversations(), strict=True)
    samples = map(encode, records)
    return corpora.memory_corpus(samples, vocab_size=tokenizer.vocab_size, names=names), counts


def pack(cfg, ps, corpus, counts, say):
    """Return the rows to train on, and those held out: no conversation is in both."""
    cut = {"truncated": counts["truncated"], "dropped": counts["dropped"], "what": "conversations"}
    if warning := packing.overlong_warning(counts["conversations"], capacity=cfg.row_length, **cut):
        say(warning)
    bins_of = functools.partial(
        data.cached_bins,
        cfg.cache,
        capacity=cfg.row_length,
        multiple_of=cfg.multiple_of,
        content=corpora.fingerprint(corpus),
        overlong="error",
        seed=cfg.seed,
        axis=ps.world,
        tell=say,
    )
    lengths = np.where(corpora.held_out_documents(corpus), 0, corpus.lengths)
    if (lengths == corpus.lengths).all():
        say("no conversation is held out of so few, so there is nothing to evaluate on")
    return bins_of(lengths=lengths), bins_of(lengths=corpus.lengths - lengths)


def choose_model(cfg, tokenizer, tell):
    """Return the model's configuration, and the checkpoint of its first weights with `init`."""
    if cfg.init is None:
        vocab_size = models.round_up_vocabulary(tokenizer.vocab_size)
        return models.decoder_config(cfg.size, vocab_size=vocab_size), None
    begun = cfg.resume == "auto" and checkpoint.list_checkpoints(cfg.out / "checkpoints")
    path = checkpoint.find_checkpoint(cfg.out if begun else cfg.init, tell=tell)
    facts = checkpoint.read_facts(path)
    if facts.get("tokenizer") != tokenizers.tokenizer_hash(tokenizer):
        raise CheckpointError(
            f"--init: {path} was trained with another tokenizer than {cfg.tokenizer}; name the "
            "same with --tokenizer",
            where=path,
        )
    return models.config_from_facts(facts["model"]), path


def build(cfg, ps, model):
    """Return this rank's stages of the model and their optimizer."""
    plan = [
        parallel.tensor(),
        parallel.sequence(),
        parallel.precision(parallel.DTYPES[cfg.dtype]),
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


def bind_batches(cfg, ps, corpus, rows, tokenizer):
    """Return make_batch(cursor): this rank's part of the global batch at a cursor."""
    return functools.partial(
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


def bind_evaluation(cfg, ps, corpus, rows, stages, loss, tokenizer):
    """Return evaluate(), which gives the loss over the rows that are held out."""

    def evaluate():
        batches = tk.eval_batches(
            corpus,
            rows,
            ps.dp.share,
            ring=ps.ring.share,
            ulysses=ps.ulysses.share,
            rows_per_batch=cfg.microbatch,
            pad_id=tokenizer.pad_id or 0,
            device=ps.device,
        )
        return tk.to_host(tk.evaluate(stages, batches, loss, axis=ps.loss, pp=ps.pp, tp=ps.tp))

    return evaluate


def make_train_step(cfg, ps, stages, optimizer, loss, evidence):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params = tk.parameters_of(stages)
    lr_at = schedules.cosine(cfg.lr, warmup=cfg.warmup, total=cfg.schedule_steps)
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


def make_facts(cfg, model, tokenizer, corpus, rows):
    """Return what a run must be continued with as it was begun."""
    facts = config.config_facts(cfg)
    facts |= {"model": attrs.asdict(model), "tokenizer": tokenizers.tokenizer_hash(tokenizer)}
    facts |= {"files": corpus.sources, "fingerprint": corpora.fingerprint(corpus)}
    return facts | {"rows": packing.bins_hash(rows)}


def answer(cfg, ps, stages, tokenizer, question):
    """Return what the model says to a question."""
    template = chat.TEMPLATES[cfg.template]
    messages = [{"role": "user", "content": question}]
    prompt = chat.prompt_ids(messages, tokenizer, template=template)
    (stop_id,) = chat.stop_ids(tokenizer, template)
    drawn = models.generate(
        stages[0],
        prompt,
        max_new_tokens=100,
        context=cfg.row_length,
        temperature=0.0,
        stop_id=stop_id,
        vocab_size=tokenizer.vocab_size,
        call=bind_call(stages, ps),
    )
    return tokenizer.decode(drawn)


def finish(cfg, ps, state, stages, optimizer, tokenizer, say):
    """Write how the run has ended, draw its loss, and ask the model some questions."""
    checkpoint.write_final(cfg.out, state, stages, optimizer, ps)
    answers = [answer(cfg, ps, stages, tokenizer, question) for question in cfg.ask]
    if ps.world.index == 0:
        sinks.plot_loss(cfg.out / "metrics.jsonl", cfg.out / "loss.png")
        for question, said in zip(cfg.ask, answers, strict=True):
            say(f"\n{question}\n    {sinks.printable(said)}")
        say(f"\nthe run is in {cfg.out}; its loss is drawn in {cfg.out / 'loss.png'}")
        say(sinks.run_summary(cfg.out))


def train(cfg, ps, tokenizer, model, init, told, phase, stopping, say):
    """Go on from the last checkpoint, or begin, and train until `cfg.steps` or until a stop."""
    say(f"reading {cfg.data or 'signatures and docstrings of the standard library'}")
    corpus, counts = open_conversations(cfg, tokenizer)
    rows, held_rows = pack(cfg, ps, corpus, counts, say)
    stages, optimizer = build(cfg, ps, model)
    say(parallel.start_lines(stages, ps, rows, rows_per_step=cfg.rows, dtype=cfg.dtype))
    checkpoint.require_space(cfg.out, stages, axis=ps.world, tell=say)
    facts = make_facts(cfg, model, tokenizer, corpus, rows)
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
    if init and state.step == 0:
        checkpoint.load_weights(init, stages)
        told.append(f"beginning with the weights of {init}")
    say("\n".join(told) or "beginning afresh")
    if ps.world.index == 0:
        config.write_config(cfg.out / "config.toml", cfg)
    if state.step >= cfg.steps:
        say(f"the run in {cfg.out} is complete at step {state.step}; --steps takes it further")

    loss = losses.next_token_linear
    evidence = {}
    train_step = make_train_step(cfg, ps, stages, optimizer, loss, evidence)
    make_batch = bind_batches(cfg, ps, corpus, rows, tokenizer)
    evaluate = bind_evaluation(cfg, ps, corpus, held_rows, stages, loss, tokenizer)
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
        event("packing", step=state.step, **packing.packing_report(rows), **counts)
        while state.step < cfg.steps and not stop:
            begin = time.perf_counter()
            state, metrics = train_step(state, next_batch(state.cursor))
            phase(f"step {state.step + 1}", allow=cfg.step_timeout)
            record = step_record(metrics, begin=begin)
            log(state.step, record)
            state = guard(state, record)
            if len(held_rows) and schedules.due(state.step, cfg.eval_every, last=cfg.steps):
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
    told: list[str] = []
    with runtime.report_errors():
        cfg = config.load_config(Config, argv)
        if cfg.deterministic:
            runtime.deterministic()
        cfg = attrs.evolve(cfg, dtype=parallel.choose_dtype(cfg.dtype))
        tokenizer = tokenizers.open_tokenizer(cfg.tokenizer)
        model, init = choose_model(cfg, tokenizer, told.append)
        rows = {"row_length": cfg.row_length, "rows": cfg.rows, "microbatch": cfg.microbatch}
        parallel.check_layout(model, world=tk.mesh.world_size(), **rows, **cfg.layout)
        facts = config.config_facts(cfg) | runtime.code_facts(__file__)
    with runtime.open_run(cfg.out, facts=facts, **cfg.session) as (ps, phase, stopping):
        say = sinks.printer(ps.world.share)
        for note in launch_notes(os.environ):
            say(note)
        return train(cfg, ps, tokenizer, model, init, told, phase, stopping, say)


if __name__ == "__main__":
    runtime.leave(main)
