"""What a rank holds in its memory, in bytes, and the largest sum of it at any moment of a step.

The formulas follow what this library's decoder keeps, not a general transformer. Letters: T tokens
of a microbatch on this rank, D width, Q and K columns of queries and keys, F of the MLP, V words,
all after division by the degrees that split them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs

from trainkit.optim.table import OPTIMIZERS, list_precision_options, state_bytes
from trainkit.tools.planning.activations import (
    Block,
    Head,
    block_activations,
    head_activations,
    tokens_per_microbatch,
)
from trainkit.tools.planning.jobs import FP32, Job, num_microbatches, stages_per_rank
from trainkit.tools.planning.stages import (
    BUCKET,
    Part,
    Sharding,
    blocks_of,
    buffers_of,
    ends_of,
    in_flight,
    part_of,
    sharding_of,
    units_apart,
)
from trainkit.tools.planning.weights import Held, Sizes, Units, units_of
from trainkit.types import Layout


@attrs.frozen
class MemoryEstimate:
    """Bytes of the rank that needs most, each kind at its largest, and the peak of their sum.

    The peak is less than the sum of the kinds: gradients come while activations go. It is the
    device's: with `cpu_offload` the first three kinds are in host memory instead, and with
    `Job.offload_optimizer` the third is.

    Args:
        parameters: This rank's part of the parameters, and of matrices in few bits.
        gradients: Of the gradients of those that are trained.
        optimizer: Of the optimizer's state, of the same.
        activations: What the blocks keep for backward, and what one block's backward takes besides.
        logits: What the output layer and the loss need at once.
        gathered: FSDP's gathered parameters, and gradients that are not scattered yet; or the
            copies of parameters that `precision` casts.
        buffers: What communication needs: key and value blocks, stage boundaries.
        peak: The largest sum of all of these at any moment.
        moment: When that is.
        pp_rank: Which pipeline rank it is.
        host: Bytes in host memory: optimizer state and activations that are offloaded; with
            `cpu_offload` also parameters and gradients.
        between: What is left on the device between two steps, which `parallel.offload_state` frees.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    buffers: int
    peak: int
    moment: str
    pp_rank: int = 0
    host: int = 0
    between: int = 0


def estimate_memory(
    job: Job,
    layout: Layout,
    *,
    pp_rank: int | None = None,
    fused_norms: bool = True,
    in_backward: bool = False,
) -> MemoryEstimate:
    """Return what a pipeline rank holds: the one that needs most, or the one that is asked for.

    Args:
        job: What is trained, and how.
        layout: The degrees.
        pp_rank: Which pipeline rank; None takes the one whose peak is the highest.
        fused_norms: Whether a norm is one kernel, as on a GPU, and keeps its input alone.
        in_backward: Whether parameters are stepped as their gradients arrive, by
            `grads.make_step_in_backward`.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=64)
        >>> memory = estimate_memory(job, Layout(dp_shard=64))
        >>> memory.parameters * 64 / 4 / 1e9  # billions of parameters
        8.0302...
        >>> memory.moment
        'loss'
    """
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1}
    if job.config.experts is not None:  # the first of those with most of them
        ranks.add(max(range(layout.pp), key=lambda rank: part_of(job, layout, rank).experts))
    found = [
        _memory_of_rank(job, layout, rank, fused_norms=fused_norms, in_backward=in_backward)
        for rank in (sorted(ranks) if pp_rank is None else [pp_rank])
    ]
    return max(found, key=lambda memory: memory.peak)


def _remembered(job: Job, blocks: Held, ends: Held) -> tuple[int, int]:
    """Return the bytes of an optimizer's state: of hidden layers, and of the ends of a model.

    Of all parameters, and of the one of which it is the most.
    """
    options = {
        **list_precision_options(job.optimizer, job.precision),
        **dict(job.optimizer_options),
    }
    each = []
    is_kahan = options.get("rounding") == "kahan"
    rest = job.stored if is_kahan and job.stored < FP32 else 0
    for own, hidden in ((blocks.trained, True), (ends.trained, False)):
        of = partial(state_bytes, job.optimizer, options, hidden=hidden)
        short = of(in_blocks=False) * own.short
        besides = rest + FP32 * (job.mean and not _keeps_mean(job))
        each.append((own, of() * (own.shard - own.short) + short + besides * own.shard))
    kind = OPTIMIZERS[job.optimizer]
    draws = options.get("rounding") == "stochastic" or (
        kind.narrow and options.get("moments", "fp32") != "fp32"
    )
    counts = FP32 * max(kind.counts, int(draws)) * (blocks + ends).trained.tensors
    most = max(round(size * own.largest / max(own.whole, 1)) for own, size in each)
    return sum(round(size) for _, size in each) + counts, most


def _keeps_mean(job: Job) -> bool:
    """Say whether an optimizer has a mean of the weights anyway."""
    return "mean" in getattr(OPTIMIZERS[job.optimizer].make, "copies", ())


def _memory_of_rank(
    job: Job, layout: Layout, pp_rank: int, *, fused_norms: bool, in_backward: bool
) -> MemoryEstimate:
    part, units = part_of(job, layout, pp_rank), units_of(job, layout)
    ends, blocks = ends_of(part, units, tied=job.config.tied), blocks_of(part, units)
    own, rank = (blocks + ends).trained, _rank_of(job, layout, pp_rank, fused_norms)
    parameters = (blocks + ends).nbytes(job.stored)
    gradients = own.shard * FP32
    optimizer, of_one = _remembered(job, blocks, ends)
    buffers = buffers_of(job, layout, pp_rank)
    if in_backward and not rank.later:
        rank = attrs.evolve(rank, stays=False)
    moments = _moments(rank)
    if job.offload_optimizer:
        moments["optimizer step"] += of_one
    if job.mean and not _keeps_mean(job):  # what it moves to; and on a device, whether it may
        copies = 2 if fused_norms else 1
        moments["optimizer step"] += copies * FP32 * own.largest * own.shard / max(own.whole, 1)
    if layout.count("sp_unfolded") > 1 and not layout.cpu_offload:
        moments["sum over the sequence"] = rank.gradients + _flat_buffers(own) * FP32
    if layout.tp > 1 and not layout.cpu_offload:
        whole = units.whole(part.numbers).trained
        moments["sum over tp"] = rank.gradients + _flat_buffers(whole) * FP32
    moment = max(moments, key=lambda name: moments[name])
    remembered = layout.cpu_offload or job.offload_optimizer
    between = (not layout.cpu_offload) * parameters + (not remembered) * optimizer
    host = parameters + optimizer - between + layout.cpu_offload * gradients + rank.moved
    one, shard = rank.activations, rank.sharding
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients if rank.stays else 0,
        optimizer=optimizer,
        activations=round(
            rank.waiting(rank.held, 0) - rank.held * rank.casts - one.kept + one.backward
        ),
        logits=rank.heads * rank.head.kept + rank.head.beside,
        gathered=max(shard.ends, shard.head, shard.first)
        + (shard.unit + shard.ahead + shard.scatter + _unreduced(rank))
        + round(max(rank.held * rank.casts, rank.cast)),
        buffers=buffers,
        peak=round(between + buffers + moments[moment]),
        moment=moment,
        pp_rank=pp_rank,
        host=round(host),
        between=between,
    )  # fmt: skip


def _rank_of(job: Job, layout: Layout, pp_rank: int, fused_norms: bool) -> _Rank:
    part, units = part_of(job, layout, pp_rank), units_of(job, layout)
    ends, blocks = ends_of(part, units, tied=job.config.tied), blocks_of(part, units)
    counts = {True: part.experts, False: part.layers - part.experts}
    kinds = {
        experts: block_activations(job, layout, fused_norms=fused_norms, experts=experts)
        for experts, many in counts.items()
        if many
    }
    of_blocks = _kept(job, part, units, kinds)
    largest = max(kinds.values(), key=lambda block: block.backward)
    of_stage, of_block = _casts(job, layout, part, units)
    again = job.recompute != "none"  # then backward casts them once more, a block at a time
    return _Rank(
        job=job,
        layout=layout,
        part=part,
        blocks=blocks.trained,
        unit=_largest_unit(part, units),
        ends=ends.trained,
        apart=units_apart(job, layout, part=part)[1].trained,
        activations=largest,
        kept=of_blocks[0] / stages_per_rank(layout) + _passed_on(job, layout, part),
        movable=of_blocks[1] / stages_per_rank(layout),
        casts=0.0 if again else of_stage,
        cast=of_block,
        head=_head(job, layout, part, units, fused_norms),
        sharding=sharding_of(job, layout, part=part),
        unpacked=_unpacked(job, layout, part) if blocks.packed.whole else 0,
        layers=part.layers / stages_per_rank(layout),
        held=in_flight(job, layout, pp_rank, split=largest.split / largest.kept),
        later=num_microbatches(job, layout) * stages_per_rank(layout) - 1,
        heads=_heads_in_flight(job, layout, pp_rank),
    )


def _casts(job: Job, layout: Layout, part: Part, units: Units) -> tuple[float, float]:
    """Return the bytes of a stage's and of a block's weights that `precision` casts in forward.

    FSDP gathers weights cast, once for all microbatches. Without it each microbatch casts its own.
    """
    if layout.wrapped > 1 or job.precision.compute == job.precision.storage:
        return 0.0, 0.0
    own = blocks_of(part, units)
    cast = (own.trained.whole + own.frozen.whole) * job.itemsize
    return cast / stages_per_rank(layout), cast / part.layers


def _kept(job: Job, part: Part, units: Units, kinds: Mapping[bool, Block]) -> tuple[int, int]:
    """Return what a rank's blocks keep for backward, and what of it may be moved.

    Nothing before the first that is trained.
    """
    routed = {*job.config.expert_layers}
    numbers = [number for number in part.numbers if number >= units.first_trained]
    found = [kinds[number in routed] for number in numbers]
    return sum(x.kept for x in found), sum(x.movable for x in found)


def _passed_on(job: Job, layout: Layout, part: Part) -> float:
    """Return the bytes that a waiting microbatch adds to what a stage has passed on.

    torch holds its output until its backward. Where a rank has several stages, all that was sent is
    held to the end of the step, and counted by `buffers_of`: but it has not sent its gradient yet.
    """
    output = tokens_per_microbatch(job, layout) * job.config.width / layout.tp * job.itemsize
    if stages_per_rank(layout) > 1:
        return -output
    return output if layout.pp > 1 and not part.head else 0.0


def _largest_unit(part: Part, units: Units) -> Sizes:
    """Return the largest part of a block whose gradients are reduced at once."""
    kinds = [layer for layer, _ in units.counts(part.numbers)]
    return max((x.trained for y in kinds for x in (y.block, y.dealt)), key=lambda x: x.whole)


def _unpacked(job: Job, layout: Layout, part: Part) -> int:
    """Return the bytes of a block's largest matrix, or experts, while a product dequantises it.

    In fp32, beside its codes as integers, or beside what it is cast to.
    """
    plain = attrs.evolve(job, begins=(), frozen=frozenset())
    return blocks_of(part, units_of(plain, layout)).trained.largest * (FP32 + 2)


def _head(job: Job, layout: Layout, part: Part, units: Units, fused_norms: bool) -> Head:
    weight = units.embedding if job.config.tied else units.head
    if not part.head:
        return Head()
    trained = weight.trained.whole > 0
    return head_activations(job, layout, fused_norms=fused_norms, trained=trained)


def _flat_buffers(own: Sizes) -> int:
    """Return the elements of the buffers of a sum: the present one, and the one before it."""
    if not own.whole:
        return 0
    largest = own.largest * own.shard // own.whole  # a parameter larger than a buffer has its own
    return min(own.shard, 2 * max(BUCKET, largest))


@attrs.frozen
class _Rank:
    """All that the moments of a rank's step are made of.

    `blocks` are all of the rank's that are trained, as the `ends` are, of which `apart` are those
    that are reduced before the blocks, `unit` is the largest part of one that is reduced at once,
    `unpacked` what dequantising the largest matrix takes, and `activations` are the largest
    block's. `layers` are those of one stage and `kept` is what they keep, `movable` the part of it
    that may be in host memory, `held` the stages times microbatches that wait for backward, `later`
    how many of them can while others have left their gradients behind, `heads` how many
    microbatches have seen the output layer and wait, and `stays` whether gradients wait for a step
    at the end.
    """

    job: Job
    layout: Layout
    part: Part
    blocks: Sizes
    unit: Sizes
    ends: Sizes
    apart: Sizes
    activations: Block
    kept: float
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
        """Return the bytes on the device of what some stages and blocks have kept."""
        one, budget = self.activations, self.job.offload_activations
        whole, movable = (
            stages * stage + blocks * block
            for stage, block in ((self.kept, one.kept), (self.movable, one.movable))
        )
        away = 0.0 if budget is None else max(0.0, movable - max(budget, one.used))
        return whole - away + stages * self.casts + blocks * (self.cast if self.casts else 0.0)

    @property
    def gradients(self) -> int:
        """Bytes of this rank's part of all gradients, on the device."""
        return (self.blocks.shard + self.ends.shard) * self.of_shard

    @property
    def of_shard(self) -> int:
        """Bytes on the device of one number of this rank's part of the gradients."""
        return 0 if self.layout.cpu_offload or not self.stays else FP32


def _heads_in_flight(job: Job, layout: Layout, pp_rank: int) -> int:
    """Return how many microbatches have seen the output layer and wait for backward, or a part.

    All where forwards come first, else one; the interleaved zero bubble delays the gradients of
    weights by as many as the rank's number.
    """
    if layout.pp > 1 and layout.schedule in ("gpipe", "looped_bfs"):
        return num_microbatches(job, layout)
    delayed = layout.pp > 1 and layout.schedule == "interleaved_zero_bubble"
    return min(1 + pp_rank, num_microbatches(job, layout)) if delayed else 1


def _unreduced(rank: _Rank) -> int:
    """Return the bytes of whole gradients that wait for the last microbatch, above their shards."""
    if rank.later == 0 or rank.layout.reduce == "each" or not rank.sharding.scatter:
        return 0
    return (rank.blocks.whole + rank.ends.whole) * rank.job.summed - rank.gradients


def _moments(rank: _Rank) -> dict[str, float]:
    """Return what exists at the moments that can be the worst, beside parameters and optimizer.

    Twice: in the first backward, when there are no gradients yet, and in a later one.
    """
    moments = {"optimizer step": float(rank.gradients)}
    passes = [_moments_of_pass(rank, rank.held, before=0)]
    if rank.later:
        before = rank.gradients + _unreduced(rank)
        passes.append(_moments_of_pass(rank, min(rank.held, rank.later), before=before))
    for found in passes:
        moments |= {name: max(size, moments.get(name, 0.0)) for name, size in found.items()}
    return moments


def _moments_of_pass(rank: _Rank, held: float, *, before: int) -> dict[str, float]:
    """Return the moments of one backward that begins with `before` bytes of gradients.

    A gradient that is there already is added to, so that only one weight's is there twice; that of
    a tied embedding waits until the embedding's own part is there.
    """
    one, shard = rank.activations, rank.sharding
    # The gradient of the output weight, or of the embedding.
    words = rank.ends.largest * rank.job.itemsize
    waits = words if rank.part.embedding and rank.job.config.tied else 0
    block = rank.blocks.shard / rank.part.layers * rank.of_shard
    head = rank.apart.shard * rank.of_shard if shard.head + shard.first else words
    at_start = before + waits if before else head
    at_end = before + waits if before else head + block * (rank.part.layers - 1)
    weight = rank.blocks.largest * rank.job.itemsize
    of_block = rank.unit.whole * rank.job.itemsize if shard.scatter else weight
    computed = one.backward - one.kept + weight + rank.unpacked + shard.ends + shard.unit
    computed += 0.0 if rank.casts else rank.cast
    ahead = shard.ahead if rank.layers > 1 else 0
    second = rank.waiting(held, -1) + (at_start if before else at_start + block)
    last_but_one = rank.waiting(held - 1, 2) + (at_end if before else at_end - block)
    near = held * rank.layers * shard.near
    middle = max(second + near, last_but_one) + shard.scatter + ahead if rank.layers > 2 else 0.0
    # FSDP frees gradients that it has copied, but this one, which the backward of the loss holds;
    # and there is this rank's part of the sum.
    of_head = rank.apart.whole * rank.job.itemsize + shard.head + shard.head_scatter
    of_head += rank.apart.shard * rank.job.summed
    moments = {
        "loss": (
            before + rank.waiting(held, 0) + rank.head.kept + rank.head.beside
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
            at_end + rank.waiting(held - 1, 0) + of_block
            + shard.ends + shard.unit + shard.scatter + shard.first
        ),
        "reduction of the ends": (
            (before or at_end + block) + rank.waiting(held - 1, 0) + words + waits
            + shard.ends + shard.first + shard.ends_scatter
        ),
    }  # fmt: skip
    heads = max(0, rank.heads - 1 - (before > 0)) * rank.head.kept
    return {name: size + heads for name, size in moments.items()}
