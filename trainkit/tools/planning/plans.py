"""Rank the layouts of a world by estimated step time, with the reasons why some do not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs
import numpy as np

from trainkit.metrics import model_flops
from trainkit.metrics.flops import delta_flops
from trainkit.models.config import idle_parameters
from trainkit.parallel.split import SCHEDULES
from trainkit.tools.planning.activations import estimate_block
from trainkit.tools.planning.jobs import (
    FP32,
    Job,
    explain_refusal,
    num_microbatches,
    stages_per_rank,
)
from trainkit.tools.planning.machines import Hardware
from trainkit.tools.planning.memory import MemoryEstimate, estimate_memory
from trainkit.tools.planning.stages import Part, find_part, list_kinds
from trainkit.tools.planning.traffic import Transfer, estimate_traffic
from trainkit.tools.planning.weights import compute_units
from trainkit.types import ConfigError, Layout


@attrs.frozen
class TimeEstimate:
    """An estimate of one step's time, in seconds, and its components.

    Args:
        step: The total.
        compute: Computation of the busiest pipeline rank.
        exposed: Communication that does not overlap computation.
        hidden: Communication that overlaps computation.
        bubble: Idle time of the pipeline.
    """

    step: float
    compute: float
    exposed: float
    hidden: float
    bubble: float


@attrs.frozen
class LayoutEstimate:
    """One layout with its memory, traffic and time, or the reason why it is impossible.

    Args:
        layout: The degrees.
        recompute: The recomputation mode.
        refusal: The reason why the layout is impossible or too large, or empty.
        memory: Of the rank with the highest peak; None if the model does not allow the layout.
        traffic: Transfers of one rank in a step.
        seconds: The estimated time of a step.
        tokens_per_second: Of all ranks.
        utilization: The model's FLOP/s, without recomputation, as a fraction of the peak (MFU).
    """

    layout: Layout
    recompute: str
    refusal: str
    memory: MemoryEstimate | None = None
    traffic: tuple[Transfer, ...] = ()
    seconds: TimeEstimate | None = None
    tokens_per_second: float = 0.0
    utilization: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the layout is possible, and its peak within the device's memory."""
        return not self.refusal


def rank_layouts(
    job: Job,
    layouts: Iterable[Layout],
    hardware: Hardware,
    *,
    recompute: Sequence[str] = ("none", "selective", "full"),
    reduce: Sequence[Literal["last", "each"]] | None = None,
    efficiency: float = 0.5,
    headroom: float = 0.1,
) -> list[LayoutEstimate]:
    """Estimate layouts and sort them, the best first.

    Nothing is run: all figures follow from shapes. Memory is that of this library's decoder and
    transforms, within 10 % of the measurement of torch's memory tracker on a CPU. Times serve to
    rank layouts; see `estimate_seconds` for the assumptions.

    Args:
        job: Model and training.
        layouts: For instance `list_layouts(8, like=Layout(fold_sp="none"))`.
        hardware: `get_hardware("h100")`, or your own record.
        recompute: Recomputation modes to try, in place of the job's.
        reduce: Values of `Layout.reduce` to try, in place of the layouts': `("last", "each")` tries
            both wherever they differ.
        efficiency: Fraction of the peak FLOP/s that is achieved.
        headroom: Fraction of memory to leave free, for the driver, kernels and fragmentation.

    Returns:
        One estimate per layout, mode and reduction: first those that fit, by time, then those with
        too high a peak, by peak, then those that the model does not allow.

    Raises:
        ConfigError: A fraction is out of range, or a policy unknown.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.tools.planning import get_hardware, list_layouts
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=16)
        >>> best, *_, worst = rank_layouts(job, list_layouts(8), get_hardware("h100"))
        >>> best.fits, worst.refusal
        (True, '... GiB (loss) exceed 71.1 GiB; most are optimizer: 59.8 GiB')
    """
    if not 0 < efficiency <= 1 or not 0 <= headroom < 1:
        raise ConfigError(
            "rank_layouts: efficiency must be above 0 and at most 1, and headroom at least 0 and "
            f"below 1, got {efficiency} and {headroom}"
        )
    usable = round(hardware.memory * (1 - headroom))
    jobs = [attrs.evolve(job, recompute=mode) for mode in recompute]
    estimates: list[LayoutEstimate] = []
    for layout in layouts:
        # With one microbatch, or without FSDP, gradients are reduced once anyway.
        differ = layout.wrapped > 1 and num_microbatches(job, layout) > 1
        values = [layout.reduce] if reduce is None else reduce
        estimates += [
            _estimate_layout(one, attrs.evolve(layout, reduce=value), hardware, usable, efficiency)
            for value in (values if differ else values[:1])
            for one in jobs
        ]
    return sorted(estimates, key=_sort_key)


def _rate_name(job: Job) -> str:
    """Return the key of a job's FLOP/s in `Hardware.flops`; fp16 has the rate of bf16."""
    return "fp32" if job.itemsize == FP32 else "bf16"


def _sort_key(one: LayoutEstimate) -> tuple[float, ...]:
    """Sort those that fit by time, traffic and peak, then too large ones by peak, then others."""
    peak = math.inf if one.memory is None else float(one.memory.peak)
    if not one.fits or one.seconds is None:
        return (True, 0.0, 0.0, peak)
    return (False, one.seconds.step, sum(transfer.sent for transfer in one.traffic), peak)


def _estimate_layout(
    job: Job, layout: Layout, hardware: Hardware, usable: int, efficiency: float
) -> LayoutEstimate:
    refusal = explain_refusal(job, layout)
    if refusal is not None:
        return LayoutEstimate(layout, job.recompute, refusal)
    memory = estimate_memory(job, layout, fused_norms=hardware.fused_norms)
    refusal = ""
    if memory.peak > usable:
        kinds = ["activations", "logits", "gathered", "buffers"]
        if memory.between_steps:  # otherwise all of these are in host memory
            kinds += ["parameters", "gradients"]
        if memory.between_steps > memory.parameters:
            kinds += ["optimizer"]
        sizes = {kind: getattr(memory, kind) for kind in kinds}
        largest = max(kinds, key=lambda kind: sizes[kind])
        refusal = (
            f"{_format_gib(memory.peak)} GiB ({memory.peak_phase}) exceed {_format_gib(usable)} "
            f"GiB; most are {largest}: {_format_gib(sizes[largest])} GiB"
        )
    seconds = estimate_seconds(job, layout, hardware, efficiency=efficiency)
    # Of the full model once: repeated forward passes and idle experts do not count as use.
    flops = job.rows * _count_row_flops(job, find_part(job, Layout(), 0))
    return LayoutEstimate(
        layout=layout,
        recompute=job.recompute,
        refusal=refusal,
        memory=memory,
        traffic=estimate_traffic(job, layout, pp_rank=memory.pp_rank),
        seconds=seconds,
        tokens_per_second=job.rows * job.row_length / seconds.step,
        utilization=flops / (seconds.step * hardware.flops[_rate_name(job)] * layout.world),
    )


def _format_gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.3g}"


# -------------------------------------------------------------------------------------------- time


def estimate_seconds(
    job: Job, layout: Layout, hardware: Hardware, *, efficiency: float
) -> TimeEstimate:
    """Estimate the time of one step.

    - Compute: the FLOPs (`model_flops`) of the busiest pipeline rank, and a third more of those
      that recomputation repeats, over peak x efficiency. Selective recomputation repeats no matmul.
    - Exposed: the collectives of tensor parallelism, Ulysses and ep, which the next operation waits
      for; one message per pipeline border of a microbatch; and the gradients that `sync_sp_grads`
      sums at the end of a step (`fold_sp`).
    - Hidden: the ring's messages overlap attention, those of FSDP and of replicas all computation.
      Time beyond that is exposed, and so is a tenth of the overlap, as it slows computation.
    - Bubble: (p - 1) / (v m) of the sum for p ranks of v stages and m microbatches (Narayanan et
      al. 2021), also for GPipe; a third of it if backward is split (Qi et al. 2023).
    - A message takes its bytes over the bandwidth: that inside a node if the axis, with all axes
      inside it, lies in one node, else that between nodes. Latency, the optimizer step, input and
      copies between host and device (`cpu_offload`, `offload_optimizer`, `offload_activations`)
      are not counted.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.tools.planning import get_hardware
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=64)
        >>> estimate_seconds(job, Layout(dp_shard=64), get_hardware("h100"), efficiency=0.5).bubble
        0.0
    """
    rate = hardware.flops[_rate_name(job)] * efficiency
    # A pipeline runs at the pace of its busiest rank, often the one with the head.
    busiest = max(range(layout.pp), key=lambda rank: _count_rank_flops(job, layout, rank))
    part = find_part(job, layout, busiest)
    # The fractions of the rank's matmuls, and of its attention, that are recomputed.
    repeated_matmuls, repeated_attention = 0.0, 0.0
    for (experts, delta), count in Counter(list_kinds(job.config, part.numbers)).items():
        matmuls, attention = estimate_block(
            job, layout, fused_norms=True, experts=experts, delta=delta
        ).again
        repeated_matmuls += count / part.layers * matmuls
        repeated_attention += count / part.layers * attention
    once = _count_rank_flops(job, layout, busiest) / rate
    attention_once = _count_rank_flops(job, layout, busiest, products=False) / rate
    # Recomputation repeats the forward pass, a third of forward and backward.
    attention = (1 + repeated_attention / 3) * attention_once
    compute = (1 + repeated_matmuls / 3) * (once - attention_once) + attention
    seconds: dict[str, float] = {}  # of communication, by axis
    for transfer in estimate_traffic(job, layout, pp_rank=busiest):
        # An axis is in one node if its ranks, with those of all axes inside it, are.
        is_intra = _count_span(transfer.axis, layout) <= hardware.ranks_per_node
        bandwidth = hardware.intra_node if is_intra else hardware.inter_node
        # Attention overlaps the ring's messages, but not the sum of gradients at the end of a step.
        is_sync = transfer.axis in ("ring", "ulysses", "sp") and transfer.kind == "all_reduce"
        axis = "sync" if is_sync else transfer.axis
        seconds[axis] = seconds.get(axis, 0.0) + transfer.sent / bandwidth
    ring = seconds.get("ring", 0.0)
    gradients = "fsdp", "expert_fsdp", "near", "dp_replicate"
    data = sum(seconds.get(axis, 0.0) for axis in gradients)
    exposed = sum(seconds[axis] for axis in seconds if axis not in (*gradients, "ring"))
    exposed += max(0.0, ring - attention) + max(0.0, data - compute)
    overlap = min(ring, attention) + min(data, compute)
    exposed += 0.1 * overlap
    hidden = 0.9 * overlap
    # A rank works on each microbatch in each of its stages; the bubble lasts pp - 1 such turns.
    turns = num_microbatches(job, layout) * stages_per_rank(layout)
    bubble = (compute + exposed) * (layout.pp - 1) / turns
    bubble /= 3 if SCHEDULES[layout.schedule].splits_backward else 1
    return TimeEstimate(compute + exposed + bubble, compute, exposed, hidden, bubble)


def _count_row_flops(job: Job, part: Part, *, products: bool = True) -> float:
    """Count the FLOPs of one row in a rank's blocks and head, forward and backward.

    Documents have equal lengths, up to one token. Only the experts of a token count. Without
    `products` only attention is counted.
    """
    length, remainder = divmod(job.row_length, job.documents)
    lengths = np.full(job.documents, length, np.int64)
    lengths[:remainder] += 1
    config = job.config
    # Scores multiply `head_size` columns and outputs `value_size`: their mean counts for both.
    head_dim = (config.head_size + config.value_size) / 2
    plain = attrs.evolve(
        job, plan_prefix=(), frozen=frozenset()
    )  # adapters are few, and not counted
    blocks = compute_units(plain, Layout()).blocks(part.numbers).trained
    active = blocks.whole - part.experts * idle_parameters(config)
    active += part.head * config.vocab_size * config.width
    # Sliding layers are spread nearly evenly, so a stage has a proportional number of them.
    sliding = part.layers * len(config.sliding_layers) / config.layers
    sliding_flops = model_flops(
        linear_parameters=0,
        layers=sliding,
        heads=config.heads,
        head_dim=head_dim,
        lengths=lengths,
        window=config.sliding.window if config.sliding is not None else None,
    )
    recurrent_flops = delta_flops(config, int(lengths.sum()), layers=part.deltas)
    return (
        sliding_flops
        + recurrent_flops
        + model_flops(
            linear_parameters=active if products else 0,
            layers=part.layers - part.deltas - sliding,
            heads=config.heads,
            head_dim=config.full_heads.size if config.full_heads else head_dim,
            lengths=lengths,
        )
    )


def _count_rank_flops(job: Job, layout: Layout, pp_rank: int, *, products: bool = True) -> float:
    row = _count_row_flops(job, find_part(job, layout, pp_rank), products=products)
    rows = num_microbatches(job, layout) * job.microbatch
    return rows * row / (layout.count("sp") * layout.tp)


def _count_span(axis: str, layout: Layout) -> int:
    """Return the number of neighboring ranks that contain one group of an axis."""
    world = layout.axes["world"]
    names = layout.axes.get(axis, layout.axes["fsdp"])
    *_, innermost = layout.expert_axes
    # These two span the innermost ranks of fsdp; "ep" or "expert_fsdp", as `ep_adjacent` says.
    sizes = {innermost: layout.expert_axes[innermost], "near": layout.reshard_over}
    remaining = sizes.get(axis, math.prod(layout.count(name) for name in names))
    *outer, name = names
    while remaining > layout.count(name):  # it fills this axis, and lies on the next one out
        remaining = math.ceil(remaining / layout.count(name))
        *outer, name = outer
    inside = world[world.index(name) + 1 :]
    return remaining * math.prod(layout.count(name) for name in inside)
