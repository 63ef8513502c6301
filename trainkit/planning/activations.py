"""What a block and the output layer keep for the backward pass, in bytes."""

from __future__ import annotations

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.planning.jobs import Job
from trainkit.planning.weights import FP32
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
        kept=round(tokens * (kept * item + numbers_kept * FP32)),
        backward=round(tokens * ((everything + beside) * item + numbers * FP32)),
    )


def tokens_per_microbatch(job: Job, layout: Layout) -> int:
    """Return T, the tokens of a microbatch on one rank.

    Examples:
        >>> from trainkit.models.sizes import decoder_config
        >>> job = Job(config=decoder_config("tiny"), row_length=256, rows=8, microbatch=4)
        >>> tokens_per_microbatch(job, Layout(ring=2))
        512
    """
    return job.microbatch * job.row_length // layout.count("sp")


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
    into a second pair. Under tensor parallelism V is a part of the vocabulary. Fewer than 2^22
    logits in fp32 without it exist all at once, and those of the plain loss, whole in every layout:
    log-probabilities are kept, and there are as many gradients of them and of the logits.

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
    copies = 1 if fused_norms else 2
    norm = round(tokens * config.width * (copies / layout.tp + 1) * item)
    low = item != FP32
    if logits_at_once(job, layout):
        logits = tokens * words
        return Head(norm + logits * FP32, logits * (2 * FP32 + (item if low else 0)))
    chunk = min(chunk_of_tokens(job, layout), tokens)
    logits = chunk * words * (FP32 + (item if low else 0))
    gradients = tokens * config.width * item + words * config.width * FP32
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
