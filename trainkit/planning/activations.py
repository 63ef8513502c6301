"""What a block and the output layer keep for the backward pass, in bytes."""

from __future__ import annotations

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.planning.jobs import FP32, Job
from trainkit.types import Layout

_SMALL = 2**22  # elements: losses.linear_cross_entropy has logits below this in one chunk


@attrs.frozen
class Block:
    """Bytes of one block and one microbatch.

    Args:
        kept: What waits for backward.
        backward: What exists at the worst moment of its backward, with what is computed again.
    """

    kept: int
    backward: int


def block_activations(
    job: Job, layout: Layout, *, fused_norms: bool, experts: bool = False
) -> Block:
    """Return what one block keeps for its backward, and the most that this backward holds.

    Without recomputation, in elements per token, with tp = ring = ulysses = 1:

        6 D + 2 Q + 2 K + 4 F + H

    the input of both norms, the normed copy (only where a norm is not one kernel, which then keeps
    both in fp32) and the output of both; rotated queries, keys, values, and attention's output;
    gate, silu(gate), up and their product; attention's log-sum-exp, one fp32 number per head.
    `selective` keeps the results of the matrix products and of attention and the block's input, 2 D
    + 2 Q + 2 K + 2 F + H, where every step of a ring counts as an attention; D more where a norm
    follows the MLP, which asks for its last result; `full` the input, D.
    Backward computes the rest again, one block at a time. Tensor parallelism divides all but two D,
    the gathered inputs of attention and MLP. Ulysses keeps attention's output a second time,
    exchanged back.

    Latent attention has in place of D + 2 Q + 2 K, for R and C columns of latents of queries, and
    of keys and values, D + 2 R + 2 C and what attention is given and gives; where heads of values
    are narrower, kernels fill them up, so that this is 4 Q for equal numbers of heads, and O for
    the O columns of the output that are cut from it. Tensor parallelism gathers normed latents and
    divides D. `selective` keeps in place of D + 2 Q + 2 K all results of products.

    The worst moment of backward is the product of the MLP: two gradients of F and the incoming one
    of D besides all that is kept; or, where heads are wider than the MLP, attention, when what the
    MLP has kept is gone: gradients of queries, keys, values and the output.

    An expert layer has in place of the MLP's D + 4 F, for k experts of a token and S columns of the
    shared one,

        D + k (2 D + 4 F) + 4 S

    the normed input, rows in the order of experts and their outputs, and for each row as much as an
    MLP keeps; and in numbers of 4 bytes 2 E + 8 k + 4: logits and scores, choices, their weights,
    two orders of them (over ep also 4 k, two orders of what comes). In bf16 the router reads an
    input of its own, in fp32. `selective` keeps k (D + 2 F) + D + 2 S, D more with a shared one,
    and E; over ep also the rows that have come there and back, 2 k D. Rows are taken to be balanced
    over ep: as many come as go. Backward holds, beside the incoming D and the gradients of E, k D
    more, or gradients of the product as in an MLP if these are larger; a forward pass that is
    repeated has its result beside. Tensor parallelism divides all of this, by tokens.

    The counting follows Korthikanti et al., "Reducing activation recomputation in large transformer
    models" (2022), section 4, for their block of LayerNorm, GELU and dropout.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> from trainkit.types import Precision
        >>> kept = Precision(compute="fp32")
        >>> job = Job(config=decoder_config("tiny"), row_length=100, rows=1, precision=kept)
        >>> block_activations(job, Layout(), fused_norms=True).kept / 400  # 8 D + 4 F + H + 2
        2566.0
    """
    config, item, tp = job.config, job.itemsize, layout.tp
    tokens = tokens_per_microbatch(job, layout)
    split = config.width / tp  # between the blocks, whose tokens tensor parallelism divides
    first = _of_latents if config.latents is not None else _of_attention
    first = first(job, layout, fused_norms)
    half = _of_experts(job, layout) if experts else _of_mlp(config, tp)
    numbers = first.numbers + 2 / tp + half.numbers  # fp32, also a root mean square per norm
    norms = 2 * split * _of_norm(job, fused_norms)
    everything = norms + first.kept + half.kept
    kept, numbers_kept = {
        "none": (everything, numbers),
        "selective": (
            split + first.products + half.products,
            first.scores + half.scores + half.choices,
        ),
        "full": (split, half.choices),
    }[job.recompute]
    worst = max(everything + half.beside, norms / 2 + first.kept + first.beside)
    return Block(
        kept=round(tokens * (kept * item + numbers_kept * FP32)),
        backward=round(tokens * (worst * item + numbers * FP32)),
    )


@attrs.frozen
class _Half:
    """Numbers per token of attention or what follows it, in the computation's dtype or in fp32.

    Args:
        kept: What waits for backward without recomputation, without the input of the norm.
        products: Results of matrix products.
        beside: Gradients at the worst moment of backward.
        numbers: What is kept in fp32.
        scores: The part of them that are results of matrix products.
        choices: What is on the tape of a forward pass that is repeated.
    """

    kept: float
    products: float
    beside: float
    numbers: float = 0.0
    scores: float = 0.0
    choices: float = 0.0


def _of_attention(job: Job, layout: Layout, fused_norms: bool) -> _Half:
    config, tp = job.config, layout.tp
    d, heads, kv_heads = config.width, config.heads // tp, config.kv_heads // tp
    q, k, *_ = attention_widths(config, layout)
    kept = d + 2 * q + 2 * k + (q if _output_is_copied(job, layout, fused_norms) else 0)
    if config.qk_norm:
        kept += _of_norm(job, fused_norms) * (q + kv_heads * config.head_size)
    return _Half(
        kept=kept,
        products=d + (1 + layout.ring) * q + 2 * k,
        beside=d / tp + 2 * q + 2 * k,
        numbers=heads + bool(config.qk_norm) * (heads + kv_heads),
        scores=heads,
    )


def _of_latents(job: Job, layout: Layout, fused_norms: bool) -> _Half:
    config, tp, made = job.config, layout.tp, job.config.latents
    assert made is not None
    d, heads, copies = config.width, config.heads // tp, _of_norm(job, fused_norms)
    q, k, v, out = attention_widths(config, layout)
    # Kernels take one size of head, and fill up with zeros what is narrower; the ring's inside.
    wide = heads * max(config.head_size, config.value_size) if layout.ring == 1 else 0
    filled, cut = v < wide, out < wide
    made_of = heads * (made.plain + made.values)  # of which values are a view, until something is
    values = max(v, wide) if filled else made_of if layout.ulysses == 1 else v
    exchanged = v * filled * (layout.ulysses > 1)
    again = out * (cut or _output_is_copied(job, layout, fused_norms))
    queries = (made.query_rank or 0) * (1 + copies / tp) or d * (tp > 1)
    latents = queries + made.kv_rank * (1 + copies / tp)
    kernel = max(q, wide) + max(k, wide) + values + max(out, wide)  # and as many gradients
    narrow = ((made.query_rank or 0) + made.kv_rank + made.rotary) / tp
    return _Half(
        kept=d / tp + latents + kernel + exchanged + again,
        products=d + narrow + q + made_of + layout.ring * max(q, out),
        beside=d / tp + kernel - again,
        numbers=heads + (1 + (made.query_rank is not None)) / tp,
        scores=heads,
    )


def _of_mlp(config: DecoderConfig, tp: int) -> _Half:
    d, f, gated = config.width, config.mlp_width // tp, config.how_fed.gated
    products = 1 + gated
    after = d * config.how_normed.after  # without, nobody asks for the result
    return _Half(kept=d + 2 * products * f, products=after + products * f, beside=d + products * f)


def _of_experts(job: Job, layout: Layout) -> _Half:
    experts, d, tp = job.config.experts, job.config.width, layout.tp
    assert experts is not None
    k, f, shared = experts.chosen, experts.width, experts.shared
    low, again = job.itemsize != FP32, job.recompute != "none"
    inputs = d * (not low or shared > 0)
    scores = experts.count * FP32 / job.itemsize
    dealt = layout.ep > 1
    return _Half(
        kept=(inputs + k * (2 * d + 4 * f) + 4 * shared) / tp,
        products=(k * (d + 2 * f + 2 * d * dealt) + d + (2 * shared + d) * (shared > 0)) / tp,
        beside=(d + d * again + scores + k * max(d, 2 * f - d)) / tp,
        numbers=(2 * experts.count + (8 + 4 * dealt) * k + 4 + d * low) / tp,
        scores=experts.count / tp,
        choices=2 * k / tp,
    )


def _of_norm(job: Job, fused_norms: bool) -> int:
    """Return how many numbers a norm keeps for each of its input, in the computation's dtype.

    Its input; where it is not one kernel also the normed one, and both are in fp32.
    """
    return 1 if fused_norms else 2 * FP32 // job.itemsize


def tokens_per_microbatch(job: Job, layout: Layout) -> int:
    """Return T, the tokens of a microbatch on one rank.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=256, rows=8, microbatch=4)
        >>> tokens_per_microbatch(job, Layout(ring=2))
        512
    """
    return job.microbatch * job.row_length // layout.count("sp")


def attention_widths(config: DecoderConfig, layout: Layout) -> tuple[float, float, float, float]:
    """Return the columns of queries, keys, values and the output as attention sees them.

    Ulysses repeats key heads that are fewer than it.
    """
    heads, kv_heads = config.heads / layout.tp, max(config.kv_heads // layout.tp, layout.ulysses)
    size, of_values = config.head_size, config.value_size
    return heads * size, kv_heads * size, kv_heads * of_values, heads * of_values


def _output_is_copied(job: Job, layout: Layout, fused_norms: bool) -> bool:
    """Say whether the output of attention is kept twice: by attention, and as wo's input.

    Ulysses exchanges it; and where documents are attended one by one, on a CPU, they are joined.
    """
    return layout.ulysses > 1 or (job.documents > 1 and not fused_norms)


@attrs.frozen
class Head:
    """Bytes of the last norm, the output layer and the loss, for one microbatch.

    Args:
        kept: What waits for backward.
        beside: What exists besides at the worst moment of the loss and the start of its backward.
    """

    kept: int = 0
    beside: int = 0


def head_activations(job: Job, layout: Layout, *, fused_norms: bool, trained: bool = True) -> Head:
    """Return what the output layer and the loss keep and need.

    `linear_cross_entropy` makes logits chunk by chunk, and keeps the gradients of the hidden states
    (T x D) and of the weight (V x D, fp32), if that is `trained`, which are ready when forward
    ends; backward scales them into a second pair. Under tensor parallelism V is a part of the
    vocabulary. Fewer than 2^22 logits in fp32 without it exist all at once, and those of the plain
    loss, whole in every layout: log-probabilities are kept, and there are as many gradients of them
    and of the logits.

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
    parts = 1 if job.loss == "plain" else layout.tp
    tokens, words = tokens_per_microbatch(job, layout), config.vocab_size // parts
    copies = _of_norm(job, fused_norms)
    norm = round(tokens * config.width * (copies / layout.tp + 1) * item)
    low = item != FP32
    if logits_at_once(job, layout):
        logits = tokens * words
        return Head(norm + logits * FP32, logits * (2 * FP32 + (item if low else 0)))
    chunk = min(chunk_of_tokens(job, layout), tokens)
    logits = chunk * words * (FP32 + (item if low else 0))
    weight = words * config.width
    gradients = tokens * config.width * item + weight * FP32 * trained
    cast = weight * item if low else 0
    return Head(norm + gradients, max(logits, gradients + cast))


def logits_at_once(job: Job, layout: Layout) -> bool:
    """Say whether all logits of a microbatch exist at once.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> from trainkit.types import Precision
        >>> kept = Precision(compute="fp32")
        >>> job = Job(config=decoder_config("tiny"), row_length=8, rows=1, precision=kept)
        >>> logits_at_once(job, Layout()), logits_at_once(job, Layout(tp=2))
        (True, False)
    """
    words = job.config.vocab_size
    few = tokens_per_microbatch(job, layout) * words <= _SMALL
    return job.loss == "plain" or (few and job.precision.compute == "fp32" and layout.tp == 1)


def chunk_of_tokens(job: Job, layout: Layout) -> int:
    """Return how many tokens' logits exist at a time, as `linear_cross_entropy` chooses.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
        >>> chunk_of_tokens(job, Layout())
        2048
    """
    return max(1, job.config.width // 2, _SMALL // (job.config.vocab_size // layout.tp))
