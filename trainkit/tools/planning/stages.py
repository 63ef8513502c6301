"""Which part of a model a pipeline rank has, and what its sharding and its borders hold."""

from __future__ import annotations

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
    """What a pipeline rank holds: some layers, perhaps the embedding, perhaps the output layer."""

    numbers: tuple[int, ...]
    """The numbers of the layers."""
    embedding: bool
    head: bool
    experts: int = 0
    """How many of the layers have experts."""

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.numbers)


def find_part(job: Job, layout: Layout, pp_rank: int) -> Part:
    """Return what a pipeline rank holds, all of its stages together, as `split_layers` cuts it.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("10m"), row_length=8, rows=8)
        >>> [find_part(job, Layout(pp=3), rank).layers for rank in range(3)]
        [3, 3, 2]
    """
    if layout.pp == 1:
        many = len(job.config.expert_layers)
        every = tuple(range(job.config.layers))
        return Part(every, embedding=True, head=True, experts=many)
    holders = assign_stages(layout.schedule, layout.pp)
    own = [stage for stage, rank in enumerate(holders) if rank == pp_rank]
    ranges = _split_layers(job.config, len(holders))
    layers = tuple(layer for stage in own for layer in ranges[stage])
    many = len({*layers} & {*job.config.expert_layers})
    return Part(layers, 0 in own, len(holders) - 1 in own, experts=many)


@lru_cache(maxsize=64)
def _split_layers(config: DecoderConfig, stages: int) -> list[range]:
    blocks, embedding, head = decoder_costs(config)
    return split_layer_ranges(blocks, stages, first=embedding, last=head)


def get_ends(part: Part, units: Units, *, tied: bool) -> Params:
    """Return what a rank owns besides its blocks; the last stage has a copy of a tied embedding."""
    first = units.embedding + units.positions if part.embedding else Params()
    last = units.norm if part.head else Params()
    if part.head and not (tied and part.embedding):
        last += units.embedding if tied else units.head
    return first + last


def get_blocks(part: Part, units: Units) -> Params:
    """Return what a rank owns of its blocks."""
    return units.blocks(part.numbers) + units.sharded_experts(part.numbers)


def count_in_flight(job: Job, layout: Layout, pp_rank: int, *, split: float = 0) -> float:
    """Return the most (stage, microbatch) pairs whose activations a rank holds at once.

    All microbatches for GPipe and looped BFS; p - rank for 1F1B; its interleaved form holds more of
    smaller stages (Narayanan et al., "Efficient large-scale language model training on GPU
    clusters", 2021). Where backward is split, a pair whose gradient of the input has been sent
    waits for its weights' gradients, and holds the gradients that these are made of as well (Qi et
    al., "Zero bubble pipeline parallelism", 2023); how many do is read off torch's orders (from
    2.11 on).

    Args:
        job: What is trained.
        layout: The degrees and the schedule.
        pp_rank: Which rank it is.
        split: What a pair that waits for its weights' gradients holds besides its activations, as a
            part of them.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("10m"), row_length=8, rows=8)
        >>> [count_in_flight(job, Layout(pp=4), rank) for rank in range(4)]
        [4, 3, 2, 1]
        >>> layout = Layout(pp=4, schedule="zero_bubble_v")
        >>> [count_in_flight(job, layout, rank, split=0.5) for rank in range(4)]
        [8.5, 8.5, 8.5, 10.5]
    """
    p, v, m, rank = layout.pp, stages_per_rank(layout), num_microbatches(job, layout), pp_rank
    if p == 1:
        return 1
    # How many pairs wait for a backward, and how many for their weights' gradients alone.
    most = {
        "gpipe": [(m, 0)],
        "looped_bfs": [(v * m, 0)],
        "1f1b": [(p - rank, 0)],
        "interleaved_1f1b": [(2 * (p - rank - 1) + (v - 1) * p + 1, 0)],
        "interleaved_zero_bubble": [(v * p - 1 - rank, 1 + rank)],
        "zero_bubble_v": [(2 * p - 1, 1), (p - 1 - rank, 2 * rank + 1)],
        "dual_pipe_v": [(2 * p + 1, 0)],
    }
    return max(
        min(whole + halves, v * m) + split * min(halves, v * m)
        for whole, halves in most[layout.schedule]
    )


@attrs.frozen
class Sharding:
    """Bytes that FSDP2 adds, and of gradients that are not scattered yet; zeros without it.

    Args:
        ends: The gathered embedding, last norm and output layer, which stay from forward to the end
            of backward, since they are one unit.
        unit: One gathered block, with the experts of a rank of ep.
        ahead: The blocks that are gathered meanwhile, without those unless `prefetch` asks for
            them; none where FSDP only replicates.
        scatter: What one reduce-scatter of a block, or of its experts, reads.
        ends_scatter: What that of the ends reads; of the embedding, where the head is apart.
        near: What `reshard_over` keeps of a block between its forward and its backward.
        first: The gathered embedding, where it is a unit of its own and not among the ends.
        head: The gathered last norm and output layer, where they are.
        head_scatter: What their reduce-scatter reads.
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
    """Return what FSDP2 gathers: a block at a time and the next one ahead, and the ends all along.

    Zhao et al., "PyTorch FSDP" (2023). With one data-parallel rank there is no FSDP, and
    the copies that `precision` casts live until the microbatch is done.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny", vocab_size=256), row_length=8, rows=8)
        >>> layout = Layout(dp_shard=8)
        >>> found = estimate_sharding(job, layout, part=find_part(job, layout, 0))
        >>> found.ends, found.unit, found.ahead, found.scatter, found.ends_scatter
        (65792, 426496, 426496, 852992, 131584)
    """
    units, item = compute_units(job, layout), job.itemsize
    ends, blocks = get_ends(part, units, tied=job.config.tied), get_blocks(part, units)
    if layout.wrapped == 1:
        cast = item if job.precision.compute != job.precision.storage else 0
        return Sharding(ends=(ends.trained.whole + ends.frozen.whole) * cast)
    kinds = [layer for layer, _ in units.counts(part.numbers)]
    stay = 0 if reshards(layout) else blocks.gathered(item)
    block = 0 if stay else max(x.block.gathered(item) for x in kinds)
    unit = block and block + max(x.sharded_experts.gathered(item) for x in kinds)
    others = part.layers // stages_per_rank(layout) - 1
    prefetched = min(layout.prefetch, others) * unit
    scattered = (y.trained.gathered for x in kinds for y in (x.block, x.sharded_experts))
    first, last = separate_units(job, layout, part=part)
    return Sharding(
        ends=stay if first + last != Params() else ends.gathered(item) + stay,
        unit=unit,
        ahead=(prefetched or block) if layout.count("fsdp") > 1 else 0,
        scatter=max(scattered) * job.summed,
        ends_scatter=(first if first + last != Params() else ends).trained.gathered * job.summed,
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

    The ring holds two blocks of keys and values, the present and the next one, in backward as many
    of their gradients in fp32, and an fp32 sum of the queries' gradients (or of the output). The
    pipeline stages of torch (from 2.11 on) hold a receiving buffer for every microbatch of a step
    and each of their boundaries; schedules with several stages on a rank also hold what was sent
    across them until the step ends.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny"), row_length=256, rows=8)
        >>> estimate_buffers(job, Layout(), 0)
        0
    """
    tokens, config = tokens_per_microbatch(job, layout), job.config
    q, k, v, _ = attention_widths(config, layout)
    ring = tokens * (2 * (k + v) * (job.itemsize + FP32) + q * FP32) if layout.ring > 1 else 0
    if layout.pp == 1:
        return round(ring)
    boundary = tokens * config.width / layout.tp * job.itemsize
    borders = pipeline_borders(layout, pp_rank) * (2 if stages_per_rank(layout) > 1 else 1)
    return round(ring + num_microbatches(job, layout) * borders * boundary)


def pipeline_borders(layout: Layout, pp_rank: int) -> int:
    """Return how many borders a rank's stages have with stages of other ranks.

    Examples:
        >>> layout = Layout(pp=3, schedule="dual_pipe_v")
        >>> [pipeline_borders(layout, rank) for rank in range(3)]
        [2, 4, 2]
    """
    holders = assign_stages(layout.schedule, layout.pp)
    return sum(a != b and pp_rank in (a, b) for a, b in pairwise(holders))
