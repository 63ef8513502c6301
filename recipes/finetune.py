"""Supervised fine-tuning: teach a pretrained decoder to answer, by the assistant's tokens alone.

python finetune.py                            # from runs/pretrain, or a base of its own
python finetune.py --init MODEL --data chats.jsonl    # from a Hugging Face folder
python finetune.py --method lora --rank 8     # trains adapters of matrices that are frozen
python finetune.py --method qlora             # the same, with the matrices in 4 bits
torchrun --nproc-per-node 2 finetune.py --init runs/pretrain --tp 2

The frame is that of pretrain.py, whose comments explain it. The comments here are about
conversations and adapters.
"""

import functools
from pathlib import Path
from typing import Literal

import attrs

import trainkit as tk


@attrs.frozen(kw_only=True)
class AdapterOptions:
    """Adapters, with --method lora or qlora: small trained matrices next to frozen ones."""

    rank: int = attrs.field(default=32, validator=tk.config.positive)
    """The rank of each adapter."""
    alpha: float = attrs.field(default=96.0, validator=tk.config.positive)
    """An adapter's product is scaled by alpha / rank."""
    adapter_dropout: float = attrs.field(default=0.0, validator=tk.config.fraction)
    """The dropout probability of an adapter's input."""
    adapted: str = "layers.*.{attention,mlp}.*"
    """A pattern of the names of the matrices that have adapters."""
    dora: bool = False
    """DoRA: learn the length of each row separately from its direction."""


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Teach a trained decoder to answer; by default, what functions of Python's library do."""

    out: Path = tk.config.option(Path("runs/finetune"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures."""
    steps: int = tk.config.option(275, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A run, a checkpoint or a Hugging Face folder; by default runs/pretrain, or a small base."""
    method: Literal["full", "lora", "qlora"] = "full"
    """What is trained: all; adapters; or adapters of matrices that are stored in 4 bits."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """Conversations: a .jsonl or .parquet file with a field messages, or a .tokens file."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default that of init."""
    template: str | None = tk.config.option(None, on_resume="allow")
    """How a conversation is written: chatml, llama3, qwen3, a folder's; by default that of init."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Which turns are trained on: all of the assistant's, or only the last; .tokens files say."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are cached for the next run; None for no cache."""
    eval_every: tk.schedules.Interval = tk.config.interval(275, on_resume="allow")
    """Steps between evaluations on held-out conversations, with one at both ends; 0 for none."""
    ask: tuple[str, ...] = tk.config.option(
        ("def is_open(self)", "def get_version(name)", "def remove_file(path, force=False)"),
        on_resume="allow",
    )
    """Questions whose answers are printed after each evaluation."""
    batch: tk.config.RowOptions = tk.config.RowOptions()
    linear: tk.config.LinearOptions = tk.config.LinearOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=3e-3, schedule_steps=275)
    adapters: AdapterOptions = AdapterOptions()


def open_rows(cfg, run, tokenizer):
    """Return the rows to train on, the rows held out, and counts of what was read."""
    # The template writes a conversation as tokens; a mask says which of them are trained on. A
    # conversation that is longer than a row is left out: truncated, it would end in the middle.
    corpus, counts = tk.corpora.open_chats(
        cfg.data,
        tokenizer=tokenizer,
        template=cfg.template,
        train=cfg.train_on,
        max_length=cfg.batch.row_length,
        log=run.log,
    )
    # One conversation in twenty is held out. Several are packed into a row, and each attends only
    # to itself.
    rows, held_out = tk.data.split_held_out(
        corpus,
        tk.corpora.held_out_documents(corpus),
        cfg.batch.row_length,
        overlong="error",
        multiple_of=cfg.batch.multiple_of,
        seed=cfg.seed,
        cache_dir=cfg.cache,
        axis=run.ps.world,
        log=run.log,
    )
    return rows, held_out, counts


def change_matrices(cfg):
    """Return the transforms with which a plan starts: 4 bits, low precision, adapters."""
    plan = [tk.adapters.quantized("nf4")] if cfg.method == "qlora" else []
    plan += tk.adapters.make_linear_transforms(cfg.linear.linears, cfg.linear.linear_modules)
    if cfg.method == "full":
        return plan
    # Each adapted matrix W computes W x + alpha / rank * B A x, and A and B alone are trained.
    adapter = tk.adapters.Lora(
        cfg.adapters.adapted,
        rank=cfg.adapters.rank,
        alpha=cfg.adapters.alpha,
        dropout=cfg.adapters.adapter_dropout,
        dora=cfg.adapters.dora,
    )
    return [*plan, tk.adapters.lora(adapter, seed=cfg.seed)]


def build(cfg, ps, base):
    """Return this rank's part of the model, with its weights, and its optimizer."""
    # The transforms for the layout come after those of the matrices.
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
        [*change_matrices(cfg), *plan],
        # Each rank reads its part of a run, a checkpoint or a folder. Adapters are new.
        weights=tk.adapters.open_base_weights(base.path, axis=ps.world),
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed,  # serves decoders with experts and without, and dropout
    )
    # Frozen parameters are left out: with adapters, these alone are stepped.
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


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    # Warm up, and fall along a cosine to 0.
    lr_at = tk.schedules.cosine(
        cfg.optim.lr,
        warmup=cfg.optim.warmup,
        total=cfg.optim.schedule_steps,
    )

    def train_step(state, batch):
        # Only the assistant's tokens have labels, so only they are counted, on all ranks together:
        # a long answer weighs as much per token as a short one, however rows fall to ranks.
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        # The rest of the step is that of pretrain.py.
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(tokens, scale)
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


def train(cfg, run, tokenizer, base, first):
    """Resume from the last checkpoint, or start, and train until `steps` or until a stop."""
    ps = run.ps
    # Data: rows of conversations, gone through once per epoch, each epoch in an order of its own.
    rows, held_out, counts = open_rows(cfg, run, tokenizer)
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    make_batch = functools.partial(
        tk.make_step_batch,
        rows,
        rows_at,
        rows_per_microbatch=cfg.batch.microbatch,
        data_shard=ps.data_shard,
        pad_id=tokenizer.pad_id or 0,
        # Dropout is a function of these keys, one per token, and so the same in every layout.
        noise_seed=cfg.seed if cfg.adapters.adapter_dropout > 0 else None,
    )

    # The model, its optimizer, and the functions that train and evaluate it.
    if base.config.width >= 512 and cfg.optim.lr == 3e-3:
        run.log("warning: --lr 3e-3 suits small models: large ones want about 2e-5, adapters 2e-4")
    stages, optimizer = build(cfg, ps, base)
    run.describe(stages, rows.bins, rows_per_step=cfg.batch.rows, precision=cfg.precision)
    loss = tk.losses.next_token_linear
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    evaluate = tk.evaluation.make_evaluator(
        stages,
        held_out,
        loss,
        rows_per_batch=cfg.batch.microbatch,
    )

    # Facts that a resumed run must share. The context is the longest text that the model is for.
    facts = {"context": max(cfg.batch.row_length, base.full_context)}
    if cfg.method != "full":
        # Checkpoints then hold the adapters alone, and a hash of the frozen base.
        facts |= tk.adapters.exclude_frozen_(stages, ps, source=base.path)
    state = run.resume(
        stages,
        optimizer,
        request=cfg.resume,
        config=cfg,
        model=base.config,
        tokenizer=tokenizer,
        rows=rows,
        template=cfg.template,
        first=first if cfg.method == "full" else None,
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
        loop.event("packing", step=state.step, facts={**rows.report, **counts})
        # Evaluated before the first step too, to see what was learned.
        if len(held_out) and cfg.eval_every and state.step == 0:
            run.log(f"the weights of {base.path}, before:")
            state = loop.evaluate(state, evaluate)
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held_out) and loop.is_due(state, cfg.eval_every):
                state = loop.evaluate(state, evaluate)
                loop.show_sample(state, answer_questions(cfg, stages, tokenizer))
            stop = loop.checkpoint(state)
        if not stop:
            loop.result("eval/loss")  # the first and the last evaluation
    return run.finish(state, stages, optimizer, stop=stop)


def answer_questions(cfg, stages, tokenizer):
    """Return each question and the model's most likely answer to it."""
    answers = tk.generation.answer_questions(
        stages,
        cfg.ask,
        tokenizer=tokenizer,
        template=cfg.template,
        max_new_tokens=100,
        context=cfg.batch.row_length,
    )
    return "\n".join(f"{q}\n    {answer}" for q, answer in zip(cfg.ask, answers, strict=True))


def main(argv=None):
    """Read the configuration, check it, open the process groups, and train."""
    cfg = tk.config.load_config(Config, argv)
    # The model to build, and its initial weights: those of --init, or of the run that is resumed.
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    base = tk.hub.open_model(
        first.path or tk.hub.ensure_base_run(),
        tokenizer=cfg.tokenizer,
        context=cfg.batch.row_length,
    )
    first = first.resolved(base.path)
    # What flags leave open is decided here, and stored with the run: above all how a conversation
    # is written, which must be as the base has learned it.
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
    if cfg.method == "full" and cfg.adapters != AdapterOptions():
        given = attrs.asdict(cfg.adapters, filter=lambda field, value: value != field.default)
        raise ValueError(
            f"--method full has no adapters, and these were given: {', '.join(given)}; take "
            "--method lora, or leave them out"
        )
    tk.parallel.check_layout(
        cfg.layout,
        base.config,
        cfg.batch,
        others=tk.adapters.find_problems(
            change_matrices(cfg),
            base.config,
            layout=cfg.layout,
            base=base.facts,
        ),
    )
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
