"""Communication of a rank in a step: collectives by axis, their number and their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.parallel.recompute import read_mode
from trainkit.tools.planning.activations import (
    attention_widths,
    count_chunk_tokens,
    tokens_per_microbatch,
)
from trainkit.tools.planning.jobs import FP32, Job, num_microbatches, reshards
from trainkit.tools.planning.stages import (
    BUCKET,
    find_part,
    get_blocks,
    get_ends,
    pipeline_borders,
    separate_units,
)
from trainkit.tools.planning.weights import Params, Sizes, compute_units
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
    """Estimate the transfers of one rank of a pipeline stage in a step.

    The few bytes of the gradient norm, of metrics and of a pipeline's terms are not counted.

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
        *_estimate_fsdp(job, layout, pp_rank),
        *_estimate_expert_parallel(job, layout, pp_rank),
        *_estimate_tensor_parallel(job, layout, pp_rank),
        *_estimate_sequence(job, layout, pp_rank),
        *_estimate_sequence_gradients(job, layout, pp_rank),
        *_estimate_pipeline(job, layout, pp_rank),
    )
    return tuple(transfer for transfer in transfers if transfer.size > 1 and transfer.count)


def _estimate_fsdp(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """FSDP2: blocks are gathered for forward and again for backward, the ends once.

    So are the experts of a rank of ep, over expert_fsdp. Gradients are scattered once per step, or
    with every microbatch; replicas sum their shards once. Where FSDP only replicates, it still
    sums. A number for each parameter says on how many ranks it has a gradient.
    """
    part, units = find_part(job, layout, pp_rank), compute_units(job, layout)
    ends, turns = get_ends(part, units, tied=job.config.tied), num_microbatches(job, layout)
    scatters = turns if layout.reduce == "each" else 1
    times = 2 if reshards(layout) else 1
    far = 1 if layout.reshard_over else times
    first, last = separate_units(job, layout, part=part)
    around = [(first, 1, times), (last, 1, 1)] if first + last != Params() else [(ends, 1, 1)]
    near, counts = layout.expert_axes["expert_fsdp"], units.counts(part.numbers)
    of_blocks = [(x.block, many, far) for x, many in counts]
    for axis, size, parts in (
        ("fsdp", layout.count("fsdp"), [*of_blocks, *around]),
        ("expert_fsdp", near, [(x.sharded_experts, many, times) for x, many in counts]),
    ):
        yield _estimate_gathers(job, (axis, size), parts, turns)
        own = sum((each * many for each, many, _ in parts), Params()).trained
        calls = sum(many for each, many, _ in parts if each.trained != Sizes())
        scattered = scatters * own.gathered * job.summed
        yield Transfer(axis, size, "reduce_scatter", scatters * calls, scattered)
        # In fp64: which parameters have gradients, and two sums that tell the order of the units.
        flags = own.tensors * _FP64
        yield Transfer(axis, size, "all_reduce", int(calls > 0), flags + 2 * _FP64 * (calls > 0))
        data, calls = own.shard * job.summed + flags, calls + (calls > 0)
        yield Transfer("dp_replicate", layout.dp_replicate, "all_reduce", calls, data)
    again = [(each, many, times - far) for each, many, _ in of_blocks]
    yield _estimate_gathers(job, ("near", layout.reshard_over), again, turns)


def _estimate_gathers(
    job: Job, over: tuple[str, int], units: Sequence[tuple[Params, int, int]], turns: int
) -> Transfer:
    """Return the gathers of some units over an axis of a size: each, how many, and how often."""
    parts = [(each, many * often) for each, many, often in units if each != Params()]
    data = sum(each.gathered(job.itemsize) * calls for each, calls in parts)
    calls = sum(calls for _, calls in parts)
    return Transfer(*over, "all_gather", turns * calls, turns * data)


def _estimate_expert_parallel(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Expert parallelism: rows are dispatched to their experts and combined, balanced over ranks.

    In forward, in backward, and in a repeated forward pass unless they are saved; before each
    dispatch, ranks exchange the numbers of rows (Lepikhin et al., "GShard", 2020).
    """
    experts = job.config.experts
    if experts is None:
        return
    runs = find_part(job, layout, pp_rank).experts * num_microbatches(job, layout)
    mode = read_mode(job.recompute)
    forwards = 1 if mode is None or "exchanges" in mode.every else 2
    exchanges = 2 * (1 + forwards)
    rows = tokens_per_microbatch(job, layout) // layout.tp * experts.chosen
    # Each forward also exchanges the number of rows for each expert.
    data = exchanges * rows * job.config.width * job.itemsize + forwards * experts.count * _INT64
    yield Transfer("ep", layout.ep, "all_to_all", runs * (exchanges + forwards), runs * data)


def _estimate_tensor_parallel(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022, section 4.2).

    Each block gathers its hidden states T x D twice and scatters sums twice in forward, and the
    other way round in backward; what is computed again in backward is gathered again. Latent
    attention gathers its latents in their place. An expert layer gathers and scatters nothing; its
    gradients, like those of norms and of what makes latents, are summed once per step. The fused
    loss sums one number per token, and then two; for the plain one logits are gathered.
    """
    part, turns = find_part(job, layout, pp_rank), num_microbatches(job, layout)
    tokens, config = tokens_per_microbatch(job, layout), job.config
    forwards = 1 if job.recompute == "none" else 2
    dense, entering = part.layers - part.experts, list_attention_inputs(config)
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
    units = compute_units(job, layout)
    held = units.whole(part.numbers) + units.norm * part.head + units.positions * part.embedding
    own = held.trained
    calls = math.ceil(own.shard / BUCKET)
    yield Transfer("tp", layout.tp, "all_reduce", calls, (own.shard + own.tensors) * FP32)
    if not plain:
        turns *= part.head
        calls = 2 * turns * math.ceil(tokens / count_chunk_tokens(job, layout))
        yield Transfer("tp", layout.tp, "all_reduce", calls, 3 * tokens * turns * FP32)


def _estimate_sequence(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Ring and Ulysses attention, in each block and microbatch.

    The ring sends keys and values N - 1 times in forward and in backward, and their gradients N
    times, in fp32 (Liu et al. 2023). Ulysses exchanges queries, keys and values, and the output
    back, in forward, and their gradients in backward (Jacobs et al. 2023).
    """
    runs = find_part(job, layout, pp_rank).layers * num_microbatches(job, layout)
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


def _estimate_sequence_gradients(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """`sync_sp_grads` over the sequence's ranks that `fold_sp` leaves: flat buffers, once a step.

    And a number for each parameter, which says whether it has a gradient.
    """
    part, units = find_part(job, layout, pp_rank), compute_units(job, layout)
    own = (get_blocks(part, units) + get_ends(part, units, tied=job.config.tied)).trained
    long = [name for name in layout.axes["sp_unfolded"] if layout.count(name) > 1]
    axis = long[0] if len(long) == 1 else "sp"
    calls = math.ceil(own.shard / BUCKET)
    yield Transfer(
        axis, layout.count("sp_unfolded"), "all_reduce", calls, (own.shard + own.tensors) * FP32
    )


def _estimate_pipeline(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Each microbatch's hidden states go on, and their gradients back, at every stage's borders.

    With experts so does what their routers have counted, `types.RoutedOutput`.
    """
    borders = pipeline_borders(layout, pp_rank)
    sends = num_microbatches(job, layout) * borders
    hidden = tokens_per_microbatch(job, layout) * job.config.width // layout.tp * job.itemsize
    yield Transfer("pp", layout.pp, "send", sends, sends * hidden)
    if job.config.experts is not None:
        sums = len(job.config.expert_layers) * (3 + job.config.experts.count) * FP32
        yield Transfer("pp", layout.pp, "send", sends, sends * sums)


def list_attention_inputs(config: DecoderConfig) -> list[int]:
    """Return the columns of what tensor parallelism gathers for attention, a number for each call.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> list_attention_inputs(make_decoder_config("qwen3-8b"))
        [4096]
        >>> list_attention_inputs(make_decoder_config("deepseek-v3"))
        [1536, 512, 64]
    """
    latents = config.latents
    if latents is None:
        return [config.width]
    return [latents.query_rank or config.width, latents.kv_rank, latents.rotary]
