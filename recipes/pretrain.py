"""Train a decoder from scratch; by default a small one, on the source of Python's own library.

    python recipes/pretrain.py                                   # one process
    torchrun --nproc-per-node 2 recipes/pretrain.py              # two, and the same losses
    python recipes/pretrain.py --data FOLDER --size 10m          # your text, a larger model
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import attrs
import orjson
import torch

import trainkit as tk
from trainkit import config, data, losses, models, optim, parallel, runtime, schedules, sinks

TrainStep = Callable[[tk.TrainState, tk.StepBatch], tuple[tk.TrainState, dict[str, torch.Tensor]]]
MAY_CHANGE = "out steps config resume save_every eval_every microbatch recompute compiled " \
    "pp dp_replicate dp_shard ring ulysses tp ep".split()


@attrs.frozen(kw_only=True)
class Config(config.RunConfig):
    """Train a decoder from scratch; by default a small one, on the source of Python's library."""

    out: Path = Path("runs/pretrain")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = attrs.field(default=700, validator=config.positive)
    """Stop after this step. Nothing else depends on it: see schedule-steps."""
    schedule_steps: int = attrs.field(default=700, validator=config.positive)
    """The length of the learning rate's schedule; past it the last rate holds."""
    data: Path | None = None
    """A directory of text, a .jsonl or a .tokens file; by default Python's standard library."""
    size: str = "tiny"
    """A named model size; see trainkit.models.decoder_sizes."""
    row_length: int = attrs.field(default=256, validator=config.positive)
    """Tokens in a row; documents are packed into rows, longer ones are split."""
    rows: int = attrs.field(default=16, validator=config.positive)
    """Rows in a step, over all ranks."""
    microbatch: int = attrs.field(default=8, validator=config.positive)
    """Rows that go through the model at once, on each rank."""
    lr: float = attrs.field(default=3e-3, validator=config.positive)
    """The peak learning rate."""
    warmup: int = attrs.field(default=30, validator=config.non_negative)
    """Steps in which the learning rate rises."""
    weight_decay: float = attrs.field(default=0.1, validator=config.non_negative)
    """Decay of matrices; vectors have none."""
    max_norm: float = attrs.field(default=1.0, validator=config.positive)
    """Gradients above this norm are scaled down to it."""
    dropout: float = attrs.field(default=0.0, validator=config.fraction)
    """The probability that a feature is dropped."""
    recompute: str = attrs.field(default="none", validator=config.one_of("none", "selective", "full"))
    """What is computed again in the backward pass, to save memory."""
    compiled: bool = False
    """Compile the blocks with torch.compile."""
    eval_every: int = attrs.field(default=200, validator=config.non_negative)
    """Evaluate on held-out documents every so many steps, and at the end; 0 for never."""


def make_train_step(
    cfg: Config, ps: tk.ParallelState, stages: list[torch.nn.Module], optimizer: torch.optim.Optimizer
) -> TrainStep:
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params = tk.parameters_of(stages)
    lr_at = schedules.warmup_stable_decay(cfg.lr, warmup=cfg.warmup, total=cfg.schedule_steps, decay=0.4)
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


def train(cfg: Config, stack: ExitStack) -> None:
    """Open everything, go on from the last checkpoint, and train until `cfg.steps`."""
    ps = stack.enter_context(
        tk.parallel_session(
            pp=cfg.pp,
            dp_replicate=cfg.dp_replicate,
            dp_shard=cfg.dp_shard,
            ring=cfg.ring,
            ulysses=cfg.ulysses,
            tp=cfg.tp,
            ep=cfg.ep,
        )
    )
    say = print if ps.world.index == 0 else lambda *_: None
    run_dir = runtime.make_run_dir(cfg.out)
    config.check_same_run(run_dir, cfg, may_change=MAY_CHANGE)

    source, keep = (cfg.data, None) if cfg.data else (data.standard_library(), data.is_library_source)
    say(f"reading {source}")
    tokenizer = data.byte_tokenizer()
    corpus = tk.open_corpus(source, tokenizer=tokenizer, keep=keep)
    held = data.held_out_documents(corpus)
    bins = tk.pack_bins(np.where(held, 0, corpus.lengths), cfg.row_length)
    held_bins = tk.pack_bins(np.where(held, corpus.lengths, 0), cfg.row_length)

    model = models.decoder_config(cfg.size, vocab_size=corpus.vocab_size)
    plan = [parallel.recompute(cfg.recompute), *[parallel.compiled()] * cfg.compiled, parallel.fsdp()]
    weights = models.init_weights(model, seed=cfg.seed)
    stages = tk.build_stages(lambda: models.Decoder(model, head="hidden"), ps, plan, weights=weights)
    groups = optim.decay_groups(tk.named_parameters_of(stages), weight_decay=cfg.weight_decay)
    optimizer = optim.adamw(groups, lr=cfg.lr)
    state = tk.resume(run_dir, tk.TrainState(), stages, optimizer, ps, request=cfg.resume, tell=say)
    if state.step >= cfg.steps:
        say(f"the run in {run_dir} is complete: step {state.step}; --steps takes it further")
        return
