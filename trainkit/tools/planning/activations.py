"""Bytes of the activations that a block and the output layer save for backward."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trainkit.attention.gated_delta import choose_chunk
from trainkit.batch import spans_from_rows
from trainkit.models.config import DecoderConfig
from trainkit.parallel.recompute import read_mode
from trainkit.parallel.recompute_budget import WHOLE, Result, choose_fitting
from trainkit.tools.planning.jobs import FP32, Job
from trainkit.types import Layout

_MAX_CHUNK_LOGITS = 2**22  # losses.linear_cross_entropy computes fewer in one chunk


@attrs.frozen
class Block:
    """Bytes of one block and one microbatch.

    Args:
        saved: Activations saved for backward.
        backward: Peak memory of its backward, with recomputed activations.
        movable: The part of `saved` that may be offloaded; see `parallel.offload_activations`.
        used: The part of `movable` that backward needs at once on the device: three for two
            gradients.
        again: Fractions of its matmuls, and of attention, that backward recomputes.
        split: Output gradients that a schedule with a split backward holds until it computes the
            gradients of the weights.
    """

    saved: int
    backward: int
    movable: int
    used: int
    again: tuple[float, float]
    split: int = 0


def estimate_block(
    job: Job, layout: Layout, *, fused_norms: bool, experts: bool = False, delta: bool = False
) -> Block:
    """Estimate the activations that one block saves for backward, and the peak of its backward.

    Without recomputation, in elements per token, with tp = ring = ulysses = 1:

        6 D + 2 Q + 2 K + 4 F + H

    the input of both norms, the normed copy (only where a norm is not one kernel; both are then in
    fp32) and the output of both; rotated queries, keys, values, and attention's output; gate,
    silu(gate), up and their product; attention's log-sum-exp, one fp32 number per head.
    Recomputation saves the block's input, D, and outputs of operators: of the groups that it names,
    or as many as fit into a fraction of all of the above. See `list_results`. Backward recomputes
    the others, one block at a time. Tensor parallelism divides all but two D, the gathered inputs
    of attention and MLP. Ulysses saves attention's output twice, before and after its all-to-all.

    A gate of attention's output adds 2 Q. Latent attention replaces D + 2 Q + 2 K, for R and C
    columns of latents of queries, and of keys and values, by D + 2 R + 2 C and attention's inputs
    and output. Kernels pad narrower value heads, so that the latter are 4 Q for equal numbers of
    heads, and O for the O columns of the output without the padding. Tensor parallelism gathers
    normed latents and divides D.

    The peak of backward is at the product in the MLP: two gradients of F and the incoming one of D,
    with all saved activations; or, where heads are wider than the MLP, at attention, after those of
    the MLP are freed: gradients of queries, keys, values and the output.

    An expert layer replaces the MLP's D + 4 F, for k experts of a token and S columns of the shared
    one, by

        D + k (2 D + 4 F) + 4 S

    the normed input, rows sorted by expert and their outputs, and for each row the activations of
    an MLP (7 F with a clamp in place of 4 F); and 2 E + 8 k + 4 numbers of 4 bytes: logits and
    scores, choices, their weights, two permutations (over ep also 4 k, two permutations of received
    rows). In bf16 the router has a separate input in fp32; with a gate of the shared expert there
    is one more D. Recomputation always saves the choices, 2 k of these. Rows are assumed to be
    balanced over ep. The peak of backward adds the incoming D and the gradients of E, and k D or
    the gradients of the product as in an MLP, if these are larger, and the output of a repeated
    forward pass. Tensor parallelism divides all of this, by tokens.

    A delta layer replaces 2 Q + 2 K + H, for K key heads of D columns, H value heads of E, the C =
    2 K D + H E columns of the convolutions, and chunks of c tokens, by

        3 C + 6 H E + 2 K D + H (D + D (D + E) / c) + 2 K + 5 H

    the convolution's input and output and its SiLU; five tensors around the gated norm (four where
    it is one kernel) and the input of the last product; normed queries and keys; what the tokens
    read of the states, the maps of the chunks and the states before them; the lengths of heads, and
    gates. All but the convolution's and the last product's are in fp32, and in bf16 there are two
    more K D. The insides of chunks are computed again in backward. Their peak, 14 H D + 1.3 H E +
    5.6 K D, is fitted to measurements on a CPU, for D from 16 to 128, within 4 %. A ring computes
    each scan twice, and saves D (D + E) a head for both parts of every document.

    The counting follows Korthikanti et al., "Reducing activation recomputation in large transformer
    models" (2022), section 4, for their block of LayerNorm, GELU and dropout.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.types import Precision
        >>> fp32 = Precision(compute="fp32")
        >>> job = Job(config=make_decoder_config("tiny"), row_length=100, rows=1, precision=fp32)
        >>> estimate_block(job, Layout(), fused_norms=True).saved / 400  # 8 D + 4 F + H + 2
        2566.0
    """
    item = job.itemsize
    tokens = tokens_per_microbatch(job, layout)
    attention, mlp = _estimate_halves(job, layout, fused_norms, experts=experts, delta=delta)
    width = job.config.width / layout.tp  # between the blocks, whose tokens tp divides
    fp32_elements = attention.numbers + 2 / layout.tp + mlp.numbers  # also an rms per norm
    norms = 2 * width * _count_norm_copies(job, fused_norms)
    elements = norms + attention.saved + mlp.saved
    peak = max(elements + mlp.gradients, norms / 2 + attention.saved + attention.gradients)
    num_bytes = elements * item + fp32_elements * FP32
    input_bytes = width * item
    results = _number_products(attention, mlp)
    mode = read_mode(job.recompute)
    # Output gradients of a block's last product, which is not among the results, and of its norms.
    passed = input_bytes + 2 * width * (item if fused_norms else FP32)
    product_bytes = sum(x.size for x in results if x.group == "products")
    saved = num_bytes
    movable = num_bytes
    recomputed = list[Result]()
    if mode is not None:
        # The block's input is saved in any case, and takes part of the budget.
        budget = mode.budget
        is_saved = (
            mode if budget is None else choose_fitting(results, budget * num_bytes - input_bytes)
        )
        recomputed = [x for x in results if not is_saved(x.group, x.number)]
        result_bytes = sum(x.size for x in results if x not in recomputed)
        saved = input_bytes + mlp.choices * FP32 + result_bytes
        movable = input_bytes
    return Block(
        saved=round(tokens * saved),
        backward=round(tokens * (peak * item + fp32_elements * FP32)),
        movable=round(tokens * movable),
        used=round(tokens * min(movable, 1.5 * (mlp.gradients - width) * item)),
        again=(
            _count_operations(recomputed) / _count_operations(results),
            # The delta rule is no operator whose result could be saved.
            float(mode is not None if delta else any(x.group == "attention" for x in recomputed)),
        ),
        split=round(tokens * (product_bytes + passed)),
    )


def _count_operations(results: Sequence[Result]) -> float:
    return sum(x.inner * x.size for x in results)


def list_results(
    job: Job, layout: Layout, *, experts: bool = False, delta: bool = False
) -> list[Result]:
    """List the operator outputs of a block that recomputation can save, in order of computation.

    Sizes are bytes per token. They are the outputs of matmuls (of the last one only if more than a
    sum reads it), of attention (one per step of a ring), and of the all-to-alls of ep.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("tiny"), row_length=100, rows=1)
        >>> [(x.group, x.inner) for x in list_results(job, Layout())][2:5]
        [('products', 128), ('attention', 0), ('products', 128.0)]
    """
    halves = _estimate_halves(job, layout, fused_norms=True, experts=experts, delta=delta)
    return _number_products(*halves)


def _number_products(attention: _Half, mlp: _Half) -> list[Result]:
    results = [*attention.results, *mlp.results]
    products = [i for i, x in enumerate(results) if x.group == "products"]
    for number, i in enumerate(products):
        results[i] = attrs.evolve(results[i], number=number)
    return results


@attrs.frozen
class _Half:
    """Elements per token of a block's attention, or of its MLP or expert layer.

    Args:
        saved: Activations saved without recomputation, in the dtype of computation, without the
            input of the norm.
        results: Operator outputs that recomputation can save, in bytes.
        gradients: Gradients at the peak of backward.
        numbers: Saved elements in fp32.
        choices: Saved elements in fp32 of a forward pass that is repeated.
    """

    saved: float
    results: Sequence[Result]
    gradients: float
    numbers: float = 0.0
    choices: float = 0.0


def _estimate_halves(
    job: Job, layout: Layout, fused_norms: bool, *, experts: bool, delta: bool
) -> tuple[_Half, _Half]:
    latents = job.config.latents
    estimate = _estimate_attention if latents is None else _estimate_latent_attention
    estimate = _estimate_delta if delta else estimate
    mlp = _estimate_experts(job, layout) if experts else _estimate_mlp(job, layout.tp)
    return estimate(job, layout, fused_norms), mlp


def _make_products(item: float, *shapes: tuple[float, float]) -> list[Result]:
    """Return the results of products by (inner width, columns)."""
    return [Result("products", WHOLE, inner, columns * item) for inner, columns in shapes]


def _make_attention_results(job: Job, layout: Layout, columns: float) -> list[Result]:
    heads = job.config.heads // layout.tp
    # A ring computes attention once for each block of keys; heads have a log-sum-exp in fp32.
    return [Result("attention", WHOLE, 0, columns * job.itemsize + heads * FP32)] * layout.ring


def _estimate_attention(job: Job, layout: Layout, fused_norms: bool) -> _Half:
    config = job.config
    tp = layout.tp
    item = job.itemsize
    # Letters as in `estimate_block`; columns that tp shards are already divided by it.
    d = config.width
    heads = config.heads // tp
    kv_heads = config.kv_heads // tp
    q, k, *_ = attention_widths(config, layout)
    kv = kv_heads * config.head_size  # of the products, before Ulysses repeats heads
    saved = d + 2 * q + 2 * k + (q if _is_output_copied(job, layout, fused_norms) else 0)
    if config.qk_norm:
        saved += _count_norm_copies(job, fused_norms) * (q + kv)
    # A gate's sigmoid and the product with it; before the sigmoid it is not needed again.
    gate = q * config.attention_gate
    return _Half(
        saved=saved + 2 * gate,
        results=[
            *_make_products(item, (d, q), (d, kv), (d, kv), *[(d, q)] * config.attention_gate),
            *_make_attention_results(job, layout, q),
            *_make_products(item, (q, d)),
        ],
        gradients=d / tp + 2 * q + 2 * k + gate,
        numbers=heads + bool(config.qk_norm) * (heads + kv_heads),
    )


def _estimate_latent_attention(job: Job, layout: Layout, fused_norms: bool) -> _Half:
    config = job.config
    tp = layout.tp
    latents = job.config.latents
    item = job.itemsize
    assert latents is not None
    d = config.width
    heads = config.heads // tp
    copies = _count_norm_copies(job, fused_norms)
    q, k, v, out = attention_widths(config, layout)
    # Kernels take one head size and pad narrower heads with zeros, except for the ring's.
    padded = heads * max(config.head_size, config.value_size) if layout.ring == 1 else 0
    is_padded = v < padded
    up_columns = heads * (latents.plain + latents.values)  # the values are a view of the product
    values = max(v, padded) if is_padded else up_columns if layout.ulysses == 1 else v
    exchanged = v * is_padded * (layout.ulysses > 1)
    output_copy = out * (out < padded or _is_output_copied(job, layout, fused_norms))
    query_rank = latents.query_rank or 0
    query_columns = query_rank * (1 + copies / tp) or d * (tp > 1)
    latent_columns = query_columns + latents.kv_rank * (1 + copies / tp)
    kernel = max(q, padded) + max(k, padded) + values + max(out, padded)  # and as many gradients
    query_products = [(d, query_rank / tp), (query_rank, q)] if query_rank else [(d, q)]
    return _Half(
        saved=d / tp + latent_columns + kernel + exchanged + output_copy,
        results=[
            *_make_products(
                item,
                *query_products,
                (d, latents.kv_rank / tp),
                (latents.kv_rank, up_columns),
                (d, latents.rotary / tp),
            ),
            *_make_attention_results(job, layout, max(q, out)),
            *_make_products(item, (out, d)),
        ],
        gradients=d / tp + kernel - output_copy,
        numbers=heads + (1 + (query_rank > 0)) / tp,
    )


def _estimate_delta(job: Job, layout: Layout, fused_norms: bool) -> _Half:
    config = job.config
    item = job.itemsize
    delta = config.delta
    assert delta is not None
    # Letters as in `estimate_block`.
    d = config.width
    heads = delta.value_heads // layout.tp
    he = heads * delta.value_size
    key_columns = delta.key_heads // layout.tp * delta.key_size
    # Ulysses repeats key heads if there are fewer than its ranks.
    kd, _ = delta_widths(config, layout)
    low = item != FP32
    tokens = tokens_per_microbatch(job, layout)
    parts = layout.ring > 1
    documents = job.microbatch * job.documents * (1 + parts)
    length = job.row_length // job.documents // (layout.ring * (1 + parts))
    chunk = choose_chunk(spans_from_rows(1, length), delta.key_size)
    padding = -(-length // chunk) * chunk / length
    maps = delta.key_size * (delta.key_size + delta.value_size)
    # A ring's first scan keeps the maps as well, with the identity among the columns.
    states = (1 + parts) * maps / chunk * padding + parts * documents * maps / tokens
    in_fp32 = (5 - fused_norms) * he + 2 * (1 + low) * kd
    in_fp32 += heads * (delta.key_size * padding + states)
    gradients = 14 * heads * delta.key_size + 1.3 * he + 5.6 * kd
    gradients += parts * heads * 2 * documents * maps / tokens
    return _Half(
        saved=d + 3 * (2 * kd + he) + he,
        results=_make_products(
            item,
            (d, key_columns),
            (d, key_columns),
            (d, he),
            (d, he),
            (d, heads),
            (d, heads),
            (he, d),
        ),
        gradients=d / layout.tp + gradients * FP32 / item,
        numbers=in_fp32 + 2 * kd / delta.key_size + 5 * heads,
    )


def _estimate_mlp(job: Job, tp: int) -> _Half:
    config = job.config
    d = config.width
    f = config.mlp_width // tp
    products = 1 + config.feed_forward_config.gated
    after = [(f, d)] * config.norm_config.after  # otherwise only the residual sum reads it
    return _Half(
        saved=d + 2 * products * f,
        results=_make_products(job.itemsize, *[(d, f)] * products, *after),
        gradients=d + products * f,
    )


def _estimate_experts(job: Job, layout: Layout) -> _Half:
    experts = job.config.experts
    d = job.config.width
    tp = layout.tp
    assert experts is not None
    k = experts.top_k
    f = experts.width
    shared = experts.shared
    products = 1 + experts.gated
    item = job.itemsize / tp
    again = job.recompute != "none"
    low = job.itemsize != FP32
    # In low precision the router has its own input in fp32; then only a shared expert saves this.
    inputs = d * (not low or shared > 0)
    summed = d * (1 + low * FP32 / job.itemsize)  # rows are weighted and summed in fp32
    scores = experts.count * FP32 / job.itemsize
    is_sharded = layout.ep > 1
    # A clamp saves gate and up before and after it, the sigmoid, and the products of two and three.
    inner = 2 * products * f if experts.clamp is None else 7 * f
    sent = [Result("exchanges", WHOLE, 0, k * d * item)] * is_sharded
    own = _make_products(item, *[(d, k * f)] * products, (f, k * d))
    sizes = *[(d, shared)] * products, (shared, d)
    of_shared = _make_products(item, *sizes) if shared else []
    if experts.shared_gate:
        of_shared += _make_products(item, (d, 1))
    # The gate multiplies the shared expert's output, which a sum alone would not need again.
    gated = (d + 1) * experts.shared_gate
    return _Half(
        saved=(inputs + k * (2 * d + inner) + 2 * products * shared + gated) / tp,
        # In order: router, dispatch, experts, combine, shared expert.
        results=[*_make_products(item, (d, scores)), *sent, *own, *sent, *of_shared],
        gradients=(d + d * again + scores + k * max(summed, products * f - d)) / tp,
        numbers=(2 * experts.count + (8 + 4 * is_sharded) * k + 4 + d * low) / tp,
        choices=2 * k / tp,
    )


def _count_norm_copies(job: Job, fused_norms: bool) -> int:
    """Count the elements that a norm saves per input element, in the dtype of computation."""
    # One kernel saves its input; separate operators also the normed input, both in fp32.
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
    """Return the columns of attention's queries, keys, values and output."""
    # Ulysses repeats key heads if there are fewer than its ranks.
    heads = config.heads / layout.tp
    kv_heads = max(config.kv_heads // layout.tp, layout.ulysses)
    return (
        heads * config.head_size,
        kv_heads * config.head_size,
        kv_heads * config.value_size,
        heads * config.value_size,
    )


def delta_widths(config: DecoderConfig, layout: Layout) -> tuple[float, float]:
    """Return the columns of a delta layer's queries (as many as of its keys), and of its values.

    Examples:
        >>> from trainkit.models import Delta
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> delta = Delta(key_heads=2, value_heads=8, key_size=16, value_size=12)
        >>> config = make_decoder_config("tiny", delta=delta)
        >>> delta_widths(config, Layout()), delta_widths(config, Layout(ulysses=4))
        ((32, 96), (64, 96))
    """
    delta = config.delta
    assert delta is not None
    keys = max(delta.key_heads // layout.tp, layout.ulysses)
    return keys * delta.key_size, delta.value_heads // layout.tp * delta.value_size


def _is_output_copied(job: Job, layout: Layout, fused_norms: bool) -> bool:
    """Return whether the output of attention is saved twice: by attention, and as wo's input."""
    # That is so after the all-to-all of Ulysses, and on a CPU, which computes documents, or windows
    # of a longer one, one by one and concatenates them.
    sliding = job.config.sliding
    cut = job.documents > 1 or (sliding is not None and sliding.window < job.row_length)
    return layout.ulysses > 1 or (cut and not fused_norms)


@attrs.frozen
class Head:
    """Bytes of the last norm, the output layer and the loss, for one microbatch.

    Args:
        saved: Tensors saved for backward.
        temporary: Further tensors at the peak of the loss and the start of its backward.
    """

    saved: int = 0
    temporary: int = 0


def estimate_head(job: Job, layout: Layout, *, fused_norms: bool, trained: bool = True) -> Head:
    """Estimate the memory of the output layer and the loss.

    `linear_cross_entropy` computes logits in chunks, and saves the gradients of the hidden states
    (T x D) and, if `trained`, of the weight (V x D, fp32), which its forward computes; backward
    scales them into a second pair. Under tensor parallelism V is this rank's shard of the
    vocabulary. Without it, fewer than 2^22 logits in fp32 are computed at once, and so are those of
    the plain loss, for the full vocabulary in every layout: log-probabilities are saved, and there
    are as many gradients of them and of the logits.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
        >>> for loss in ("linear", "plain"):
        ...     head = estimate_head(attrs.evolve(job, loss=loss), Layout(), fused_norms=True)
        ...     print(f"{(head.saved + head.temporary) / 2**30:.1f} GiB")
        5.1 GiB
        13.8 GiB
    """
    config = job.config
    item = job.itemsize
    # The plain loss gathers its logits over tp.
    parts = 1 if job.loss == "plain" else layout.tp
    tokens = tokens_per_microbatch(job, layout)
    vocab_size = config.vocab_size // parts
    copies = _count_norm_copies(job, fused_norms)
    norm = round(tokens * config.width * (copies / layout.tp + 1) * item)
    low = item != FP32
    if has_full_logits(job, layout):
        logits = tokens * vocab_size
        return Head(norm + logits * FP32, logits * (2 * FP32 + (item if low else 0)))
    chunk = min(count_chunk_tokens(job, layout), tokens)
    logits = chunk * vocab_size * (FP32 + (item if low else 0))
    weight = vocab_size * config.width
    gradients = tokens * config.width * item + weight * FP32 * trained
    cast = weight * item if low else 0
    return Head(norm + gradients, max(logits, gradients + cast))


def has_full_logits(job: Job, layout: Layout) -> bool:
    """Return whether all logits of a microbatch are computed at once.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> from trainkit.types import Precision
        >>> fp32 = Precision(compute="fp32")
        >>> job = Job(config=make_decoder_config("tiny"), row_length=8, rows=1, precision=fp32)
        >>> has_full_logits(job, Layout()), has_full_logits(job, Layout(tp=2))
        (True, False)
    """
    # See `linear_cross_entropy`, whose choice this repeats.
    few = tokens_per_microbatch(job, layout) * job.config.vocab_size <= _MAX_CHUNK_LOGITS
    return job.loss == "plain" or (few and job.precision.compute == "fp32" and layout.tp == 1)


def count_chunk_tokens(job: Job, layout: Layout) -> int:
    """Return the number of tokens in a chunk of `linear_cross_entropy`.

    Examples:
        >>> from trainkit.models.decoder_sizes import make_decoder_config
        >>> job = Job(config=make_decoder_config("llama-3.1-8b"), row_length=8192, rows=1)
        >>> count_chunk_tokens(job, Layout())
        2048
    """
    local_vocab_size = job.config.vocab_size // layout.tp
    return max(1, job.config.width // 2, _MAX_CHUNK_LOGITS // local_vocab_size)
