"""Teach a decoder which of two answers is better: DPO, IPO, KTO, SimPO or ORPO on pairs.

python preference.py                          # from runs/finetune, or a base of its own
python preference.py --init MODEL --data pairs.jsonl --lr 1e-6
python preference.py --loss simpo             # needs no reference
torchrun --nproc-per-node 2 preference.py --init runs/finetune --tp 2

The frame is that of pretrain.py, whose comments explain it. The comments here are about pairs and
the reference.
"""

import functools
from pathlib import Path
from typing import Literal

import attrs

import trainkit as tk


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Teach a decoder which of two answers is better; by default, one that ends."""

    out: Path = tk.config.option(Path("runs/preference"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures."""
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
    """The loss of a pair; the first three compare with the initial weights."""
    beta: float | None = tk.config.option(None, attrs.validators.optional(tk.config.positive))
    """The factor of the log-ratios (ORPO: of the odds ratio); by default 0.1, for SimPO 2."""
    eval_every: tk.schedules.Interval = tk.config.interval(60, on_resume="allow")
    """Steps between evaluations on held-out pairs, with one at both ends; 0 for none."""
    batch: tk.config.RowOptions = tk.config.RowOptions(row_length=512, rows=4, microbatch=2)
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(
        lr=1e-4,
        warmup=10,
        schedule_steps=60,
    )


def build(cfg, ps, base):
    """Return this rank's part of the model, with its weights, and its optimizer."""
    plan = tk.parallel.make_decoder_plan(
        cfg.layout,
        precision=cfg.precision,
        recompute=cfg.recompute,
        compiled=cfg.compiled,
        attention=cfg.attention,
        offload=cfg.offload_activations,
    )
    stages = tk.build_stages(
        functools.partial(tk.models.Decoder, base.config, head="hidden"),
        ps,
        plan,
        weights=tk.adapters.open_base_weights(base.path, axis=ps.world),
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed,  # serves decoders with experts and without
    )
    optimizer = tk.optim.make_optimizer(
        stages,
        optimizer=cfg.optim.optimizer,
        lr=cfg.optim.lr,
        weight_decay=cfg.optim.weight_decay,
        options=cfg.optim.options,
        groups=cfg.optim.groups,
        mean=cfg.optim.mean,
        offload=cfg.optim.offload_optimizer,
        precision=cfg.precision,
        seed=cfg.seed,
    )
    return stages, optimizer


def make_loss(cfg, ps):
    """Return the loss of pairs, or with KTO of answers: a sum over them."""
    # A loss needs the log-probability of a whole answer. With --ring or --ulysses its tokens are
    # on several ranks, and the loss sums over these.
    loss = getattr(tk.objectives, cfg.loss)
    return loss(axis=ps.sp) if cfg.beta is None else loss(cfg.beta, axis=ps.sp)


def add_references(cfg, run, stages, rows, held_out):
    """Return the rows with the reference's log-probabilities, and the mismatched rows of KTO.

    DPO, IPO and KTO measure how far the model has moved from the reference, its own initial
    weights. These never change, so no second model is needed: the log-probabilities of all tokens
    are computed once, before the first step, and stored in the run directory as one more column.
    """

    def add(rows, file):
        return tk.evaluation.score_reference(
            stages,
            rows,
            run.dir / file,
            is_new=is_new,
            facts=facts,
            announce=lambda: run.phase("the reference", allow=cfg.timeouts.start_timeout),
            log=run.log,
        )

    # A resumed run reads the files again: its weights are not the reference any more.
    is_new = cfg.resume == "never" or not tk.checkpoint.list_checkpoints(run.dir / "checkpoints")
    facts = {"compute": cfg.precision.compute}
    if is_new:
        facts["weights"] = tk.checkpoint.hash_weights(stages, run.ps)
    others, other_held_out = None, None
    if cfg.loss == "kto":
        # KTO takes single answers, good or bad. It compares each with how far the model has moved
        # in general (a KL divergence), which it measures on answers to other prompts.
        others = add(tk.corpora.pack_mismatched_answers(rows), "others.tokens")
        if len(held_out):
            other_held_out = add(tk.corpora.pack_mismatched_answers(held_out), "held_others.tokens")
    if cfg.loss in ("dpo", "ipo", "kto"):
        # The file has every document of the corpus, the held-out ones as well.
        rows = add(rows, "reference.tokens")
        held_out = attrs.evolve(held_out, corpus=rows.corpus)
    return rows, held_out, others, other_held_out


def measure_kl(ps, stages, batches):
    """Return the mean log-ratio of answers to other prompts, equal on all ranks."""
    return tk.evaluate(stages, batches, tk.objectives.log_ratio(axis=ps.sp))["kl"]


def add_kl(batches, kl):
    """Yield batches with two columns that KTO reads: which answers are good, and the KL."""
    for batch in batches:
        desirable = (batch.document_ids % 2 == 0).float()  # chosen and rejected take turns
        flagged = attrs.evolve(batch, extra={**batch.extra, "desirable": desirable})
        yield from tk.objectives.add_reference_point([flagged], kl)


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    # Warm up, and fall along a cosine to 0.
    lr_at = tk.schedules.cosine(
        cfg.optim.lr,
        warmup=cfg.optim.warmup,
        total=cfg.optim.schedule_steps,
    )
    in_pairs = cfg.loss != "kto"  # which counts answers

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        # The denominator is the number of pairs, or answers, in the whole global batch: each weighs
        # the same, however long it is.
        count = tk.all_sum(tk.batch.count_documents(batch.microbatches, halves=in_pairs), ps.loss)
        # The rest of the step is that of pretrain.py.
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(count, scale)
        )
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), count)
        loss = terms.pop("preference")
        should_apply = tk.health.make_finite_check(loss, state.health, cfg.policy, tokens=count)
        lr = lr_at(state.step)
        update = tk.clip_and_step(
            stages,
            optimizer,
            lr=lr,
            max_norm=cfg.optim.max_norm,
            should_apply=should_apply,
            scale=scale,
        )
        # `terms` are the rewards, and how often the chosen answer has the larger one.
        metrics = {
            "loss": loss,
            **terms,
            "pairs" if in_pairs else "answers": count,
            "tokens": tokens,
            "lr": lr,
            **update.metrics,
        }
        return tk.advance(state, batch, metrics, axis=ps.loss)

    return train_step


def make_evaluator(cfg, ps, stages, held_out, others):
    """Return evaluate(): the loss and the rewards of held-out pairs."""
    loss = make_loss(cfg, ps)
    answers = len(held_out.bins.documents)
    count = {"answers": answers} if cfg.loss == "kto" else {"pairs": answers // 2}

    # Evaluations read rows afresh each time, in their order.
    def read(rows):
        return tk.make_eval_batches(
            rows,
            rows_per_batch=cfg.batch.microbatch,
            data_shard=ps.data_shard,
            device=ps.device,
        )

    def evaluate():
        batches = read(held_out)
        if others is not None:
            batches = add_kl(batches, measure_kl(ps, stages, read(others)))
        terms = tk.to_host(tk.evaluate(stages, batches, loss))
        return {"loss": terms.pop("preference"), **count, **terms}

    return evaluate


def train(cfg, run, tokenizer, base, first):
    """Resume from the last checkpoint, or start, and train until `steps` or until a stop."""
    ps = run.ps
    # Document 2i is the chosen answer of pair i, 2i + 1 the rejected one. Both halves of a pair
    # are in the same row, so that a loss finds them in one microbatch.
    corpus = tk.corpora.open_preferences(
        cfg.data,
        tokenizer=tokenizer,
        template=cfg.template,
        log=run.log,
    )
    pairs, held_out = tk.corpora.split_pairs(
        corpus,
        cfg.batch.row_length,
        multiple_of=cfg.batch.multiple_of,
        log=run.log,
    )
    # The model, and the log-probabilities of its initial weights.
    stages, optimizer = build(cfg, ps, base)
    rows, held_out, others, other_held_out = add_references(cfg, run, stages, pairs, held_out)
    run.describe(stages, rows.bins, rows_per_step=cfg.batch.rows, precision=cfg.precision)

    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    make_batch = functools.partial(
        tk.make_step_batch,
        rows,
        rows_at,
        rows_per_microbatch=cfg.batch.microbatch,
        data_shard=ps.data_shard,
        pad_id=tokenizer.pad_id or 0,
    )
    # KTO reads as many mismatched answers in a step as answers.
    if others is not None:
        other_rows_at = tk.sampling.shuffle_epochs(
            len(others),
            rows_per_step=cfg.batch.rows,
            seed=cfg.seed,
        )

    def prepare(batch):
        """Add KTO's estimate of the KL divergence, by as many mismatched answers as answers."""
        if others is None:
            return batch
        mismatched = tk.make_step_batch(
            others,
            other_rows_at,
            attrs.evolve(batch.cursor, batch=batch.cursor.batch - 1),  # where this batch started
            rows_per_microbatch=cfg.batch.microbatch,
            data_shard=ps.data_shard,
            device=ps.device,
        )
        kl = measure_kl(ps, stages, mismatched.microbatches)
        return attrs.evolve(batch, microbatches=[*add_kl(batch.microbatches, kl)])

    forward_backward = tk.make_forward_backward(
        stages,
        make_loss(cfg, ps),
        reduce=cfg.layout.reduce,
    )
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    evaluate = make_evaluator(cfg, ps, stages, held_out, other_held_out)

    # The files of the reference are facts of the run, as its pairs are.
    facts = {"context": max(cfg.batch.row_length, base.full_context)}
    if rows is not pairs:
        facts["reference"] = tk.data.fingerprint(rows.corpus)
    if others is not None:
        facts["others"] = tk.data.fingerprint(others.corpus)
    state = run.resume(
        stages,
        optimizer,
        request=cfg.resume,
        config=cfg,
        model=base.config,
        tokenizer=tokenizer,
        template=cfg.template,
        rows=pairs,
        first=first,
        facts=facts,
    )
    stop = None
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(
            state,
            stages,
            optimizer,
            steps=cfg.steps,
            replay=forward_backward,
            checkpoints=cfg.checkpoints,
            logging=cfg.logging,
            policy=cfg.policy,
            batches_per_epoch=len(rows) / cfg.batch.rows,  # for --save-every 2epochs
        ) as loop,
    ):
        loop.event("packing", step=state.step, facts=rows.report)
        # Evaluated before the first step too, to see what was learned.
        if len(held_out) and cfg.eval_every and state.step == 0:
            state = loop.evaluate(state, evaluate)
        while state.step < cfg.steps and not stop:
            batch = prepare(next_batch(state.cursor))
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held_out) and loop.is_due(state, cfg.eval_every):
                state = loop.evaluate(state, evaluate)
            stop = loop.checkpoint(state)
        # The first and the last value of each evaluation, for people to compare.
        rewards = ("desirable_reward", "undesirable_reward") if cfg.loss == "kto" else ("margin",)
        for name in ("loss", *rewards) if not stop else ():
            loop.result(f"eval/{name}")
    return run.finish(state, stages, optimizer, stop=stop)


def main(argv=None):
    """Read the configuration, check it, open the process groups, and train."""
    cfg = tk.config.load_config(Config, argv)
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    base = tk.hub.open_model(
        first.path or tk.hub.ensure_base_run("finetune"),
        tokenizer=cfg.tokenizer,
        context=cfg.batch.row_length,
    )
    first = first.resolved(base.path)
    cfg = attrs.evolve(
        cfg,
        init=first.source,
        tokenizer=base.name,
        template=tk.chat.choose_template_name(
            cfg.template,
            base.tokenizer,
            own=base.template,
            where=str(base.path),
        ),
        precision=tk.parallel.resolve_precision(cfg.precision),
    )
    tk.parallel.check_layout(cfg.layout, base.config, cfg.batch)
    with tk.open_run(
        cfg.out,
        layout=cfg.layout,
        timeouts=cfg.timeouts,
        numerics=cfg.numerics,
        config=cfg,
    ) as run:
        return train(cfg, run, base.tokenizer, base, first)


if __name__ == "__main__":
    tk.run.run_main(main)
