"""Train a decoder from scratch; by default a small one, on the source of Python's own library.

python pretrain.py                                   # one process
torchrun --nproc-per-node 2 pretrain.py              # two, and the same losses
torchrun --nproc-per-node 4 pretrain.py --pp 2 --tp 2   # four, and the same losses
python pretrain.py --data FOLDER --size 10m          # your text, a larger model
python pretrain.py --data FOLDER --init MODEL        # continues a Hugging Face model

Read `train` first: it has all parts of a run, in order. Several corpora in proportions of your own,
and a last phase with other proportions, are in mixture.py.
"""

import functools
from pathlib import Path

import attrs

import trainkit as tk


# Each field is a flag, --eval-every for eval_every, and the text below it is what --help prints.
# `on_resume` says whether a run may be resumed with another value: "refuse" (the default), "ask"
# (only with --allow-change NAME), "allow", or "ignore" (it is not even compared).
@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Train a decoder from scratch; by default a small one, on the source of Python's library."""

    out: Path = tk.config.option(Path("runs/pretrain"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures."""
    steps: int = tk.config.option(650, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    data: tuple[Path, ...] = tk.config.option((), on_resume="allow")
    """Corpora: text files, directories of them, .jsonl, .tokens and others; by default Python's."""
    field: str = tk.config.option("text", on_resume="allow")
    """The field of JSON lines, parquet or arrow files that holds the text."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default that of init, of the data's folder, or bytes."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are cached for the next run; None for no cache."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A Hugging Face folder to start from: its architecture, weights and tokenizer."""
    size: str = "tiny"
    """A named model size, where there is no init; see trainkit.models.list_decoder_sizes."""
    eval_every: tk.schedules.Interval = tk.config.interval(325, on_resume="allow")
    """Steps between evaluations on held-out documents, with one at the end; 0 for none."""
    prompt: str | None = tk.config.option(None, on_resume="allow")
    """What the model continues after an evaluation; by default the start of a held-out text."""
    sample: int = tk.config.option(120, tk.config.positive, on_resume="allow")
    """The number of tokens that it writes."""
    batch: tk.config.RowOptions = tk.config.RowOptions()
    linear: tk.config.LinearOptions = tk.config.LinearOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=4e-3, schedule_steps=650)


def choose_model(cfg, num_ids):
    """Return the model's configuration: that of init, or of a named size."""
    if cfg.init:
        return tk.hub.read_init_config(cfg.init, vocab_size=num_ids, context=cfg.batch.row_length)
    # The vocabulary is rounded up to a multiple of 16, so that its matrices divide over ranks.
    return tk.models.make_decoder_config(cfg.size, num_ids=num_ids)


def make_linear_transforms(cfg):
    """Return the transforms, one or none, that let linear layers compute in low precision."""
    return tk.adapters.make_linear_transforms(cfg.linear.linears, cfg.linear.linear_modules)


def build(cfg, ps, model, first):
    """Return this rank's part of the model, and its optimizer."""
    # What is done to the model, in this order: tensor and sequence parallelism, precision,
    # recomputation, compilation, and sharding of the parameters.
    plan = tk.parallel.make_decoder_plan(
        cfg.layout,
        precision=cfg.precision,
        recompute=cfg.recompute,
        compiled=cfg.compiled,
        attention=cfg.attention,
        offload=cfg.offload_activations,
    )
    # New weights are a function of seed, name and index: the same numbers in every layout. With
    # --init they are those of a folder. (A run that resumes reads its own checkpoint, in `train`.)
    weights = tk.models.init_weights(model, seed=cfg.seed)
    if first.source and not first.resume_from:
        weights = tk.adapters.open_base_weights(first.source, axis=ps.world)
    # Made without memory, split into pipeline stages, transformed by the plan, and only then
    # filled: no rank ever holds more than its part. With head="hidden" it ends in hidden states and
    # the output matrix, so that the loss can make logits a few tokens at a time.
    stages = tk.build_stages(
        functools.partial(tk.models.Decoder, model, head="hidden"),
        ps,
        [*make_linear_transforms(cfg), *plan],
        weights=weights,
        schedule=cfg.layout.schedule,
    )
    # Weight decay is for matrices; norms have none. Groups are other values for some parameters.
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
    # The rate warms up, holds, and decays over the last 40 % of --schedule-steps. It does not
    # depend on --steps, which only says where to stop: past the schedule the last rate holds.
    lr_at = tk.schedules.warmup_stable_decay(
        cfg.optim.lr,
        warmup=cfg.optim.warmup,
        total=cfg.optim.schedule_steps,
        decay=0.4,
    )

    def train_step(state, batch):
        # The number of labels in the global batch: the sum over `ps.loss`, the ranks that hold
        # different tokens. It is known before the first forward pass and is the only denominator:
        # losses are sums, so that microbatches and ranks add up to the mean over all tokens.
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        # In fp16 small gradients would underflow to 0, so the loss is multiplied by a scale (None
        # in fp32 and bf16). Dividing by tokens / scale does it.
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        # Forward and backward of all microbatches; with --pp, through all stages of the pipeline.
        # What is returned are raw sums: the denominator and the scale are in the gradients alone.
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(tokens, scale)
        )
        # FSDP sums gradients (it is set not to average) over its ranks. Ranks that share a
        # sequence but are not in FSDP's group are summed here; without such ranks it does nothing.
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        # The sums of the loss, all-reduced and divided by the tokens: equal on all ranks.
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        # If the loss is not finite, or a spike with --on-spike skip (checked here), or the gradient
        # norm is not finite (checked in clip_and_step), weights and optimizer stay as they are; the
        # step still counts. The device decides, so that the host does not wait for it.
        should_apply = tk.health.make_finite_check(
            terms["loss"], state.health, cfg.policy, tokens=tokens
        )
        # Removes the loss scale, clips the gradient norm of the whole model to max_norm, takes
        # the optimizer step if it should be applied, and clears the gradients.
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
        # Counts the step and its tokens, and moves the cursor to the next batch. The cursor is not
        # the step: after a roll-back the step is an earlier one, and the batches go on.
        return tk.advance(state, batch, metrics, axis=ps.loss)

    return train_step


def train(cfg, run, tokenizer, model, first):
    """Resume from the last checkpoint, or start, and train until `steps` or until a stop."""
    # This rank's view of the parallel layout. Its fields are mesh axes: `ps.world` is all ranks,
    # `ps.loss` the ranks that hold different tokens, and `ps.data_shard` says which part of a batch
    # this rank reads.
    ps = run.ps

    # Data. One document in forty is held out. The documents of both parts are packed into rows of
    # equal length, several to a row; attention does not cross from one document into the next.
    # The order of rows depends on the name of a corpus. If a file was renamed since, a resumed run
    # keeps the name that it recorded.
    corpora = tk.corpora.open_corpora(
        cfg.data,
        tokenizer=tokenizer,
        field=cfg.field,
        init=first.source,
        recorded=tk.checkpoint.read_resume_facts(cfg.out, cfg.resume),
        log=run.log,
    )
    rows, held_out, reports = tk.corpora.pack_corpora(
        corpora,
        cfg.batch.row_length,
        one_in=40,
        multiple_of=cfg.batch.multiple_of,
        seed=cfg.seed,
        cache_dir=cfg.cache,
        axis=ps.world,
        log=run.log,
    )
    # Which rows make up batch n is a function of the seed and n, so that there is no loader state
    # to save. Every rank knows all rows of a batch, and reads its shard of them.
    rows_at = tk.sampling.sample_mixture(rows.num_rows, rows_per_step=cfg.batch.rows, seed=cfg.seed)
    make_batch = functools.partial(
        tk.make_step_batch,
        rows,
        rows_at,
        rows_per_microbatch=cfg.batch.microbatch,
        data_shard=ps.data_shard,
        pad_id=tokenizer.pad_id or 0,  # any id will do: padding has no labels
    )

    # The model and its optimizer, and the functions that train and evaluate it.
    stages, optimizer = build(cfg, ps, model, first)
    run.describe(stages, rows.bins, rows_per_step=cfg.batch.rows, precision=cfg.precision)
    loss = tk.losses.next_token_linear  # takes hidden states, and never makes all logits at once
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    evaluate = tk.evaluation.make_evaluator(
        stages,
        held_out,
        loss,
        rows_per_batch=cfg.batch.microbatch,
    )

    # Loads the newest checkpoint whose hashes match, if there is one. What is given here is stored
    # with each checkpoint: a run that resumes with another value is rejected, unless the field of
    # Config allows it (`on_resume`).
    state = run.resume(
        stages,
        optimizer,
        request=cfg.resume,
        config=cfg,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        corpora=corpora,
        first=first,
        context=cfg.batch.row_length,
    )
    if cfg.init and state.step == 0:
        run.log(f"starting from the weights of {cfg.init}")

    stop = None
    with (
        # A thread makes the next batches while this one is computed.
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        # Writes metrics, saves in the background, and acts on steps that are not finite.
        run.loop(
            state,
            stages,
            optimizer,
            steps=cfg.steps,
            replay=forward_backward,  # runs a bad step again, to name its rank and parameter
            checkpoints=cfg.checkpoints,
            logging=cfg.logging,
            policy=cfg.policy,
            batches_per_epoch=len(rows) / cfg.batch.rows,  # for --save-every 2epochs
        ) as loop,
    ):
        for name, report in reports.items():
            loop.event("packing", step=state.step, facts={"corpus": name, **report})
        while state.step < cfg.steps and not stop:
            # One step: take a batch, train on it, record its metrics. After too many bad steps
            # `record` restores a checkpoint into stages and optimizer, and returns its state.
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            # Every eval_every steps and after the last one. All ranks generate; one prints.
            if len(held_out) and loop.is_due(state, cfg.eval_every):
                state = loop.evaluate(state, evaluate)
                loop.show_sample(state, sample(cfg, stages, tokenizer, held_out))
            # Saves if a save is due. Returns why to stop ("SIGTERM" after a signal), or None.
            stop = loop.checkpoint(state)
    # Writes final.json, plots the loss, and returns the exit code 0. If the run was stopped, it
    # only returns the exit code 75: the same command resumes the run.
    return run.finish(state, stages, optimizer, stop=stop)


def sample(cfg, stages, tokenizer, held_out):
    """Return a prompt and what the model makes of it."""
    prompt = cfg.prompt
    if prompt is None:
        document = int(held_out.bins.documents[0])
        length = min(24, held_out.corpus.lengths[document])
        prompt = held_out.corpus.read(document, 0, length).tolist()
    return tk.generation.sample_text(
        stages,
        prompt,
        tokenizer=tokenizer,
        max_new_tokens=cfg.sample,
        context=cfg.batch.row_length,
        seed=cfg.seed,
    )


def main(argv=None):
    """Read the configuration, check it, open the process groups, and train."""
    cfg = tk.config.load_config(Config, argv)
    # What flags leave open is decided here, and stored with the run.
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    cfg = attrs.evolve(
        cfg,
        init=first.source,
        tokenizer=tk.tokenizers.find_tokenizer(cfg.tokenizer, cfg.data, init=first.source),
        precision=tk.parallel.resolve_precision(cfg.precision),
    )
    tokenizer = tk.tokenizers.open_tokenizer(cfg.tokenizer)
    model = choose_model(cfg, tokenizer.vocab_size)
    # All problems of the layout are reported at once, before anything is built.
    tk.parallel.check_layout(
        cfg.layout,
        model,
        cfg.batch,
        others=tk.adapters.find_problems(make_linear_transforms(cfg), model),
    )
    # Opens the process groups, locks the run directory, and handles signals and lost ranks.
    with tk.open_run(
        cfg.out,
        layout=cfg.layout,
        timeouts=cfg.timeouts,
        numerics=cfg.numerics,
        config=cfg,
    ) as run:
        return train(cfg, run, tokenizer, model, first)


if __name__ == "__main__":
    tk.run.run_main(main)
