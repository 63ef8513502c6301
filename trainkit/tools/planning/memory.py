"""Memory of a rank in bytes, by kind, and its peak over a step.

The formulas are for this library's decoder, not for a general transformer. Letters: T tokens of a
microbatch on this rank, D width, Q and K columns of queries and keys, F columns of the MLP, V size
of the vocabulary, all divided by the degrees that shard them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs

from trainkit.optim.table import OPTIMIZERS, list_precision_options, state_bytes
from trainkit.tools.planning.activations import (
    Block,
    Head,
    estimate_block,
    estimate_head,
    tokens_per_microbatch,
)
from trainkit.tools.planning.jobs import FP32, Job, num_microbatches, stages_per_rank
from trainkit.tools.planning.stages import (
    BUCKET,
    Part,
    Sharding,
    count_in_flight,
    estimate_buffers,
    estimate_sharding,
    find_part,
    get_blocks,
    get_ends,
    list_kinds,
    separate_units,
)
from trainkit.tools.planning.weights import Params, Sizes, Units, compute_units
from trainkit.types import Layout


@attrs.frozen
class MemoryEstimate:
    """Bytes of the rank with the highest peak: the maximum of each kind, and the peak of their sum.

    The peak is less than the sum of the kinds: gradients appear while activations are freed. It is
    the device's: with `cpu_offload` the first three kinds are in host memory, and with
    `Job.offload_optimizer` the third is.

    Args:
        parameters: This rank's shard of the parameters, and of quantized matrices.
        gradients: Gradients of trainable parameters.
        optimizer: Optimizer state of trainable parameters.
        activations: Activations that the blocks save, and temporaries of one block's backward.
        logits: Tensors of the output layer and the loss.
        gathered: FSDP's gathered parameters, and gradients before their reduce-scatter; or the
            copies of parameters that `precision` casts.
        buffers: Communication buffers: key and value blocks, stage boundaries.
        peak: The maximum over a step of the sum of these.
        peak_phase: The phase of the step that has the peak.
        pp_rank: The pipeline rank.
        host: Bytes in host memory: offloaded optimizer state and activations; with `cpu_offload`
            also parameters and gradients.
        between_steps: Device memory between two steps, which `parallel.offload_state` frees.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    buffers: int
    peak: int
    peak_phase: str
    pp_rank: int = 0
    host: int = 0
    between_steps: int = 0


def estimate_memory(
    job: Job,
    layout: Layout,
    *,
    pp_rank: int | None = None,
    fused_norms: bool = True,
    in_backward: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of one pipeline rank, by default of the one with the highest peak.

    Args:
        job: Model and training.
        layout: The degrees.
        pp_rank: The pipeline rank; None takes the one with the highest peak.
        fused_norms: Whether a norm is one kernel, as on a GPU, and saves its input alone.
        in_backward: Whether parameters are stepped as their gradients arrive, by
            `grads.make_step_in_backward`.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=64)
        >>> memory = estimate_memory(job, Layout(dp_shard=64))
        >>> memory.parameters * 64 / 4 / 1e9  # billions of parameters
        8.0302...
        >>> memory.peak_phase
        'loss'
    """
    # The first rank holds most microbatches in flight, the last has the output layer, and of those
    # between the second holds most, unless a later one has more experts.
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1}
    if job.config.experts is not None:
        ranks.add(max(range(layout.pp), key=lambda rank: find_part(job, layout, rank).experts))
    estimates = [
        _estimate_rank_memory(job, layout, rank, fused_norms=fused_norms, in_backward=in_backward)
        for rank in (sorted(ranks) if pp_rank is None else [pp_rank])
    ]
    return max(estimates, key=lambda memory: memory.peak)


def _estimate_optimizer(job: Job, blocks: Params, ends: Params) -> tuple[int, int]:
    """Return the bytes of optimizer state: of all parameters, and of the largest one."""
    # The job's own options win over those that its precision implies.
    options = {
        **list_precision_options(job.optimizer, job.precision),
        **dict(job.optimizer_options),
    }
    is_kahan = options.get("rounding") == "kahan"
    # Kahan summation keeps the rounding error of each parameter, in the parameter's dtype.
    extra = job.stored if is_kahan and job.stored < FP32 else 0
    extra += FP32 * (job.mean and not _has_mean(job))
    sizes = []
    # Muon has another state for hidden matrices than for the ends.
    for own, hidden in ((blocks.trained, True), (ends.trained, False)):
        per_element = partial(state_bytes, job.optimizer, options, hidden=hidden)
        long = per_element() * (own.shard - own.short)
        short = per_element(in_blocks=False) * own.short
        sizes.append((own, long + short + extra * own.shard))
    kind = OPTIMIZERS[job.optimizer]
    # Stochastic rounding needs a step count per parameter, which is the counter of its noise.
    is_stochastic = options.get("rounding") == "stochastic" or (
        kind.low_precision_moments and options.get("moments", "fp32") != "fp32"
    )
    counts = FP32 * max(kind.counts, int(is_stochastic)) * (blocks + ends).trained.tensors
    # In proportion to elements, as parameters of one group have about equal state per element.
    largest = max(round(size * own.largest / max(own.whole, 1)) for own, size in sizes)
    return sum(round(size) for _, size in sizes) + counts, largest


def _has_mean(job: Job) -> bool:
    """Return whether an optimizer's own state includes averaged weights."""
    return "mean" in getattr(OPTIMIZERS[job.optimizer].make, "copies", ())


def _estimate_rank_memory(
    job: Job, layout: Layout, pp_rank: int, *, fused_norms: bool, in_backward: bool
) -> MemoryEstimate:
    part = find_part(job, layout, pp_rank)
    units = compute_units(job, layout)
    ends = get_ends(part, units, tied=job.config.tied)
    blocks = get_blocks(part, units)
    own = (blocks + ends).trained
    rank = _estimate_rank(job, layout, pp_rank, fused_norms)
    parameters = (blocks + ends).nbytes(job.stored)
    gradients = own.shard * FP32
    optimizer, largest_state = _estimate_optimizer(job, blocks, ends)
    buffers = estimate_buffers(job, layout, pp_rank)
    # Gradients are complete only in the last backward, so with several they stay until the step.
    if in_backward and not rank.later:
        rank = attrs.evolve(rank, stays=False)
    phases = _estimate_phases(rank)
    if job.offload_optimizer:  # the step brings back one parameter's state at a time
        phases["optimizer step"] += largest_state
    if job.mean and not _has_mean(job):  # the new average; and on a device, whether it may be used
        copies = 2 if fused_norms else 1
        phases["optimizer step"] += copies * FP32 * own.largest * own.shard / max(own.whole, 1)
    if layout.count("sp_unfolded") > 1 and not layout.cpu_offload:
        phases["sum over the sequence"] = rank.gradients + _count_buffer_elements(own) * FP32
    if layout.tp > 1 and not layout.cpu_offload:
        replicated = units.whole(part.numbers).trained
        phases["sum over tp"] = rank.gradients + _count_buffer_elements(replicated) * FP32
    peak_phase = max(phases, key=lambda name: phases[name])
    is_state_on_host = layout.cpu_offload or job.offload_optimizer
    # Products with a bool: what is offloaded counts 0 here and in `host` instead.
    between = (not layout.cpu_offload) * parameters + (not is_state_on_host) * optimizer
    host = parameters + optimizer - between + layout.cpu_offload * gradients + rank.moved
    one = rank.activations
    shard = rank.sharding
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients if rank.stays else 0,
        optimizer=optimizer,
        activations=round(
            rank.waiting(rank.held, 0) - rank.held * rank.casts - one.saved + one.backward
        ),
        logits=rank.heads * rank.head.saved + rank.head.temporary,
        gathered=max(shard.ends, shard.head, shard.first)
        + (shard.unit + shard.ahead + shard.scatter + _estimate_unreduced(rank))
        + round(max(rank.held * rank.casts, rank.cast)),
        buffers=buffers,
        peak=round(between + buffers + phases[peak_phase]),
        peak_phase=peak_phase,
        pp_rank=pp_rank,
        host=round(host),
        between_steps=between,
    )  # fmt: skip


def _estimate_rank(job: Job, layout: Layout, pp_rank: int, fused_norms: bool) -> _Rank:
    part = find_part(job, layout, pp_rank)
    units = compute_units(job, layout)
    ends = get_ends(part, units, tied=job.config.tied)
    blocks = get_blocks(part, units)
    kinds = {
        (experts, delta): estimate_block(
            job, layout, fused_norms=fused_norms, experts=experts, delta=delta
        )
        for experts, delta in dict.fromkeys(list_kinds(job.config, part.numbers))
    }
    saved, movable = _estimate_saved(job, part, units, kinds)
    largest = max(kinds.values(), key=lambda block: block.backward)
    cast_of_stage, cast_of_block = _estimate_casts(job, layout, part, units)
    layers = [layer for layer, _ in units.counts(part.numbers)]
    reduced_units = [params.trained for x in layers for params in (x.block, x.sharded_experts)]
    # A rank without the output layer has no logits.
    head = Head()
    if part.head:
        weight = units.embedding if job.config.tied else units.head
        is_trained = weight.trained.whole > 0
        head = estimate_head(job, layout, fused_norms=fused_norms, trained=is_trained)
    return _Rank(
        job=job,
        layout=layout,
        part=part,
        blocks=blocks.trained,
        unit=max(reduced_units, key=lambda unit: unit.whole),
        ends=ends.trained,
        apart=separate_units(job, layout, part=part)[1].trained,
        activations=largest,
        saved=saved / stages_per_rank(layout) + _estimate_stage_outputs(job, layout, part),
        movable=movable / stages_per_rank(layout),
        # With recomputation backward casts them once more, a block at a time.
        casts=0.0 if job.recompute != "none" else cast_of_stage,
        cast=cast_of_block,
        head=head,
        sharding=estimate_sharding(job, layout, part=part),
        unpacked=_estimate_dequantized(job, layout, part) if blocks.packed.whole else 0,
        layers=part.layers / stages_per_rank(layout),
        held=count_in_flight(job, layout, pp_rank, split=largest.split / largest.saved),
        later=num_microbatches(job, layout) * stages_per_rank(layout) - 1,
        heads=_count_heads_in_flight(job, layout, pp_rank),
    )


def _estimate_casts(job: Job, layout: Layout, part: Part, units: Units) -> tuple[float, float]:
    """Return the bytes of a stage's and of a block's weights that `precision` casts in forward."""
    # FSDP casts before it gathers, once for all microbatches; without it each microbatch casts.
    if layout.wrapped > 1 or job.precision.compute == job.precision.storage:
        return 0.0, 0.0
    blocks = get_blocks(part, units)
    cast = (blocks.trained.whole + blocks.frozen.whole) * job.itemsize
    return cast / stages_per_rank(layout), cast / part.layers


def _estimate_saved(
    job: Job, part: Part, units: Units, kinds: Mapping[tuple[bool, bool], Block]
) -> tuple[int, int]:
    """Return the bytes that a rank's blocks save for backward, and those that may be offloaded."""
    # No gradient reaches the blocks before the first trainable one, so they save nothing.
    reached = [i for i in part.numbers if i >= units.first_trained]
    blocks = [kinds[kind] for kind in list_kinds(job.config, reached)]
    return sum(x.saved for x in blocks), sum(x.movable for x in blocks)


def _estimate_stage_outputs(job: Job, layout: Layout, part: Part) -> float:
    """Return the bytes of a stage's output that a microbatch holds until its backward."""
    # torch holds an output until its backward. With several stages on a rank it holds all that was
    # sent to the end of the step (see `estimate_buffers`), but the gradient is not sent yet.
    output = tokens_per_microbatch(job, layout) * job.config.width / layout.tp * job.itemsize
    if stages_per_rank(layout) > 1:
        return -output
    return output if layout.pp > 1 and not part.head else 0.0


def _estimate_dequantized(job: Job, layout: Layout, part: Part) -> int:
    """Return the bytes of a block's largest matrix, or experts, while a matmul dequantizes it."""
    plain = attrs.evolve(job, plan_prefix=(), frozen=frozenset())
    # In fp32, together with its codes as integers or its cast copy, of 2 bytes an element.
    return get_blocks(part, compute_units(plain, layout)).trained.largest * (FP32 + 2)


def _count_buffer_elements(own: Sizes) -> int:
    """Return the elements of the buffers of an all-reduce: the current and the previous one."""
    if not own.whole:
        return 0
    largest = own.largest * own.shard // own.whole  # a parameter larger than a buffer has its own
    return min(own.shard, 2 * max(BUCKET, largest))


@attrs.frozen
class _Rank:
    """The inputs of `_estimate_phases` for one rank.

    `blocks` and `ends` are the rank's trainable parameters; `apart` those of the ends that are
    reduced before the blocks, `unit` the largest part of a block that is reduced at once,
    `unpacked` the bytes of dequantizing the largest matrix, `activations` the largest block.
    `layers` is the number of layers of one stage, `saved` the bytes that they save, `movable` those
    of them that may be offloaded. `held` counts (stage, microbatch) pairs that wait for backward,
    `later` those that can still wait after a first backward, `heads` the microbatches between
    output layer and backward. `stays` is whether gradients remain until a step at the end.
    """

    job: Job
    layout: Layout
    part: Part
    blocks: Sizes
    unit: Sizes
    ends: Sizes
    apart: Sizes
    activations: Block
    saved: float
    movable: float
    casts: float
    cast: float
    head: Head
    sharding: Sharding
    unpacked: int
    layers: float
    held: float
    later: int
    heads: int
    stays: bool = True

    @property
    def moved(self) -> float:
        """Bytes of activations in host memory when forward ends."""
        budget = self.job.offload_activations
        return 0.0 if budget is None else max(0.0, self.held * self.movable - budget)

    def waiting(self, stages: float, blocks: int) -> float:
        """Return the bytes on the device that some stages and blocks have saved."""
        one = self.activations
        budget = self.job.offload_activations
        saved = stages * self.saved + blocks * one.saved
        movable = stages * self.movable + blocks * one.movable
        offloaded = 0.0 if budget is None else max(0.0, movable - max(budget, one.used))
        return saved - offloaded + stages * self.casts + blocks * (self.cast if self.casts else 0.0)

    @property
    def gradients(self) -> int:
        """Bytes of this rank's shard of all gradients, on the device."""
        return (self.blocks.shard + self.ends.shard) * self.bytes_per_gradient

    @property
    def bytes_per_gradient(self) -> int:
        """Bytes on the device of one element of this rank's shard of the gradients."""
        return 0 if self.layout.cpu_offload or not self.stays else FP32


def _count_heads_in_flight(job: Job, layout: Layout, pp_rank: int) -> int:
    """Count the microbatches between the output layer and the end of their backward."""
    if layout.pp > 1 and layout.schedule in ("gpipe", "looped_bfs"):  # all forwards come first
        return num_microbatches(job, layout)
    if layout.pp > 1 and layout.schedule == "interleaved_zero_bubble":
        # It delays the gradients of weights by the rank's index.
        return min(1 + pp_rank, num_microbatches(job, layout))
    return 1


def _estimate_unreduced(rank: _Rank) -> int:
    """Return the bytes of unsharded gradients before the last microbatch, above their shards."""
    if rank.later == 0 or rank.layout.reduce == "each" or not rank.sharding.scatter:
        return 0
    return (rank.blocks.whole + rank.ends.whole) * rank.job.summed - rank.gradients


def _estimate_phases(rank: _Rank) -> dict[str, float]:
    """Return the bytes of each phase of a step, without parameters and optimizer state."""
    phases = {"optimizer step": float(rank.gradients)}
    # The first backward starts without gradients, a later one with fewer activations.
    passes = [_estimate_backward(rank, rank.held, before=0)]
    if rank.later:
        before = rank.gradients + _estimate_unreduced(rank)
        passes.append(_estimate_backward(rank, min(rank.held, rank.later), before=before))
    for sizes in passes:
        phases |= {name: max(size, phases.get(name, 0.0)) for name, size in sizes.items()}
    return phases


def _estimate_backward(rank: _Rank, held: float, *, before: int) -> dict[str, float]:
    """Return the bytes of the phases of one backward that starts with `before` bytes of gradients.

    Existing gradients are accumulated into, so that only one weight's exists twice; that of a tied
    embedding waits until the embedding's own gradient exists.
    """
    one = rank.activations
    shard = rank.sharding
    # The gradient of the output weight, or of the embedding.
    vocabulary = rank.ends.largest * rank.job.itemsize
    waits = vocabulary if rank.part.embedding and rank.job.config.tied else 0
    block = rank.blocks.shard / rank.part.layers * rank.bytes_per_gradient
    is_separate = shard.head + shard.first > 0
    head = rank.apart.shard * rank.bytes_per_gradient if is_separate else vocabulary
    at_start = before + waits if before else head
    at_end = before + waits if before else head + block * (rank.part.layers - 1)
    weight = rank.blocks.largest * rank.job.itemsize
    unreduced = rank.unit.whole * rank.job.itemsize if shard.scatter else weight
    computed = one.backward - one.saved + weight + rank.unpacked + shard.ends + shard.unit
    computed += 0.0 if rank.casts else rank.cast
    ahead = shard.ahead if rank.layers > 1 else 0
    # Backward frees one block's activations after the other and, the first time, adds gradients:
    # a middle block's peak is at one of its ends.
    second = rank.waiting(held, -1) + (at_start if before else at_start + block)
    last_but_one = rank.waiting(held - 1, 2) + (at_end if before else at_end - block)
    near = held * rank.layers * shard.near
    middle = max(second + near, last_but_one) + shard.scatter + ahead if rank.layers > 2 else 0.0
    # FSDP frees gradients that it has copied, but this one, which the backward of the loss holds;
    # and there is this rank's part of the sum.
    of_head = rank.apart.whole * rank.job.itemsize + shard.head + shard.head_scatter
    of_head += rank.apart.shard * rank.job.summed
    phases = {
        "loss": (
            before + rank.waiting(held, 0) + rank.head.saved + rank.head.temporary
            + shard.ends + shard.head + near
        ),
        "reduction of the head": (shard.head > 0) * (
            before + rank.waiting(held, 0) + of_head + near + ahead
        ),
        "backward of the last block": (
            at_start + rank.waiting(held, 0) + computed + ahead + max(0, near - shard.near)
        ),
        "backward of a middle block": middle + computed,
        "backward of the first block": (
            at_end + rank.waiting(held - 1, 1) + computed + shard.scatter + shard.first
        ),
        "reduction of a block": (
            at_end + rank.waiting(held - 1, 0) + unreduced
            + shard.ends + shard.unit + shard.scatter + shard.first
        ),
        "reduction of the ends": (
            (before or at_end + block) + rank.waiting(held - 1, 0) + vocabulary + waits
            + shard.ends + shard.first + shard.ends_scatter
        ),
    }  # fmt: skip
    heads = max(0, rank.heads - 1 - (before > 0)) * rank.head.saved
    return {name: size + heads for name, size in phases.items()}
