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
    delta_widths,
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

TransferKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@attrs.frozen
class Transfer:
    """The calls of one kind that one rank makes on one axis in a step.

    Args:
        axis: The axis. "fsdp" is dp_shard, and ring and ulysses as `fold_sp` says, "sp" is ring x
            ulysses, "expert_fsdp" is fsdp / ep, "near" the part of fsdp in `reshard_over`.
        size: The number of its ranks.
        kind: The collective.
        count: The number of calls.
        bytes: Bytes of the full tensors of all calls: those that are summed or sent, the output of
            an all-gather, the input of a reduce-scatter, as in `testing.count_collectives`.

    Examples:
        >>> Transfer("tp", 4, "all_reduce", 1, 1000).sent
        1500.0
    """

    axis: str
    size: int
    kind: TransferKind
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """The bytes that leave the rank, with ring algorithms (Patarasuk and Yuan, 2009)."""
        if self.kind == "send":
            return float(self.bytes)
        # A ring all-reduce is a reduce-scatter and an all-gather.
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

    The experts of a rank of ep are gathered likewise over expert_fsdp. Gradients are scattered once
    per step, or with every microbatch. Replicas sum their shards once.
    """
    part = find_part(job, layout, pp_rank)
    units = compute_units(job, layout)
    ends = get_ends(part, units, tied=job.config.tied)
    turns = num_microbatches(job, layout)
    scatters = turns if layout.reduce == "each" else 1
    times = 2 if reshards(layout) else 1
    # With `reshard_over` blocks are gathered for backward over the axis "near" alone.
    far = 1 if layout.reshard_over else times
    first, last = separate_units(job, layout, part=part)
    # Units with their number, and how often a microbatch gathers each.
    around = [(ends, 1, 1)]
    if first + last != Params():
        around = [(first, 1, times), (last, 1, 1)]
    counts = units.counts(part.numbers)
    blocks = [(x.block, count, far) for x, count in counts]
    experts = [(x.sharded_experts, count, times) for x, count in counts]
    for axis, size, gathered in (
        ("fsdp", layout.count("fsdp"), [*blocks, *around]),
        ("expert_fsdp", layout.expert_axes["expert_fsdp"], experts),
    ):
        yield _estimate_gathers(job, axis, size, gathered, turns)
        own = sum((unit * count for unit, count, _ in gathered), Params()).trained
        calls = sum(count for unit, count, _ in gathered if unit.trained != Sizes())
        scattered = scatters * own.gathered * job.summed
        yield Transfer(axis, size, "reduce_scatter", scatters * calls, scattered)
        # In fp64: for each parameter the number of ranks on which it has a gradient, and two sums
        # that show whether all ranks have the same order of units.
        flags = own.tensors * _FP64
        checks = int(calls > 0)
        yield Transfer(axis, size, "all_reduce", checks, flags + 2 * _FP64 * checks)
        data = own.shard * job.summed + flags
        yield Transfer("dp_replicate", layout.dp_replicate, "all_reduce", calls + checks, data)
    again = [(unit, count, times - far) for unit, count, _ in blocks]
    yield _estimate_gathers(job, "near", layout.reshard_over, again, turns)


def _estimate_gathers(
    job: Job, axis: str, size: int, units: Sequence[tuple[Params, int, int]], turns: int
) -> Transfer:
    """Return the all-gathers of some units (parameters, number, times per microbatch)."""
    calls = sum(count * times for unit, count, times in units if unit != Params())
    data = sum(unit.gathered(job.itemsize) * count * times for unit, count, times in units)
    return Transfer(axis, size, "all_gather", turns * calls, turns * data)


def _estimate_expert_parallel(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Expert parallelism: rows are dispatched to their experts and combined, balanced over ranks.

    That happens in forward, in backward, and in a repeated forward pass unless its results are
    saved. Before each dispatch ranks exchange the numbers of rows (Lepikhin et al., "GShard",
    2020).
    """
    experts = job.config.experts
    if experts is None:
        return
    runs = find_part(job, layout, pp_rank).experts * num_microbatches(job, layout)
    mode = read_mode(job.recompute)
    forwards = 1 if mode is None or "exchanges" in mode.every else 2
    exchanges = 2 * (1 + forwards)  # dispatch and combine, of each forward and of backward
    rows = tokens_per_microbatch(job, layout) // layout.tp * experts.top_k
    data = exchanges * rows * job.config.width * job.itemsize + forwards * experts.count * _INT64
    yield Transfer("ep", layout.ep, "all_to_all", runs * (exchanges + forwards), runs * data)


def _estimate_tensor_parallel(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022, section 4.2).

    Each block gathers its hidden states T x D twice and scatters sums twice in forward, and vice
    versa in backward; what is recomputed is gathered again. Latent attention gathers its latents in
    their place. An expert layer gathers and scatters nothing; its gradients, like those of norms
    and of projections to latents, are summed once per step. The fused loss sums one number per
    token, and then two; the plain one gathers logits.
    """
    part = find_part(job, layout, pp_rank)
    turns = num_microbatches(job, layout)
    tokens = tokens_per_microbatch(job, layout)
    config = job.config
    forwards = 1 if job.recompute == "none" else 2
    dense = part.layers - part.experts
    attention_inputs = list_attention_inputs(config)
    # Calls, and columns, of one pass over the inputs of all attention layers.
    input_calls = turns * part.layers * len(attention_inputs)
    input_columns = turns * part.layers * sum(attention_inputs)
    # Of D columns: inputs of MLPs and head, and gradients of what forward has scattered.
    hidden_calls = turns * (part.layers + dense * (1 + forwards) + part.embedding + part.head)
    plain_calls = turns * part.head if job.loss == "plain" else 0
    calls = input_calls * forwards + hidden_calls + plain_calls
    columns = input_columns * forwards + hidden_calls * config.width
    columns += plain_calls * config.vocab_size
    yield Transfer("tp", layout.tp, "all_gather", calls, columns * tokens * job.itemsize)
    # The last matmul of a block is not recomputed: no later backward needs its output.
    hidden_calls = turns * (part.layers * forwards + 2 * dense + part.embedding + part.head)
    calls = input_calls + hidden_calls
    columns = input_columns + hidden_calls * config.width
    yield Transfer("tp", layout.tp, "reduce_scatter", calls, columns * tokens * job.itemsize)
    # Flat buffers of the gradients of replicated parameters, and a flag for each parameter.
    units = compute_units(job, layout)
    replicated = units.whole(part.numbers)
    # tp replicates the norm before the head, and learned positions, as well.
    own = (replicated + units.norm * part.head + units.positions * part.embedding).trained
    calls = math.ceil(own.shard / BUCKET)
    yield Transfer("tp", layout.tp, "all_reduce", calls, (own.shard + own.tensors) * FP32)
    if not plain_calls:
        turns *= part.head
        calls = 2 * turns * math.ceil(tokens / count_chunk_tokens(job, layout))
        yield Transfer("tp", layout.tp, "all_reduce", calls, 3 * tokens * turns * FP32)


def _estimate_sequence(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """Ring and Ulysses, in each block and microbatch.

    The ring sends keys and values N - 1 times in forward and in backward, and their gradients N
    times, in fp32 (Liu et al. 2023). Ulysses exchanges queries, keys and values, and the output
    back, in forward, and their gradients in backward (Jacobs et al. 2023).

    In delta layers a ring sends at most two states of each document, in fp32, and gathers the last
    tokens of its parts for the convolution; Ulysses also exchanges the gates, in fp32.
    """
    part = find_part(job, layout, pp_rank)
    turns = num_microbatches(job, layout)
    runs = (part.layers - part.deltas) * turns
    tokens = tokens_per_microbatch(job, layout)
    q, k, v, out = attention_widths(job.config, layout)
    forwards = 1 if job.recompute == "none" else 2
    # A block is the keys and values of one rank.
    block = round(tokens * (k + v))
    n = layout.ring
    sends = runs * ((forwards + 1) * (n - 1) + n)
    # Bytes an element: keys and values in the dtype of computation, their gradients in fp32.
    sent_per_element = (forwards + 1) * (n - 1) * job.itemsize + n * FP32
    data = runs * block * sent_per_element
    yield Transfer("ring", n, "send", sends, data)
    # In backward gradients go the same ways in the opposite direction.
    there, back = round(tokens * (q + k + v)), round(tokens * out)
    calls = runs * 2 * (forwards + 1)
    data = runs * (forwards + 1) * (there + back) * job.itemsize
    delta = job.config.delta
    if delta is not None:
        runs = part.deltas * turns
        documents = job.microbatch * job.documents
        heads = delta.value_heads // layout.tp
        columns, values = delta_widths(job.config, layout)
        tails = 2 * n * documents * (delta.conv - 1) * round(2 * columns + values) * job.itemsize
        yield Transfer("ring", n, "all_gather", runs * forwards, runs * forwards * tails)
        yield Transfer("ring", n, "reduce_scatter", runs, runs * tails)
        sends = runs * (forwards + 1) * min(2, n - 1)
        state = heads * delta.key_size * delta.value_size * FP32
        yield Transfer("ring", n, "send", sends, sends * documents * state)
        calls += runs * 3 * (forwards + 1)
        heads_bytes = 2 * round(columns + values) * job.itemsize + 2 * heads * FP32
        data += runs * (forwards + 1) * tokens * heads_bytes
    yield Transfer("ulysses", layout.ulysses, "all_to_all", calls, data)


def _estimate_sequence_gradients(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """`sync_sp_grads` over the axes of sp that FSDP does not reduce: flat buffers, once a step."""
    part = find_part(job, layout, pp_rank)
    units = compute_units(job, layout)
    ends = get_ends(part, units, tied=job.config.tied)
    own = (get_blocks(part, units) + ends).trained
    names = [name for name in layout.axes["sp_unfolded"] if layout.count(name) > 1]
    axis = names[0] if len(names) == 1 else "sp"
    calls = math.ceil(own.shard / BUCKET)
    # The buffers end with a flag for each parameter: whether it has a gradient.
    yield Transfer(
        axis, layout.count("sp_unfolded"), "all_reduce", calls, (own.shard + own.tensors) * FP32
    )


def _estimate_pipeline(job: Job, layout: Layout, pp_rank: int) -> Iterator[Transfer]:
    """A pipeline: each microbatch's hidden states, and their gradients back, at every border.

    With experts, the sums of their routers (`types.RoutedOutput`) travel with them.
    """
    borders = pipeline_borders(layout, pp_rank)
    sends = num_microbatches(job, layout) * borders
    hidden = tokens_per_microbatch(job, layout) * job.config.width // layout.tp * job.itemsize
    yield Transfer("pp", layout.pp, "send", sends, sends * hidden)
    if job.config.experts is not None:
        sums = len(job.config.expert_layers) * (3 + job.config.experts.count) * FP32
        yield Transfer("pp", layout.pp, "send", sends, sends * sums)


def list_attention_inputs(config: DecoderConfig) -> list[int]:
    """List the columns of the inputs of attention that tensor parallelism gathers, one per call.

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
