"""Attention document by document, with torch's `scaled_dot_product_attention`.

A document is attended by itself, so the cost grows with the sum of squared document lengths and
never with the squared row. In a window it is cut into chunks of queries, each of which gets the
keys of its windows, by overlapping views; all have one small mask, so that the cost grows with the
tokens times the window. It is the exact reference of this folder, and what runs on a CPU. Memory
grows with the tokens and never with their square: where CUDA has no fused kernel for key heads that
several query heads share (fp32, or a mask), these are repeated, and where it has none at all
(fp64), `blocks.written_out` goes through the queries in chunks, as it does for soft caps, which no
kernel of torch's attention knows. Where keys and values differ in size, the narrower are filled up
with zeros, for kernels that take one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.attention.blocks import written_out
from trainkit.attention.inputs import check_inputs, of_one_size
from trainkit.types import Spans


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention inside each span, one `scaled_dot_product_attention` per span.

    Spans of one common length take a single batched call. `torch.compile` leaves this function
    alone (one graph break), because the lengths are host integers that change with every batch.

    Args:
        q: Queries `[B, S, H, D]`.
        k: Keys `[B, S, K, D]`; K divides H, and each key head serves H / K neighbouring query
            heads.
        v: Values `[B, S, K, E]`.
        spans: The documents, over the flattened rows.
        scale: What scores are multiplied by; 1 / sqrt(D) by default.
        window: How many keys a query sees at most, itself among them: those less than this number
            of tokens before it (Beltagy et al., "Longformer", 2020).
        softcap: c, where a score s becomes c * tanh(s / c) (Bello et al., "Neural combinatorial
            optimization with reinforcement learning", 2016; Gemma 2).

    Returns:
        `[B, S, H, E]`, of q's dtype; under autocast of autocast's.

    Raises:
        ValueError: Shapes or dtypes do not fit each other, there are no tokens, the spans do not
            cover the B * S tokens, the scale or the soft cap is not a finite number above 0, or
            the window is below 1.

    Examples:
        >>> import numpy as np
        >>> from trainkit.types import Spans
        >>> spans = Spans(torch.tensor([0, 3, 4], dtype=torch.int32), np.array([3, 1]), 3)
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> out = sdpa(q, k, v, spans=spans)
        >>> torch.equal(out[:, 3], v[:, 3])  # a document of one token sees only itself
        True
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if torch.compiler.is_compiling():
        # Applied here and not as a decorator: `disable` imports torch._dynamo, 1.1 s (torch 2.13).
        return torch.compiler.disable(_attended)(q, k, v, spans, **how)
    return _attended(q, k, v, spans, **how)


def _attended(q: Tensor, k: Tensor, v: Tensor, spans: Spans, **how: Any) -> Tensor:
    q, k, v, how["scale"] = check_inputs(q, k, v, spans=spans, **how)
    if how["window"] is not None and how["window"] >= spans.max_length:
        how["window"] = None
    attend = _by_document if how["softcap"] is None else written_out
    return attend(q, k, v, spans=spans, **how)


def _by_document(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **how: Any) -> Tensor:
    if q.shape[3] != v.shape[3]:
        q_, k_, v_ = of_one_size(q, k, v)
        return _by_document(q_, k_, v_, spans=spans, **how)[..., : v.shape[3]]
    window: int | None = how["window"]
    mask = None if window is None else _mask(q, window, longest=spans.max_length)
    groups = q.shape[2] // k.shape[2]
    if not _fused(q, k, v, mask):
        k_, v_ = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        if not _fused(q, k_, v_, mask):
            return written_out(q, k, v, spans=spans, **how)
        k, v, groups = k_, v_, 1
    lengths = spans.lengths.tolist()
    if mask is None and len(set(lengths)) == 1:
        parts = [tuple(_heads_first(x, len(lengths)) for x in (q, k, v))]
    else:
        # One split and not a slice per document: the gradient of a slice is a zero tensor of the
        # whole row, 64 of them here (random lengths, 4,096 tokens: 217 ms against 80).
        parts = zip(*(_heads_first(x, 1).split(lengths, dim=2) for x in (q, k, v)), strict=True)
    outputs = [
        nn.functional.scaled_dot_product_attention(
            *qkv,
            attn_mask=hidden,
            is_causal=hidden is None,
            scale=how["scale"],
            enable_gqa=groups > 1,
        )
        for q_, k_, v_ in parts
        for *qkv, hidden in _calls(q_, k_, v_, mask)
    ]
    joined = [out.transpose(1, 2).flatten(0, 1) for out in outputs]
    return (torch.cat(joined) if len(joined) > 1 else joined[0]).view_as(q)


def _mask(q: Tensor, window: int, *, longest: int) -> Tensor:
    """Return what is added to the scores of a chunk: 0 for what a query sees, and else -inf.

    Its keys begin a window before it. A quarter of a window at a time computes a fourth more than
    is seen, and the gradients of keys have five times their size for a moment; chunks of a whole
    window would compute twice as much as is seen. Of a window of W the mask has 5/16 W^2 numbers,
    which a call keeps for its backward pass.
    """
    size = min(max(window // 4, 64), longest - window)
    hidden = q.new_full((size, size + window), -torch.inf)
    return hidden.tril() + hidden.triu(window + 1)


def _calls(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield queries, keys, values and mask of the calls for a document, or for some of one length.

    The first queries, as many as a window has keys, see all that is before them.
    """
    window = q.shape[2] if mask is None else mask.shape[1] - mask.shape[0]
    rest = q.shape[2] - window
    if mask is None or rest <= 0:
        yield q, k, v, None
        return
    size = min(mask.shape[0], rest)
    last = rest % size
    begin, chunks, end = q.split([window, rest - last, last], dim=2)
    yield begin, k[:, :, :window], v[:, :, :window], None
    keys, values = (_cut(x, size + window, size) for x in (k, v))
    yield _cut(chunks, size, size), keys, values, mask[:size, : size + window]
    if last:
        keys, values = (x[:, :, -(last + window) :] for x in (k, v))
        yield end, keys, values, mask[:last, : last + window]


def _cut(x: Tensor, size: int, step: int) -> Tensor:
    """Return views `[n, H, size, D]` of a document `[1, H, L, D]`, `step` tokens apart."""
    return x[0].unfold(1, size, step).permute(1, 0, 3, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Say whether torch has a kernel that does not keep all scores: it would not say so itself.

    One that takes a mask takes causal attention as well.
    """
    if not q.is_cuda:
        return True
    backend, shared = torch.backends.cuda, q.shape[2] != k.shape[2]
    q_, k_, v_ = (_heads_first(x, 1) for x in (q, k, v))
    if mask is not None:
        rows, seen = mask.shape
        q_, k_, v_ = q_[:, :, :rows], k_[:, :, :seen], v_[:, :, :seen]
    asked = backend.SDPAParams(q_, k_, v_, mask, 0.0, mask is None, shared)
    kinds = "flash", "efficient", "cudnn"
    return any(getattr(backend, f"can_use_{kind}_attention")(asked) for kind in kinds)


def _heads_first(x: Tensor, count: int) -> Tensor:
    """Cut `[B, S, H, D]` into `count` rows of equal length: `[count, H, B * S / count, D]`."""
    return x.reshape(count, -1, *x.shape[2:]).transpose(1, 2)
