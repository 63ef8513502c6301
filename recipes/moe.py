"""Train a mixture of experts; by default a small one, on the source of Python's own library.

python recipes/moe.py                                   # one process, balanced without a loss
python recipes/moe.py --balance loss                    # with the auxiliary loss instead
torchrun --nproc-per-node 2 recipes/moe.py --ep 2       # two, each with half of the experts
python recipes/moe.py --data FOLDER --experts 32 --chosen 4     # your text, more experts
python recipes/moe.py --data FOLDER --init MODEL        # goes on from a Hugging Face folder
"""

import functools
from pathlib import Path
from typing import Literal

import attrs

import trainkit as tk


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Train a decoder whose layers have experts; by default a small one, on Python's library.

    Every layer but the first has experts in place of its MLP, and a shared expert beside them. One
    expert is mlp width / (chosen + 1) wide, so a token meets as many weights as in the dense size.
    """

    out: Path = tk.config.option(Path("runs/moe"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(400, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """A text file, a directory of them, .jsonl, .tokens and others; by default Python's library."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default that of init, or beside the data, or bytes."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are kept for the next run; None keeps none."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A Hugging Face folder of a mixture to begin with; it says what size to balance would."""
    size: str = "tiny"
    """The dense size that layers get experts in; see trainkit.models.list_decoder_sizes."""
    experts: int = tk.config.option(8, tk.config.positive)
    """How many experts a layer has."""
    chosen: int = tk.config.option(2, tk.config.positive)
    """How many of them a token goes to."""
    balance: Literal["bias", "loss"] = "bias"
    """What keeps experts balanced: a bias for the choice, without a loss; or an auxiliary loss."""
    bias_rate: float = tk.config.option(0.01, tk.config.non_negative, on_resume="allow")
    """By how much a step moves the biases at most; it falls at the end, as the learning rate."""
    loss_weight: float = tk.config.option(0.01, tk.config.non_negative, on_resume="allow")
    """What the auxiliary loss, a mean over the layers, is multiplied by; 0.01 to 0.1 balance."""
    eval_every: int = tk.config.option(200, tk.config.non_negative, on_resume="allow")
    """Evaluate on held-out documents every so many steps, and at the end; 0 for never."""
    prompt: str = tk.config.option("def ", on_resume="allow")
    """What the model goes on from when it is evaluated."""
    sample: int = tk.config.option(120, tk.config.positive, on_resume="allow")
    """How many tokens it then writes, for you to read."""
    batch: tk.config.RowOptions = tk.config.RowOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=4e-3, schedule_steps=400)


def open_rows(cfg, run, tokenizer):
    """Return the rows to train on, and those held out: no document is in both."""
    run.log(f"reading {cfg.data or 'the source of the standard library'}")
    length, template = cfg.batch.row_length, tk.chat.locate_template(cfg.init)
    if cfg.data:
        whole = tk.open_corpus(cfg.data, tokenizer=tokenizer, template=template)
    else:
        whole = tk.corpora.open_library_corpus(tokenizer)
    corpus, is_held = tk.corpora.hold_out(whole, one_in=40, piece=length)
    how = {"cache_dir": cfg.cache, "axis": run.ps.world, "seed": cfg.seed, "log": run.log}
    how |= {"multiple_of": cfg.batch.multiple_of}
    return tk.data.split_held_out(corpus, is_held, length, **how)


def choose_model(cfg, tokenizer):
    """Return the configuration of init, or of a size with experts in all layers but the first."""
    if cfg.init:
        known = {"vocab_size": tokenizer.vocab_size, "context": cfg.batch.row_length}
        return tk.hub.read_init_config(cfg.init, experts=True, **known)
    dense = tk.models.make_decoder_config(cfg.size)
    width = dense.mlp_width // (cfg.chosen + 1) // 8 * 8  # for one grouped multiplication
    experts = tk.models.Experts(
        count=cfg.experts,
        chosen=cfg.chosen,
        width=width,
        shared=width,
        first=1,
        scores="sigmoid",
        biased=cfg.balance == "bias",
    )
    vocab_size = tk.models.pad_vocab_size(tokenizer.vocab_size)
    return attrs.evolve(dense, experts=experts, vocab_size=vocab_size)


def build(cfg, ps, model, first):
    """Return this rank's stages of the model and their optimizer."""
    plan = tk.parallel.make_decoder_plan(cfg.layout, **cfg.planned)
    make_model = functools.partial(tk.models.Decoder, model, head="hidden")
    weights = tk.models.init_weights(model, seed=cfg.seed)
    if first.source and not first.resume_from:
        weights = tk.hub.open_folder_weights(tk.hub.open_folder(first.source), axis=ps.world)
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


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    shape = {"warmup": cfg.optim.warmup, "total": cfg.optim.schedule_steps, "decay": 0.4}
    lr_at = tk.schedules.warmup_stable_decay(cfg.optim.lr, **shape)
    rate_at = tk.schedules.warmup_stable_decay(cfg.bias_rate, **shape | {"warmup": 0})
    max_norm = cfg.optim.max_norm

    def train_step(state, batch):
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        seen = tk.all_sum(tk.count_tokens(batch.microbatches), ps.loss)
        per = {"loss": tokens, "balance": seen}
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(per, scale)
        )
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        applies = tk.health.make_finite_check(
            terms["loss"], state.health, cfg.policy, tokens=tokens
        )
        lr, rate = lr_at(state.step), rate_at(state.step)
        update = tk.clip_and_step(
            stages, optimizer, lr=lr, max_norm=max_norm, should_apply=applies, scale=scale
        )
        load, taken = terms["load"], update.applied
        biases = tk.models.update_routers_(stages, load, rate=rate, applied=taken)
        shown = tk.metrics.make_expert_load_metrics(load, biases=tk.all_sum(biases, ps.pp))
        metrics = {**terms, **shown, **update.metrics, "lr": lr}
        return tk.advance(state, batch, {**metrics, "tokens": tokens}, axis=ps.loss)

    return train_step


def sample(cfg, stages, tokenizer):
    """Return a text that the model goes on from, and how."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    begin = [*bos, *tokenizer.encode(cfg.prompt)]
    how = {"context": cfg.batch.row_length, "slide": True, "max_new_tokens": cfg.sample}
    how["sampling"] = tk.generation.Sampling(temperature=0.7, seed=cfg.seed)
    ids = {"stop_ids": [tokenizer.eos_id], "vocab_size": tokenizer.vocab_size}
    (drawn,) = tk.generation.generate(stages, [begin], **how, **ids)
    return tk.sinks.escape_control_characters(tokenizer.decode([*begin, *drawn.ids]))


def make_facts(cfg, model, tokenizer, rows):
    """Return what a run must be continued with as it was begun."""
    facts = tk.config.make_config_facts(cfg) | tk.data.make_data_facts(rows)
    named = {"model": attrs.asdict(model), "tokenizer": tk.tokenizers.tokenizer_hash(tokenizer)}
    own = tk.hub.open_folder(cfg.init).full_context if cfg.init else 0
    return facts | named | {"context": max(cfg.batch.row_length, own)}


def train(cfg, run, tokenizer, model, first):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps, weight = run.ps, 0.0 if model.experts.biased else cfg.loss_weight
    rows, held = open_rows(cfg, run, tokenizer)
    stages, optimizer = build(cfg, ps, model, first)
    size = {"rows_per_step": cfg.batch.rows, "precision": cfg.precision}
    run.log(tk.parallel.describe_run(stages, rows.bins, **size))
    loss = tk.losses.add_router_losses(tk.losses.next_token_linear, balance=weight)
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    evaluate = tk.evaluation.make_evaluator(
        stages, held, tk.losses.next_token_linear, rows_per_batch=cfg.batch.microbatch
    )
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    share = {"place": ps.place, "rows_per_microbatch": cfg.batch.microbatch}
    pad_id = tokenizer.pad_id or 0
    make_batch = functools.partial(tk.make_step_batch, rows, rows_at, pad_id=pad_id, **share)
    facts = make_facts(cfg, model, tokenizer, rows)
    changes = tk.config.make_resume_rules(cfg, free=["files", "context"])
    facts |= tk.checkpoint.hash_initial_weights(first, stages, ps)
    state = run.resume(stages, optimizer, facts=facts, changes=changes, request=cfg.resume)
    stop, around = None, {"steps": cfg.steps, "policy": cfg.policy}
    around |= {"checkpoints": cfg.checkpoints, "logging": cfg.logging}
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop,
    ):
        loop.event("packing", step=state.step, **tk.packing.report_packing(rows.bins))
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held) and tk.schedules.is_due(state.step, cfg.eval_every, last=cfg.steps):
                state = loop.evaluate(state, evaluate)
                run.log(sample(cfg, stages, tokenizer))
            stop = loop.checkpoint(state)
    if stop:
        return tk.run.EXIT_SAVED
    run.finish(state, stages, optimizer)
    return 0


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    beside = (cfg.data,) if cfg.data else ()
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    name = tk.tokenizers.find_tokenizer(cfg.tokenizer, beside, init=first.source)
    precision = tk.parallel.resolve_precision(cfg.precision)
    cfg = attrs.evolve(cfg, init=first.source, tokenizer=name, precision=precision)
    tokenizer = tk.tokenizers.open_tokenizer(name)
    model = choose_model(cfg, tokenizer)
    problems = tk.parallel.problems(cfg.layout, model, cfg.batch, world=tk.mesh.get_world_size())
    tk.parallel.refuse(problems)
    with tk.open_run(cfg.out, **cfg.opened) as run:
        return train(cfg, run, tokenizer, model, first)


if __name__ == "__main__":
    tk.run.run_main(main)
