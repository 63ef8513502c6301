"""From the sums of a step to numbers that people read, and what the hardware made of it.

Ranks exchange sums, never means (`reduce_metrics`); the host reads all of them at once (`to_host`);
model FLOPs are counted from the real lengths of documents, since a packed row costs less attention
than one document of its length.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch import Tensor

from trainkit.batch import batch_hash, count_tokens
from trainkit.collectives import all_sum, get_compute_device
from trainkit.health import update_loss_scale
from trainkit.noise.hashing import MASK64, make_key
from trainkit.types import Axis, DelayedMetrics, IntArray, StepBatch, TrainState


def reduce_metrics(sums: Mapping[str, Tensor], axis: Axis) -> dict[str, Tensor]:
    """Return the sums of all ranks of an axis, with one collective for all names.

    The values travel as one fp64 tensor, in the order of their sorted names, and come back in the
    dtype they had. So integers are exact up to 2^53. Nothing is divided, and no host sync is made.

    Every rank must pass the same names; one that has no value for a name passes a 0. Ranks of up to
    255 names that differ are refused on a CPU, and none waits for another; elsewhere all values
    come back as NaN, since a check would wait for the device.

    Args:
        sums: a tensor per name.
        axis: the ranks to sum over.

    Returns:
        A new dict, on the device that the ranks of the axis compute on. On an axis of size 1 its
        values are the detached inputs.

    Raises:
        ValueError: on all ranks, if ranks passed different names, or values of different shapes.

    Effects:
        Communicates: one all-reduce on `axis`; none if its size is 1.

    Examples:
        >>> import torch
        >>> from trainkit.mesh import solo_parallel
        >>> reduce_metrics({"loss": torch.tensor(6.0)}, solo_parallel().loss)
        {'loss': tensor(6.)}
    """
    given = {name: value.detach() if value.requires_grad else value for name, value in sums.items()}
    if axis.count == 1:
        return given
    # A rank whose values lie elsewhere must send them from the same device as the others.
    given = {name: value.to(get_compute_device(axis)) for name, value in given.items()}
    totals = _totals(given, axis)
    return {name: totals[name].to(value.dtype) for name, value in given.items()}


def _totals(sums: Mapping[str, Tensor], axis: Axis) -> dict[str, Tensor]:
    """Return the fp64 totals by name, or fail alike on all ranks whose names differ."""
    names = sorted(sums)
    shapes = [str(tuple(sums[name].shape)) for name in names]
    sizes = [sums[name].numel() for name in names]
    device = get_compute_device(axis)
    # Gloo aborts the process when sizes differ, so ranks that disagree must send equally much.
    packed = torch.zeros(-(-(1 + sum(sizes)) // 256) * 256, dtype=torch.float64, device=device)
    key = make_key(*names, *shapes) >> 32  # 32 bits: the sum over 2^21 ranks is exact
    packed[0].fill_(key)  # packed[0] = key would be copied from the host, and waited for
    if names:
        flat = torch.cat([sums[name].double().flatten() for name in names])
        packed[1 : 1 + len(flat)] = flat
    total = all_sum(packed, axis)
    agreed = total[0] == key * axis.count
    if device.type == "cpu" and not agreed:
        raise ValueError(
            f"reduce_metrics: the ranks of {axis.name!r} passed different names, here {names}; "
            "pass the same names on all of them, with a 0 where a rank has no value"
        )
    values = torch.where(agreed, total, torch.nan)[1 : 1 + sum(sizes)].split(sizes)
    return {name: x.view(sums[name].shape) for name, x in zip(names, values, strict=True)}


def expert_load_ratio(load: Tensor) -> Tensor:
    """Return how often the expert that was chosen most was chosen, over the mean of all.

    Args:
        load: `[..., E]`, how often each expert of a layer was chosen, in the whole global batch:
            the term "load" of `losses.add_router_losses`, after `reduce_metrics`. No host sync.

    Returns:
        fp64 `[...]`: 1 where all are chosen alike, E where one has all; NaN where nobody chose.

    Examples:
        >>> expert_load_ratio(torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])).tolist()
        [3.0, 1.0]
    """
    return load.amax(-1) / load.double().mean(-1)


def expert_load_entropy(load: Tensor) -> Tensor:
    """Return the entropy of the choice of experts, as a part of the largest that there can be.

    Not in nats: -sum of p ln p over ln E. It falls where many experts are seldom chosen, which
    `expert_load_ratio` does not see.

    Args:
        load: As in `expert_load_ratio`, of two experts at least.

    Returns:
        fp64 `[...]`: 1 where all are chosen alike, 0 where one has all; NaN where nobody chose.

    Examples:
        >>> expert_load_entropy(torch.tensor([[2, 2, 0, 0], [1, 1, 1, 1], [0, 9, 0, 0]])).tolist()
        [0.5, 1.0, 0.0]
    """
    shares = load / load.double().sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1) / math.log(load.shape[-1])


def make_expert_load_metrics(
    load: Tensor, *, biases: Tensor | None = None, dropped: Tensor | None = None
) -> dict[str, Tensor]:
    """Return how balanced the experts of a step are, as scalars for its metrics.

    Each has a value for each expert layer, `NAME/0`, `NAME/1` and so on in the order of `load`, and
    `NAME` alone is that of the worst layer: `expert_load_ratio`, `expert_load_entropy`,
        `expert_bias` (the
    largest absolute value of a layer's biases) and `dropped_share` (of all choices).

    Args:
        load: As in `expert_load_ratio`, `[L, E]`.
        biases: `[L, E]`, what `models.update_routers_` returns, summed over the pipeline.
        dropped: `[L]`, the term of that name.

    Examples:
        >>> shown = make_expert_load_metrics(
        ...     torch.tensor([[3, 1], [2, 2]]), biases=torch.zeros(2, 2)
        ... )
        >>> {name: round(x.item(), 2) for name, x in shown.items() if name.startswith("load")}
        {'load_over_mean': 1.5, 'load_over_mean/0': 1.5, 'load_over_mean/1': 1.0,
         'load_entropy': 0.81, 'load_entropy/0': 0.81, 'load_entropy/1': 1.0}
    """
    each = {"load_over_mean": expert_load_ratio(load), "load_entropy": expert_load_entropy(load)}
    if biases is not None:
        each["expert_bias"] = biases.abs().amax(-1)
    if dropped is not None:
        each["dropped_share"] = dropped / load.sum(-1)
    shown: dict[str, Tensor] = {}
    for name, x in each.items():
        shown[name] = x.amin() if name == "load_entropy" else x.amax()
        shown |= {f"{name}/{layer}": value for layer, value in enumerate(x)}
    return shown


def to_host(metrics: Mapping[str, Tensor | float]) -> dict[str, Any]:
    """Return metrics as Python numbers, with one transfer for all tensors of a device.

    Integer and bool tensors come back as int, all 64 bits of it, others as float, those with
    dimensions as nested lists (which lines of JSON hold, and sinks of curves leave out); plain
    numbers stay what they are.

    Args:
        metrics: tensors and plain numbers by name.

    Returns:
        A new dict in the same order.

    Effects:
        Waits for the device: this is the one host sync of a step that logs.

    Examples:
        >>> import torch
        >>> to_host({"loss": torch.tensor(2.5), "load": torch.tensor([[7, 1]]), "lr": 0.1})
        {'loss': 2.5, 'load': [[7, 1]], 'lr': 0.1}
    """
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
    numbers: dict[str, Any] = {}
    for device in {value.device for value in tensors.values()}:
        here = {name: value for name, value in tensors.items() if value.device == device}
        bits = torch.cat([_bits(value.detach()).flatten() for value in here.values()]).cpu().numpy()
        ends = np.cumsum([value.numel() for value in here.values()])[:-1]
        for (name, value), own in zip(here.items(), np.split(bits, ends), strict=True):
            kind = np.float64 if value.is_floating_point() else np.int64
            numbers[name] = own.view(kind).reshape(value.shape).tolist()
    return {
        name: numbers[name] if isinstance(value, Tensor) else value
        for name, value in metrics.items()
    }


def _bits(value: Tensor) -> Tensor:
    """Return numbers as int64: floating point by the bits of their fp64 form."""
    return value.double().view(torch.int64) if value.is_floating_point() else value.long()


def advance(
    state: TrainState, batch: StepBatch, metrics: Mapping[str, Tensor | float], *, axis: Axis
) -> tuple[TrainState, dict[str, Tensor | float]]:
    """Return the counters after a step, and its metrics with what every step reports.

    Args:
        state: The counters before it.
        batch: What this rank has trained on.
        metrics: The step's own metrics; `tokens` is what the global batch was trained on. With
            `loss_scale` and `overflowed` among them, see `Update.metrics`, the scale moves too.
        axis: The ranks that hold different tokens, `ps.loss`.

    Returns:
        The state of the next step, whose data begin at `batch.cursor`; and the metrics with
        `tokens_processed`, all that went through the model, `tokens_total`, trained on so far, and
        `batch_hash` of the global batch.

    Effects:
        Communicates: one all-reduce of two numbers on `axis`.

    Examples:
        >>> import torch
        >>> from trainkit.batch import make_padding_batch
        >>> from trainkit.types import SOLO, Cursor
        >>> batch = StepBatch([make_padding_batch(1, 2)], Cursor(1))
        >>> state, metrics = advance(TrainState(), batch, {"tokens": torch.tensor(0)}, axis=SOLO)
        >>> state.step, state.cursor.batch, metrics["tokens_total"]
        (1, 1, tensor(0))
    """
    own = [batch_hash(batch.microbatches), count_tokens(batch.microbatches)]
    total_hash, processed = all_sum(torch.stack(own), axis).unbind()
    tokens: Any = state.tokens + metrics["tokens"]
    moved = attrs.evolve(state, step=state.step + 1, tokens=tokens, cursor=batch.cursor)
    if "overflowed" in metrics:
        moved = attrs.evolve(moved, health=update_loss_scale(state.health, metrics))
    counts = {"tokens_processed": processed, "tokens_total": tokens, "batch_hash": total_hash}
    return moved, {**metrics, **counts}


def make_step_record(metrics: Mapping[str, Tensor | float], *, begin: float) -> dict[str, Any]:
    """Return one line of metrics.jsonl: `make_step_records` of a single step.

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
    """Return lines of metrics.jsonl: metrics of steps as plain values, and what follows from them.

    A step has ended when its numbers have arrived on the host, not when Python has handed it to the
    device: the clock is read after them. Of several steps, all are taken to have lasted as long.

    Args:
        steps: Of each step tensors and plain numbers; `tokens` is what it trained on, and
            `tokens_processed`, if it is there, what went through the model (`count_tokens`).
        begin: When the first of them began, with everything around it: `time.perf_counter()`.

    Returns:
        For each step its metrics as numbers; `batch_hash` as 16 hex digits; `loss_hex`,
        `grad_norm_hex` and `lr_hex`, which hold every bit; `seconds`, the mean of these steps; and
        `tokens_per_second`, of the tokens that were processed where they are known. All but the
        last are `DelayedMetrics`.

    Effects:
        Waits for the device, once for all steps: see `to_host`.

    Examples:
        >>> import time
        >>> steps = [{"loss": 0.5, "tokens": 100}, {"loss": 0.25, "tokens": 50}]
        >>> first, second = make_step_records(steps, begin=time.perf_counter())
        >>> second["loss_hex"], first["seconds"] == second["seconds"]
        ('0x1.0000000000000p-2', True)
    """
    numbers = to_host({f"{i} {name}": x for i, own in enumerate(steps) for name, x in own.items()})
    seconds = (time.perf_counter() - begin) / max(len(steps), 1)
    own = [{name: numbers[f"{i} {name}"] for name in x} for i, x in enumerate(steps)]
    records = [_record(values, seconds) for values in own]
    return [*map(DelayedMetrics, records[:-1]), *records[-1:]]


def _record(numbers: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in numbers.items():
        record[name] = f"{int(value) & MASK64:016x}" if name == "batch_hash" else value
        if name in ("loss", "grad_norm", "lr"):
            record[f"{name}_hex"] = float(value).hex()
    speed = tokens_per_second(record.get("tokens_processed", record["tokens"]), seconds)
    return record | {"seconds": seconds, "tokens_per_second": speed}


def read_memory_stats(device: torch.device) -> dict[str, int]:
    """Return the bytes of memory that are in use, and the most since it was last asked.

    Of an accelerator what torch has given to tensors. On a CPU what the process has of the host's
    memory, of which the most is that since the process began: it cannot be asked for anew.

    Args:
        device: What this rank computes on, `ps.device`.

    Returns:
        "memory" and "memory_peak", in bytes, of this process alone.

    Effects:
        An accelerator's peak is counted anew. Nothing waits for it.

    Examples:
        >>> found = read_memory_stats(torch.device("cpu"))
        >>> 0 < found["memory"] <= found["memory_peak"]
        True
    """
    if device.type == "cpu":
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        most *= 1 if sys.platform == "darwin" else 1024
        pages = Path("/proc/self/statm")
        now = int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else most
        # The kernel notes the most less often than it counts what there is.
        return {"memory": now, "memory_peak": max(most, now)}
    found = {
        "memory": torch.accelerator.memory_allocated(device),
        "memory_peak": torch.accelerator.max_memory_allocated(device),
    }
    torch.accelerator.reset_peak_memory_stats(device)
    return found


def estimate_gradient_noise(
    part_square: Tensor, part_tokens: Tensor, square: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate, in one step, how noisy the gradient is: the two sides of the noise scale.

    The gradient noise scale is noise / signal in tokens: a batch of about that size is where a
    larger one begins to save few steps. Either is an unbiased estimate that may be negative, and
    their ratio is not: average each over many steps (the scale grows in training, so by exponential
    averages), then divide.

    A part is what some of a step's microbatches, or some ranks, give, drawn like the whole. To
    measure it costs no second backward pass but one norm, and a second reduction over ranks: take
    `forward_backward` of some microbatches, the norm of what is there, then of the others, which
    adds to it. Gradients that `sync_sp_grads` sums cannot be measured that way, for it sums once.

    Args:
        part_square: The squared norm of the gradient of the part, divided by the same denominator
            as the whole's, `tokens`; 0-d, or of any shape for several parts.
        part_tokens: How many valid tokens the part has, above 0 and below `tokens`.
        square: The squared norm of the whole gradient.
        tokens: How many valid tokens the whole has.

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
        >>> how = {"denominator": tokens, "call": lambda model, batch: model(batch["x"])}
        >>> squares = []
        >>> for batch in batches:
        ...     _ = forward_backward(model, [batch], loss, **how)
        ...     squares.append(grad_norm(model.parameters()) ** 2)
        >>> estimate_gradient_noise(squares[0], torch.tensor(1), squares[1], tokens)
        (tensor(-10.6667), tensor(11.6667))
    """
    small = part_square * tokens / part_tokens * tokens / part_tokens
    rest = tokens - part_tokens
    noise = (small - square) * part_tokens * tokens / rest
    return noise, (square * tokens - small * part_tokens) / rest


def tokens_per_second(tokens: float, seconds: float) -> float:
    """Return the throughput; 0 when no time has passed.

    Args:
        tokens: how many tokens were processed, on all ranks.
        seconds: how long it took.

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
        linear_parameters: parameters of the matrices that each token meets: the head counts, the
            lookup of an embedding does not, and of experts only those that a token is sent to.
        layers: attention layers.
        heads: query heads of a layer.
        head_dim: width of a head; the mean of that of keys and that of values.
        lengths: tokens of each document.
        attention: the convention.
        window: how many keys a query sees at most; "full" counts that many for each.

    Raises:
        ValueError: if `attention` is neither.

    Examples:
        >>> shape = dict(linear_parameters=1000, layers=2, heads=4, head_dim=8)
        >>> model_flops(**shape, lengths=[10, 20])
        383520.0
        >>> model_flops(**shape, lengths=[10, 20], attention="full")
        564000.0
        >>> model_flops(**shape, lengths=[30], attention="full")  # one document costs more than two
        871200.0
        >>> model_flops(**shape, lengths=[10, 20], window=1)  # each query sees itself alone
        203040.0
    """
    if attention not in ("causal", "full"):
        raise ValueError(f'model_flops: attention must be "causal" or "full", got {attention!r}')
    tokens = np.asarray(lengths, dtype=np.float64)
    seen = tokens if window is None else np.minimum(tokens, window)
    pairs = tokens * seen if attention == "full" else seen * (2 * tokens - seen + 1) / 2
    linear = 6.0 * linear_parameters * float(tokens.sum())
    return linear + 12.0 * layers * heads * head_dim * float(pairs.sum())


def model_flops_utilization(
    flops: float, seconds: float, *, peak: float, devices: int = 1
) -> float:
    """Return which fraction of the devices' peak a computation reached.

    Args:
        flops: operations on all devices, from `model_flops`; the result is of the same convention.
        seconds: how long they took.
        peak: operations per second of one device, for instance from `peak_flops`.
        devices: how many devices took part.

    Raises:
        ValueError: if seconds, peak or devices are not positive.

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

    Figures are the makers' data sheets', without structured sparsity, at full power. The most
    specific name counts:
    an "H100 PCIe" is not an "H100". A part of a device (MIG) or a laptop's is unknown.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it.

    Returns:
        Operations per second of one device, or None if it is unknown.

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
    known = [key for key in table if re.search(rf"\b{key}\b", device_name)]
    if not known or re.search(r"\bMIG\b|Laptop", device_name):
        return None
    return table[max(known, key=len)]
