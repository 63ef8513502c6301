"""Every layout of a world with what it costs, the best first, and why the others do not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from trainkit.metrics import model_flops
from trainkit.models.config import idle_parameters
from trainkit.parallel.split import SCHEDULES
from trainkit.tools.planning.activations import block_activations
from trainkit.tools.planning.jobs import (
    FP32,
    Job,
    explain_refusal,
    num_microbatches,
    stages_per_rank,
)
from trainkit.tools.planning.machines import Hardware
from trainkit.tools.planning.memory import MemoryEstimate, estimate_memory
from trainkit.tools.planning.stages import Part, part_of
from trainkit.tools.planning.traffic import Transfer, estimate_traffic
from trainkit.tools.planning.weights import units_of
from trainkit.types import ConfigError, Layout


@attrs.frozen
class TimeEstimate:
    """An estimate of one step's time, and what it is made of.

    Args:
        step: All of it.
        compute: Arithmetic of the busiest pipeline rank.
        exposed: Communication that nothing can hide.
        hidden: Communication that runs beside the arithmetic.
        bubble: Waiting of the pipeline at its two ends.
    """

    step: float
    compute: float
    exposed: float
    hidden: float
    bubble: float


@attrs.frozen
class LayoutEstimate:
    """One layout, what it costs each rank, and whether it can be.

    Args:
        layout: The degrees.
        recompute: What is computed again in backward.
        why_not: Why it cannot be, in one sentence; empty where it can.
        memory: Bytes of the rank that needs most; None where the model does not allow the layout.
        traffic: What one rank sends in a step.
        seconds: The estimated time of a step.
        tokens_per_second: Of all ranks.
        utilization: The model's operations, without what is computed again, over the peak.
    """

    layout: Layout
    recompute: str
    why_not: str
    memory: MemoryEstimate | None = None
    traffic: tuple[Transfer, ...] = ()
    seconds: TimeEstimate | None = None
    tokens_per_second: float = 0.0
    utilization: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the layout is possible, and its peak within the memory."""
        return not self.why_not


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
    """Return some layouts with what they cost, the best first.

    Nothing is run: all figures follow from shapes. Memory is that of this library's decoder and
    transforms, within 10 % of what torch's memory tracker measures on a CPU. Times are estimates
    that put layouts in an order; see `estimate_seconds` for what is assumed.

    Args:
        job: What is trained, and how.
        layouts: Those to try, for instance `list_layouts(8, like=Layout(fold_sp="none"))`.
        hardware: What they run on; `hardware("h100")`, or your own record.
        recompute: The policies to try, in place of the job's.
        reduce: After which microbatches FSDP reduces gradients, in place of the layouts': `("last",
            "each")` tries both wherever they differ.
        efficiency: The fraction of the peak that the arithmetic reaches.
        headroom: The fraction of memory that is not planned with: the driver's, the kernels' and
            what fragments.

    Returns:
        One plan for each layout, policy and reduction: those that fit, fastest first, then those
        whose memory does not suffice, least first, then those that the model does not allow.

    Raises:
        ConfigError: A fraction is out of range, or a policy unknown.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.tools.planning import get_hardware, list_layouts
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=16)
        >>> best, *_, worst = rank_layouts(job, list_layouts(8), get_hardware("h100"))
        >>> best.fits, worst.why_not
        (True, '... GiB (loss) exceed 71.1 GiB; most are optimizer: 59.8 GiB')
    """
    if not 0 < efficiency <= 1 or not 0 <= headroom < 1:
        raise ConfigError(
            "plan: efficiency must be above 0 and at most 1, and headroom at least 0 and below 1, "
            f"got {efficiency} and {headroom}"
        )
    usable = round(hardware.memory * (1 - headroom))
    jobs = [attrs.evolve(job, recompute=policy) for policy in recompute]
    plans = [
        _plan_one(one, reducing, hardware, usable, efficiency)
        for layout in layouts
        for reducing in _reductions(job, layout, reduce)
        for one in jobs
    ]
    return sorted(plans, key=_order)


def _reductions(
    job: Job, layout: Layout, reduce: Sequence[Literal["last", "each"]] | None
) -> list[Layout]:
    """Return the layout with each way to reduce, or one where FSDP reduces once anyway."""
    if reduce is None:
        return [layout]
    differ = layout.wrapped > 1 and num_microbatches(job, layout) > 1
    return [attrs.evolve(layout, reduce=one) for one in (reduce if differ else reduce[:1])]


def _kind(job: Job) -> str:
    """Return by which of a machine's rates a job computes: fp16 as bf16."""
    return "fp32" if job.itemsize == FP32 else "bf16"


def _order(one: LayoutEstimate) -> tuple[float, ...]:
    """Fitting ones by time, then what is sent, then peak; too large ones by peak; others last."""
    peak = math.inf if one.memory is None else float(one.memory.peak)
    if not one.fits or one.seconds is None:
        return (True, 0.0, 0.0, peak)
    return (False, one.seconds.step, sum(transfer.sent for transfer in one.traffic), peak)


def _plan_one(
    job: Job, layout: Layout, hardware: Hardware, usable: int, efficiency: float
) -> LayoutEstimate:
    why_not = explain_refusal(job, layout)
    if why_not is not None:
        return LayoutEstimate(layout, job.recompute, why_not)
    memory = estimate_memory(job, layout, fused_norms=hardware.fused_norms)
    if memory.peak > usable:
        why_not = _too_large(memory, usable)
    seconds = estimate_seconds(job, layout, hardware, efficiency=efficiency)
    whole = part_of(job, Layout(), 0)
    flops = job.rows * _row_flops(job, whole)
    return LayoutEstimate(
        layout=layout,
        recompute=job.recompute,
        why_not=why_not or "",
        memory=memory,
        traffic=estimate_traffic(job, layout, pp_rank=memory.pp_rank),
        seconds=seconds,
        tokens_per_second=job.rows * job.row_length / seconds.step,
        utilization=flops / (seconds.step * hardware.flops[_kind(job)] * layout.world),
    )


def _too_large(memory: MemoryEstimate, usable: int) -> str:
    kinds = ["activations", "logits", "gathered", "buffers"]
    if memory.between:  # else all of these are in host memory
        kinds += ["parameters", "gradients"]
    if memory.between > memory.parameters:
        kinds += ["optimizer"]
    largest = max(kinds, key=lambda kind: getattr(memory, kind))
    return (
        f"{_gib(memory.peak)} GiB ({memory.moment}) exceed {_gib(usable)} GiB; most are "
        f"{largest}: {_gib(getattr(memory, largest))} GiB"
    )


def _gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.3g}"


# -------------------------------------------------------------------------------------------- time


def estimate_seconds(
    job: Job, layout: Layout, hardware: Hardware, *, efficiency: float
) -> TimeEstimate:
    """Estimate the time of one step.

    - Compute: the model's operations (`model_flops`) of the pipeline rank that has most, a third
      more of those that recomputation repeats, over peak x efficiency. Selective recomputation
      repeats no product, and counts as none.
    - Exposed: tensor parallelism's, Ulysses' and ep's collectives, which the next operation waits
      for; and one message per pipeline border of a microbatch.
    - Exposed, too: the gradients that `sync_sp_grads` sums at the end of a step (`fold_sp`).
    - Hidden: the ring's messages run beside attention, and FSDP's and the replicas' beside all
      compute; what takes longer than that is exposed after all, and a tenth of the rest, since it
      takes a part of the device.
    - Bubble: (p - 1) / (v m) of the rest for p ranks of v stages and m microbatches (Narayanan et
      al. 2021); a third of it where backward is split (Qi et al. 2023); all of it for GPipe too.
    - A message takes its bytes over the bandwidth: that inside a node if the whole axis with all
      axes inside it lies in one, else that between nodes. No latency, no optimizer step, no input,
      and no copies between host and device (`cpu_offload`, `offload_optimizer`,
      `offload_activations`).

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.tools.planning import get_hardware
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=64)
        >>> estimate_seconds(job, Layout(dp_shard=64), get_hardware("h100"), efficiency=0.5).bubble
        0.0
    """
    rate = hardware.flops[_kind(job)] * efficiency
    busiest = max(range(layout.pp), key=lambda rank: _flops_of_rank(job, layout, rank))
    products, attends = (1 + x / 3 for x in _repeated(job, layout, part_of(job, layout, busiest)))
    every, of_attention = (
        _flops_of_rank(job, layout, busiest, products=x) / rate for x in (True, False)
    )
    attention = attends * of_attention
    compute = products * (every - of_attention) + attention
    wires: dict[str, float] = {}
    for transfer in estimate_traffic(job, layout, pp_rank=busiest):
        speed = _bandwidth(transfer.axis, layout, hardware)
        is_sync = transfer.axis in ("ring", "ulysses", "sp") and transfer.kind == "all_reduce"
        wire = "sync" if is_sync else transfer.axis
        wires[wire] = wires.get(wire, 0.0) + transfer.sent / speed
    ring = wires.get("ring", 0.0)
    gradients = "fsdp", "expert_fsdp", "near", "dp_replicate"
    data = sum(wires.get(axis, 0.0) for axis in gradients)
    exposed = sum(wires[axis] for axis in wires if axis not in (*gradients, "ring"))
    exposed += max(0.0, ring - attention) + max(0.0, data - compute)
    beside = min(ring, attention) + min(data, compute)
    exposed, hidden = exposed + 0.1 * beside, 0.9 * beside
    turns = num_microbatches(job, layout) * stages_per_rank(layout)
    bubble = (compute + exposed) * (layout.pp - 1) / turns
    bubble /= 3 if SCHEDULES[layout.schedule].splits_backward else 1
    return TimeEstimate(compute + exposed + bubble, compute, exposed, hidden, bubble)


def _repeated(job: Job, layout: Layout, part: Part) -> tuple[float, float]:
    """Return which part of the products of a rank's blocks, and of attention, is repeated."""
    products, attention = 0.0, 0.0
    for many, experts in (part.experts, True), (part.layers - part.experts, False):
        if many:
            again = block_activations(job, layout, fused_norms=True, experts=experts).again
            products += many / part.layers * again[0]
            attention += many / part.layers * again[1]
    return products, attention


def _row_flops(job: Job, part: Part, *, products: bool = True) -> float:
    """Return the operations of one row in a rank's blocks, forward and backward, and in the head.

    Its documents are as equal as they can be. A token meets the experts that it goes to. Without
    `products` only attention is counted.
    """
    base, more = divmod(job.row_length, job.documents)
    config = job.config
    plain = attrs.evolve(job, begins=(), frozen=frozenset())  # adapters are few, and not counted
    blocks = units_of(plain, Layout()).blocks(part.numbers).trained
    met = blocks.whole - part.experts * idle_parameters(config)
    met += part.head * config.vocab_size * config.width
    shape: dict[str, Any] = {
        "heads": config.heads,
        "head_dim": (config.head_size + config.value_size) / 2,
        "lengths": np.array([base + (i < more) for i in range(job.documents)], dtype=np.int64),
    }
    # Of a stage's layers as many slide as of all, which are near to even.
    sliding = part.layers * len(config.sliding_layers) / config.layers
    window = config.sliding.window if config.sliding is not None else None
    seen = model_flops(linear_parameters=0, layers=sliding, window=window, **shape)
    return seen + model_flops(
        linear_parameters=met if products else 0, layers=part.layers - sliding, **shape
    )


def _flops_of_rank(job: Job, layout: Layout, pp_rank: int, *, products: bool = True) -> float:
    row = _row_flops(job, part_of(job, layout, pp_rank), products=products)
    rows = num_microbatches(job, layout) * job.microbatch
    return rows * row / (layout.count("sp") * layout.tp)


def _bandwidth(axis: str, layout: Layout, hardware: Hardware) -> float:
    """Return the bandwidth of an axis: inside a node if it spans no more ranks than one has."""
    inside = _span(axis, layout) <= hardware.ranks_per_node
    return hardware.inside if inside else hardware.between


def _span(axis: str, layout: Layout) -> int:
    """Return among how many neighbouring ranks those of an axis lie."""
    world, names = layout.axes["world"], layout.axes.get(axis, layout.axes["fsdp"])
    *_, near = layout.expert_axes
    whole = math.prod(layout.count(name) for name in names)
    own = {near: layout.expert_axes[near], "near": layout.reshard_over}
    left = own.get(axis, whole)
    *outer, name = names
    while left > layout.count(name):
        left = math.ceil(left / layout.count(name))
        *outer, name = outer
    inside = world[world.index(name) + 1 :]
    return left * math.prod(layout.count(name) for name in inside)
