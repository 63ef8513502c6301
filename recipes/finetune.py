"""Teach a trained decoder to answer: loss on the assistant's words alone, one token like another.

python recipes/finetune.py                            # from runs/pretrain, or a base of its own
python recipes/finetune.py --init MODEL --data chats.jsonl    # from a Hugging Face folder
python recipes/finetune.py --method lora --rank 8     # trains adapters beside matrices that stay
python recipes/finetune.py --method qlora             # the same, beside matrices of 4 bits
torchrun --nproc-per-node 2 recipes/finetune.py --init runs/pretrain --tp 2
"""

import functools
from collections import Counter
from pathlib import Path
from typing import Literal

import attrs

import trainkit as tk
from trainkit.types import ConfigError


@attrs.frozen(kw_only=True)
class AdapterOptions:
    """What is trained beside matrices that stay, with --method lora or qlora."""

    rank: int = attrs.field(default=32, validator=tk.config.positive)
    """The rank of each adapter."""
    alpha: float = attrs.field(default=96.0, validator=tk.config.positive)
    """What an adapter's product is scaled by, over its rank."""
    adapter_dropout: float = attrs.field(default=0.0, validator=tk.config.fraction)
    """The part of an adapter's input that is dropped."""
    adapted: str = r"layers\.\d+\.(attention|mlp)\.\w+"
    """A regular expression of the names of the matrices that get one."""
    dora: bool = False
    """Learn the length of each row apart from its direction."""


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Teach a trained decoder to answer; by default, what functions of Python's library do."""

    out: Path = tk.config.option(Path("runs/finetune"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(275, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A run, a checkpoint or a Hugging Face folder; by default runs/pretrain, or a small base."""
    method: Literal["full", "lora", "qlora"] = "full"
    """What is trained: all; adapters; or adapters beside matrices that are held in 4 bits."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """Conversations: a .jsonl or .parquet file with a field messages, or a .tokens file."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json; by default that of init."""
    template: str | None = tk.config.option(None, on_resume="allow")
    """How a conversation is written: chatml, llama3, qwen3, a folder's; by default that of init."""
    train_on: str = tk.config.option("assistant", tk.config.one_of("assistant", "last"))
    """Which turns are trained on: all of the assistant's, or only the last; .tokens files say."""
    cache: Path | None = tk.config.option(Path("runs/cache"), on_resume="allow")
    """Where packings are kept for the next run; None keeps none."""
    eval_every: int = tk.config.option(275, tk.config.non_negative, on_resume="allow")
    """Evaluate on held-out conversations before, every so many steps, and at the end; 0: never."""
    ask: tuple[str, ...] = tk.config.option(
        ("def is_open(self)", "def get_version(name)", "def remove_file(path, force=False)"),
        on_resume="allow",
    )
    """What the model is asked when it is evaluated, for you to read its answers."""
    batch: tk.config.RowOptions = tk.config.RowOptions()
    linear: tk.config.LinearOptions = tk.config.LinearOptions()
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=3e-3, schedule_steps=275)
    adapters: AdapterOptions = AdapterOptions()


def open_conversations(cfg, tokenizer):
    """Return the conversations, the assistant's tokens marked, and a count of what was cut."""
    counts = Counter()
    how = {"template": tk.chat.load_template(cfg.template), "train": cfg.train_on, "counts": counts}
    size = {"max_length": cfg.batch.row_length, "overlong": "drop"}
    encode = tk.chat.make_chat_encoder(tokenizer, **how, **size)
    corpus = tk.corpora.open_conversations(
        cfg.data, encode, tokenizer=tokenizer, template=cfg.template
    )
    return corpus, counts


def pack(cfg, run, corpus, counts):
    """Return the rows to train on, and those held out: no conversation is in both."""
    length, asked = cfg.batch.row_length, counts["conversations"]
    cut = {"truncated": counts["truncated"], "dropped": counts["dropped"], "what": "conversations"}
    if warning := tk.packing.format_overlong_warning(asked, capacity=length, **cut):
        run.log(warning)
    if warning := tk.chat.format_answers_warning(counts):
        run.log(warning)
    how = {"cache_dir": cfg.cache, "axis": run.ps.world, "seed": cfg.seed, "log": run.log}
    how |= {"multiple_of": cfg.batch.multiple_of, "overlong": "error"}
    return tk.data.split_held_out(corpus, tk.corpora.held_out_documents(corpus), length, **how)


def add_adapters(cfg):
    """Return the transforms with which a plan begins: few bits, roundings, adapters."""
    own, held = cfg.adapters, [tk.adapters.quantized("nf4")] if cfg.method == "qlora" else []
    held += tk.adapters.make_linear_transforms(cfg.linear.linears, cfg.linear.linear_modules)
    how = {"rank": own.rank, "alpha": own.alpha, "dora": own.dora}
    one = tk.adapters.Lora(own.adapted, dropout=own.adapter_dropout, **how)
    return held if cfg.method == "full" else [*held, tk.adapters.lora(one, seed=cfg.seed)]


def build(cfg, ps, base):
    """Return this rank's stages of the model, with its weights, and their optimizer."""
    plan = [*add_adapters(cfg), *tk.parallel.make_decoder_plan(cfg.layout, **cfg.planned)]
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


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    total = cfg.optim.schedule_steps
    lr_at = tk.schedules.cosine(cfg.optim.lr, warmup=cfg.optim.warmup, total=total)
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
        lr = lr_at(state.step)
        update = tk.clip_and_step(
            stages, optimizer, lr=lr, max_norm=max_norm, should_apply=applies, scale=scale
        )
        metrics = {**terms, **update.metrics, "lr": lr}
        return tk.advance(state, batch, {**metrics, "tokens": tokens}, axis=ps.loss)

    return train_step


def answer(cfg, stages, tokenizer):
    """Return what the model says to each question."""
    template = tk.chat.load_template(cfg.template)
    asked = [[{"role": "user", "content": question}] for question in cfg.ask]
    prompts = [tk.chat.encode_prompt(each, tokenizer, template=template) for each in asked]
    how = {
        "stop_ids": tk.chat.find_stop_ids(tokenizer, template),
        "vocab_size": tokenizer.vocab_size,
    }
    greedy = tk.generation.Sampling(temperature=0.0)
    how |= {"max_new_tokens": 100, "context": cfg.batch.row_length, "slide": True}
    said = tk.generation.generate(stages, prompts, sampling=greedy, tokenizer=tokenizer, **how)
    told = [
        f"{q}\n    {tk.sinks.escape_control_characters(x.text)}"
        for q, x in zip(cfg.ask, said, strict=True)
    ]
    return "\n".join(told)


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
    ps, drops = run.ps, cfg.adapters.adapter_dropout > 0
    run.log(f"reading {cfg.data or 'signatures and docstrings of the standard library'}")
    corpus, counts = open_conversations(cfg, tokenizer)
    rows, held = pack(cfg, run, corpus, counts)
    if base.config.width >= 512 and cfg.optim.lr == 3e-3:
        run.log("warning: --lr 3e-3 suits small models: large ones want about 2e-5, adapters 2e-4")
    stages, optimizer = build(cfg, ps, base)
    size = {"rows_per_step": cfg.batch.rows, "precision": cfg.precision}
    run.log(tk.parallel.describe_run(stages, rows.bins, **size))
    forward_backward = tk.make_forward_backward(
        stages, tk.losses.next_token_linear, reduce=cfg.layout.reduce
    )
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    evaluate = tk.evaluation.make_evaluator(
        stages, held, tk.losses.next_token_linear, rows_per_batch=cfg.batch.microbatch
    )
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    share = {"place": ps.place, "rows_per_microbatch": cfg.batch.microbatch}
    share |= {"noise_seed": cfg.seed} if drops else {}
    pad_id = tokenizer.pad_id or 0
    make_batch = functools.partial(tk.make_step_batch, rows, rows_at, pad_id=pad_id, **share)
    facts = make_facts(cfg, base, rows)
    changes = tk.config.make_resume_rules(cfg, free=["files", "context", "base_from"])
    if cfg.method == "full":
        facts |= tk.checkpoint.hash_initial_weights(first, stages, ps)
    else:
        facts |= tk.adapters.exclude_frozen_(stages, ps, source=base.path)
    state = run.resume(stages, optimizer, facts=facts, changes=changes, request=cfg.resume)
    stop, around = None, {"steps": cfg.steps, "policy": cfg.policy}
    around |= {"checkpoints": cfg.checkpoints, "logging": cfg.logging}
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop,
    ):
        loop.event("packing", step=state.step, **tk.packing.report_packing(rows.bins), **counts)
        if len(held) and cfg.eval_every and state.step == 0:
            run.log(f"the weights of {base.path}, before:")
            state = loop.evaluate(state, evaluate)
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            if len(held) and tk.schedules.is_due(state.step, cfg.eval_every, last=cfg.steps):
                state = loop.evaluate(state, evaluate)
                run.log(answer(cfg, stages, tokenizer))
            stop = loop.checkpoint(state)
        if not stop:
            loop.event("result", **tk.sinks.compare_evaluations(run.dir, "eval/loss"))
    if stop:
        return tk.run.EXIT_SAVED
    run.finish(state, stages, optimizer)
    return 0


def open_base(cfg):
    """Return the model to build, and where the weights are that the run begins or began with."""
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    path = first.path or tk.hub.ensure_base_run(Path(__file__).parent)
    base = tk.hub.open_model(path, tokenizer=cfg.tokenizer, context=cfg.batch.row_length)
    return base, first.resolved(base.path)


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    base, first = open_base(cfg)
    tokenizer = base.tokenizer
    template = tk.chat.choose_template_name(
        cfg.template, tokenizer, own=base.template, where=str(base.path)
    )
    precision = tk.parallel.resolve_precision(cfg.precision)
    cfg = attrs.evolve(cfg, init=first.source, tokenizer=base.name, template=template)
    cfg = attrs.evolve(cfg, precision=precision)
    problems = tk.parallel.problems(
        cfg.layout, base.config, cfg.batch, world=tk.mesh.get_world_size()
    )
    add, beside = add_adapters(cfg), {"layout": cfg.layout, "base": base.facts}
    problems += tk.adapters.problems(add, base.config, **beside)
    if cfg.method == "full" and cfg.adapters != AdapterOptions():
        own = attrs.asdict(cfg.adapters, filter=lambda field, value: value != field.default)
        what = f"--method full has no adapters, and these were given: {', '.join(own)}"
        problems.append(ConfigError(f"{what}; take --method lora, or leave them out"))
    tk.parallel.refuse(problems)
    with tk.open_run(cfg.out, **cfg.opened) as run:
        return train(cfg, run, tokenizer, base, first)


if __name__ == "__main__":
    tk.run.run_main(main)
