"""Train a decoder from scratch; by default a small one, on the source of Python's own library.

python recipes/pretrain.py                                   # one process
torchrun --nproc-per-node 2 recipes/pretrain.py              # two, and the same losses
python recipes/pretrain.py --data FOLDER --size 10m          # your text, a larger model
"""

import sys
import time
from pathlib import Path

import attrs
import numpy as np
import torch

import trainkit as tk
from trainkit import config, data, losses, models, optim, parallel, runtime, schedules, sinks
from trainkit.metrics import step_record


@attrs.frozen(kw_only=True)
class Config(config.RunConfig):
    """Train a decoder from scratch; by default a small one, on the source of Python's library."""

    out: Path = Path("runs/pretrain")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = attrs.field(default=650, validator=config.positive)
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    schedule_steps: int = attrs.field(default=650, validator=config.positive)
    """The length of the learning rate's schedule; past it the last rate holds."""
    data: Path | None = None
    """A directory of text, a .jsonl or a .tokens file; by default Python's standard library."""
    size: str = "tiny"
    """A named model size; see trainkit.models.decoder_sizes."""
    row_length: int = attrs.field(default=256, validator=config.positive)
    """Tokens in a row; documents are packed into rows, longer ones are split."""
    rows: int = attrs.field(default=8, validator=config.positive)
    """Rows in a step, over all ranks."""
    microbatch: int = attrs.field(default=4, validator=config.positive)
    """Rows that go through the model at once, on each rank."""
    lr: float = attrs.field(default=4e-3, validator=config.positive)
    """The peak learning rate."""
    warmup: int = attrs.field(default=30, validator=config.non_negative)
    """Steps in which the learning rate rises."""
    weight_decay: float = attrs.field(default=0.1, validator=config.non_negative)
    """Decay of matrices; vectors have none."""
    max_norm: float = attrs.field(default=1.0, validator=config.positive)
    """Gradients above this norm are scaled down to it."""
    recompute: str = attrs.field(
        default="none", validator=config.one_of("none", "selective", "full")
    )
    """What is computed again in the backward pass, to save memory."""
    compiled: bool = False
    """Compile the blocks with torch.compile."""
    eval_every: int = attrs.field(default=325, validator=config.non_negative)
    """Evaluate on held-out documents every so many steps, and at the end; 0 for never."""


# What a run may be continued with another value of: it changes nothing that is computed.
MAY_CHANGE = (*config.PLACE_FIELDS, "microbatch", "recompute", "compiled", "eval_every")


def open_data(cfg, tokenizer):
    """Return the corpus, its rows for training, and its rows held out by their documents' names."""
    source, keep = (
        (cfg.data, None) if cfg.data else (data.standard_library(), data.is_library_source)
    )
    corpus = tk.open_corpus(source, tokenizer=tokenizer, keep=keep)
    held = data.held_out_documents(corpus, one_in=40)
    rows = tk.pack_bins(np.where(held, 0, corpus.lengths), cfg.row_length)
    return corpus, rows, tk.pack_bins(np.where(held, corpus.lengths, 0), cfg.row_length)


def build(cfg, ps, model):
    """Return this rank's stages of the model and their optimizer."""
    plan = [parallel.recompute(cfg.recompute), parallel.fsdp()]
    if cfg.compiled:
        plan.insert(1, parallel.compiled())
    weights = models.init_weights(model, seed=cfg.seed)
    stages = tk.build_stages(
        lambda: models.Decoder(model, head="hidden"), ps, plan, weights=weights
    )
    groups = optim.decay_groups(tk.named_parameters_of(stages), weight_decay=cfg.weight_decay)
    return stages, optim.adamw(groups, lr=cfg.lr)


def make_train_step(cfg, ps, stages, optimizer):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params = tk.parameters_of(stages)
    lr_at = schedules.warmup_stable_decay(
        cfg.lr, warmup=cfg.warmup, total=cfg.schedule_steps, decay=0.4
    )
    forward_backward = tk.bind_forward_backward(stages, losses.next_token_linear, axis=ps.pp)

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = forward_backward(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        lr = lr_at(state.step)
        norm = tk.clip_and_step(params, optimizer, lr=lr, max_norm=cfg.max_norm, axis=ps.pp)
        sums = tk.reduce_metrics(sums, ps.loss)
        metrics = {
            "loss": sums["loss"] / tokens.clamp(min=1),
            "grad_norm": norm,
            "skipped": ~torch.isfinite(norm),
            "lr": lr,
            "tokens": tokens,
            "tokens_total": state.tokens + tokens,
            "batch_hash": tk.all_sum(tk.batch_hash(batch.microbatches), ps.loss),
        }
        moved = {"step": state.step + 1, "tokens": metrics["tokens_total"], "cursor": batch.cursor}
        return attrs.evolve(state, **moved), metrics

    return train_step


def finish(cfg, ps, state, stages, optimizer):
    """Write how the run has ended, draw its loss, and show what the model writes."""
    tk.checkpoint.write_final(cfg.out, state, stages, optimizer, ps)
    tokenizer = data.byte_tokenizer()
    prompt = tokenizer.encode("def ")
    drawn = models.generate(
        stages[0],
        [tokenizer.bos_id, *prompt],
        max_new_tokens=200,
        context=cfg.row_length,
        temperature=0.7,
        seed=cfg.seed,
        stop_id=tokenizer.eos_id,
    )
    if ps.world.index == 0:
        sinks.plot_loss(cfg.out / "metrics.jsonl", cfg.out / "loss.png")
        print(f"\n{tokenizer.decode([*prompt, *drawn])}\n")
        print(f"the run is in {cfg.out}; its loss is drawn in {cfg.out / 'loss.png'}")


def train(cfg, ps):
    """Go on from the last checkpoint, or begin, and train until `cfg.steps`."""
    say = print if ps.world.index == 0 else lambda _: None
    run_dir = runtime.make_run_dir(cfg.out)
    say(f"reading {cfg.data or 'the source of the standard library'}")
    tokenizer = data.byte_tokenizer()
    corpus, rows, held_rows = open_data(cfg, tokenizer)
    if not len(held_rows):
        say("no document is held out of so few, so there is nothing to evaluate on")
    model = models.decoder_config(cfg.size, vocab_size=corpus.vocab_size)
    stages, optimizer = build(cfg, ps, model)
    tk.checkpoint.require_space(run_dir, stages)
    facts = config.bound_values(cfg, may_change=MAY_CHANGE)
    facts |= {"model": attrs.asdict(model), "corpus": data.fingerprint(corpus)}
    told: list[str] = []
    state = tk.resume(
        run_dir,
        tk.TrainState(),
        stages,
        optimizer,
        ps,
        request=cfg.resume,
        facts=facts,
        tell=told.append,
    )
    say("\n".join(told) or "beginning afresh")
    if ps.world.index == 0:
        config.write_config(run_dir / "config.toml", cfg)
    if state.step >= cfg.steps:
        say(f"the run in {run_dir} is complete at step {state.step}; --steps takes it further")

    train_step = make_train_step(cfg, ps, stages, optimizer)
    at_hand = {"pad_id": tokenizer.pad_id, "device": ps.device}
    with sinks.run_sinks(run_dir, ps.world.share, step=state.step, last=cfg.steps) as (log, event):
        event("resume", step=state.step, told=told)
        while state.step < cfg.steps:
            begin = time.perf_counter()
            batch = tk.step_batch(
                corpus,
                rows,
                state.cursor,
                rows=cfg.rows,
                seed=cfg.seed,
                share=ps.dp.share,
                rows_per_microbatch=cfg.microbatch,
                **at_hand,
            )
            state, metrics = train_step(state, batch)
            log(state.step, step_record(metrics, seconds=time.perf_counter() - begin))
            if len(held_rows) and schedules.due(state.step, cfg.eval_every, last=cfg.steps):
                held = tk.eval_batches(corpus, held_rows, ps.dp.share, rows_per_batch=32, **at_hand)
                found = tk.evaluate(stages[0], held, losses.next_token_linear, axis=ps.loss)
                found = tk.to_host(found)
                event("evaluation", step=state.step, **found)
                say(f"held out: {found['loss']:.4f} nats per token, over {found['tokens']} tokens")
            if schedules.due(state.step, cfg.save_every, last=cfg.steps):
                path = tk.save_checkpoint(run_dir, state, stages, optimizer, ps, facts=facts)
                event("save", step=state.step, path=str(path))
    finish(cfg, ps, state, stages, optimizer)


def main(argv=None):
    """Read the configuration, open the process groups, train."""
    with runtime.report_errors():
        cfg = config.load_config(Config, argv)
    with runtime.report_errors(cfg.out), tk.parallel_session(**cfg.degrees) as ps:
        train(cfg, ps)


if __name__ == "__main__":
    sys.exit(main())
