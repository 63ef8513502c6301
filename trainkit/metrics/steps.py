"""The record of a step: numbers on the host, memory, throughput and FLOPs.

The host reads all metrics of a step at once (`to_host`). Model FLOPs follow from the lengths of
documents, because a packed row costs less attention than one document of its length.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch import Tensor

from trainkit.batch import batch_hash, count_documents, count_tokens
from trainkit.collectives import all_sum
from trainkit.health import update_loss_scale
from trainkit.metrics.means import loss_to_perplexity
from trainkit.models.config import DecoderConfig
from trainkit.noise.hashing import MASK64
from trainkit.parallel.recompute import read_mode
from trainkit.parallel.split import decoder_costs
from trainkit.phases import measure_phase
from trainkit.types import Axis, DelayedMetrics, IntArray, StepBatch, TrainState


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
    tensors = {name: x.detach() for name, x in metrics.items() if isinstance(x, Tensor)}
    numbers: dict[str, Any] = {}
    # One flat buffer of 64 bits for each device: a transfer of each tensor would wait each time.
    for device in {value.device for value in tensors.values()}:
        on_device = {name: value for name, value in tensors.items() if value.device == device}
        # fp64 has every value of narrower dtypes; its bits travel as int64, among the integers.
        flat = [
            (x.double().view(torch.int64) if x.is_floating_point() else x.long()).flatten()
            for x in on_device.values()
        ]
        with measure_phase("device"):
            bits = torch.cat(flat).cpu().numpy()
        ends = np.cumsum([value.numel() for value in on_device.values()])[:-1]
        for (name, value), chunk in zip(on_device.items(), np.split(bits, ends), strict=True):
            dtype = np.float64 if value.is_floating_point() else np.int64
            numbers[name] = chunk.view(dtype).reshape(value.shape).tolist()
    return {
        name: numbers[name] if isinstance(value, Tensor) else value
        for name, value in metrics.items()
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
    # All steps in one transfer, so their metrics need names of their own.
    named = {f"{i} {name}": x for i, step in enumerate(steps) for name, x in step.items()}
    numbers = to_host(named)
    seconds = (time.perf_counter() - begin) / max(len(steps), 1)
    records: list[dict[str, Any]] = []
    for i, step in enumerate(steps):
        record: dict[str, Any] = {}
        for name in step:
            value = numbers[f"{i} {name}"]
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


def model_flops(
    *,
    linear_parameters: int,
    layers: float,
    heads: int,
    head_dim: float,
    lengths: Sequence[int] | IntArray,
    attention: Literal["causal", "full"] = "causal",
    window: int | None = None,
) -> float:
    """Return the floating-point operations of forward and backward over documents of these lengths.

    A multiplication and an addition are two operations, and backward takes twice what forward does:
    6 for each token and parameter of a matrix it is multiplied with, and in each layer and head 12
    * head_dim for each pair of a query and a key. Recomputation is not counted: these are the
    model's operations, not the hardware's.

    Two conventions count the pairs of a document of s tokens. "causal" counts those that a causal
    model looks at, s (s + 1) / 2. "full" counts all s^2, as the PaLM paper and many tables do
    (Chowdhery et al. 2022, appendix B); it shows a higher utilisation for the same speed. Say which
    one you print.

    Args:
        linear_parameters: Parameters of the matrices that each token is multiplied with: the output
            head counts, the embedding lookup does not, and of experts only those of a token.
        layers: The number of attention layers.
        heads: Query heads of a layer.
        head_dim: The width of a head, the mean of keys and values.
        lengths: Tokens of each document.
        attention: The convention.
        window: The maximum number of keys of a query; "full" counts that many for each.

    Raises:
        ValueError: `attention` is neither.

    Examples:
        >>> from functools import partial
        >>> flops = partial(model_flops, linear_parameters=1000, layers=2, heads=4, head_dim=8)
        >>> flops(lengths=[10, 20])
        383520.0
        >>> flops(lengths=[10, 20], attention="full")
        564000.0
        >>> flops(lengths=[30], attention="full")  # one document costs more than two
        871200.0
        >>> flops(lengths=[10, 20], window=1)  # each query attends to itself only
        203040.0
    """
    if attention not in ("causal", "full"):
        raise ValueError(f'model_flops: attention must be "causal" or "full", got {attention!r}')
    tokens = np.asarray(lengths, dtype=np.float64)
    keys = tokens if window is None else np.minimum(tokens, window)
    # With a window w query i sees min(i, w) keys: w (2 s - w + 1) / 2 pairs of s tokens.
    pairs = tokens * keys if attention == "full" else keys * (2 * tokens - keys + 1) / 2
    linear = 6.0 * linear_parameters * float(tokens.sum())
    return linear + 12.0 * layers * heads * head_dim * float(pairs.sum())


def decoder_flops(config: DecoderConfig, lengths: Sequence[int] | IntArray) -> float:
    """Return the floating-point operations of forward and backward of a decoder over documents.

    As `model_flops` with the "causal" convention: of experts only those of a token count, and
    layers with a sliding window have fewer pairs. All parameters are trained.

    Args:
        config: The architecture.
        lengths: Tokens of each document.

    Examples:
        >>> from trainkit.models import make_decoder_config
        >>> decoder_flops(make_decoder_config("tiny"), [256]) / 256
        6116352.0
    """
    blocks, _, head = decoder_costs(config)
    attention = partial(
        model_flops,
        heads=config.heads,
        head_dim=(config.head_size + config.value_size) / 2,
        lengths=lengths,
    )
    # Sliding layers differ in their pairs alone, so the first call has all matrices.
    sliding = len(config.sliding_layers)
    window = None if config.sliding is None else config.sliding.window
    return attention(
        linear_parameters=int(sum(blocks) + head), layers=config.layers - sliding
    ) + attention(linear_parameters=0, layers=sliding, window=window)


def recomputed_flops(
    config: DecoderConfig, lengths: Sequence[int] | IntArray, mode: str
) -> float | None:
    """Return the operations of a decoder's forward pass that a mode of recomputation repeats.

    Added to `decoder_flops`, they give the operations of the hardware, for the hardware FLOPs
    utilization (HFU).

    Args:
        config: The architecture.
        lengths: Tokens of each document.
        mode: The mode of `parallel.recompute`.

    Returns:
        The operations; None for a fraction such as "0.4", whose choice depends on the device.

    Examples:
        >>> from trainkit.models import make_decoder_config
        >>> tiny = make_decoder_config("tiny")
        >>> recomputed_flops(tiny, [256], "none"), recomputed_flops(tiny, [256], "selective")
        (0.0, 0.0)
        >>> recomputed_flops(tiny, [256], "full") / decoder_flops(tiny, [256])
        0.32...
    """
    saved = read_mode(mode)
    if saved is None:
        return 0.0
    if saved.budget is not None:
        return None
    blocks, _, head = decoder_costs(config)
    products = 2.0 * float(sum(blocks)) * float(np.sum(lengths))
    attention = decoder_flops(config, lengths) / 3 - products - 2.0 * head * float(np.sum(lengths))
    # "products/2" saves every second product of a block: about half of the operations.
    every = saved.every.get("products")
    repeated = products * (1.0 if every is None else 1 - 1 / every)
    return repeated + attention * ("attention" not in saved.every)


def model_flops_utilization(
    flops: float, seconds: float, *, peak: float, devices: int = 1
) -> float:
    """Return the model FLOPs utilization: the fraction of the devices' peak.

    Args:
        flops: Operations on all devices, from `model_flops`, in the same convention.
        seconds: The time in seconds.
        peak: Operations per second of one device, as from `peak_flops`.
        devices: The number of devices.

    Raises:
        ValueError: Seconds, peak or devices are not positive.

    Examples:
        >>> model_flops_utilization(4e14, 2.0, peak=1e15, devices=1)
        0.2
    """
    capacity = seconds * peak * devices
    if not (math.isfinite(capacity) and seconds > 0 and peak > 0 and devices > 0):
        raise ValueError(
            "model_flops_utilization: seconds, peak and devices must be positive and finite, got "
            f"{seconds}, {peak} and {devices}"
        )
    return flops / capacity


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 operations per second, with fp32 accumulation, of a known device.

    Numbers are from the vendors' data sheets, without structured sparsity, at full power. The most
    specific name counts: an "H100 PCIe" is not an "H100". MIG slices and laptop GPUs are unknown.

    Args:
        device_name: The name from `torch.cuda.get_device_name()`.

    Returns:
        Operations per second of one device, or None for an unknown one.

    Examples:
        >>> peak_flops("NVIDIA H100 PCIe")
        756000000000000.0
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
        >>> peak_flops("abacus") is None
        True
    """
    table = {
        "A10": 125e12,
        "A100": 312e12,
        "A800": 312e12,
        "L4": 121e12,
        "L40": 181e12,
        "L40S": 362e12,
        "H20": 148e12,
        "H100": 989e12,
        "H100 NVL": 835e12,
        "H100 PCIe": 756e12,
        "H800": 989e12,
        "H200": 989e12,
        "H200 NVL": 835e12,
        "GH200": 989e12,
        "B200": 2250e12,
        "GB200": 2500e12,
        "RTX 3090": 71e12,
        "RTX 4090": 165e12,
        "MI300X": 1307e12,
        "MI325X": 1307e12,
    }
    matches = [key for key in table if re.search(rf"\b{key}\b", device_name)]
    if not matches or re.search(r"\bMIG\b|Laptop", device_name):
        return None
    # "H100 PCIe" matches "H100" as well: the longer name is the more specific one.
    return table[max(matches, key=len)]
