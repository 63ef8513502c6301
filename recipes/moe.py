"""Train a mixture of experts; by default a small one, on the source of Python's own library.

python moe.py                                   # one process, balanced without a loss
python moe.py --balance loss                    # with the auxiliary loss instead
torchrun --nproc-per-node 2 moe.py --ep 2       # two, each with half of the experts
python moe.py --data FOLDER --experts 32 --top-k 4     # your text, more experts
python moe.py --data FOLDER --init MODEL        # continues a Hugging Face model

The frame is that of pretrain.py, whose comments explain it. The comments here are about experts.
"""

import functools
from pathlib import Path
from typing import Literal

import attrs

import trainkit as tk


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Train a decoder whose layers have experts; by default a small one, on Python's library.

    Every layer but the first has experts in place of its MLP, and a shared expert. One
    expert is mlp width / (top k + 1) wide, so a token meets as many weights as in the dense size.
    """

    out: Path = tk.config.option(Path("runs/moe"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures."""
    steps: int = tk.config.option(400, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """A text file, a directory of them, .jsonl, .tokens and others; by default Python's library."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default that of init, of the data's folder, or bytes."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are cached for the next run; None for no cache."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A Hugging Face folder of a mixture to start from, in place of size, experts and balance."""
    size: str = "tiny"
    """The dense size that layers get experts in; see trainkit.models.list_decoder_sizes."""
    experts: int = tk.config.option(8, tk.config.positive)
    """The number of experts of a layer."""
    top_k: int = tk.config.option(2, tk.config.positive)
    """The number of experts that a token goes to."""
    balance: Literal["bias", "loss"] = "bias"
    """How experts are balanced: by a bias of the choice, or by an auxiliary loss."""
    bias_rate: float = tk.config.option(0.01, tk.config.non_negative, on_resume="allow")
    """The largest change of a bias in a step; it decays as the learning rate does."""
    loss_weight: float = tk.config.option(0.01, tk.config.non_negative, on_resume="allow")
    """The weight of the auxiliary loss, a mean over the layers; 0.01 to 0.1 balances."""
    eval_every: tk.schedules.Interval = tk.config.interval(200, on_resume="allow")
    """Steps between evaluations on held-out documents, with one at the end; 0 for none."""
    prompt: str = tk.config.option("def ", on_resume="allow")
    """What the model continues when it is evaluated."""
    sample: int = tk.config.option(120, tk.config.positive, on_resume="allow")
    """The number of tokens that it writes."""
    batch: tk.config.RowOptions = tk.config.RowOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=4e-3, schedule_steps=400)


def choose_model(cfg, tokenizer):
    """Return the configuration of init, or of a size with experts in all layers but the first."""
    # A mixture that has been trained: its experts, and how they are balanced, come with it.
    if cfg.init:
        return tk.hub.read_init_config(
            cfg.init,
            experts=True,
            vocab_size=tokenizer.vocab_size,
            context=cfg.batch.row_length,
        )
    dense = tk.models.make_decoder_config(cfg.size, num_ids=tokenizer.vocab_size)
    # A multiple of 8, which grouped matrix multiplications want.
    width = dense.mlp_width // (cfg.top_k + 1) // 8 * 8
    experts = tk.models.Experts(
        count=cfg.experts,
        top_k=cfg.top_k,
        width=width,
        shared=width,  # an expert that every token goes to
        first=1,  # the first layer stays dense, as in DeepSeek's models
        scores="sigmoid",  # to which a bias may be added, as in DeepSeek-V3
        biased=cfg.balance == "bias",
    )
    return attrs.evolve(dense, experts=experts)


def build(cfg, ps, model, first):
    """Return this rank's part of the model, and its optimizer."""
    # With --ep, experts are sharded over ranks; tokens are dispatched to their experts and back.
    plan = tk.parallel.make_decoder_plan(
        cfg.layout,
        precision=cfg.precision,
        recompute=cfg.recompute,
        compiled=cfg.compiled,
        attention=cfg.attention,
        offload=cfg.offload_activations,
    )
    weights = tk.models.init_weights(model, seed=cfg.seed)
    if first.source and not first.resume_from:
        weights = tk.adapters.open_base_weights(first.source, axis=ps.world)
    stages = tk.build_stages(
        functools.partial(tk.models.Decoder, model, head="hidden"),
        ps,
        plan,
        weights=weights,
        schedule=cfg.layout.schedule,
        # The output also has the sums of the routers: loads and losses. Padding goes to no expert.
        call=tk.models.call_routed,
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


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    lr_at = tk.schedules.warmup_stable_decay(
        cfg.optim.lr,
        warmup=cfg.optim.warmup,
        total=cfg.optim.schedule_steps,
        decay=0.4,
    )
    # The biases have a rate of their own. It falls as the learning rate does, so that the choice
    # of experts comes to rest; it needs no warm-up.
    bias_rate_at = tk.schedules.warmup_stable_decay(
        cfg.bias_rate,
        warmup=0,
        total=cfg.optim.schedule_steps,
        decay=0.4,
    )

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        # Two denominators: the loss is a mean over the tokens with a label, the balance loss one
        # over all tokens that were routed.
        routed = tk.all_sum(tk.count_tokens(batch.microbatches), ps.loss)
        # The rest of the step is that of pretrain.py, up to the biases.
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        denominator = tk.batch.scale_denominator({"loss": tokens, "balance": routed}, scale)
        sums = forward_backward(batch.microbatches, denominator=denominator)
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
        # After the step: an expert with less than its share of the tokens gets a larger bias, one
        # with more a smaller. No gradient is involved. Without biases nothing moves.
        biases = tk.models.update_routers_(
            stages,
            terms["load"],
            rate=bias_rate_at(state.step),
            applied=update.applied,
        )
        # How evenly the experts are used. With --pp a rank has the biases of its stages alone.
        load = tk.metrics.make_expert_load_metrics(
            terms["load"],
            biases=tk.all_sum(biases, ps.pp),
        )
        metrics = {**terms, **load, **update.metrics, "lr": lr, "tokens": tokens}
        return tk.advance(state, batch, metrics, axis=ps.loss)

    return train_step


def train(cfg, run, tokenizer, model, first):
    """Resume from the last checkpoint, or start, and train until `steps` or until a stop."""
    ps = run.ps
    # The data of pretrain.py, and the same documents held out.
    corpora = tk.corpora.open_corpora(
        (cfg.data,) if cfg.data else (),
        tokenizer=tokenizer,
        init=first.source,
        log=run.log,
    )
    rows, held_out, _ = tk.corpora.pack_corpora(
        corpora,
        cfg.batch.row_length,
        one_in=40,
        multiple_of=cfg.batch.multiple_of,
        seed=cfg.seed,
        cache_dir=cfg.cache,
        axis=ps.world,
        log=run.log,
    )
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    make_batch = functools.partial(
        tk.make_step_batch,
        rows,
        rows_at,
        rows_per_microbatch=cfg.batch.microbatch,
        data_shard=ps.data_shard,
        pad_id=tokenizer.pad_id or 0,
    )

    # The model, its optimizer, and the functions that train and evaluate it.
    stages, optimizer = build(cfg, ps, model, first)
    run.describe(stages, rows.bins, rows_per_step=cfg.batch.rows, precision=cfg.precision)
    # Adds the auxiliary loss to that of the tokens, and reports the load of each expert. Where the
    # routers have biases its weight is 0, and it is only reported.
    loss = tk.losses.add_router_losses(
        tk.losses.next_token_linear, balance=0.0 if model.experts.biased else cfg.loss_weight
    )
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    # Held-out text is evaluated by the loss of its tokens alone, to compare with dense models.
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
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        first=first,
        context=cfg.batch.row_length,
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
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held_out) and loop.is_due(state, cfg.eval_every):
                state = loop.evaluate(state, evaluate)
                text = tk.generation.sample_text(
                    stages,
                    cfg.prompt,
                    tokenizer=tokenizer,
                    max_new_tokens=cfg.sample,
                    context=cfg.batch.row_length,
                    seed=cfg.seed,
                )
                loop.show_sample(state, text)
            stop = loop.checkpoint(state)
    return run.finish(state, stages, optimizer, stop=stop)


def main(argv=None):
    """Read the configuration, check it, open the process groups, and train."""
    cfg = tk.config.load_config(Config, argv)
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    data = (cfg.data,) if cfg.data else ()
    cfg = attrs.evolve(
        cfg,
        init=first.source,
        tokenizer=tk.tokenizers.find_tokenizer(cfg.tokenizer, data, init=first.source),
        precision=tk.parallel.resolve_precision(cfg.precision),
    )
    tokenizer = tk.tokenizers.open_tokenizer(cfg.tokenizer)
    model = choose_model(cfg, tokenizer)
    tk.parallel.check_layout(cfg.layout, model, cfg.batch)
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
