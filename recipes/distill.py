"""Distil a larger decoder into a small one, and train a twin of that on the text alone.

python distill.py                            # from runs/pretrain, or a base of its own
python distill.py --teacher MODEL --data FOLDER    # a Hugging Face folder, your text
python distill.py --loss reverse --temperature 2 --hard 0.2
torchrun --nproc-per-node 2 distill.py --teacher runs/pretrain --pp 2

The frame is that of pretrain.py, whose comments explain it. The comments here are about teachers.
"""

import functools
from pathlib import Path
from typing import Literal

import attrs

import trainkit as tk

# The generalised Jensen-Shannon divergence has both KL divergences as its ends.
BETAS = {"forward": 0.0, "js": 0.5, "reverse": 1.0}


@attrs.frozen(kw_only=True)
class StudentOptions:
    """The size of the student; its vocabulary is the teacher's."""

    layers: int = attrs.field(default=2, validator=tk.config.positive)
    """Its blocks."""
    width: int = attrs.field(default=64, validator=tk.config.positive)
    """The width of its hidden states."""
    heads: int = attrs.field(default=4, validator=tk.config.positive)
    """Its attention heads, each with keys and values of its own."""
    mlp_width: int = attrs.field(default=192, validator=tk.config.positive)
    """The width inside its MLPs."""


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Train a small decoder on a larger one's distributions; by default on Python's library."""

    out: Path = tk.config.option(Path("runs/distill"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures."""
    steps: int = tk.config.option(120, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    teacher: Path | None = tk.config.option(None, on_resume="allow")
    """A run, a checkpoint or a Hugging Face folder; by default runs/pretrain, or a small base."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """A text file, a directory of them, .jsonl, .tokens and others; by default Python's library."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default the teacher's."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are cached for the next run; None for no cache."""
    loss: Literal["forward", "reverse", "js"] = "forward"
    """KL(teacher, student), KL(student, teacher), or the Jensen-Shannon divergence of the two."""
    temperature: float = tk.config.option(1.0, tk.config.positive)
    """Divides the logits of both; the divergence is multiplied by its square."""
    hard: float = tk.config.option(0.5, tk.config.fraction)
    """The weight of the loss of the text's own tokens, out of 1; 1 needs no teacher."""
    compare: bool = tk.config.option(default=True, on_resume="ignore")
    """Train a twin first, on hard labels alone, in the folder hard of the run's directory."""
    eval_every: tk.schedules.Interval = tk.config.interval(60, on_resume="allow")
    """Steps between evaluations on held-out documents, with one at the end; 0 for none."""
    student: StudentOptions = StudentOptions()
    batch: tk.config.RowOptions = tk.config.RowOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=4e-3, schedule_steps=120)


def choose_student(cfg, vocab_size):
    """Return the configuration of the model that is trained."""
    return tk.models.make_decoder_config(
        "tiny",
        layers=cfg.student.layers,
        width=cfg.student.width,
        heads=cfg.student.heads,
        kv_heads=cfg.student.heads,
        mlp_width=cfg.student.mlp_width,
        vocab_size=vocab_size,
    )


def open_rows(cfg, run, tokenizer, template=None):
    """Return the rows to train on, and those held out: pretrain.py holds out the same."""
    corpora = tk.corpora.open_corpora(
        (cfg.data,) if cfg.data else (),
        tokenizer=tokenizer,
        template=template,
        log=run.log,
    )
    rows, held_out, _ = tk.corpora.pack_corpora(
        corpora,
        cfg.batch.row_length,
        one_in=40,
        multiple_of=cfg.batch.multiple_of,
        seed=cfg.seed,
        cache_dir=cfg.cache,
        axis=run.ps.world,
        log=run.log,
    )
    return rows, held_out


def build_model(cfg, ps, model, weights):
    """Return this rank's part of a model, the student or its teacher, in the run's layout."""
    plan = tk.parallel.make_decoder_plan(
        cfg.layout,
        precision=cfg.precision,
        recompute=cfg.recompute,
        compiled=cfg.compiled,
        attention=cfg.attention,
        offload=cfg.offload_activations,
    )
    return tk.build_stages(
        functools.partial(tk.models.Decoder, model, head="hidden"),
        ps,
        plan,
        weights=weights,
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed,  # serves decoders with experts and without
    )


def make_optimizer(cfg, stages):
    """Return the optimizer of the student."""
    return tk.optim.make_optimizer(
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


def make_soft_labels(cfg, ps, base, batch):
    """Return the loss; teach(microbatches), which adds what it needs to them; and facts."""
    if cfg.hard == 1:  # the twin
        return tk.losses.next_token_linear, list, {}
    teacher = build_model(
        cfg,
        ps,
        base.config,
        tk.adapters.open_base_weights(base.path, axis=ps.world),
    )
    # The teacher is never trained: it has no gradients and no optimizer.
    for stage in teacher:
        stage.requires_grad_(False)
    # The teacher's distribution of a token has one number per id of the vocabulary, too many to
    # store. Its last hidden state is stored instead, and the loss computes logits from it for a few
    # tokens at a time. For this it needs the teacher's output matrix, copied here once.
    head = tk.parallel.make_output_head(teacher, batch)
    divergence = tk.objectives.distillation(
        head,
        beta=BETAS[cfg.loss],
        temperature=cfg.temperature,
    )
    # A temperature T makes gradients 1/T^2 as large (Hinton et al. 2015).
    soft_weight = (1 - cfg.hard) * cfg.temperature**2
    loss = tk.losses.add_terms(
        (tk.losses.next_token_linear, cfg.hard),
        (divergence, soft_weight),
    )

    # The hidden states become one more column of each microbatch.
    def find_hidden(output, _):
        return {"teacher_hidden": tk.types.drop_routing(output).hidden}

    def teach(microbatches):
        return tk.parallel.add_columns(teacher, microbatches, find_hidden)

    # A hash of the teacher: a run cannot be resumed with another one.
    weights = tk.adapters.exclude_frozen_(teacher, ps, source=base.path)["base"]
    return loss, teach, {"weights of the teacher": weights}


def make_train_step(cfg, ps, stages, optimizer, teach, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    lr_at = tk.schedules.warmup_stable_decay(
        cfg.optim.lr,
        warmup=cfg.optim.warmup,
        total=cfg.optim.schedule_steps,
        decay=0.4,
    )

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        # The rest of the step is that of pretrain.py.
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        # The teacher goes first, over all microbatches of the step.
        sums = forward_backward(
            teach(batch.microbatches), denominator=tk.batch.scale_denominator(tokens, scale)
        )
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        should_apply = tk.health.make_finite_check(
            terms["loss"], state.health, cfg.policy, tokens=tokens
        )
        lr = lr_at(state.step)
        update = tk.clip_and_step(
            stages,
            optimizer,
            lr=lr,
            max_norm=cfg.optim.max_norm,
            should_apply=should_apply,
            scale=scale,
        )
        metrics = {**terms, **update.metrics, "lr": lr, "tokens": tokens}
        return tk.advance(state, batch, metrics, axis=ps.loss)

    return train_step


def compare_with_twin(run_dir):
    """Return the held-out loss of the twin on hard labels, and of the run itself."""
    twin = tk.sinks.compare_evaluations(run_dir / "hard", "eval/loss")
    return tk.sinks.compare_evaluations(run_dir, "eval/loss") | {"before": twin["after"]}


def train(cfg, run, base):
    """Resume from the last checkpoint, or start, and train until `steps` or until a stop."""
    ps = run.ps
    rows, held_out = open_rows(cfg, run, base.tokenizer, base.template)
    # The batches of the twin, too: both runs have this seed.
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    make_batch = functools.partial(
        tk.make_step_batch,
        rows,
        rows_at,
        rows_per_microbatch=cfg.batch.microbatch,
        data_shard=ps.data_shard,
        pad_id=base.tokenizer.pad_id or 0,
    )

    # The teacher, in the same layout as the student, and then the student with new weights.
    first = make_batch(tk.Cursor(), device=ps.device).microbatches[0]
    loss, teach, facts = make_soft_labels(cfg, ps, base, first)
    student = choose_student(cfg, base.config.vocab_size)
    weights = tk.models.init_weights(student, seed=cfg.seed)
    stages = build_model(cfg, ps, student, weights)
    optimizer = make_optimizer(cfg, stages)
    run.describe(stages, rows.bins, rows_per_step=cfg.batch.rows, precision=cfg.precision)
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, stages, optimizer, teach, forward_backward)
    # Held-out text is evaluated by the loss of its own tokens, which the twin has too.
    evaluate = tk.evaluation.make_evaluator(
        stages,
        held_out,
        tk.losses.next_token_linear,
        rows_per_batch=cfg.batch.microbatch,
    )

    state = run.resume(
        stages,
        optimizer,
        request=cfg.resume,
        config=cfg,
        model=student,
        tokenizer=base.tokenizer,
        rows=rows,
        facts=facts,
    )

    # To find the cause of a bad step it is computed again, the teacher's forward pass included.
    def replay(microbatches, *, denominator):
        return forward_backward(teach(microbatches), denominator=denominator)

    stop = None
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(
            state,
            stages,
            optimizer,
            steps=cfg.steps,
            replay=replay,
            checkpoints=cfg.checkpoints,
            logging=cfg.logging,
            policy=cfg.policy,
            batches_per_epoch=len(rows) / cfg.batch.rows,  # for --save-every 2epochs
        ) as loop,
    ):
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held_out) and loop.is_due(state, cfg.eval_every):
                state = loop.evaluate(state, evaluate)
            stop = loop.checkpoint(state)
        # What the teacher was worth: the loss of the twin without a teacher, and of the student.
        if not stop and cfg.compare and cfg.hard < 1:
            loop.event("result", facts=compare_with_twin(run.dir))
    return run.finish(state, stages, optimizer, stop=stop)


def plan_runs(cfg):
    """Return the configurations of the runs: the twin on hard labels, and the student."""
    if not cfg.compare or cfg.hard == 1:
        return [cfg]
    # A checkpoint that --resume names is the student's; the twin takes its own newest one.
    resume = cfg.resume if cfg.resume == "never" else "auto"
    twin = attrs.evolve(cfg, out=cfg.out / "hard", hard=1.0, teacher=None, resume=resume)
    return [twin, cfg]


def main(argv=None):
    """Read the configuration, check it, and train the twin and the student."""
    cfg = tk.config.load_config(Config, argv)
    # The teacher decides the tokenizer: both models need one vocabulary.
    base = tk.hub.open_model(
        cfg.teacher or tk.hub.ensure_base_run(),
        tokenizer=cfg.tokenizer,
        context=cfg.batch.row_length,
    )
    cfg = attrs.evolve(
        cfg,
        teacher=base.path,
        tokenizer=base.name,
        precision=tk.parallel.resolve_precision(cfg.precision),
    )
    # Both models must fit the layout.
    for model in (choose_student(cfg, base.config.vocab_size), base.config):
        tk.parallel.check_layout(cfg.layout, model, cfg.batch)
    # Two runs in one process: the twin is complete, or stopped, before the student starts.
    for each in plan_runs(cfg):
        with tk.open_run(
            each.out,
            layout=each.layout,
            timeouts=each.timeouts,
            numerics=each.numerics,
            config=each,
        ) as run:
            if code := train(each, run, base):
                return code
    return 0


if __name__ == "__main__":
    tk.run.run_main(main)
