"""What a rank sends in a step: which collectives on which axis, how often, and how many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.parallel.recompute import read_mode
from trainkit.tools.planning.activations import (
    attention_widths,
    chunk_of_tokens,
    tokens_per_microbatch,
)
from trainkit.tools.planning.jobs import FP32, Job, num_microbatches, reshards
from trainkit.tools.planning.stages import (
    BUCKET,
    blocks_of,
    ends_of,
    part_of,
    pipeline_borders,
    units_apart,
)
from trainkit.tools.planning.weights import Held, Sizes, units_of
from trainkit.types import Layout

_INT64 = 8
_FP64 = 8

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@attrs.frozen
class Transfer:
    """The calls of one kind that one rank makes on one axis in a step.

    Args:
        axis: The axis; "fsdp" is dp_shard with those of ring and ulysses that `fold_sp` names,
            "sp" is ring x ulysses, "expert_fsdp" what ep leaves of fsdp, "near" the part of fsdp
            that `reshard_over` says.
        size: Its ranks.
        kind: The collective.
        count: Calls.
        bytes: Bytes of the whole tensors that the calls are about, added up: what is summed or
            sent, what an all-gather gives, what a reduce-scatter takes. The same as in the ledger
            of `testing.count_collectives`.

    Examples:
        >>> Transfer("tp", 4, "all_reduce", 1, 1000).sent
        1500.0
    """

    axis: str
    size: int
    kind: Kind
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """The bytes that leave the rank, with ring algorithms (Patarasuk and Yuan, 2009)."""
        if self.kind == "send":
            return float(self.bytes)
        once = self.bytes * (self.size - 1) / self.size
        return 2 * once if self.kind == "all_reduce" else once


def estimate_traffic(job: Job, layout: Layout, *, pp_rank: int = 0) -> tuple[Transfer, ...]:
    """Return what one rank of a pipeline stage sends in a step.

    Left out are the few numbers of the gradient norm, of metrics and of a pipeline's terms.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny", vocab_size=256), row_length=256, rows=8)
        >>> for transfer in estimate_traffic(job, Layout(dp_shard=8)):
        ...     print(transfer.axis, transfer.kind, transfer.count, transfer.bytes)
        fsdp all_gather 9 3477760
        fsdp reduce_scatter 5 3543552
        fsdp all_reduce 1 320
    """
    transfers = (
        *_sharding(job, layout, pp_rank),
        *_experts(job, layout, pp_rank),
        *_tensor(job, layout, pp_rank),
        *_sequence(job, layout, pp_rank),
        *_sequence_gradients(job, layout, pp_rank),
        *_pipeline(job, layout, pp_rank),
    )
    return tuple(transfer for transfer in transfers if transfer.size > 1 and transfer.count)


def _sharding(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """FSDP2: blocks are gathered for forward and again for backward, the ends once.

    So are the experts of a rank of ep, over expert_fsdp. Gradients are scattered once per step, or
    with every microbatch; replicas sum their shards once. Where FSDP only replicates, it still
    sums. A number for each parameter says on how many ranks it has a gradient.
    """
    part, units = part_of(job, layout, pp_rank), units_of(job, layout)
    ends, turns = ends_of(part, units, tied=job.config.tied), num_microbatches(job, layout)
    scatters = turns if layout.reduce == "each" else 1
    times = 2 if reshards(layout) else 1
    far = 1 if layout.reshard_over else times
    first, last = units_apart(job, layout, part=part)
    around = [(first, 1, times), (last, 1, 1)] if first + last != Held() else [(ends, 1, 1)]
    near, counts = layout.expert_axes["expert_fsdp"], units.counts(part.numbers)
    of_blocks = [(x.block, many, far) for x, many in counts]
    for axis, size, parts in (
        ("fsdp", layout.count("fsdp"), [*of_blocks, *around]),
        ("expert_fsdp", near, [(x.dealt, many, times) for x, many in counts]),
    ):
        yield _gathers(job, (axis, size), parts, turns)
        own = sum((each * many for each, many, _ in parts), Held()).trained
        calls = sum(many for each, many, _ in parts if each.trained != Sizes())
        scattered = scatters * own.gathered * job.summed
        yield Transfer(axis, size, "reduce_scatter", scatters * calls, scattered)
        # In fp64: which parameters have gradients, and two sums that tell the order of the units.
        flags = own.tensors * _FP64
        yield Transfer(axis, size, "all_reduce", int(calls > 0), flags + 2 * _FP64 * (calls > 0))
        data, calls = own.shard * job.summed + flags, calls + (calls > 0)
        yield Transfer("dp_replicate", layout.dp_replicate, "all_reduce", calls, data)
    again = [(each, many, times - far) for each, many, _ in of_blocks]
    yield _gathers(job, ("near", layout.reshard_over), again, turns)


def _gathers(
    job: Job, over: tuple[str, int], units: Sequence[tuple[Held, int, int]], turns: int
) -> Transfer:
    """Return the gathers of some units over an axis of a size: each, how many, and how often."""
    parts = [(each, many * often) for each, many, often in units if each != Held()]
    data = sum(each.gathered(job.itemsize) * calls for each, calls in parts)
    calls = sum(calls for _, calls in parts)
    return Transfer(*over, "all_gather", turns * calls, turns * data)


def _experts(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Expert parallelism: rows go to their experts and come back, with as many to each rank.

    In forward, in backward, and where a forward pass that is repeated does not keep them; before
    they go, ranks tell each other how many (Lepikhin et al., "GShard", 2020).
    """
    experts = job.config.experts
    if experts is None:
        return
    runs = part_of(job, layout, pp_rank).experts * num_microbatches(job, layout)
    kept = read_mode(job.recompute)
    told = 1 if kept is None or "exchanges" in kept.every else 2
    exchanges = 2 * (1 + told)
    rows = tokens_per_microbatch(job, layout) // layout.tp * experts.chosen
    data = exchanges * rows * job.config.width * job.itemsize + told * experts.count * _INT64
    yield Transfer("ep", layout.ep, "all_to_all", runs * (exchanges + told), runs * data)


def _tensor(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022, section 4.2).

    Each block gathers its hidden states T x D twice and scatters sums twice in forward, and the
    other way round in backward; what is computed again in backward is gathered again. Latent
    attention gathers its latents in their place. An expert layer gathers and scatters nothing; its
    gradients, like those of norms and of what makes latents, are summed once per step. The fused
    loss sums one number per token, and then two; for the plain one logits are gathered.
    """
    part, turns = part_of(job, layout, pp_rank), num_microbatches(job, layout)
    tokens, config = tokens_per_microbatch(job, layout), job.config
    forwards = 1 if job.recompute == "none" else 2
    dense, entering = part.layers - part.experts, entering_attention(config)
    enters = turns * part.layers, turns * part.layers * len(entering)
    whole = turns * (part.layers + dense * (1 + forwards) + part.embedding + part.head)
    columns = enters[0] * forwards * sum(entering) + whole * config.width
    plain = turns * part.head if job.loss == "plain" else 0  # whose logits are gathered
    columns += plain * config.vocab_size
    calls = enters[1] * forwards + whole + plain
    yield Transfer("tp", layout.tp, "all_gather", calls, columns * tokens * job.itemsize)
    # The last product of a block is not computed again: nothing behind it waits for it.
    whole = turns * (part.layers * forwards + 2 * dense + part.embedding + part.head)
    columns = enters[0] * sum(entering) + whole * config.width
    calls = enters[1] + whole
    yield Transfer("tp", layout.tp, "reduce_scatter", calls, columns * tokens * job.itemsize)
    # Flat buffers with these gradients, and for each parameter whether it has one.
    units = units_of(job, layout)
    held = units.whole(part.numbers) + units.norm * part.head + units.positions * part.embedding
    own = held.trained
    calls = math.ceil(own.shard / BUCKET)
    yield Transfer("tp", layout.tp, "all_reduce", calls, (own.shard + own.tensors) * FP32)
    if not plain:
        turns *= part.head
        calls = 2 * turns * math.ceil(tokens / chunk_of_tokens(job, layout))
        yield Transfer("tp", layout.tp, "all_reduce", calls, 3 * tokens * turns * FP32)


def _sequence(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Ring and Ulysses attention, in each block and microbatch.

    The ring sends keys and values N - 1 times in forward and in backward, and their gradients N
    times, in fp32 (Liu et al. 2023). Ulysses exchanges queries, keys and values, and the output
    back, in forward, and their gradients in backward (Jacobs et al. 2023).
    """
    runs = part_of(job, layout, pp_rank).layers * num_microbatches(job, layout)
    tokens = tokens_per_microbatch(job, layout)
    q, k, v, out = attention_widths(job.config, layout)
    forwards = 1 if job.recompute == "none" else 2
    block, n = round(tokens * (k + v)), layout.ring
    sends = runs * ((forwards + 1) * (n - 1) + n)
    data = runs * block * ((forwards + 1) * (n - 1) * job.itemsize + n * FP32)
    yield Transfer("ring", n, "send", sends, data)
    there, back = round(tokens * (q + k + v)), round(tokens * out)
    calls = runs * 2 * (forwards + 1)
    data = runs * (forwards + 1) * (there + back) * job.itemsize
    yield Transfer("ulysses", layout.ulysses, "all_to_all", calls, data)


def _sequence_gradients(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """`sync_sp_grads` over the sequence's ranks that `fold_sp` leaves: flat buffers, once a step.

    And a number for each parameter, which says whether it has a gradient.
    """
    part, units = part_of(job, layout, pp_rank), units_of(job, layout)
    own = (blocks_of(part, units) + ends_of(part, units, tied=job.config.tied)).trained
    long = [name for name in layout.axes["sp_unfolded"] if layout.count(name) > 1]
    axis = long[0] if len(long) == 1 else "sp"
    calls = math.ceil(own.shard / BUCKET)
    yield Transfer(
        axis, layout.count("sp_unfolded"), "all_reduce", calls, (own.shard + own.tensors) * FP32
    )


def _pipeline(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Each microbatch's hidden states go on, and their gradients back, at every stage's borders.

    With experts so does what their routers have counted, `types.Routed`.
    """
    borders = pipeline_borders(layout, pp_rank)
    sends = num_microbatches(job, layout) * borders
    hidden = tokens_per_microbatch(job, layout) * job.config.width // layout.tp * job.itemsize
    yield Transfer("pp", layout.pp, "send", sends, sends * hidden)
    if job.config.experts is not None:
        sums = len(job.config.expert_layers) * (3 + job.config.experts.count) * FP32
        yield Transfer("pp", layout.pp, "send", sends, sends * sums)


def entering_attention(config: DecoderConfig) -> list[int]:
    """Return the columns of what tensor parallelism gathers for attention, a number for each call.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> entering_attention(make_decoder_config("qwen3-8b"))
        [4096]
        >>> entering_attention(make_decoder_config("deepseek-v3"))
        [1536, 512, 64]
    """
    latents = config.latents
    if latents is None:
        return [config.width]
    return [latents.query_rank or config.width, latents.kv_rank, latents.rotary]
