"""What a rank holds in its memory, in bytes, and the largest sum of it at any moment of a step.

The formulas follow what this library's decoder keeps, not a general transformer. Letters: T tokens
of a microbatch on this rank, D width, Q and K columns of the query and the key projection, F of the
MLP, V words, all after division by the degrees that split them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import attrs

from trainkit.models.config import DecoderConfig, parameter_shapes
from trainkit.parallel.split import decoder_costs, layer_ranges, rank_of_stages
from trainkit.planning.layouts import (
    Job,
    Layout,
    num_microbatches,
    reshards,
    stages_per_rank,
)

_FP32 = 4
_SMALL = 2**22  # elements: losses.linear_cross_entropy has logits below this in one chunk
_STATES = {"adamw": 2, "momentum": 1, "sgd": 0}


@attrs.frozen
class Memory:
    """Bytes of the rank that needs most, each kind at its largest, and the peak of their sum.

    The peak is less than the sum of the kinds: gradients come while activations go.

    Args:
        parameters: This rank's part of the parameters, fp32.
        gradients: Of their gradients, fp32.
        optimizer: Of the optimizer's state.
        activations: What the blocks keep for backward, and what one block's backward takes besides.
        logits: What the output layer and the loss need at once.
        gathered: FSDP's gathered parameters, and gradients that are not scattered yet.
        buffers: What communication needs: key and value blocks, stage boundaries.
        peak: The largest sum of all of these at any moment.
        moment: When that is.
        pp_rank: Which pipeline rank it is.
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


# -------------------------------------------------------------------------------------- parameters


@attrs.frozen
class Weights:
    """Some parameters as one rank has them: how many elements, of which it owns a shard.

    Args:
        whole: Elements after tensor parallelism, gathered over FSDP.
        shard: Elements that the first rank of FSDP owns, which has the most.
        tensors: Number of parameters.
        largest: Elements of the largest one.
    """

    whole: int = 0
    shard: int = 0
    tensors: int = 0
    largest: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.whole + other.whole,
            self.shard + other.shard,
            self.tensors + other.tensors,
            max(self.largest, other.largest),
        )

    def __mul__(self, times: int) -> Weights:
        largest = self.largest if times else 0
        return Weights(self.whole * times, self.shard * times, self.tensors * times, largest)


@attrs.frozen
class Units:
    """The parameters of one block, of the embedding, of the last norm, and of the output layer."""

    block: Weights
    embedding: Weights
    norm: Weights
    head: Weights


def units_of(config: DecoderConfig, layout: Layout) -> Units:
    """Return the sizes of a model's parts in a layout, exact to the element.

    Tensor parallelism divides the rows of wq, wk, wv, gate, up, embedding and head, and the columns
    of wo and down (Shoeybi et al., "Megatron-LM", 2019); FSDP2 cuts what is left along its first
    dimension, in parts of which the first are the larger ones (ZeRO stage 3: Rajbhandari et al.,
    "ZeRO", 2020).

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> units = units_of(decoder_config("tiny", vocab_size=259), Layout(dp_shard=2))
        >>> units.embedding
        Weights(whole=33152, shard=16640, tensors=1, largest=33152)
    """
    return _units(config, layout.tp, layout.fsdp)


@lru_cache(maxsize=256)
def _units(config: DecoderConfig, tp: int, fsdp: int) -> Units:
    shapes = parameter_shapes(attrs.evolve(config, layers=1))

    def total(prefix: str) -> Weights:
        found = (
            _local(_tensor_parallel_shape(name, shape, tp), fsdp)
            for name, shape in shapes.items()
            if name.startswith(prefix)
        )
        return sum(found, Weights())

    return Units(total("layers."), total("embedding."), total("norm."), total("head."))


def _tensor_parallel_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if "norm" in name:
        return shape
    if name.endswith(("wo.weight", "down.weight")):
        return (shape[0], shape[1] // tp)
    return (shape[0] // tp, *shape[1:])


def _local(shape: tuple[int, ...], parts: int) -> Weights:
    whole = math.prod(shape)
    rows = math.ceil(shape[0] / parts)
    return Weights(whole, rows * math.prod(shape[1:]), 1, whole)


# ------------------------------------------------------------------------------------- activations


@attrs.frozen
class Block:
    """Bytes of one block and one microbatch.

    Args:
        kept: What waits for backward.
        backward: What exists at the worst moment of its backward, with what is computed again.
    """

    kept: int
    backward: int


def block_activations(job: Job, layout: Layout, *, fused_norms: bool) -> Block:
    """Return what one block keeps for its backward, and the most that this backward holds.

    Without recomputation, in elements per token, with tp = ring = ulysses = 1:

        6 D + 2 Q + 2 K + 4 F + H

    the input of both norms, the normed copy (only where a norm is not one kernel) and the output of
    both; rotated queries, keys, values, and attention's output; gate, silu(gate), up and their
    product; attention's log-sum-exp, one fp32 number per head. `selective` keeps the results of the
    matrix products and of attention and the block's input, 3 D + 2 Q + 2 K + 2 F + H, where every
    step of a ring counts as an attention; `full` the input, D. Backward computes the rest again,
    one block at a time. Tensor parallelism divides all but two D, the gathered inputs of attention
    and MLP. Ulysses keeps attention's output a second time, exchanged back.

    The worst moment of backward is the product of the MLP: two gradients of F and the incoming one
    of D besides all that is kept.

    The counting follows Korthikanti et al., "Reducing activation recomputation in large transformer
    models" (2022), section 4, for their block of LayerNorm, GELU and dropout.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=100, rows=1, dtype="fp32")
        >>> block_activations(job, Layout(), fused_norms=True).kept / 400  # 8 D + 4 F + H + 2
        2566.0
    """
    config, item, tp = job.config, job.itemsize, layout.tp
    tokens = tokens_per_microbatch(job, layout)
    d, f = config.width, config.mlp_width // tp
    split = d / tp  # of the stream between the blocks, whose tokens tensor parallelism divides
    q, k = attention_widths(config, layout)
    copies = 1 if fused_norms else 2
    numbers = config.heads // tp + 2 / tp  # fp32: log-sum-exp, and a root mean square per norm
    attention = 2 * q + 2 * k + (q if _output_is_copied(job, layout, fused_norms) else 0)
    if config.qk_norm:
        attention += copies * (q + config.kv_heads * config.head_size // tp)
        numbers += (config.heads + config.kv_heads) // tp
    everything = 2 * copies * split + 2 * d + attention + 4 * f
    kept = {
        "none": everything,
        "selective": split + 2 * d + (1 + layout.ring) * q + 2 * k + 2 * f,
        "full": split,
    }[job.recompute]
    if job.recompute != "none":
        numbers_kept = config.heads // tp if job.recompute == "selective" else 0
    else:
        numbers_kept = numbers
    beside = d + 2 * f
    return Block(
        kept=round(tokens * (kept * item + numbers_kept * _FP32)),
        backward=round(tokens * ((everything + beside) * item + numbers * _FP32)),
    )


def tokens_per_microbatch(job: Job, layout: Layout) -> int:
    """Return T, the tokens of a microbatch on one rank.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=256, rows=8, microbatch=4)
        >>> tokens_per_microbatch(job, Layout(ring=2))
        512
    """
    return job.microbatch * job.row_length // layout.sp


def attention_widths(config: DecoderConfig, layout: Layout) -> tuple[float, float]:
    """Return Q and K as attention sees them: Ulysses repeats key heads that are fewer than it."""
    q = config.heads * config.head_size / layout.tp
    kv_heads = config.kv_heads // layout.tp
    return q, max(kv_heads, layout.ulysses) * config.head_size


def _output_is_copied(job: Job, layout: Layout, fused_norms: bool) -> bool:
    """Say whether the output of attention is kept twice: by attention, and as wo's input.

    Ulysses exchanges it; and where documents are attended one by one, on a CPU, they are joined.
    """
    return layout.ulysses > 1 or (job.documents > 1 and not fused_norms)


# ------------------------------------------------------------------------------------ output layer


@attrs.frozen
class Head:
    """Bytes of the last norm, the output layer and the loss, for one microbatch.

    Args:
        kept: What waits for backward.
        beside: What exists besides at the worst moment of the loss and the start of its backward.
    """

    kept: int = 0
    beside: int = 0


def head_activations(job: Job, layout: Layout, *, fused_norms: bool) -> Head:
    """Return what the output layer and the loss keep and need.

    `linear_cross_entropy` makes logits chunk by chunk, and keeps the gradients of the hidden states
    (T x D) and of the weight (V x D, fp32), which are ready when forward ends; backward scales them
    into a second pair. Fewer than 2^22 logits in fp32, and the plain loss, exist all at once:
    log-probabilities are kept, and there are as many gradients of them and of the logits. Under
    tensor parallelism V is a part of the vocabulary.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
        >>> for loss in ("linear", "plain"):
        ...     head = head_activations(attrs.evolve(job, loss=loss), Layout(), fused_norms=True)
        ...     print(f"{(head.kept + head.beside) / 2**30:.1f} GiB")
        5.1 GiB
        13.8 GiB
    """
    config, item = job.config, job.itemsize
    tokens, words = tokens_per_microbatch(job, layout), config.vocab_size // layout.tp
    copies = 1 if fused_norms else 2
    norm = round(tokens * config.width * (copies / layout.tp + 1) * item)
    low = item != _FP32
    if logits_at_once(job, layout):
        logits = tokens * words
        return Head(norm + logits * _FP32, logits * (2 * _FP32 + (item if low else 0)))
    chunk = min(chunk_of_tokens(job, layout), tokens)
    logits = chunk * words * (_FP32 + (item if low else 0))
    gradients = tokens * config.width * item + words * config.width * _FP32
    cast = words * config.width * item if low else 0
    return Head(norm + gradients, max(logits, gradients + cast))


def logits_at_once(job: Job, layout: Layout) -> bool:
    """Say whether all logits of a microbatch exist at once.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=8, rows=1, dtype="fp32")
        >>> logits_at_once(job, Layout()), logits_at_once(job, Layout(tp=2))
        (True, False)
    """
    words = job.config.vocab_size
    few = tokens_per_microbatch(job, layout) * words <= _SMALL
    return job.loss == "plain" or (few and job.dtype == "fp32" and layout.tp == 1)


def chunk_of_tokens(job: Job, layout: Layout) -> int:
    """Return how many tokens' logits exist at a time, as `linear_cross_entropy` chooses.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
        >>> chunk_of_tokens(job, Layout())
        2048
    """
    return max(1, job.config.width // 2, _SMALL // (job.config.vocab_size // layout.tp))


# ------------------------------------------------------------------------------------------ stages


@attrs.frozen
class Part:
    """What a pipeline rank holds: some layers, perhaps the embedding, perhaps the output layer."""

    layers: int
    embedding: bool
    head: bool


def part_of(job: Job, layout: Layout, pp_rank: int) -> Part:
    """Return what a pipeline rank holds, all of its stages together, as `split_layers` cuts it.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("10m"), row_length=8, rows=8)
        >>> [part_of(job, Layout(pp=3), rank).layers for rank in range(3)]
        [3, 3, 2]
    """
    if layout.pp == 1:
        return Part(job.config.layers, embedding=True, head=True)
    holders = rank_of_stages(job.schedule, layout.pp)
    own = [stage for stage, rank in enumerate(holders) if rank == pp_rank]
    sizes = _layers_of_stages(job.config, len(holders))
    return Part(sum(sizes[stage] for stage in own), 0 in own, len(holders) - 1 in own)


@lru_cache(maxsize=64)
def _layers_of_stages(config: DecoderConfig, stages: int) -> tuple[int, ...]:
    block, embedding, head = decoder_costs(config)
    ranges = layer_ranges([block] * config.layers, stages, first=embedding, last=head)
    return tuple(map(len, ranges))


def in_flight(job: Job, layout: Layout, pp_rank: int) -> int:
    """Return the most (stage, microbatch) pairs whose activations a rank holds at once.

    All microbatches for GPipe and looped BFS; p - rank for 1F1B; its interleaved form holds more of
    smaller stages (Narayanan et al., "Efficient large-scale language model training on GPU
    clusters", 2021). Where backward is split, every rank holds as much as the first one of 1F1B,
    and some that wait for their weights' gradients (Qi et al., "Zero bubble pipeline parallelism",
    2023): one, and in torch's interleaved form (2.11 to 2.13) more on later ranks.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("10m"), row_length=8, rows=8)
        >>> [in_flight(job, Layout(pp=4), rank) for rank in range(4)]
        [4, 3, 2, 1]
    """
    p, v, m = layout.pp, stages_per_rank(job, layout), num_microbatches(job, layout)
    if p == 1:
        return 1
    most = {
        "gpipe": m,
        "looped_bfs": v * m,
        "1f1b": p - pp_rank,
        "interleaved_1f1b": 2 * (p - pp_rank - 1) + (v - 1) * p + 1,
        "interleaved_zero_bubble": v * p + 1 + math.ceil(pp_rank / 2),
        "zero_bubble_v": 2 * p + 1,
        "dual_pipe_v": 2 * p + 1,
    }
    return min(most[job.schedule], v * m)


# ---------------------------------------------------------------------------------------- sharding


@attrs.frozen
class Sharding:
    """Bytes that FSDP2 adds, and of gradients that are not scattered yet; zeros without it.

    Args:
        ends: The gathered embedding, last norm and output layer, which stay from forward to the end
            of backward, since they are one unit.
        unit: One gathered block.
        scatter: What one block's reduce-scatter reads, fp32.
        ends_scatter: What that of the ends reads.
    """

    ends: int = 0
    unit: int = 0
    scatter: int = 0
    ends_scatter: int = 0


def sharding_of(
    job: Job, layout: Layout, *, block: Weights, ends: Weights, layers: int
) -> Sharding:
    """Return what FSDP2 gathers: a block at a time and the next one ahead, and the ends all along.

    Zhao et al., "PyTorch FSDP" (2023). With one data-parallel rank there is no FSDP; bf16 is then
    autocast's, which keeps a copy of every weight until the microbatch is done.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny", vocab_size=256), row_length=8, rows=8)
        >>> units = units_of(job.config, Layout(dp_shard=8))
        >>> rest = dict(block=units.block, ends=units.embedding + units.norm, layers=4)
        >>> sharding_of(job, Layout(dp_shard=8), **rest)
        Sharding(ends=65792, unit=426496, scatter=852992, ends_scatter=131584)
    """
    if layout.fsdp * layout.dp_replicate > 1:
        stay = 0 if reshards(job, layout) else layers * block.whole
        return Sharding(
            ends=(ends.whole + stay) * job.itemsize,
            unit=0 if stay else block.whole * job.itemsize,
            scatter=block.whole * _FP32,
            ends_scatter=ends.whole * _FP32,
        )
    cast = job.itemsize if job.dtype != "fp32" else 0
    return Sharding(ends=(ends.whole + layers * block.whole) * cast)


def buffers_of(job: Job, layout: Layout, pp_rank: int) -> int:
    """Return the bytes of communication buffers that live through a step.

    The ring holds two blocks of keys and values, the present and the next one, in backward as many
    of their gradients in fp32, and an fp32 sum of the queries' gradients (or of the output). The
    pipeline stages of torch (2.11 to 2.13) hold a receiving buffer for every microbatch of a step
    and each of their boundaries.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=256, rows=8)
        >>> buffers_of(job, Layout(), 0)
        0
    """
    tokens, config = tokens_per_microbatch(job, layout), job.config
    q, k = attention_widths(config, layout)
    ring = tokens * (4 * k * (job.itemsize + _FP32) + q * _FP32) if layout.ring > 1 else 0
    if layout.pp == 1:
        return round(ring)
    boundary = tokens * config.width / layout.tp * job.itemsize
    borders = pipeline_borders(job, layout, pp_rank)
    return round(ring + num_microbatches(job, layout) * borders * boundary)


def pipeline_borders(job: Job, layout: Layout, pp_rank: int) -> int:
    """Return how many borders a rank's stages have with stages of other ranks.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("10m"), row_length=8, rows=8, schedule="dual_pipe_v")
        >>> [pipeline_borders(job, Layout(pp=3), rank) for rank in range(3)]
        [2, 4, 2]
    """
    holders = rank_of_stages(job.schedule, layout.pp)
    return sum(a != b and pp_rank in (a, b) for a, b in pairwise(holders))


# -------------------------------------------------------------------------------------------- peak


def memory_of(job: Job, layout: Layout, *, fused_norms: bool = True) -> Memory:
    """Return what the pipeline rank holds that needs most.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("llama-3.1-8b"), row_length=8192, rows=64)
        >>> memory = memory_of(job, Layout(dp_shard=64))
        >>> memory.parameters * 64 / 4 / 1e9  # billions of parameters
        8.0302...
        >>> memory.moment
        'loss'
    """
    ranks = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    found = [_memory_of_rank(job, layout, rank, fused_norms) for rank in ranks]
    return max(found, key=lambda memory: memory.peak)


def _memory_of_rank(job: Job, layout: Layout, pp_rank: int, fused_norms: bool) -> Memory:
    part, units = part_of(job, layout, pp_rank), units_of(job.config, layout)
    ends = ends_of(part, units, tied=job.config.tied)
    own = units.block * part.layers + ends
    states = _STATES[job.optimizer]
    rank = _Rank(
        job=job,
        part=part,
        block=units.block,
        ends=ends,
        activations=block_activations(job, layout, fused_norms=fused_norms),
        head=head_activations(job, layout, fused_norms=fused_norms) if part.head else Head(),
        sharding=sharding_of(job, layout, block=units.block, ends=ends, layers=part.layers),
        layers=part.layers / stages_per_rank(job, layout),
        held=in_flight(job, layout, pp_rank),
        later=num_microbatches(job, layout) * stages_per_rank(job, layout) - 1,
        heads=_heads_in_flight(job, layout, pp_rank),
    )
    parameters = own.shard * _FP32
    optimizer = states * parameters + (_FP32 * own.tensors if states == 2 else 0)
    buffers = buffers_of(job, layout, pp_rank)
    moments = _moments(rank)
    moment = max(moments, key=lambda name: moments[name])
    one, shard = rank.activations, rank.sharding
    return Memory(
        parameters=parameters,
        gradients=parameters,
        optimizer=optimizer,
        activations=round((rank.held * rank.layers - 1) * one.kept + one.backward),
        logits=rank.heads * rank.head.kept + rank.head.beside,
        gathered=shard.ends + 2 * shard.unit + shard.scatter + _unreduced(rank),
        buffers=buffers,
        peak=round(parameters + optimizer + buffers + moments[moment]),
        moment=moment,
        pp_rank=pp_rank,
    )


def ends_of(part: Part, units: Units, *, tied: bool) -> Weights:
    """Return what a rank owns besides its blocks; the last stage has a copy of a tied embedding."""
    first = units.embedding if part.embedding else Weights()
    last = units.norm if part.head else Weights()
    if part.head and not (tied and part.embedding):
        last += units.embedding if tied else units.head
    return first + last


@attrs.frozen
class _Rank:
    """All that the moments of a rank's step are made of.

    `layers` are those of one stage, `held` the stages times microbatches that wait for backward,
    `later` how many of them can while others have left their gradients behind, `heads` how many
    microbatches have seen the output layer and wait.
    """

    job: Job
    part: Part
    block: Weights
    ends: Weights
    activations: Block
    head: Head
    sharding: Sharding
    layers: float
    held: int
    later: int
    heads: int

    @property
    def gradients(self) -> int:
        """Bytes of this rank's part of all gradients."""
        return (self.block.shard * self.part.layers + self.ends.shard) * _FP32


def _heads_in_flight(job: Job, layout: Layout, pp_rank: int) -> int:
    """Return how many microbatches have seen the output layer and wait for backward, or a part.

    All where forwards come first, else one; the interleaved zero bubble delays the gradients of
    weights by as many as the rank's number.
    """
    if layout.pp > 1 and job.schedule in ("gpipe", "looped_bfs"):
        return num_microbatches(job, layout)
    delayed = layout.pp > 1 and job.schedule == "interleaved_zero_bubble"
    return min(1 + pp_rank, num_microbatches(job, layout)) if delayed else 1


def _unreduced(rank: _Rank) -> int:
    """Return the bytes of whole gradients that wait for the last microbatch, above their shards."""
    if rank.later == 0 or rank.job.reduce == "each" or not rank.sharding.scatter:
        return 0
    return (rank.block.whole * rank.part.layers + rank.ends.whole) * _FP32 - rank.gradients


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


def _moments_of_pass(rank: _Rank, held: int, *, before: int) -> dict[str, float]:
    """Return the moments of one backward that begins with `before` bytes of gradients.

    A gradient that is there already is added to, so that only one weight's is there twice; that of
    a tied embedding waits until the embedding's own part is there.
    """
    one, shard = rank.activations, rank.sharding
    words = _output_weight(rank)
    waits = words if rank.part.embedding and rank.job.config.tied else 0
    block = rank.block.shard * _FP32
    at_start = before + waits if before else words
    at_end = before + waits if before else words + block * (rank.part.layers - 1)
    all_kept = held * rank.layers * one.kept
    all_kept += max(0, rank.heads - 1 - (before > 0)) * rank.head.kept
    others_kept = all_kept - rank.layers * one.kept
    weight = rank.block.largest * rank.job.itemsize
    of_block = rank.block.whole * rank.job.itemsize if shard.scatter else weight
    gathered = shard.ends + 2 * shard.unit
    return {
        "loss": before + all_kept + rank.head.kept + rank.head.beside + shard.ends,
        "backward of the last block": (
            at_start + all_kept - one.kept + one.backward + weight + gathered
        ),
        "backward of the first block": (
            at_end + others_kept + one.backward + weight + gathered + shard.scatter
        ),
        "reduction of a block": (
            at_end + others_kept + of_block + shard.ends + shard.unit + shard.scatter
        ),
        "reduction of the ends": (
            (before or at_end + block) + others_kept + words + waits
            + shard.ends + shard.ends_scatter
        ),
    }  # fmt: skip


def _output_weight(rank: _Rank) -> int:
    """Return the bytes of the gradient of the output weight, or of the embedding."""
    return rank.ends.largest * rank.job.itemsize
