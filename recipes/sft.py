"""Teach a decoder to answer: loss on the assistant's words alone, one token like another.

python recipes/sft.py                            # from a function's signature to what it does
python recipes/sft.py --init runs/pretrain       # the same, from what pretrain.py has learnt
python recipes/sft.py --init MODEL               # from a Hugging Face folder, and its tokenizer
torchrun --nproc-per-node 2 recipes/sft.py --data chats.jsonl
"""

import functools
from collections import Counter
from pathlib import Path

import attrs
import numpy as np

import trainkit as tk
from trainkit.types import CheckpointError


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Teach a decoder to answer; by default a small one, what functions of Python's library do."""

    out: Path = tk.config.option(Path("runs/sft"), change="no fact")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(550, tk.config.positive, change="no fact")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    data: Path | None = tk.config.option(None, change="free")
    """Conversations: a .jsonl or .parquet file with a field messages, or a .tokens file."""
    tokenizer: str | None = None
    """bytes, or a tokenizer.json; by default that of init's folder, or bytes."""
    template: str = tk.config.option("chatml", tk.config.one_of(*tk.chat.TEMPLATES))
    """How a conversation is written down."""
    train_on: str = tk.config.option("assistant", tk.config.one_of("assistant", "last"))
    """Which turns are trained on: all of the assistant's, or only the last; .tokens files say."""
    cache: Path | None = tk.config.option(Path("runs/cache"), change="free")
    """Where packings are kept for the next run; None keeps none."""
    init: Path | None = tk.config.option(None, change="free")
    """A run, a checkpoint or a Hugging Face folder whose weights to begin with."""
    size: str = "tiny"
    """A named model size, where there is no init; see trainkit.models.decoder_sizes."""
    eval_every: int = tk.config.option(275, tk.config.non_negative, change="free")
    """Evaluate on held-out conversations every so many steps, and at the end; 0 for never."""
    ask: tuple[str, ...] = tk.config.option(
        ("def is_open(self)", "def get_version(name)", "def remove_file(path, force=False)"),
        change="free",
    )
    """What the model is asked when it is evaluated, for you to read its answers."""
    batch: tk.config.RowOptions = tk.config.RowOptions()
    optim: tk.config.OptimOptions = tk.config.OptimOptions(lr=3e-3, schedule_steps=550)


def open_conversations(cfg, tokenizer):
    """Return the conversations, the assistant's tokens marked, and a count of what was cut."""
    counts = Counter()
    how = {"template": tk.chat.TEMPLATES[cfg.template], "train": cfg.train_on, "counts": counts}
    size = {"max_length": cfg.batch.row_length, "overlong": "drop"}
    encode = tk.chat.chat_encoder(tokenizer, **how, **size)
    return tk.corpora.open_conversations(cfg.data, encode, tokenizer=tokenizer), counts


def pack(cfg, run, corpus, counts):
    """Return the rows to train on, and those held out: no conversation is in both."""
    length, asked = cfg.batch.row_length, counts["conversations"]
    cut = {"truncated": counts["truncated"], "dropped": counts["dropped"], "what": "conversations"}
    if warning := tk.packing.overlong_warning(asked, capacity=length, **cut):
        run.say(warning)
    size = {"capacity": length, "multiple_of": cfg.batch.multiple_of, "overlong": "error"}
    how = {"content": tk.corpora.fingerprint(corpus), "seed": cfg.seed, "tell": run.say}
    bins_of = functools.partial(tk.data.cached_bins, cfg.cache, axis=run.ps.world, **how, **size)
    lengths = np.where(tk.corpora.held_out_documents(corpus), 0, corpus.lengths)
    rows, held = bins_of(lengths=lengths), bins_of(lengths=corpus.lengths - lengths)
    return tk.Packed(corpus, rows), tk.Packed(corpus, held)


def choose_model(cfg, tokenizer):
    """Return the model's configuration, and the checkpoint of its first weights with `init`."""
    if cfg.init is None:
        vocab_size = tk.models.round_up_vocabulary(tokenizer.vocab_size)
        return tk.models.decoder_config(cfg.size, vocab_size=vocab_size), None
    begun = cfg.resume == "auto" and tk.checkpoint.list_checkpoints(cfg.out / "checkpoints")
    if not begun and tk.hub.is_folder(cfg.init):
        return tk.hub.init_config(cfg.init, vocab_size=tokenizer.vocab_size), cfg.init
    path = tk.checkpoint.find_checkpoint(cfg.out if begun else cfg.init)
    facts = tk.checkpoint.read_facts(path)
    if facts.get("tokenizer") != tk.tokenizers.tokenizer_hash(tokenizer):
        other = f"{path} was trained with another tokenizer than {cfg.tokenizer}"
        raise CheckpointError(f"--init: {other}; name the same with --tokenizer", where=path)
    return tk.models.config_from_facts(facts["model"]), path


def build(cfg, ps, model):
    """Return this rank's stages of the model and their optimizer."""
    plan = [
        tk.parallel.tensor(),
        tk.parallel.sequence(),
        tk.parallel.precision(tk.parallel.DTYPES[cfg.dtype]),
        tk.parallel.recompute(cfg.recompute, preserve_rng_state=False),
        *([tk.parallel.compiled()] if cfg.compiled else []),
        tk.parallel.fsdp(cfg.layout),
    ]
    make_model = functools.partial(tk.models.Decoder, model, head="hidden")
    weights = tk.models.init_weights(model, seed=cfg.seed)
    stages = tk.build_stages(make_model, ps, plan, weights=weights, schedule=cfg.layout.schedule)
    named, decay = tk.named_parameters_of(stages), cfg.optim.weight_decay
    return stages, tk.optim.adamw(tk.optim.decay_groups(named, weight_decay=decay), lr=cfg.optim.lr)


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params, total = tk.parameters_of(stages), cfg.optim.schedule_steps
    lr_at = tk.schedules.cosine(cfg.optim.lr, warmup=cfg.optim.warmup, total=total)
    clip = {"max_norm": cfg.optim.max_norm, "axis": ps.pp, "world": ps.world}

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = forward_backward(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        terms = tk.losses.mean_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        applies = tk.health.step_test(terms["loss"], state.health, cfg.policy, tokens=tokens)
        lr = lr_at(state.step)
        update = tk.clip_and_step(params, optimizer, lr=lr, applies=applies, **clip)
        metrics = {**terms, "grad_norm": update.norm, "skipped": ~update.applied, "lr": lr}
        return tk.advance(state, batch, {**metrics, "tokens": tokens}, axis=ps.loss)

    return train_step


def bind_evaluation(cfg, ps, held, stages, loss):
    """Return evaluate(), which gives the loss over the rows that are held out."""

    def evaluate():
        how = {"rows_per_batch": cfg.batch.microbatch, "device": ps.device}
        batches = tk.eval_batches(held, place=ps.place, **how)
        return tk.to_host(tk.evaluate(stages, batches, loss, axis=ps.loss, pp=ps.pp, tp=ps.tp))

    return evaluate


def answer(cfg, ps, stages, tokenizer, question):
    """Return what the model says to a question."""
    template = tk.chat.TEMPLATES[cfg.template]
    messages = [{"role": "user", "content": question}]
    prompt = tk.chat.prompt_ids(messages, tokenizer, template=template)
    call, window = tk.parallel.bind_call(stages, ps), cfg.batch.row_length
    how = {"context": window, "slide": True, "max_new_tokens": 100}
    how |= {"sampling": tk.generation.Sampling(temperature=0.0), "tokenizer": tokenizer}
    ids = {"stop_ids": tk.chat.stop_ids(tokenizer, template), "vocab_size": tokenizer.vocab_size}
    (drawn,) = tk.generation.generate(stages[0], [prompt], **how, **ids, call=call)
    return drawn.text


def make_facts(cfg, model, tokenizer, rows):
    """Return what a run must be continued with as it was begun."""
    facts = tk.config.config_facts(cfg)
    facts |= {"model": attrs.asdict(model), "tokenizer": tk.tokenizers.tokenizer_hash(tokenizer)}
    facts |= {"files": rows.corpus.sources, "fingerprint": tk.corpora.fingerprint(rows.corpus)}
    return facts | {"rows": tk.packing.bins_hash(rows.bins)}


def train(cfg, run, tokenizer, model, init):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps, loss = run.ps, tk.losses.next_token_linear
    run.say(f"reading {cfg.data or 'signatures and docstrings of the standard library'}")
    corpus, counts = open_conversations(cfg, tokenizer)
    rows, held = pack(cfg, run, corpus, counts)
    stages, optimizer = build(cfg, ps, model)
    size = {"rows_per_step": cfg.batch.rows, "dtype": cfg.dtype}
    run.say(tk.parallel.start_lines(stages, ps, rows.bins, **size))
    order = {"schedule": cfg.layout.schedule, "reduce": cfg.layout.reduce}
    forward_backward = tk.bind_forward_backward(stages, loss, axis=ps.pp, **order)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    evaluate = bind_evaluation(cfg, ps, held, stages, loss)
    rows_at = tk.sampling.rows_of_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    share = {"place": ps.place, "rows_per_microbatch": cfg.batch.microbatch}
    pad_id = tokenizer.pad_id or 0
    make_batch = functools.partial(tk.step_batch, rows, rows_at, pad_id=pad_id, **share)
    facts, changes = make_facts(cfg, model, tokenizer, rows), tk.config.changes_of(cfg)
    state = run.resume(stages, optimizer, facts=facts, changes=changes, request=cfg.resume)
    if init and state.step == 0:
        room = tk.hub if tk.hub.is_folder(init) else tk.checkpoint
        room.load_weights(init, stages, axis=ps.world)
        run.say(f"beginning with the weights of {init}")
    stop, around = None, {"steps": cfg.steps, "keeping": cfg.keeping, "policy": cfg.policy}
    with (
        tk.data.prefetch(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop,
    ):
        loop.event("packing", step=state.step, **tk.packing.packing_report(rows.bins), **counts)
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.after(state, metrics, batch)
            if len(held) and tk.schedules.due(state.step, cfg.eval_every, last=cfg.steps):
                state = loop.evaluated(state, evaluate)
                for question in cfg.ask:
                    said = answer(cfg, ps, stages, tokenizer, question)
                    run.say(f"{question}\n    {tk.sinks.printable(said)}")
            stop = loop.keep(state)
    if stop:
        return tk.runtime.SAVED
    run.finish(state, stages, optimizer)
    return 0


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    name = tk.tokenizers.find_tokenizer(cfg.tokenizer, init=cfg.init)
    cfg = attrs.evolve(cfg, tokenizer=name, dtype=tk.parallel.choose_dtype(cfg.dtype))
    tokenizer = tk.tokenizers.open_tokenizer(name)
    model, init = choose_model(cfg, tokenizer)
    problems = tk.parallel.problems(cfg.layout, model, cfg.batch, world=tk.mesh.world_size())
    tk.parallel.refuse(problems)
    told = tk.config.plain_values(cfg)
    with tk.open_run(cfg.out, layout=cfg.layout, limits=cfg.limits, config=told) as run:
        return train(cfg, run, tokenizer, model, init)


if __name__ == "__main__":
    tk.runtime.leave(main)
