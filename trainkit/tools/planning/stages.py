"""The part of the model on a pipeline rank, and the memory of its sharding and its borders."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.parallel.split import assign_stages, decoder_costs, split_layer_ranges
from trainkit.tools.planning.activations import attention_widths, tokens_per_microbatch
from trainkit.tools.planning.jobs import FP32, Job, num_microbatches, reshards, stages_per_rank
from trainkit.tools.planning.weights import Params, Units, compute_units
from trainkit.types import Layout

BUCKET = 2**24
"""Elements of a flat buffer of `grads.sync_sp_grads`."""


@attrs.frozen
class Part:
    """The part of a model on a pipeline rank: layers, and perhaps embedding and output layer."""

    numbers: tuple[int, ...]
    """The indices of the layers."""
    embedding: bool
    head: bool
    experts: int = 0
    """The number of layers with experts."""
    deltas: int = 0
    """The number of delta layers."""

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.numbers)


def find_part(job: Job, layout: Layout, pp_rank: int) -> Part:
    """Return the part of the model on a pipeline rank: all of its stages, as by `split_layers`.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("10m"), row_length=8, rows=8)
        >>> [find_part(job, Layout(pp=3), rank).layers for rank in range(3)]
        [3, 3, 2]
    """
    if layout.pp == 1:
        layers = tuple(range(job.config.layers))
        return _make_part(job.config, layers, embedding=True, head=True)
    # Some schedules give a rank several stages, which need not be neighbors.
    rank_of_stage = assign_stages(layout.schedule, layout.pp)
    stages = [stage for stage, rank in enumerate(rank_of_stage) if rank == pp_rank]
    ranges = _split_layers(job.config, len(rank_of_stage))
    layers = tuple(layer for stage in stages for layer in ranges[stage])
    return _make_part(
        job.config, layers, embedding=0 in stages, head=len(rank_of_stage) - 1 in stages
    )


def _make_part(
    config: DecoderConfig, layers: tuple[int, ...], *, embedding: bool, head: bool
) -> Part:
    return Part(
        layers,
        embedding=embedding,
        head=head,
        experts=len({*layers} & {*config.expert_layers}),
        deltas=len({*layers} & {*config.delta_layers}),
    )


def list_kinds(config: DecoderConfig, layers: Iterable[int]) -> list[tuple[bool, bool]]:
    """Return for each of some layers whether it has experts, and whether it is a delta layer.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> list_kinds(make_decoder_config("deepseek-v3"), [2, 3])
        [(False, False), (True, False)]
    """
    experts, deltas = {*config.expert_layers}, {*config.delta_layers}
    return [(i in experts, i in deltas) for i in layers]


@lru_cache(maxsize=64)  # asked for every layout, rank and formula, with few different answers
def _split_layers(config: DecoderConfig, stages: int) -> list[range]:
    # The ends cost as much as some blocks, so their stages get fewer blocks.
    blocks, embedding, head = decoder_costs(config)
    return split_layer_ranges(blocks, stages, first=embedding, last=head)


def get_ends(part: Part, units: Units, *, tied: bool) -> Params:
    """Return a rank's parameters outside of blocks; the last stage copies a tied embedding."""
    first = units.embedding + units.positions if part.embedding else Params()
    last = units.norm if part.head else Params()
    if part.head and not (tied and part.embedding):
        last += units.embedding if tied else units.head
    return first + last


def get_blocks(part: Part, units: Units) -> Params:
    """Return the parameters of a rank's blocks."""
    return units.blocks(part.numbers) + units.sharded_experts(part.numbers)


def count_in_flight(job: Job, layout: Layout, pp_rank: int, *, split: float = 0) -> float:
    """Return the maximum number of (stage, microbatch) pairs whose activations a rank holds.

    That is all microbatches for GPipe and looped BFS, and p - rank for 1F1B; its interleaved form
    holds more of smaller stages (Narayanan et al., "Efficient large-scale language model training
    on GPU clusters", 2021). With a split backward a pair still waits for its weights' gradients
    after the gradient of the input has been sent, and holds output gradients as well (Qi et al.,
    "Zero bubble pipeline parallelism", 2023). Their number is that in torch's orders (from 2.11
    on).

    Args:
        job: Model and training.
        layout: The degrees and the schedule.
        pp_rank: The pipeline rank.
        split: Output gradients that a pair with a split backward holds, as a fraction of its
            activations.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("10m"), row_length=8, rows=8)
        >>> [count_in_flight(job, Layout(pp=4), rank) for rank in range(4)]
        [4, 3, 2, 1]
        >>> layout = Layout(pp=4, schedule="zero_bubble_v")
        >>> [count_in_flight(job, layout, rank, split=0.5) for rank in range(4)]
        [8.5, 8.5, 8.5, 10.5]
    """
    # The letters of Narayanan et al.: p ranks with v stages each, and m microbatches.
    p = layout.pp
    v = stages_per_rank(layout)
    m = num_microbatches(job, layout)
    rank = pp_rank
    if p == 1:
        return 1
    # Pairs that wait for their backward, and for their weights' gradients alone, at each moment
    # that may be the maximum.
    candidates = {
        "gpipe": [(m, 0)],
        "looped_bfs": [(v * m, 0)],
        "1f1b": [(p - rank, 0)],
        "interleaved_1f1b": [(2 * (p - rank - 1) + (v - 1) * p + 1, 0)],
        "interleaved_zero_bubble": [(v * p - 1 - rank, 1 + rank)],
        "zero_bubble_v": [(2 * p - 1, 1), (p - 1 - rank, 2 * rank + 1)],
        "dual_pipe_v": [(2 * p + 1, 0)],
    }
    return max(
        # There are only v * m pairs in a step.
        min(full + halves, v * m) + split * min(halves, v * m)
        for full, halves in candidates[layout.schedule]
    )


@attrs.frozen
class Sharding:
    """Bytes of FSDP2's gathered parameters, and of gradients before their reduce-scatter.

    Args:
        ends: The gathered embedding, last norm and output layer, which stay from forward to the end
            of backward, since they are one unit.
        unit: One gathered block, with the experts of a rank of ep.
        ahead: The blocks that are gathered meanwhile, without experts unless `prefetch` includes
            them; 0 if FSDP only replicates.
        scatter: Input of the reduce-scatter of a block, or of its experts.
        ends_scatter: Input of the reduce-scatter of the ends, or of the embedding if it is a
            separate unit.
        near: The shard of a block that `reshard_over` keeps between its forward and its backward.
        first: The gathered embedding, if it is a separate unit.
        head: The gathered last norm and output layer, if they are a separate unit.
        head_scatter: Input of their reduce-scatter.
    """

    ends: int = 0
    unit: int = 0
    ahead: int = 0
    scatter: int = 0
    ends_scatter: int = 0
    near: int = 0
    first: int = 0
    head: int = 0
    head_scatter: int = 0


def estimate_sharding(job: Job, layout: Layout, *, part: Part) -> Sharding:
    """Estimate the bytes that FSDP2 gathers: a block and the next one at a time, the ends always.

    Zhao et al., "PyTorch FSDP" (2023). With one data-parallel rank there is no FSDP, and the copies
    that `precision` casts live until the end of the microbatch.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny", vocab_size=256), row_length=8, rows=8)
        >>> layout = Layout(dp_shard=8)
        >>> found = estimate_sharding(job, layout, part=find_part(job, layout, 0))
        >>> found.ends, found.unit, found.ahead, found.scatter, found.ends_scatter
        (65792, 426496, 426496, 852992, 131584)
    """
    units = compute_units(job, layout)
    item = job.itemsize
    ends = get_ends(part, units, tied=job.config.tied)
    blocks = get_blocks(part, units)
    if layout.wrapped == 1:
        cast = item if job.precision.compute != job.precision.storage else 0
        return Sharding(ends=(ends.trained.whole + ends.frozen.whole) * cast)
    kinds = [layer for layer, _ in units.counts(part.numbers)]
    # Without resharding all blocks stay gathered to the end, and none is gathered again.
    resident = 0 if reshards(layout) else blocks.gathered(item)
    block = 0 if resident else max(x.block.gathered(item) for x in kinds)
    unit = block and block + max(x.sharded_experts.gathered(item) for x in kinds)
    # A stage cannot gather more blocks ahead than it has besides the current one.
    other_blocks = part.layers // stages_per_rank(layout) - 1
    prefetched = min(layout.prefetch, other_blocks) * unit
    scattered = (y.trained.gathered for x in kinds for y in (x.block, x.sharded_experts))
    first, last = separate_units(job, layout, part=part)
    # As one unit the ends stay gathered through the step; as two they come and go.
    is_separate = first + last != Params()
    return Sharding(
        ends=resident if is_separate else ends.gathered(item) + resident,
        unit=unit,
        ahead=(prefetched or block) if layout.count("fsdp") > 1 else 0,
        scatter=max(scattered) * job.summed,
        ends_scatter=(first if is_separate else ends).trained.gathered * job.summed,
        near=block // layout.reshard_over if layout.reshard_over else 0,
        first=first.gathered(item),
        head=last.gathered(item),
        head_scatter=last.trained.gathered * job.summed,
    )


def separate_units(job: Job, layout: Layout, *, part: Part) -> tuple[Params, Params]:
    """Return a rank's embedding, and its last norm and head, if `separate_ends` makes them units.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8, rows=8)
        >>> layout = Layout(dp_shard=2, separate_ends=True)
        >>> [x.trained.tensors for x in separate_units(job, layout, part=find_part(job, layout, 0))]
        [1, 2]
    """
    if not layout.separate_ends or layout.wrapped == 1 or job.config.tied:
        return Params(), Params()
    units = compute_units(job, layout)
    first = units.embedding + units.positions if part.embedding else Params()
    return first, units.norm + units.head if part.head else Params()


def estimate_buffers(job: Job, layout: Layout, pp_rank: int) -> int:
    """Return the bytes of communication buffers that live through a step.

    The ring holds two blocks of keys and values, the current and the next one, in backward as many
    of their gradients in fp32, and an fp32 sum of the queries' gradients (or of the output). The
    pipeline stages of torch (from 2.11 on) hold a receive buffer for every microbatch of a step and
    each of their boundaries. With several stages on a rank they also hold all sent tensors until
    the step ends.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny"), row_length=256, rows=8)
        >>> estimate_buffers(job, Layout(), 0)
        0
    """
    tokens = tokens_per_microbatch(job, layout)
    config = job.config
    q, k, v, _ = attention_widths(config, layout)
    ring = 0.0
    if layout.ring > 1:
        blocks = 2 * (k + v) * (job.itemsize + FP32)
        ring = tokens * (blocks + q * FP32)
    if layout.pp == 1:
        return round(ring)
    # Between stages tp shards the tokens of the hidden state.
    boundary = tokens * config.width / layout.tp * job.itemsize
    borders = pipeline_borders(layout, pp_rank) * (2 if stages_per_rank(layout) > 1 else 1)
    return round(ring + num_microbatches(job, layout) * borders * boundary)


def pipeline_borders(layout: Layout, pp_rank: int) -> int:
    """Count the borders between a rank's stages and stages of other ranks.

    Examples:
        >>> layout = Layout(pp=3, schedule="dual_pipe_v")
        >>> [pipeline_borders(layout, rank) for rank in range(3)]
        [2, 4, 2]
    """
    rank_of_stage = assign_stages(layout.schedule, layout.pp)
    return sum(a != b and pp_rank in (a, b) for a, b in pairwise(rank_of_stage))
