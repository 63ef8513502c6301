"""Train a small decoder on what a larger one finds likely, and a twin of it on the text alone.

python recipes/distill.py                            # from runs/pretrain, or a base of its own
python recipes/distill.py --teacher MODEL --data FOLDER    # a Hugging Face folder, your text
python recipes/distill.py --loss reverse --temperature 2 --hard 0.2
torchrun --nproc-per-node 2 recipes/distill.py --teacher runs/pretrain --pp 2
"""

import functools
from pathlib import Path
from typing import Literal

import attrs

import trainkit as tk

BETAS = {"forward": 0.0, "js": 0.5, "reverse": 1.0}


@attrs.frozen(kw_only=True)
class StudentOptions:
    """The size of the student, which has the words of its teacher."""

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
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(120, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    teacher: Path | None = tk.config.option(None, on_resume="allow")
    """A run, a checkpoint or a Hugging Face folder; by default runs/pretrain, or a small base."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """A text file, a directory of them, .jsonl, .tokens and others; by default Python's library."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default the teacher's."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are kept for the next run; None keeps none."""
    loss: Literal["forward", "reverse", "js"] = "forward"
    """KL(teacher, student), KL(student, teacher), or the Jensen-Shannon divergence of the two."""
    temperature: float = tk.config.option(1.0, tk.config.positive)
    """What the logits of both are divided by; the divergence is multiplied by its square."""
    hard: float = tk.config.option(0.5, tk.config.fraction)
    """The weight of the text's own next tokens; the divergence has the rest. 1: no teacher."""
    compare: bool = tk.config.option(default=True, on_resume="ignore")
    """Train a twin first, on hard labels alone, in the folder hard of the run's directory."""
    eval_every: int = tk.config.option(60, tk.config.non_negative, on_resume="allow")
    """Evaluate on held-out documents every so many steps, and at the end; 0 for never."""
    student: StudentOptions = StudentOptions()
    batch: tk.config.RowOptions = tk.config.RowOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=4e-3, schedule_steps=120)


def open_rows(cfg, run, tokenizer, template=None):
    """Return the rows to train on, and those held out: pretrain.py holds out the same."""
    run.log(f"reading {cfg.data or 'the source of the standard library'}")
    length = cfg.batch.row_length
    if cfg.data:
        whole = tk.open_corpus(cfg.data, tokenizer=tokenizer, template=template)
    else:
        whole = tk.corpora.open_library_corpus(tokenizer)
    corpus, is_held = tk.corpora.hold_out(whole, one_in=40, piece=length)
    how = {"cache_dir": cfg.cache, "axis": run.ps.world, "seed": cfg.seed, "log": run.log}
    how |= {"multiple_of": cfg.batch.multiple_of}
    return tk.data.split_held_out(corpus, is_held, length, **how)


def choose_student(cfg, words):
    """Return the configuration of the model that is trained."""
    size = attrs.asdict(cfg.student) | {"kv_heads": cfg.student.heads, "vocab_size": words}
    return tk.models.make_decoder_config("tiny", **size)


def build(cfg, ps, model, weights):
    """Return this rank's stages of a model, the student or its teacher, in the run's layout."""
    plan = tk.parallel.make_decoder_plan(cfg.layout, **cfg.planned)
    make_model = functools.partial(tk.models.Decoder, model, head="hidden")
    return tk.build_stages(
        make_model,
        ps,
        plan,
        weights=weights,
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed,
    )


def soft_labels(cfg, ps, base, batch):
    """Return the loss, teach(microbatches), which puts beside them what it needs, and facts."""
    if cfg.hard == 1:
        return tk.losses.next_token_linear, list, {}
    teacher = build(cfg, ps, base.config, tk.adapters.open_base_weights(base.path, axis=ps.world))
    for stage in teacher:
        stage.requires_grad_(False)
    head = tk.parallel.make_output_head(teacher, batch)
    soft = {"beta": BETAS[cfg.loss], "temperature": cfg.temperature}
    loss = tk.losses.add_terms(
        (tk.losses.next_token_linear, cfg.hard),
        (tk.objectives.distillation(head, **soft), (1 - cfg.hard) * cfg.temperature**2),
    )

    def select_columns(output, _):
        return {"teacher_hidden": tk.types.drop_routing(output).hidden}

    def teach(microbatches):
        return tk.parallel.add_columns(teacher, microbatches, select_columns)

    known = tk.adapters.exclude_frozen_(teacher, ps, source=base.path)
    return loss, teach, {"weights of the teacher": known["base"]}


def make_train_step(cfg, ps, model, teach, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    (stages, optimizer), total = model, cfg.optim.schedule_steps
    rise = {"warmup": cfg.optim.warmup, "total": total}
    lr_at = tk.schedules.warmup_stable_decay(cfg.optim.lr, **rise, decay=0.4)
    max_norm = cfg.optim.max_norm

    def train_step(state, batch):
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        per = tk.batch.scale_denominator(tokens, scale)
        sums = forward_backward(teach(batch.microbatches), denominator=per)
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        applies = tk.health.make_finite_check(
            terms["loss"], state.health, cfg.policy, tokens=tokens
        )
        lr = lr_at(state.step)
        update = tk.clip_and_step(
            stages, optimizer, lr=lr, max_norm=max_norm, should_apply=applies, scale=scale
        )
        metrics = {**terms, **update.metrics, "lr": lr}
        return tk.advance(state, batch, {**metrics, "tokens": tokens}, axis=ps.loss)

    return train_step


def make_facts(cfg, model, tokenizer, rows):
    """Return what a run must be continued with as it was begun, but for its teacher."""
    facts = tk.config.make_config_facts(cfg) | tk.data.make_data_facts(rows)
    named = {"model": attrs.asdict(model), "tokenizer": tk.tokenizers.tokenizer_hash(tokenizer)}
    return facts | named


def result(run_dir):
    """Return the held-out loss of the twin on hard labels, and of the run itself."""
    twin = tk.sinks.compare_evaluations(run_dir / "hard", "eval/loss")
    return tk.sinks.compare_evaluations(run_dir, "eval/loss") | {"before": twin["after"]}


def train(cfg, run, base):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps = run.ps
    rows, held = open_rows(cfg, run, base.tokenizer, base.template)
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    how = {"place": ps.place, "rows_per_microbatch": cfg.batch.microbatch}
    how |= {"pad_id": base.tokenizer.pad_id or 0}
    make_batch = functools.partial(tk.make_step_batch, rows, rows_at, **how)
    first = make_batch(tk.Cursor(), device=ps.device).microbatches[0]
    loss, teach, known = soft_labels(cfg, ps, base, first)
    student = choose_student(cfg, base.config.vocab_size)
    stages = build(cfg, ps, student, tk.models.init_weights(student, seed=cfg.seed))
    how = {"precision": cfg.precision, "seed": cfg.seed}
    optimizer = tk.optim.make_optimizer(stages, **cfg.optim.made, **how)
    size = {"rows_per_step": cfg.batch.rows, "precision": cfg.precision}
    run.log(tk.parallel.describe_run(stages, rows.bins, **size))
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, (stages, optimizer), teach, forward_backward)
    evaluate = tk.evaluation.make_evaluator(
        stages, held, tk.losses.next_token_linear, rows_per_batch=cfg.batch.microbatch
    )
    facts = make_facts(cfg, student, base.tokenizer, rows) | known
    changes = tk.config.make_resume_rules(cfg, free=["files"])
    state = run.resume(stages, optimizer, facts=facts, changes=changes, request=cfg.resume)

    def replay(microbatches, *, denominator):
        return forward_backward(teach(microbatches), denominator=denominator)

    stop, around = None, {"steps": cfg.steps, "policy": cfg.policy}
    around |= {"checkpoints": cfg.checkpoints, "logging": cfg.logging}
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(state, stages, optimizer, replay=replay, **around) as loop,
    ):
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held) and tk.schedules.is_due(state.step, cfg.eval_every, last=cfg.steps):
                state = loop.evaluate(state, evaluate)
            stop = loop.checkpoint(state)
        if not stop and cfg.compare and cfg.hard < 1:
            loop.event("result", **result(run.dir))
    if stop:
        return tk.run.EXIT_SAVED
    run.finish(state, stages, optimizer)
    return 0


def runs_of(cfg):
    """Return what is trained, one after the other: the twin on hard labels, and the run itself."""
    if not cfg.compare or cfg.hard == 1:
        return [cfg]
    again = cfg.resume if cfg.resume == "never" else "auto"
    twin = attrs.evolve(cfg, out=cfg.out / "hard", hard=1.0, teacher=None, resume=again)
    return [twin, cfg]


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, train the twin and the student."""
    cfg = tk.config.load_config(Config, argv)
    path = cfg.teacher or tk.hub.ensure_base_run(Path(__file__).parent)
    base = tk.hub.open_model(path, tokenizer=cfg.tokenizer, context=cfg.batch.row_length)
    precision = tk.parallel.resolve_precision(cfg.precision)
    cfg = attrs.evolve(cfg, teacher=base.path, tokenizer=base.name, precision=precision)
    for model in (choose_student(cfg, base.config.vocab_size), base.config):
        shapes = cfg.layout, model, cfg.batch
        tk.parallel.refuse(tk.parallel.problems(*shapes, world=tk.mesh.get_world_size()))
    for each in runs_of(cfg):
        with tk.open_run(each.out, **each.opened) as run:
            if code := train(each, run, base):
                return code
    return 0


if __name__ == "__main__":
    tk.run.run_main(main)
