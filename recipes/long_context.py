"""Train on documents of thousands of tokens, each spread over ranks by ring x Ulysses attention.

python long_context.py                       # one process, on Python's own library
torchrun --nproc-per-node 4 long_context.py --ring 2 --ulysses 2   # the same losses
torchrun --nproc-per-node 4 long_context.py --ring 4 --row-length 16384

The frame is that of pretrain.py, whose comments explain it. The comments here are about long rows.
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

    torchrun --nproc-per-node 4 long_context.py --ring 2 --ulysses 2
    """

    out: Path = tk.config.option(Path("runs/long_context"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures."""
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
        lr=2e-3,
        warmup=5,
        schedule_steps=30,
    )


def open_documents(cfg, tokenizer):
    """Return the corpus: one document for all text below each entry of the directory."""
    keep = tk.corpora.is_library_source if cfg.data is None else None
    folder = cfg.data or tk.corpora.standard_library()
    texts = tk.corpora.read_records(folder, suffixes=(".py", ".md", ".txt"), keep=keep)
    # Files come in the order of their paths, so those of an entry follow one another.
    entries = itertools.groupby(texts, key=lambda named: named[0].partition("/")[0])
    documents = {
        name: "\n".join(tk.tokenizers.get_text(record, "text") for _, record in parts)
        for name, parts in entries
    }
    samples = (tk.tokenizers.encode_document(tokenizer, text) for text in documents.values())
    return tk.data.make_corpus(samples, vocab_size=tokenizer.vocab_size, names=list(documents))


def build(cfg, ps, model):
    """Return this rank's part of the model, and its optimizer."""
    # --ring and --ulysses replace attention, the only part of a decoder in which a token sees
    # others. In a ring, keys and values travel from rank to rank, each of which holds two slices
    # of a document, one from either end, so that all do the same work. Ulysses exchanges tokens
    # for heads. All else is computed where a token is.
    plan = tk.parallel.make_decoder_plan(
        cfg.layout,
        precision=cfg.precision,
        recompute=cfg.recompute,
        compiled=cfg.compiled,
        attention=cfg.attention,
        offload=cfg.offload_activations,
    )
    stages = tk.build_stages(
        functools.partial(tk.models.Decoder, model, head="hidden"),
        ps,
        plan,
        weights=tk.models.init_weights(model, seed=cfg.seed),
        schedule=cfg.layout.schedule,
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
    lr_at = tk.schedules.cosine(
        cfg.optim.lr,
        warmup=cfg.optim.warmup,
        total=cfg.optim.schedule_steps,
    )

    def train_step(state, batch):
        # Ranks that split a row hold different tokens of it: they count and add up theirs, as
        # ranks that read different rows do. `ps.loss` has both.
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        # The rest of the step is that of pretrain.py.
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(tokens, scale)
        )
        # Each of them has the gradient of its own tokens. FSDP adds these up where it shards over
        # the ranks of a sequence too, as it does by default; this adds up the rest: --fold-sp.
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


def train(cfg, run, tokenizer, model):
    """Resume from the last checkpoint, or start, and train until `steps` or until a stop."""
    ps = run.ps
    run.log(f"reading {cfg.data or 'the source of the standard library'}")
    corpus = open_documents(cfg, tokenizer)
    longest, tokens = corpus.lengths.max(), corpus.lengths.sum()
    run.log(f"{len(corpus.lengths)} documents of {tokens} tokens, the longest of {longest}")
    # A document that is longer than a row continues in another one. In a row, each document is
    # split into equal slices for the ring, so its length is rounded up: multiple-of.
    bins = tk.pack_bins(
        corpus.lengths,
        cfg.batch.row_length,
        multiple_of=cfg.batch.multiple_of,
        seed=cfg.seed,
    )
    rows = tk.PackedCorpus(corpus, bins)
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    # Labels are shifted before a row is split: that of the last token of a slice is the first token
    # of the next. A rank gets its slices, with the positions that they have in their documents.
    make_batch = functools.partial(
        tk.make_step_batch,
        rows,
        rows_at,
        rows_per_microbatch=cfg.batch.microbatch,
        data_shard=ps.data_shard,
        pad_id=tokenizer.pad_id or 0,
    )

    stages, optimizer = build(cfg, ps, model)
    run.describe(stages, bins, rows_per_step=cfg.batch.rows, precision=cfg.precision)
    forward_backward = tk.make_forward_backward(
        stages,
        tk.losses.next_token_linear,
        reduce=cfg.layout.reduce,
    )
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)

    state = run.resume(
        stages,
        optimizer,
        request=cfg.resume,
        config=cfg,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
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
        while state.step < cfg.steps and not stop:
            batch = next_batch(state.cursor)
            state, metrics = train_step(state, batch)
            state = loop.record(state, metrics, batch)
            stop = loop.checkpoint(state)
    return run.finish(state, stages, optimizer, stop=stop)


def main(argv=None):
    """Read the configuration, check it, open the process groups, and train."""
    cfg = tk.config.load_config(Config, argv)
    cfg = attrs.evolve(cfg, precision=tk.parallel.resolve_precision(cfg.precision))
    tokenizer = tk.tokenizers.open_tokenizer(cfg.tokenizer)
    # Rotary embeddings turn a head's features with the position; the slowest must not come around
    # within a row, which a larger theta sees to.
    model = tk.models.make_decoder_config(
        cfg.size,
        num_ids=tokenizer.vocab_size,
        rope_theta=cfg.rope_theta,
    )
    tk.parallel.check_layout(cfg.layout, model, cfg.batch)
    with tk.open_run(
        cfg.out,
        layout=cfg.layout,
        timeouts=cfg.timeouts,
        numerics=cfg.numerics,
        config=cfg,
    ) as run:
        return train(cfg, run, tokenizer, model)


if __name__ == "__main__":
    tk.run.run_main(main)
