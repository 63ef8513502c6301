"""The record of a step: numbers on the host, memory and throughput.

The host reads all metrics of a step at once (`to_host`).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from trainkit.batch import batch_hash, count_documents, count_tokens
from trainkit.collectives import all_sum
from trainkit.health import update_loss_scale
from trainkit.metrics.means import loss_to_perplexity
from trainkit.noise.hashing import MASK64
from trainkit.phases import measure_phase
from trainkit.types import Axis, DelayedMetrics, StepBatch, TrainState


def to_host(metrics: Mapping[str, Tensor | float]) -> dict[str, Any]:
    """Convert metrics to Python numbers, with one transfer for all tensors of a device.

    Integer and bool tensors become int, with all 64 bits, others float. Tensors with dimensions
    become nested lists, which JSON records contain and sinks of curves skip. Plain numbers do not
    change.

    Args:
        metrics: Tensors and plain numbers by name.

    Returns:
        A new dict in the same order.

    Effects:
        Waits for the device: this is the one host sync of a step that logs.

    Examples:
        >>> import torch
        >>> to_host({"loss": torch.tensor(2.5), "load": torch.tensor([[7, 1]]), "lr": 0.1})
        {'loss': 2.5, 'load': [[7, 1]], 'lr': 0.1}
    """
    return dict(zip(metrics, _read_values([*metrics.values()]), strict=True))


def _read_values(values: Sequence[Tensor | float]) -> list[Any]:
    """Return values as Python numbers, with one transfer for all tensors of a device."""
    read: list[Any] = [*values]
    tensors = {i: x.detach() for i, x in enumerate(values) if isinstance(x, Tensor)}
    for device in {x.device for x in tensors.values()}:
        own = {i: x for i, x in tensors.items() if x.device == device}
        for i, x in (own if device == torch.device("cpu") else _copy_to_host(own)).items():
            # A bool is a byte, 0 or 1.
            read[i] = (x.view(torch.uint8) if x.dtype == torch.bool else x).tolist()
    return read


def _copy_to_host(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return tensors of one device on the host."""
    # The bytes of all in one buffer, since a transfer of each would wait each time. The widest
    # come first, so that each begins at a multiple of its size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    parts = [x.contiguous().flatten().view(torch.uint8) for x in ordered.values()]
    with measure_phase("device"):
        buffer = torch.cat(parts).cpu()
    on_host = buffer.split([part.numel() for part in parts])
    return {
        i: part.view(x.dtype).view(x.shape)
        for (i, x), part in zip(ordered.items(), on_host, strict=True)
    }


def advance(
    state: TrainState, batch: StepBatch, metrics: Mapping[str, Tensor | float], *, axis: Axis
) -> tuple[TrainState, dict[str, Tensor | float]]:
    """Return the counters after a step, and its metrics with those of every step.

    Args:
        state: The counters before the step.
        batch: The batch of this rank.
        metrics: The metrics of the step; `tokens` is the number of tokens in the loss of the global
            batch. With `loss_scale` and `overflowed`, see `Update.metrics`, the loss scale is
            updated too.
        axis: The ranks that hold different tokens, `ps.loss`.

    Returns:
        The state of the next step, with the cursor of `batch`; and the metrics with those of the
        global batch: `tokens_processed`, the tokens that went through the model; `documents`, those
        that they belong to; `padding`, the share of positions without a token; `tokens_total`, the
        tokens in the loss so far; `batch_hash`; and `batch.counts`.

    Effects:
        Communicates: one all-reduce of four numbers on `axis`.

    Examples:
        >>> import torch
        >>> from trainkit.batch import make_padding_batch
        >>> from trainkit.types import SOLO, Cursor
        >>> batch = StepBatch([make_padding_batch(1, 2)], Cursor(1))
        >>> state, metrics = advance(TrainState(), batch, {"tokens": torch.tensor(0)}, axis=SOLO)
        >>> state.step, state.cursor.batch, metrics["tokens_total"]
        (1, 1, tensor(0))
    """
    # The hash of a batch is a sum over its tokens, so that it adds up over ranks in any layout.
    processed = count_tokens(batch.microbatches)
    positions = sum(microbatch["input_ids"].numel() for microbatch in batch.microbatches)
    local = torch.stack(
        [
            batch_hash(batch.microbatches),
            processed,
            count_documents(batch.microbatches),
            torch.full_like(processed, positions),
        ]
    )
    total_hash, processed, documents, positions = all_sum(local, axis).unbind()
    tokens: Any = state.tokens + metrics["tokens"]
    next_state = attrs.evolve(state, step=state.step + 1, tokens=tokens, cursor=batch.cursor)
    if "overflowed" in metrics:
        next_state = attrs.evolve(next_state, health=update_loss_scale(state.health, metrics))
    return next_state, {
        **metrics,
        **batch.counts,
        "tokens_processed": processed,
        "documents": documents,
        "padding": 1 - processed / positions,
        "tokens_total": tokens,
        "batch_hash": total_hash,
    }


def make_step_record(metrics: Mapping[str, Tensor | float], *, begin: float) -> dict[str, Any]:
    """Return one record of metrics.jsonl: `make_step_records` of a single step.

    Examples:
        >>> import time
        >>> metrics = {"loss": 0.5, "tokens": 100, "batch_hash": 255}
        >>> make_step_record(metrics, begin=time.perf_counter())["batch_hash"]
        '00000000000000ff'
    """
    return make_step_records([metrics], begin=begin)[0]


def make_step_records(
    steps: Sequence[Mapping[str, Tensor | float]], *, begin: float
) -> list[dict[str, Any]]:
    """Return records of metrics.jsonl: metrics of steps as plain values, with time and throughput.

    A step ends when its numbers arrive on the host, not when Python has launched its kernels, so
    the clock is read after the transfer. Several steps get equal times.

    Args:
        steps: The metrics of each step, tensors and plain numbers; `tokens` is the number of tokens
            in the loss, and `tokens_processed`, if present, of those that went through the model
            (`count_tokens`).
        begin: The start of the first step, with everything around it: `time.perf_counter()`.

    Returns:
        For each step its metrics as numbers; `batch_hash` as 16 hex digits; `loss_hex`,
        `grad_norm_hex` and `lr_hex`, with every bit; `perplexity` (`loss_to_perplexity`) where the
        loss is a mean over tokens; `seconds`, the mean of these steps; and rates:
        `tokens_per_second`, of processed tokens if known, `trained_tokens_per_second`, of those in
        the loss, and `documents_per_second`. All but the last are `DelayedMetrics`.

    Effects:
        Waits for the device, once for all steps: see `to_host`.

    Examples:
        >>> import time
        >>> steps = [{"loss": 0.5, "tokens": 100}, {"loss": 0.25, "tokens": 50}]
        >>> first, second = make_step_records(steps, begin=time.perf_counter())
        >>> second["loss_hex"], first["seconds"] == second["seconds"]
        ('0x1.0000000000000p-2', True)
    """
    values = iter(_read_values([x for step in steps for x in step.values()]))
    seconds = (time.perf_counter() - begin) / max(len(steps), 1)
    records: list[dict[str, Any]] = []
    for step in steps:
        record: dict[str, Any] = {}
        for name in step:
            value = next(values)
            # 64 bits may be negative as int64, and lose digits as the float64 of a JSON reader.
            record[name] = f"{int(value) & MASK64:016x}" if name == "batch_hash" else value
            if name in ("loss", "grad_norm", "lr"):
                record[f"{name}_hex"] = float(value).hex()
        if "loss" in record and is_loss_per_token(record):
            record["perplexity"] = loss_to_perplexity(record["loss"])
        record["seconds"] = seconds
        processed = record.get("tokens_processed", record["tokens"])
        record["tokens_per_second"] = tokens_per_second(processed, seconds)
        record["trained_tokens_per_second"] = tokens_per_second(record["tokens"], seconds)
        if "documents" in record:
            record["documents_per_second"] = tokens_per_second(record["documents"], seconds)
        records.append(record)
    return [*map(DelayedMetrics, records[:-1]), *records[-1:]]


def is_loss_per_token(metrics: Mapping[str, Any]) -> bool:
    """Return whether the loss of these metrics is a mean over tokens, and has a perplexity.

    That of a preference, which counts pairs or answers, and of a policy gradient, which reports how
    much of it is clipped, have none.

    Examples:
        >>> is_loss_per_token({"loss": 2.5, "tokens": 8}), is_loss_per_token({"pairs": 4})
        (True, False)
    """
    return not {"pairs", "answers", "clipped"} & metrics.keys()


def read_memory_stats(device: torch.device) -> dict[str, int]:
    """Return the bytes of memory in use, and the peak since the last call.

    For an accelerator this is the memory of tensors. For a CPU it is the resident memory of the
    process, whose peak cannot be reset: it is that since the start of the process.

    Args:
        device: The device of this rank, `ps.device`.

    Returns:
        "memory" and "memory_peak", in bytes, of this process; for an accelerator also
        "memory_reserved", which its allocator holds.

    Effects:
        Resets an accelerator's peak, without a host sync.

    Examples:
        >>> stats = read_memory_stats(torch.device("cpu"))
        >>> 0 < stats["memory"] <= stats["memory_peak"]
        True
    """
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
        statm = Path("/proc/self/statm")
        # The second number of statm is the resident set, in pages.
        now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
        # The kernel updates the peak less often than the current value.
        return {"memory": now, "memory_peak": max(peak, now)}
    stats = {
        "memory": torch.accelerator.memory_allocated(device),
        "memory_reserved": torch.accelerator.memory_reserved(device),
        "memory_peak": torch.accelerator.max_memory_allocated(device),
    }
    torch.accelerator.reset_peak_memory_stats(device)
    return stats


def estimate_gradient_noise(
    part_square: Tensor, part_tokens: Tensor, square: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate the gradient noise and the signal of the noise scale from one step.

    The gradient noise scale is noise / signal in tokens: beyond a batch of about this size a larger
    one saves few steps. Both are unbiased estimates and may be negative; their ratio is not
    unbiased. Average each over many steps first (the scale grows during training, so use an
    exponential average), then divide.

    A part is the gradient of some of the microbatches, or some of the ranks, of a step. It costs no
    second backward pass, only a second norm and a second reduction: call `forward_backward` with
    some microbatches, take the norm, and call it with the others, which adds to the gradient.
    Gradients of `sync_sp_grads` cannot be measured this way, because it sums only once.

    Args:
        part_square: The squared norm of the gradient of the part, with the same denominator,
            `tokens`; 0-d, or of any shape for several parts.
        part_tokens: The number of valid tokens of the part, above 0 and below `tokens`.
        square: The squared norm of the full gradient.
        tokens: The number of valid tokens of the step.

    Returns:
        The noise, the trace of the covariance of one token's gradient, and the signal, the squared
        norm of the true gradient, for each part.

    References:
        McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1.

    Examples:
        >>> from torch import nn
        >>> from trainkit.grads import grad_norm
        >>> from trainkit.step import forward_backward
        >>> model, tokens = nn.Linear(1, 1, bias=False), torch.tensor(4)
        >>> batches = [{"x": torch.tensor([[1.0]])}, {"x": torch.tensor([[3.0], [4.0], [4.0]])}]
        >>> def loss(y, batch):
        ...     return y.sum(), {}
        >>> def call(model, batch):
        ...     return model(batch["x"])
        >>> squares = []
        >>> for batch in batches:
        ...     _ = forward_backward(model, [batch], loss, denominator=tokens, call=call)
        ...     squares.append(grad_norm(model.parameters()) ** 2)
        >>> estimate_gradient_noise(squares[0], torch.tensor(1), squares[1], tokens)
        (tensor(-10.6667), tensor(11.6667))
    """
    # With the part's own tokens as the denominator. In expectation the squared norm of a gradient
    # of n tokens is signal + noise / n: two equations, for the part and for the step.
    small = part_square * tokens / part_tokens * tokens / part_tokens
    rest = tokens - part_tokens
    noise = (small - square) * part_tokens * tokens / rest
    return noise, (square * tokens - small * part_tokens) / rest


def tokens_per_second(tokens: float, seconds: float) -> float:
    """Return the throughput, or 0 for no time.

    Args:
        tokens: The number of tokens, on all ranks.
        seconds: The time in seconds.

    Examples:
        >>> tokens_per_second(1000, 0.5)
        2000.0
    """
    return tokens / seconds if seconds > 0 else 0.0
