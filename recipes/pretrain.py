"""Train a decoder from scratch; by default a small one, on the source of Python's own library.

python recipes/pretrain.py                                   # one process
torchrun --nproc-per-node 2 recipes/pretrain.py              # two, and the same losses
torchrun --nproc-per-node 4 recipes/pretrain.py --pp 2 --tp 2   # four, and the same losses
python recipes/pretrain.py --data FOLDER --size 10m          # your text, a larger model
python recipes/pretrain.py --data FOLDER --init MODEL        # goes on from a Hugging Face folder
python recipes/pretrain.py --data a.tokens b.tokens --weights 3 1    # a mixture of two corpora
"""

import functools
from pathlib import Path

import attrs

import trainkit as tk
from trainkit.types import ConfigError


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Train a decoder from scratch; by default a small one, on the source of Python's library."""

    out: Path = tk.config.option(Path("runs/pretrain"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(650, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    data: tuple[Path, ...] = tk.config.option((), on_resume="allow")
    """Corpora: text files, directories of them, .jsonl, .tokens and others; by default Python's."""
    field: str = tk.config.option("text", on_resume="allow")
    """The field of JSON lines, parquet or arrow files that holds the text."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default that of init, or beside the data, or bytes."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are kept for the next run; None keeps none."""
    weights: tuple[float, ...] = ()
    """How many of a step's rows each corpus gives, in proportion; by default as many as it has."""
    anneal_step: int = tk.config.option(0, tk.config.non_negative, on_resume="allow")
    """From this global batch on the anneal-weights and the anneal-lr hold; 0 for never."""
    anneal_weights: tuple[float, ...] = tk.config.option((), on_resume="allow")
    """What the weights become at the anneal-step."""
    anneal_lr: float = tk.config.option(1.0, tk.config.positive, on_resume="allow")
    """What the learning rate is multiplied with from the anneal-step on."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A Hugging Face folder whose architecture, weights and tokenizer to begin with."""
    size: str = "tiny"
    """A named model size, where there is no init; see trainkit.models.list_decoder_sizes."""
    eval_every: int = tk.config.option(325, tk.config.non_negative, on_resume="allow")
    """Evaluate on held-out documents every so many steps, and at the end; 0 for never."""
    prompt: str | None = tk.config.option(None, on_resume="allow")
    """What the model goes on from when it is evaluated; by default how a held-out text begins."""
    sample: int = tk.config.option(120, tk.config.positive, on_resume="allow")
    """How many tokens it then writes, for you to read."""
    batch: tk.config.RowOptions = tk.config.RowOptions()
    linear: tk.config.LinearOptions = tk.config.LinearOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=4e-3, schedule_steps=650)


def open_corpora(cfg, tokenizer):
    """Return the corpora by name."""
    if not cfg.data:
        return {"library": tk.corpora.open_library_corpus(tokenizer)}
    if len(set(cfg.data)) < len(cfg.data):
        raise ConfigError(f"--data names a corpus twice: {', '.join(map(str, cfg.data))}")
    alike = len({path.stem for path in cfg.data}) < len(cfg.data)
    how = {"tokenizer": tokenizer, "field": cfg.field}
    how |= {"template": tk.chat.locate_template(cfg.init)}
    return {str(x) if alike else x.stem: tk.open_corpus(x, **how) for x in cfg.data}


def pack(cfg, run, opened):
    """Return the rows to train on and those held out (no token is in both), and reports."""
    train, held, reports = {}, {}, {}
    how = {"cache_dir": cfg.cache, "axis": run.ps.world, "seed": cfg.seed, "log": run.log}
    how |= {"multiple_of": cfg.batch.multiple_of}
    for name, whole in opened.items():
        corpus, is_held = tk.corpora.hold_out(whole, one_in=40, piece=cfg.batch.row_length)
        train[name], held[name] = tk.data.split_held_out(
            corpus, is_held, cfg.batch.row_length, **how
        )
        reports[name] = {
            **tk.packing.report_packing(train[name].bins, corpus.lengths * ~is_held),
            "empty_documents": int((corpus.lengths == 0).sum()),
            "held_out_documents": int(is_held.sum()),
        }
    return tk.data.concat_packed(train), tk.data.concat_packed(held), reports


def make_phases(cfg, num_rows):
    """Return how much of each corpus is drawn when: from the start, and while annealing."""

    def by_name(weights, flag):
        if len(weights) not in (0, len(num_rows)):
            raise ConfigError(f"{flag} has {len(weights)} numbers for {len(num_rows)} corpora")
        return dict(zip(num_rows, weights, strict=False))

    if not cfg.anneal_step and (cfg.anneal_weights or cfg.anneal_lr != 1):
        raise ConfigError("--anneal-weights and --anneal-lr do nothing without --anneal-step")
    first = tk.sampling.MixturePhase(0, by_name(cfg.weights, "--weights") or num_rows)
    weights = by_name(cfg.anneal_weights, "--anneal-weights")
    anneal = tk.sampling.MixturePhase(cfg.anneal_step, weights, cfg.anneal_lr)
    return tk.sampling.make_mixture_phases(first, *([anneal] if cfg.anneal_step else []))


def choose_model(cfg, vocab_size):
    """Return the model's configuration: that of init, or of a size."""
    if cfg.init:
        return tk.hub.read_init_config(
            cfg.init, vocab_size=vocab_size, context=cfg.batch.row_length
        )
    return tk.models.make_decoder_config(cfg.size, vocab_size=tk.models.pad_vocab_size(vocab_size))


def round_linears(cfg):
    """Return the transforms, one or none, of what linear layers compute in."""
    return tk.adapters.make_linear_transforms(cfg.linear.linears, cfg.linear.linear_modules)


def build(cfg, ps, model, first):
    """Return this rank's stages of the model and their optimizer."""
    plan = [*round_linears(cfg), *tk.parallel.make_decoder_plan(cfg.layout, **cfg.planned)]
    make_model = functools.partial(tk.models.Decoder, model, head="hidden")
    weights = tk.models.init_weights(model, seed=cfg.seed)
    if first.source and not first.resume_from:
        weights = tk.hub.open_folder_weights(tk.hub.open_folder(first.source), axis=ps.world)
    stages = tk.build_stages(make_model, ps, plan, weights=weights, schedule=cfg.layout.schedule)
    how = {"precision": cfg.precision, "seed": cfg.seed}
    return stages, tk.optim.make_optimizer(stages, **cfg.optim.made, **how)


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    total = cfg.optim.schedule_steps
    rise = {"warmup": cfg.optim.warmup, "total": total}
    lr_at = tk.schedules.warmup_stable_decay(cfg.optim.lr, **rise, decay=0.4)
    max_norm = cfg.optim.max_norm

    def train_step(state, batch):
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(tokens, scale)
        )
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        applies = tk.health.make_finite_check(
            terms["loss"], state.health, cfg.policy, tokens=tokens
        )
        is_annealing = 0 < cfg.anneal_step <= state.cursor.batch
        lr = lr_at(state.step) * (cfg.anneal_lr if is_annealing else 1.0)
        update = tk.clip_and_step(
            stages, optimizer, lr=lr, max_norm=max_norm, should_apply=applies, scale=scale
        )
        metrics = {**terms, **update.metrics, "lr": lr}
        return tk.advance(state, batch, {**metrics, "tokens": tokens}, axis=ps.loss)

    return train_step


def sample(cfg, stages, tokenizer, rows):
    """Return a text that the model goes on from, and how."""
    document = int(rows.bins.documents[0])
    begin = rows.corpus.read(document, 0, min(24, rows.corpus.lengths[document])).tolist()
    if cfg.prompt is not None:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        begin = [*bos, *tokenizer.encode(cfg.prompt)]
    sampling = tk.generation.Sampling(temperature=0.7, seed=cfg.seed)
    how = {"context": cfg.batch.row_length, "slide": True, "vocab_size": tokenizer.vocab_size}
    how |= {"stop_ids": [tokenizer.eos_id], "max_new_tokens": cfg.sample, "sampling": sampling}
    said = tk.generation.generate(stages, [begin], **how)
    return tk.sinks.escape_control_characters(tokenizer.decode([*begin, *said[0].ids]))


def make_facts(cfg, model, tokenizer, opened, rows):
    """Return what a run must be continued with, but for the phases of its mixture."""
    facts = tk.config.make_config_facts(cfg)
    facts |= {"model": attrs.asdict(model), "tokenizer": tk.tokenizers.tokenizer_hash(tokenizer)}
    facts |= {"rows": tk.packing.bins_hash(rows.bins)}
    own = tk.hub.open_folder(cfg.init).full_context if cfg.init else 0
    facts |= {"context": max(cfg.batch.row_length, own)}
    facts |= {"files": rows.corpus.sources}
    return facts | {f"fingerprint of {name}": tk.data.fingerprint(x) for name, x in opened.items()}


def train(cfg, run, tokenizer, model, first):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps, loss = run.ps, tk.losses.next_token_linear
    run.log(f"reading {', '.join(map(str, cfg.data)) or 'the source of the standard library'}")
    for told in filter(None, map(tk.corpora.describe_unread_files, cfg.data)):
        run.log(told)
    opened = open_corpora(cfg, tokenizer)
    opened = tk.corpora.match_recorded_names(
        opened, tk.checkpoint.read_resume_facts(cfg.out, cfg.resume)
    )
    mix, held, reports = pack(cfg, run, opened)
    phases = make_phases(cfg, mix.num_rows)
    stages, optimizer = build(cfg, ps, model, first)
    size = {"rows_per_step": cfg.batch.rows, "precision": cfg.precision}
    run.log(tk.parallel.describe_run(stages, mix.bins, **size))
    loss = tk.losses.report_by_source(tuple(opened), loss) if len(opened) > 1 else loss
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    size = {"rows_per_batch": cfg.batch.microbatch}
    evaluate = tk.evaluation.make_evaluator(stages, held, loss, **size)
    order = {"rows_per_step": cfg.batch.rows, "seed": cfg.seed}
    rows_at = tk.sampling.sample_mixture(mix.num_rows, phases, **order)
    how = {"place": ps.place, "rows_per_microbatch": cfg.batch.microbatch}
    make_batch = functools.partial(
        tk.make_step_batch, mix, rows_at, pad_id=tokenizer.pad_id or 0, **how
    )
    facts = make_facts(cfg, model, tokenizer, opened, mix)
    facts |= tk.checkpoint.hash_initial_weights(first, stages, ps)
    facts_at = tk.sampling.add_phase_facts(facts, phases)
    changes = tk.config.make_resume_rules(cfg, free=["files", "context"])
    state = run.resume(stages, optimizer, facts=facts_at, changes=changes, request=cfg.resume)
    if cfg.init and state.step == 0:
        run.log(f"beginning with the weights of {cfg.init}")
    stop, around = None, {"steps": cfg.steps, "policy": cfg.policy}
    around |= {"checkpoints": cfg.checkpoints, "logging": cfg.logging}
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop,
    ):
        for name, report in reports.items():
            loop.event("packing", step=state.step, corpus=name, **report)
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held) and tk.schedules.is_due(state.step, cfg.eval_every, last=cfg.steps):
                state = loop.evaluate(state, evaluate)
                run.log(sample(cfg, stages, tokenizer, held))
            stop = loop.checkpoint(state)
    if stop:
        return tk.run.EXIT_SAVED
    run.finish(state, stages, optimizer)
    return 0


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    name = tk.tokenizers.find_tokenizer(cfg.tokenizer, cfg.data, init=first.source)
    precision = tk.parallel.resolve_precision(cfg.precision)
    cfg = attrs.evolve(cfg, init=first.source, tokenizer=name, precision=precision)
    tokenizer = tk.tokenizers.open_tokenizer(name)
    model = choose_model(cfg, tokenizer.vocab_size)
    problems = tk.parallel.problems(cfg.layout, model, cfg.batch, world=tk.mesh.get_world_size())
    problems += tk.adapters.problems(round_linears(cfg), model)
    tk.parallel.refuse(problems)
    with tk.open_run(cfg.out, **cfg.opened) as run:
        return train(cfg, run, tokenizer, model, first)


if __name__ == "__main__":
    tk.run.run_main(main)
