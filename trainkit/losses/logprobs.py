"""Log-probabilities of labels from hidden states and the output weight, without all logits.

How they go on, into a loss of whole answers, is not known before backward, which makes the logits
again. Both passes take tiles: all words of some tokens where a sampler has left words out, else
some words of many tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.losses.linear import (
    Factors,
    add_product_,
    cast_factors,
    chunk_of,
    cuts,
    exact_factors,
    logits_maker,
    logits_of,
)
from trainkit.losses.shaping import UNSHAPED, Each, Shaping, shaped_, unshaped_slopes_
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

    It is the one by which a sampler with these settings has drawn the label; see
    `generation.Sampling`, whose order and code it shares. Without settings it is the cross entropy
    of `hidden @ weight.T`, negated. How the log-probabilities go on is not known before
    backward, which computes the logits again, one product more than `linear_cross_entropy`; they
    exist for some words of many tokens at a time. Where words are left out, they exist for all
    words of some tokens, and are gathered on `axis`. A label that is left out has the
    log-probability -inf, and no gradient.

    Args:
        hidden: As in `linear_cross_entropy`, `[..., D]`.
        weight: `[V, D]`, or this rank's rows of it, `[V_r, D]`.
        labels: int64 `[...]`.
        bias: `[V]`, or this rank's part of it.
        temperature: What logits are divided by, above 0; a number, or a tensor `[...]` with one for
            each label, as the three that follow. Where the label is -100, a tensor may hold
            anything.
        top_k: How many of the likeliest words may be drawn; of equals there may be more.
        top_p: The likeliest words that together have this much.
        min_p: Words that are at least this likely, relative to the likeliest.
        softcap: What logits are kept between by tanh, before all else.
        axis: The axis over which the vocabulary is cut. Over several ranks the gradient of `hidden`
            is this rank's part, of its words alone: let `hidden` come from `collectives.all_gather`
            or go through `collectives.sum_grad`, which sum it, once.
        chunk: Not more logits exist at a time than so many tokens have. By default those that fit
            into 16 MiB, and where words are left out as in `linear_cross_entropy`.

    Returns:
        fp32 or fp64 `[...]`, equal on all ranks of the axis.

    Raises:
        ValueError: As `linear_cross_entropy`, or a setting has another shape than the labels.

    Effects:
        Communicates as `linear_cross_entropy`, and gathers the logits of a chunk on `axis` where
        words are left out.

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
    return logprobs_of(factors, labels, shaping=shaping, axis=axis, chunk=chunk)


def logprobs_of(
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
        >>> logprobs_of(Factors(torch.zeros(2, 8), torch.zeros(4, 8)), torch.tensor([0, -100]))
        tensor([-1.3863,  0.0000])
    """
    hidden, weight, bias, softcap = factors
    flat, how = labels.flatten(), shaping.flat("token_logprobs", labels)
    asked = flat, axis, how, softcap, chunk
    found = run_untraced(_EachToken, hidden.flatten(0, -2), weight, bias, asked)
    return found.masked_fill(flat == IGNORED_LABEL, 0).view(labels.shape)


class _EachToken(torch.autograd.Function):
    """Log-probabilities of tokens; backward computes the logits again, some words at a time.

    A softmax goes on from word to word, so that tiles of logits stay in a processor's cache, and
    what is added to the weight's gradient is written once.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        asked: tuple[Tensor, Axis, Shaping, float | None, int | None],
    ) -> Tensor:
        labels, axis, shaping, softcap, chunk = asked
        tiles = _tiles(len(hidden), weight, axis, chunk, whole_rows=shaping.filters)
        make = logits_maker(Factors(hidden, weight, bias, softcap))
        scores = []
        for rows, parts in tiles:
            found, own = list[Partial](), labels[rows]
            for words in parts:
                logits = shaped_(make(rows, words), shaping.of(rows), axis)
                found.append(partial_scores_(logits, words, own, axis, of=len(weight)))
            scores.append(whole_scores(found, axis))
        losses, normalizers = (torch.cat(x) for x in zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, labels, losses, normalizers)
        ctx.how = axis, shaping, softcap, tiles
        return -losses

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_logprobs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, losses, normalizers = ctx.saved_tensors
        axis, shaping, softcap, tiles = ctx.how
        factors, exact = (
            exact_factors(Factors(hidden, weight, bias, softcap)),
            accumulation_dtype(weight),
        )
        like = {"dtype": exact, "device": weight.device}
        d_hidden, d_weight, d_bias = (
            torch.zeros(x.shape, **like) if needs else None
            for x, needs in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        (rows, (words, *_)), *_ = tiles  # the largest
        buffer = torch.empty((rows.stop - rows.start) * (words.stop - words.start), **like)
        for rows, parts in tiles:
            inputs, here = factors.hidden[rows], shaping.of(rows)
            d = here.known(-d_logprobs[rows], losses[rows])[:, None]
            for words in parts:
                logits, steep = logits_of(factors, rows, words, buffer, needs_slope=True)
                shaped_(logits, here, axis).sub_(normalizers[rows, None]).exp_().mul_(d)
                index, own = own_words(labels[rows, None], len(weight), axis, part=words)
                unshaped_slopes_(add_to_own_(logits, index, -d * own), here)
                if steep is not None:
                    logits.mul_(steep)
                slopes = logits.to(factors.weight.dtype)
                if d_hidden is not None:
                    add_product_(d_hidden[rows], slopes, factors.weight[words])
                if d_weight is not None:
                    add_product_(d_weight[words], slopes.t(), inputs)
                if d_bias is not None:
                    d_bias[words].add_(logits.sum(0))
        gradients = d_hidden, d_weight, d_bias
        return *(g if g is None else g.to(weight.dtype) for g in gradients), None


Tiles = list[tuple[slice, list[slice]]]
"""Tokens, and the parts of the words that their logits are cut into."""

_TILE = 2**22  # logits, 16 MiB of fp32, which stay in a third cache
_ROWS = 2048  # tokens of a tile: with fewer, less is done with each word's weight once it is there


def _tiles(
    tokens: int, weight: Tensor, axis: Axis, chunk: int | None, *, whole_rows: bool
) -> Tiles:
    """Return tiles with as many logits as `chunk` tokens have, or fewer that stay in a cache.

    Ranks have the same rows, and each its own parts of its words.
    """
    words = axis.largest if isinstance(axis, VocabularyAxis) else max(1, len(weight))
    if whole_rows:
        rows, part = chunk or chunk_of(weight, axis), words
    else:
        most = min(_TILE, chunk * words) if chunk else _TILE
        rows = max(1, min(tokens, _ROWS, most))
        part = max(1, most // rows)
    return [(own, cuts(len(weight), part)) for own in cuts(tokens, rows)]


def _elements(tiles: Tiles) -> int:
    """Return how many logits the largest tile has."""
    (rows, (words, *_)), *_ = tiles
    return (rows.stop - rows.start) * (words.stop - words.start)
