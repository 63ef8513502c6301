"""Teach a decoder which of two answers is better: DPO, IPO, KTO, SimPO or ORPO on pairs.

python recipes/preference.py                          # from runs/finetune, or a base of its own
python recipes/preference.py --init MODEL --data pairs.jsonl --lr 1e-6
python recipes/preference.py --loss simpo             # needs no reference
torchrun --nproc-per-node 2 recipes/preference.py --init runs/finetune --tp 2
"""

import functools
from collections import Counter
from pathlib import Path
from typing import Literal

import attrs
import numpy as np

import trainkit as tk
from trainkit.types import Cursor, TrainState


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Teach a decoder which of two answers is better; by default, one that ends."""

    out: Path = tk.config.option(Path("runs/preference"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(60, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A run, a checkpoint or a Hugging Face folder; by default runs/finetune, or a small base."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """Pairs: a .jsonl or .parquet file with the fields prompt, chosen and rejected."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default that of init."""
    template: str | None = tk.config.option(None, on_resume="allow")
    """How a conversation is written: chatml, llama3, qwen3, a folder's; by default that of init."""
    loss: Literal["dpo", "ipo", "kto", "simpo", "orpo"] = "dpo"
    """What a pair costs; the first three compare with the weights of the start."""
    beta: float | None = tk.config.option(None, attrs.validators.optional(tk.config.positive))
    """How much a log-ratio counts, or of ORPO the odds; by default 0.1, and 2 of SimPO."""
    eval_every: int = tk.config.option(60, tk.config.non_negative, on_resume="allow")
    """Evaluate on held-out pairs before, every so many steps, and at the end; 0: never."""
    batch: tk.config.RowOptions = tk.config.RowOptions(row_length=512, rows=4, microbatch=2)
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(
        lr=1e-4, warmup=10, schedule_steps=60
    )


def open_pairs(cfg, run, tokenizer):
    """Return the pairs: document 2i is a chosen answer to its prompt, 2i + 1 the rejected one."""
    template, counts = tk.chat.load_template(cfg.template), Counter()
    encode = functools.partial(
        tk.chat.encode_preference_pair, tokenizer=tokenizer, template=template, counts=counts
    )
    pairs = tk.corpora.open_pairs(cfg.data, encode, vocab_size=tokenizer.vocab_size)
    if warning := tk.chat.format_answers_warning(counts):
        run.log(warning)
    return pairs


def pack(cfg, run, corpus):
    """Return the rows to train on, and those held out: no pair is in both, or in two rows."""
    held_out, length = tk.corpora.held_out_documents(corpus), cfg.batch.row_length
    how = {"multiple_of": cfg.batch.multiple_of, "overlong": "drop"}
    parts = [np.where(out, 0, corpus.lengths) for out in (held_out, ~held_out)]
    rows, held = (tk.PackedCorpus(corpus, tk.chat.pack_pairs(x, length, **how)) for x in parts)
    pairs = len(corpus.lengths) // 2
    lost = pairs - (len(rows.bins.documents) + len(held.bins.documents)) // 2
    if warning := tk.packing.format_overlong_warning(
        pairs, capacity=length, dropped=lost, what="pairs"
    ):
        run.log(warning)
    return rows, held


def build(cfg, ps, base):
    """Return this rank's stages of the model, with its weights, and their optimizer."""
    plan = tk.parallel.make_decoder_plan(cfg.layout, **cfg.planned)
    make_model = functools.partial(tk.models.Decoder, base.config, head="hidden")
    weights = tk.adapters.open_base_weights(base.path, axis=ps.world)
    stages = tk.build_stages(
        make_model,
        ps,
        plan,
        weights=weights,
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed,
    )
    how = {"precision": cfg.precision, "seed": cfg.seed}
    return stages, tk.optim.make_optimizer(stages, **cfg.optim.made, **how)


def exchange_answers(cfg, rows):
    """Return rows of the chosen answers, each to the prompt of another pair."""
    chosen = set(rows.bins.documents[::2].tolist())
    halves = enumerate(tk.data.iterate_documents(rows.corpus))
    others = tk.chat.mismatch_answers(half for number, half in halves if number in chosen)
    corpus = tk.data.make_corpus(others, vocab_size=rows.corpus.vocab_size)
    how = {"multiple_of": cfg.batch.multiple_of, "overlong": "drop"}
    return tk.PackedCorpus(corpus, tk.pack_bins(corpus.lengths, cfg.batch.row_length, **how))


def bind_reference(cfg, run, stages, optimizer):
    """Return with_reference(rows, file): rows that know what the weights of the start say of them.

    The file is made before the first step; who goes on reads it, since the weights have moved.
    """
    score = tk.evaluation.make_scorer(stages)
    begins = cfg.resume == "never" or not tk.checkpoint.list_checkpoints(run.dir / "checkpoints")

    def heard(examples):
        run.phase("the reference", allow=cfg.limits.start_timeout)
        return score(examples)

    def with_reference(rows, file):
        path, corpus, ps = run.dir / file, rows.corpus, run.ps
        if begins:
            run.log(f"what the first weights say of {len(corpus.lengths)} answers, into {path}")
            facts = {"weights": tk.checkpoint.state_hash(TrainState(), stages, optimizer, ps)}
            facts |= {"compute": cfg.precision.compute, "corpus": tk.data.fingerprint(corpus)}
            how = {"context": cfg.batch.row_length, "axis": ps.world, "log": run.log}
            measured = tk.evaluation.make_logprob_columns(heard)
            tk.evaluation.score_corpus(measured, corpus, path, facts=facts, **how)
        return tk.PackedCorpus(tk.corpora.open_tokens(path), rows.bins)

    return with_reference


def measure_kl(ps, stages, batches):
    """Return the mean log-ratio of answers to prompts that are not theirs, equal on all ranks."""
    return tk.evaluate(stages, batches, tk.objectives.log_ratio(axis=ps.sp))["kl"]


def add_kl(batches, kl):
    """Yield batches with two columns that KTO reads: which answers are good, and the KL."""
    for batch in batches:
        desirable = (batch.document_ids % 2 == 0).float()
        flagged = attrs.evolve(batch, extra={**batch.extra, "desirable": desirable})
        yield from tk.objectives.add_reference_point([flagged], kl)


def bind_kl(cfg, ps, stages, others):
    """Return prepare(batch): a step's batch with what KTO reads, measured on as many others."""
    rows_at = tk.sampling.shuffle_epochs(len(others), rows_per_step=cfg.batch.rows, seed=cfg.seed)

    def prepare(batch):
        parts = tk.make_step_batch(
            others,
            rows_at,
            Cursor(batch.cursor.batch - 1),
            rows_per_microbatch=cfg.batch.microbatch,
            place=ps.place,
            device=ps.device,
        ).microbatches
        kl = measure_kl(ps, stages, parts)
        return attrs.evolve(batch, microbatches=[*add_kl(batch.microbatches, kl)])

    return prepare


def compare_with_start(cfg, run, stages, optimizer, rows, held):
    """Return both kinds of rows with the reference's log-probabilities, and facts of these.

    Between them stand, for KTO, rows of answers to other prompts for each kind, else nothing.
    """
    others, facts = (None, None), {}
    with_reference = bind_reference(cfg, run, stages, optimizer)
    if cfg.loss == "kto":
        files = (rows, "others.tokens"), (held, "held_others.tokens")
        others = [with_reference(exchange_answers(cfg, x), file) for x, file in files if len(x)]
        facts |= {"others": tk.data.fingerprint(others[0].corpus)}
    if cfg.loss in ("dpo", "ipo", "kto"):
        rows = with_reference(rows, "reference.tokens")
        held = tk.PackedCorpus(rows.corpus, held.bins)
        facts |= {"reference": tk.data.fingerprint(rows.corpus)}
    return rows, held, others, facts


def make_loss(cfg, ps):
    """Return the loss of pairs, or with KTO of answers: a sum over them."""
    loss, own = getattr(tk.objectives, cfg.loss), () if cfg.beta is None else (cfg.beta,)
    return loss(*own, axis=ps.sp)


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    total = cfg.optim.schedule_steps
    lr_at = tk.schedules.cosine(cfg.optim.lr, warmup=cfg.optim.warmup, total=total)
    max_norm = cfg.optim.max_norm
    halves = cfg.loss != "kto"  # which counts answers, and the others pairs
    unit = "pairs" if halves else "answers"

    def train_step(state, batch):
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        count = tk.all_sum(tk.batch.count_documents(batch.microbatches, halves=halves), ps.loss)
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(count, scale)
        )
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), count)
        loss, lr = terms.pop("preference"), lr_at(state.step)
        applies = tk.health.make_finite_check(loss, state.health, cfg.policy, tokens=count)
        update = tk.clip_and_step(
            stages, optimizer, lr=lr, max_norm=max_norm, should_apply=applies, scale=scale
        )
        metrics = {"loss": loss, **terms, unit: count, "tokens": tokens, "lr": lr}
        return tk.advance(state, batch, {**metrics, **update.metrics}, axis=ps.loss)

    return train_step


def bind_evaluation(cfg, ps, stages, held, others):
    """Return evaluate(): the loss that is trained, and its rewards, of pairs that are held out."""
    loss = make_loss(cfg, ps)
    answers = len(held.bins.documents)
    count = {"answers": answers} if cfg.loss == "kto" else {"pairs": answers // 2}

    def read(rows):
        return tk.make_eval_batches(
            rows, rows_per_batch=cfg.batch.microbatch, place=ps.place, device=ps.device
        )

    def evaluate():
        batches = read(held)
        if others is not None:
            batches = add_kl(batches, measure_kl(ps, stages, read(others)))
        found = tk.evaluate(stages, batches, loss)
        return tk.metrics.to_host({"loss": found.pop("preference"), **count, **found})

    return evaluate


def make_facts(cfg, base, rows):
    """Return what a run must be continued with as it was begun."""
    return {
        **tk.config.make_config_facts(cfg),
        **tk.data.make_data_facts(rows),
        "model": attrs.asdict(base.config),
        "tokenizer": tk.tokenizers.tokenizer_hash(base.tokenizer),
        "template": tk.chat.template_hash(cfg.template),
        "context": max(cfg.batch.row_length, base.full_context),
    }


def train(cfg, run, tokenizer, base, first):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps, changes = run.ps, tk.config.make_resume_rules(cfg, free=["files", "context"])
    run.log(f"reading {cfg.data or 'pairs of docstrings from the standard library'}")
    rows, held = pack(cfg, run, open_pairs(cfg, run, tokenizer))
    stages, optimizer = build(cfg, ps, base)
    facts = make_facts(cfg, base, rows)
    facts |= tk.checkpoint.hash_initial_weights(first, stages, ps)
    rows, held, others, references = compare_with_start(cfg, run, stages, optimizer, rows, held)
    prepare = bind_kl(cfg, ps, stages, others[0]) if cfg.loss == "kto" else lambda batch: batch
    facts |= references
    size = {"rows_per_step": cfg.batch.rows, "precision": cfg.precision}
    run.log(tk.parallel.describe_run(stages, rows.bins, **size))
    forward_backward = tk.make_forward_backward(
        stages, make_loss(cfg, ps), reduce=cfg.layout.reduce
    )
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    evaluate = bind_evaluation(cfg, ps, stages, held, others[-1])
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    share = {"place": ps.place, "rows_per_microbatch": cfg.batch.microbatch}
    share |= {"pad_id": tokenizer.pad_id or 0}
    make_batch = functools.partial(tk.make_step_batch, rows, rows_at, **share)
    state = run.resume(stages, optimizer, facts=facts, changes=changes, request=cfg.resume)
    stop, around = None, {"steps": cfg.steps, "policy": cfg.policy}
    around |= {"checkpoints": cfg.checkpoints, "logging": cfg.logging}
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop,
    ):
        loop.event("packing", step=state.step, **tk.packing.report_packing(rows.bins))
        if len(held) and cfg.eval_every and state.step == 0:
            state = loop.evaluate(state, evaluate)
        while state.step < cfg.steps and not stop:
            batch = prepare(next_batch(state.cursor))
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held) and tk.schedules.is_due(state.step, cfg.eval_every, last=cfg.steps):
                state = loop.evaluate(state, evaluate)
            stop = loop.checkpoint(state)
        rewards = ("desirable_reward", "undesirable_reward") if cfg.loss == "kto" else ("margin",)
        for metric in [f"eval/{name}" for name in ("loss", *rewards)] if not stop else ():
            loop.event("result", **tk.sinks.compare_evaluations(run.dir, metric))
    if stop:
        return tk.run.EXIT_SAVED
    run.finish(state, stages, optimizer)
    return 0


def open_base(cfg):
    """Return the model to build, and where the weights are that the run begins or began with."""
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    path = first.path or tk.hub.ensure_base_run(Path(__file__).parent, recipe="finetune")
    base = tk.hub.open_model(path, tokenizer=cfg.tokenizer, context=cfg.batch.row_length)
    return base, first.resolved(base.path)


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    base, first = open_base(cfg)
    template = tk.chat.choose_template_name(
        cfg.template, base.tokenizer, own=base.template, where=str(base.path)
    )
    precision = tk.parallel.resolve_precision(cfg.precision)
    cfg = attrs.evolve(cfg, init=first.source, tokenizer=base.name, template=template)
    cfg = attrs.evolve(cfg, precision=precision)
    world = tk.mesh.get_world_size()
    tk.parallel.refuse(tk.parallel.problems(cfg.layout, base.config, cfg.batch, world=world))
    with tk.open_run(cfg.out, **cfg.opened) as run:
        return train(cfg, run, base.tokenizer, base, first)


if __name__ == "__main__":
    tk.run.run_main(main)
