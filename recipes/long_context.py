"""Train on documents of thousands of tokens, each spread over ranks by ring x Ulysses attention.

python recipes/long_context.py                       # one process, on Python's own library
torchrun --nproc-per-node 4 recipes/long_context.py --ring 2 --ulysses 2   # the same losses
torchrun --nproc-per-node 4 recipes/long_context.py --ring 4 --row-length 16384
"""

import functools
import itertools
from pathlib import Path

import attrs

import trainkit as tk


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Train on long documents; by default the packages of Python's library, each in one piece.

    The tokens of a row are spread over ring x ulysses ranks, and the losses stay those of one
    process. Set ulysses to a divisor of the number of heads, and split longer rows with ring:

    torchrun --nproc-per-node 4 recipes/long_context.py --ring 2 --ulysses 2
    """

    out: Path = tk.config.option(Path("runs/long_context"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(30, tk.config.positive, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    data: Path | None = tk.config.option(None, on_resume="allow")
    """A directory: the text below each entry is one document; by default Python's library."""
    tokenizer: str = tk.config.option("bytes", on_resume="allow")
    """bytes, or a tokenizer.json."""
    size: str = "tiny"
    """A named model size; see trainkit.models.list_decoder_sizes."""
    rope_theta: float = tk.config.option(500_000.0, tk.config.positive)
    """The base of the rotary wavelengths: long contexts need long waves."""
    batch: tk.config.RowOptions = tk.config.RowOptions(row_length=4096, rows=2, microbatch=1)
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(
        lr=2e-3, warmup=5, schedule_steps=30
    )


def open_documents(cfg, tokenizer):
    """Return the corpus: one document for all text below each entry of the directory."""
    keep = tk.corpora.is_library_source if cfg.data is None else None
    folder = cfg.data or tk.corpora.standard_library()
    texts = tk.corpora.read_records(folder, suffixes=(".py", ".md", ".txt"), keep=keep)
    entries = itertools.groupby(texts, key=lambda named: named[0].partition("/")[0])
    documents = {
        name: "\n".join(tk.tokenizers.get_text(record, "text") for _, record in parts)
        for name, parts in entries
    }
    samples = (tk.tokenizers.encode_document(tokenizer, text) for text in documents.values())
    return tk.data.make_corpus(samples, vocab_size=tokenizer.vocab_size, names=list(documents))


def build(cfg, ps, model):
    """Return this rank's stages of the model and their optimizer."""
    plan = tk.parallel.make_decoder_plan(cfg.layout, **cfg.planned)
    make_model = functools.partial(tk.models.Decoder, model, head="hidden")
    weights = tk.models.init_weights(model, seed=cfg.seed)
    stages = tk.build_stages(make_model, ps, plan, weights=weights, schedule=cfg.layout.schedule)
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


def train(cfg, run, tokenizer, model):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps, batch = run.ps, cfg.batch
    run.log(f"reading {cfg.data or 'the source of the standard library'}")
    corpus = open_documents(cfg, tokenizer)
    longest, tokens = corpus.lengths.max(), corpus.lengths.sum()
    run.log(f"{len(corpus.lengths)} documents of {tokens} tokens, the longest of {longest}")
    rows = tk.pack_bins(
        corpus.lengths, batch.row_length, multiple_of=batch.multiple_of, seed=cfg.seed
    )
    stages, optimizer = build(cfg, ps, model)
    size = {"rows_per_step": batch.rows, "precision": cfg.precision}
    run.log(tk.parallel.describe_run(stages, rows, **size))
    facts = tk.config.make_config_facts(cfg)
    facts |= {"model": attrs.asdict(model), "tokenizer": tk.tokenizers.tokenizer_hash(tokenizer)}
    facts |= {"fingerprint": tk.data.fingerprint(corpus), "rows": tk.packing.bins_hash(rows)}
    changes = tk.config.make_resume_rules(cfg)
    state = run.resume(stages, optimizer, facts=facts, changes=changes, request=cfg.resume)
    loss = tk.losses.next_token_linear
    forward_backward = tk.make_forward_backward(stages, loss, reduce=cfg.layout.reduce)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=batch.rows, seed=cfg.seed)
    share = {"place": ps.place, "rows_per_microbatch": batch.microbatch}
    pad_id = tokenizer.pad_id or 0
    make_batch = functools.partial(
        tk.make_step_batch, tk.PackedCorpus(corpus, rows), rows_at, pad_id=pad_id, **share
    )
    stop, around = None, {"steps": cfg.steps, "policy": cfg.policy}
    around |= {"checkpoints": cfg.checkpoints, "logging": cfg.logging}
    with (
        tk.data.prefetch_batches(make_batch, state.cursor, device=ps.device) as next_batch,
        run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop,
    ):
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            stop = loop.checkpoint(state)
    if stop:
        return tk.run.EXIT_SAVED
    run.finish(state, stages, optimizer)
    return 0


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    cfg = attrs.evolve(cfg, precision=tk.parallel.resolve_precision(cfg.precision))
    tokenizer = tk.tokenizers.open_tokenizer(cfg.tokenizer)
    vocab_size = tk.models.pad_vocab_size(tokenizer.vocab_size)
    rope = {"rope_theta": cfg.rope_theta}
    model = tk.models.make_decoder_config(cfg.size, vocab_size=vocab_size, **rope)
    problems = tk.parallel.problems(cfg.layout, model, cfg.batch, world=tk.mesh.get_world_size())
    tk.parallel.refuse(problems)
    with tk.open_run(cfg.out, **cfg.opened) as run:
        return train(cfg, run, tokenizer, model)


if __name__ == "__main__":
    tk.run.run_main(main)
