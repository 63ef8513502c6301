"""What a block and the output layer keep for the backward pass, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.parallel.recompute import read_mode
from trainkit.parallel.recompute_budget import WHOLE, Result, fitting
from trainkit.tools.planning.jobs import FP32, Job
from trainkit.types import Layout

_SMALL = 2**22  # elements: losses.linear_cross_entropy has logits below this in one chunk


@attrs.frozen
class Block:
    """Bytes of one block and one microbatch.

    Args:
        kept: What waits for backward.
        backward: What exists at the worst moment of its backward, with what is computed again.
        movable: What of `kept` may lie in host memory meanwhile; see
            `parallel.offload_activations`.
        used: What of it backward needs at once, whatever may stay: three for two gradients.
        again: Which part of its products, and of attention, backward computes again.
        split: The gradients that those of its weights are made of, which a schedule that splits
            backward holds meanwhile.
    """

    kept: int
    backward: int
    movable: int
    used: int
    again: tuple[float, float]
    split: int = 0


def block_activations(
    job: Job, layout: Layout, *, fused_norms: bool, experts: bool = False
) -> Block:
    """Return what one block keeps for its backward, and the most that this backward holds.

    Without recomputation, in elements per token, with tp = ring = ulysses = 1:

        6 D + 2 Q + 2 K + 4 F + H

    the input of both norms, the normed copy (only where a norm is not one kernel, which then keeps
    both in fp32) and the output of both; rotated queries, keys, values, and attention's output;
    gate, silu(gate), up and their product; attention's log-sum-exp, one fp32 number per head.
    Recomputation keeps the block's input, D, and results of operators: those of the groups that it
    names, or what fits into a fraction of all of the above. See `results_of`.
    Backward computes the rest again, one block at a time. Tensor parallelism divides all but two D,
    the gathered inputs of attention and MLP. Ulysses keeps attention's output a second time,
    exchanged back.

    Latent attention has in place of D + 2 Q + 2 K, for R and C columns of latents of queries, and
    of keys and values, D + 2 R + 2 C and what attention is given and gives; where heads of values
    are narrower, kernels fill them up, so that this is 4 Q for equal numbers of heads, and O for
    the O columns of the output that are cut from it. Tensor parallelism gathers normed latents and
    divides D.

    The worst moment of backward is the product of the MLP: two gradients of F and the incoming one
    of D besides all that is kept; or, where heads are wider than the MLP, attention, when what the
    MLP has kept is gone: gradients of queries, keys, values and the output.

    An expert layer has in place of the MLP's D + 4 F, for k experts of a token and S columns of the
    shared one,

        D + k (2 D + 4 F) + 4 S

    the normed input, rows in the order of experts and their outputs, and for each row as much as an
    MLP keeps; and in numbers of 4 bytes 2 E + 8 k + 4: logits and scores, choices, their weights,
    two orders of them (over ep also 4 k, two orders of what comes). In bf16 the router reads an
    input of its own, in fp32. All recomputation keeps the choices, 2 k of these. Rows are taken to
    be balanced over ep: as many come as go. Backward holds, beside the incoming D and the gradients
    of E, k D more, or gradients of the product as in an MLP if these are larger; a forward pass
    that is repeated has its result beside. Tensor parallelism divides all of this, by tokens.

    The counting follows Korthikanti et al., "Reducing activation recomputation in large transformer
    models" (2022), section 4, for their block of LayerNorm, GELU and dropout.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.types import Precision
        >>> kept = Precision(compute="fp32")
        >>> job = Job(config=make_decoder_config("tiny"), row_length=100, rows=1, precision=kept)
        >>> block_activations(job, Layout(), fused_norms=True).kept / 400  # 8 D + 4 F + H + 2
        2566.0
    """
    item, tokens = job.itemsize, tokens_per_microbatch(job, layout)
    first, half = _halves(job, layout, fused_norms, experts=experts)
    split = job.config.width / layout.tp  # between the blocks, whose tokens tp divides
    numbers = first.numbers + 2 / layout.tp + half.numbers  # also a root mean square per norm
    norms = 2 * split * _of_norm(job, fused_norms)
    everything = norms + first.kept + half.kept
    worst = max(everything + half.beside, norms / 2 + first.kept + first.beside)
    whole, given = everything * item + numbers * FP32, split * item
    results, mode = _numbered(first, half), read_mode(job.recompute)
    # Of a block's last product, which is no result, and of its normed inputs.
    passed = given + 2 * split * (item if fused_norms else FP32)
    held, movable, left = whole, whole, list[Result]()
    if mode is not None:
        keeps = mode if mode.budget is None else fitting(results, mode.budget * whole - given)
        left = [x for x in results if not keeps(x.group, x.number)]
        stay = sum(x.size for x in results if x not in left)
        held, movable = given + half.choices * FP32 + stay, given
    return Block(
        kept=round(tokens * held),
        backward=round(tokens * (worst * item + numbers * FP32)),
        movable=round(tokens * movable),
        used=round(tokens * min(movable, 1.5 * (half.beside - split) * item)),
        again=(
            _operations(left) / _operations(results),
            float(any(x.group == "attention" for x in left)),
        ),
        split=round(tokens * (sum(x.size for x in results if x.group == "products") + passed)),
    )


def _operations(results: Sequence[Result]) -> float:
    return sum(x.inner * x.size for x in results)


def results_of(job: Job, layout: Layout, *, experts: bool = False) -> list[Result]:
    """Return the results of a block that recomputation can keep, in the order that it makes them.

    Sizes are bytes of a token. Products with matrices, the last one only where more than a sum asks
    for it; attention, and each step of a ring is one; and what comes from ranks of ep and goes
    back.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny"), row_length=100, rows=1)
        >>> [(x.group, x.inner) for x in results_of(job, Layout())][2:5]
        [('products', 128), ('attention', 0), ('products', 128.0)]
    """
    return _numbered(*_halves(job, layout, fused_norms=True, experts=experts))


def _numbered(first: _Half, half: _Half) -> list[Result]:
    results = [*first.results, *half.results]
    products = [i for i, x in enumerate(results) if x.group == "products"]
    for number, i in enumerate(products):
        results[i] = attrs.evolve(results[i], number=number)
    return results


@attrs.frozen
class _Half:
    """Numbers per token of attention or what follows it, in the computation's dtype or in fp32.

    Args:
        kept: What waits for backward without recomputation, without the input of the norm.
        results: What recomputation can keep, in bytes.
        beside: Gradients at the worst moment of backward.
        numbers: What is kept in fp32.
        choices: What is on the tape of a forward pass that is repeated.
    """

    kept: float
    results: Sequence[Result]
    beside: float
    numbers: float = 0.0
    choices: float = 0.0


def _halves(job: Job, layout: Layout, fused_norms: bool, *, experts: bool) -> tuple[_Half, _Half]:
    of = _of_latents if job.config.latents is not None else _of_attention
    rest = _of_experts(job, layout) if experts else _of_mlp(job, layout.tp)
    return of(job, layout, fused_norms), rest


def _products(item: float, *shapes: tuple[float, float]) -> list[Result]:
    """Return the results of products by (inner width, columns)."""
    return [Result("products", WHOLE, inner, columns * item) for inner, columns in shapes]


def _attended(job: Job, layout: Layout, columns: float) -> list[Result]:
    heads = job.config.heads // layout.tp
    return [Result("attention", WHOLE, 0, columns * job.itemsize + heads * FP32)] * layout.ring


def _of_attention(job: Job, layout: Layout, fused_norms: bool) -> _Half:
    config, tp, item = job.config, layout.tp, job.itemsize
    d, heads, kv_heads = config.width, config.heads // tp, config.kv_heads // tp
    q, k, *_ = attention_widths(config, layout)
    kept = d + 2 * q + 2 * k + (q if _output_is_copied(job, layout, fused_norms) else 0)
    if config.qk_norm:
        kept += _of_norm(job, fused_norms) * (q + kv_heads * config.head_size)
    made = _products(item, (d, q), *[(d, kv_heads * config.head_size)] * 2)
    return _Half(
        kept=kept,
        results=[*made, *_attended(job, layout, q), *_products(item, (q, d))],
        beside=d / tp + 2 * q + 2 * k,
        numbers=heads + bool(config.qk_norm) * (heads + kv_heads),
    )


def _of_latents(job: Job, layout: Layout, fused_norms: bool) -> _Half:
    config, tp, made, item = job.config, layout.tp, job.config.latents, job.itemsize
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
    rank = made.query_rank or 0
    queries = rank * (1 + copies / tp) or d * (tp > 1)
    latents = queries + made.kv_rank * (1 + copies / tp)
    kernel = max(q, wide) + max(k, wide) + values + max(out, wide)  # and as many gradients
    of_queries = [(d, rank / tp), (rank, q)] if rank else [(d, q)]
    of_keys = (d, made.kv_rank / tp), (made.kv_rank, made_of), (d, made.rotary / tp)
    return _Half(
        kept=d / tp + latents + kernel + exchanged + again,
        results=[
            *_products(item, *of_queries, *of_keys),
            *_attended(job, layout, max(q, out)),
            *_products(item, (out, d)),
        ],
        beside=d / tp + kernel - again,
        numbers=heads + (1 + (rank > 0)) / tp,
    )


def _of_mlp(job: Job, tp: int) -> _Half:
    config = job.config
    d, f, products = config.width, config.mlp_width // tp, 1 + config.how_fed.gated
    after = [(f, d)] * config.how_normed.after  # without, nobody asks for the result
    return _Half(
        kept=d + 2 * products * f,
        results=_products(job.itemsize, *[(d, f)] * products, *after),
        beside=d + products * f,
    )


def _of_experts(job: Job, layout: Layout) -> _Half:
    experts, d, tp = job.config.experts, job.config.width, layout.tp
    assert experts is not None
    k, f, shared = experts.chosen, experts.width, experts.shared
    item, again = job.itemsize / tp, job.recompute != "none"
    low = job.itemsize != FP32
    inputs = d * (not low or shared > 0)
    summed = d * (1 + low * FP32 / job.itemsize)  # rows are weighted and summed in fp32
    scores = experts.count * FP32 / job.itemsize
    dealt = layout.ep > 1
    sent = [Result("exchanges", WHOLE, 0, k * d * item)] * dealt
    own = _products(item, (d, k * f), (d, k * f), (f, k * d))
    beside = _products(item, (d, shared), (d, shared), (shared, d)) if shared else []
    return _Half(
        kept=(inputs + k * (2 * d + 4 * f) + 4 * shared) / tp,
        results=[*_products(item, (d, scores)), *sent, *own, *sent, *beside],
        beside=(d + d * again + scores + k * max(summed, 2 * f - d)) / tp,
        numbers=(2 * experts.count + (8 + 4 * dealt) * k + 4 + d * low) / tp,
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
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny"), row_length=256, rows=8, microbatch=4)
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

    Ulysses exchanges it; and where documents, or parts of one that is longer than a window, are
    attended one by one, on a CPU, they are joined.
    """
    sliding = job.config.sliding
    cut = job.documents > 1 or (sliding is not None and sliding.window < job.row_length)
    return layout.ulysses > 1 or (cut and not fused_norms)


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
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
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
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.types import Precision
        >>> kept = Precision(compute="fp32")
        >>> job = Job(config=make_decoder_config("tiny"), row_length=8, rows=1, precision=kept)
        >>> logits_at_once(job, Layout()), logits_at_once(job, Layout(tp=2))
        (True, False)
    """
    words = job.config.vocab_size
    few = tokens_per_microbatch(job, layout) * words <= _SMALL
    return job.loss == "plain" or (few and job.precision.compute == "fp32" and layout.tp == 1)


def chunk_of_tokens(job: Job, layout: Layout) -> int:
    """Return how many tokens' logits exist at a time, as `linear_cross_entropy` chooses.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
        >>> chunk_of_tokens(job, Layout())
        2048
    """
    return max(1, job.config.width // 2, _SMALL // (job.config.vocab_size // layout.tp))
