"""Log-probabilities of labels from hidden states and the output weight, without all logits.

Their use, in a loss over whole answers, is not known before backward, which computes the logits
again. Both passes work on tiles: some words of many tokens, or all words of some tokens where a
sampler excludes words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.losses.linear import (
    Factors,
    add_product_,
    cast_factors,
    cuts,
    exact_factors,
    get_chunk_size,
    logits_of,
    make_logits_function,
)
from trainkit.losses.shaping import UNSHAPED, Each, Shaping, apply_shaping_, undo_shaping_
from trainkit.losses.softmax import (
    Partial,
    accumulation_dtype,
    add_to_own_,
    make_vocabulary_axis,
    own_words,
    partial_scores_,
    run_untraced,
    whole_scores,
)
from trainkit.types import IGNORED_LABEL, SOLO, Axis, VocabularyAxis


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Each = 1.0,
    top_k: int | Tensor | None = None,
    top_p: Each = 1.0,
    min_p: Each = 0.0,
    softcap: float | None = None,
    axis: Axis = SOLO,
    chunk: int | None = None,
) -> Tensor:
    """Return the log-probability of each label, differentiable; 0 where the label is -100.

    It is the log-probability with which a sampler with these settings draws the label; see
    `generation.Sampling`, which uses the same order and code. Without settings it is the negative
    cross entropy of `hidden @ weight.T`. Backward computes the logits again, one product more than
    `linear_cross_entropy`; they exist for some words of many tokens at a time. If the settings
    exclude words, logits exist for all words of some tokens, and are gathered on `axis`. An
    excluded label has the log-probability -inf, and no gradient.

    Args:
        hidden: As in `linear_cross_entropy`, `[..., D]`.
        weight: `[V, D]`, or this rank's rows of it, `[V_r, D]`.
        labels: int64 `[...]`.
        bias: `[V]`, or this rank's part of it.
        temperature: The divisor of the logits, above 0: a number, or a tensor `[...]` with one for
            each label, like the next three. A tensor may hold anything where the label is -100.
        top_k: The number of most likely words that may be drawn; with ties there may be more.
        top_p: The total probability of the most likely words that may be drawn.
        min_p: The minimum probability of a word, relative to the most likely one.
        softcap: The bound of the logits, applied with tanh before everything else.
        axis: The axis over which the vocabulary is sharded. Over several ranks the gradient of
            `hidden` is the addend of this rank's shard: use a `hidden` from
            `collectives.all_gather` or `collectives.sum_grad`, which sum it once.
        chunk: The logits that exist at a time are at most those of this many tokens. By default
            they fit into 16 MiB; if words are excluded, as in `linear_cross_entropy`.

    Returns:
        fp32 or fp64 `[...]`, equal on all ranks of the axis.

    Raises:
        ValueError: As `linear_cross_entropy`, or a setting has another shape than the labels.

    Effects:
        Communicates as `linear_cross_entropy`, and all-gathers the logits of a chunk on `axis` if
        words are excluded.

    Examples:
        >>> import torch
        >>> hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [2.0], [1.0]])
        >>> token_logprobs(hidden, weight, torch.tensor([0, -100, 2]))
        tensor([-0.8620,  0.0000, -1.8620])
        >>> token_logprobs(hidden, weight, torch.tensor([0, -100, 2]), top_k=2)
        tensor([-0.6931,  0.0000,    -inf])
    """
    axis = make_vocabulary_axis(weight, axis)
    factors = cast_factors(
        "token_logprobs",
        hidden,
        weight,
        labels,
        bias=bias,
        softcap=softcap,
        axis=axis,
        chunk=chunk,
    )
    shaping = Shaping(temperature, top_k, top_p, min_p)
    return compute_logprobs(factors, labels, shaping=shaping, axis=axis, chunk=chunk)


def compute_logprobs(
    factors: Factors,
    labels: Tensor,
    *,
    shaping: Shaping = UNSHAPED,
    axis: Axis = SOLO,
    chunk: int | None = None,
) -> Tensor:
    """Return `token_logprobs` of factors and a shaping.

    Raises:
        ValueError: A setting has another shape than the labels.

    Effects:
        Communicates as `token_logprobs`.

    Examples:
        >>> import torch
        >>> compute_logprobs(Factors(torch.zeros(2, 8), torch.zeros(4, 8)), torch.tensor([0, -100]))
        tensor([-1.3863,  0.0000])
    """
    hidden, weight, bias, softcap = factors
    flat = labels.flatten()
    options = _Options(flat, axis, shaping.flat("token_logprobs", labels), softcap, chunk)
    logprobs = run_untraced(_TokenLogprobs, hidden.flatten(0, -2), weight, bias, options)
    return logprobs.masked_fill(flat == IGNORED_LABEL, 0).view(labels.shape)


class _Options(NamedTuple):
    labels: Tensor
    axis: Axis
    shaping: Shaping
    softcap: float | None
    chunk: int | None


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens; backward computes the logits again, some words at a time.

    The softmax is accumulated over words, so that tiles of logits stay in a processor's cache, and
    the gradient of the weight is written once.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: _Options,
    ) -> Tensor:
        labels, axis, shaping, softcap, chunk = options
        # Filters need all words of a token at once, so tiles are whole rows then.
        tiles = _make_tiles(len(hidden), weight, axis, chunk, whole_rows=shaping.filters)
        make = make_logits_function(Factors(hidden, weight, bias, softcap))
        scores = []
        for rows, parts in tiles:
            partials: list[Partial] = []
            for words in parts:
                logits = apply_shaping_(make(rows, words), shaping.of(rows), axis)
                partials.append(partial_scores_(logits, words, labels[rows], axis, of=len(weight)))
            # Ranks exchange once for each slice of tokens, after all of its words.
            scores.append(whole_scores(partials, axis))
        losses, normalizers = (torch.cat(x) for x in zip(*scores, strict=True))
        # Two numbers per token in place of V logits: exp(logit - normalizer) is the softmax again.
        ctx.save_for_backward(hidden, weight, bias, labels, losses, normalizers)
        ctx.options = options
        ctx.tiles = tiles
        return -losses

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_logprobs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, losses, normalizers = ctx.saved_tensors
        _, axis, shaping, softcap, _ = ctx.options
        factors = exact_factors(Factors(hidden, weight, bias, softcap))
        exact = accumulation_dtype(weight)
        d_hidden, d_weight, d_bias = (
            torch.zeros(x.shape, dtype=exact, device=weight.device) if needs else None
            for x, needs in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        (rows, (words, *_)), *_ = ctx.tiles  # the largest tile
        size = (rows.stop - rows.start) * (words.stop - words.start)
        buffer = torch.empty(size, dtype=exact, device=weight.device)
        for rows, parts in ctx.tiles:
            tile_shaping = shaping.of(rows)
            # The gradient of -log p is softmax - onehot, times the incoming derivative of each
            # token, which is 0 for a label that the sampler excludes.
            d_losses = tile_shaping.known(-d_logprobs[rows], losses[rows])[:, None]
            for words in parts:
                logits, d_softcap = logits_of(factors, rows, words, buffer, needs_slope=True)
                apply_shaping_(logits, tile_shaping, axis)
                logits.sub_(normalizers[rows, None]).exp_().mul_(d_losses)  # softmax * d_losses
                index, own = own_words(labels[rows, None], len(weight), axis, part=words)
                add_to_own_(logits, index, -d_losses * own)
                undo_shaping_(logits, tile_shaping)
                if d_softcap is not None:
                    logits.mul_(d_softcap)
                d_logits = logits.to(factors.weight.dtype)
                # The chain rule of logits = hidden @ weight.T + bias, tile by tile.
                if d_hidden is not None:
                    add_product_(d_hidden[rows], d_logits, factors.weight[words])
                if d_weight is not None:
                    add_product_(d_weight[words], d_logits.t(), factors.hidden[rows])
                if d_bias is not None:
                    d_bias[words].add_(logits.sum(0))
        gradients = d_hidden, d_weight, d_bias
        return *(g if g is None else g.to(weight.dtype) for g in gradients), None


Tiles = list[tuple[slice, list[slice]]]
"""Slices of tokens, each with the slices of words of its logits."""

_TILE = 2**22  # logits, 16 MiB of fp32, which fit an L3 cache
_ROWS = 2048  # tokens of a tile: with fewer, each row of the weight is loaded too often


def _make_tiles(
    tokens: int, weight: Tensor, axis: Axis, chunk: int | None, *, whole_rows: bool
) -> Tiles:
    """Split the logits into tiles of at most those of `chunk` tokens, which fit a cache.

    Ranks have the same slices of tokens, and each its slices of its words.
    """
    # The largest shard decides, so that all ranks have the same slices of tokens.
    words = axis.largest if isinstance(axis, VocabularyAxis) else max(1, len(weight))
    if whole_rows:
        rows = chunk or get_chunk_size(weight, axis)
        part = words
    else:
        size = min(_TILE, chunk * words) if chunk else _TILE
        rows = max(1, min(tokens, _ROWS, size))
        part = max(1, size // rows)
    return [(tokens_slice, cuts(len(weight), part)) for tokens_slice in cuts(tokens, rows)]
