"""Attention document by document, with torch's `scaled_dot_product_attention`.

There is no mask: a document is attended by itself, so the cost grows with the sum of squared
document lengths and never with the squared row. It is the exact reference of this folder, and what
runs on a CPU. Memory grows with the tokens and never with their square: where CUDA has no fused
kernel for key heads that several query heads share (fp32), these are repeated, and where it has
none at all (fp64), `blocks.written_out` goes through the queries in chunks, as it does for windows
and soft caps. Where keys and values differ in size, the narrower are filled up with zeros, for
kernels that take one size.
"""

from __future__ import annotations

import math
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
    q, k, v, scale = check_inputs(q, k, v, spans=spans, **how)
    if how["softcap"] is None and (how["window"] or math.inf) >= spans.max_length:
        return _by_document(q, k, v, spans, scale)
    return written_out(q, k, v, spans=spans, **how | {"scale": scale})


def _by_document(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
    if q.shape[3] != v.shape[3]:
        q_, k_, v_ = of_one_size(q, k, v)
        return _by_document(q_, k_, v_, spans, scale)[..., : v.shape[3]]
    groups = q.shape[2] // k.shape[2]
    if not _fused(q, k, v):
        repeated = [x.repeat_interleave(groups, dim=2) for x in (k, v)]
        if not _fused(q, *repeated):
            return written_out(q, k, v, spans=spans, scale=scale)
        (k, v), groups = repeated, 1
    lengths = spans.lengths.tolist()
    if len(set(lengths)) == 1:
        parts = [tuple(_heads_first(x, len(lengths)) for x in (q, k, v))]
    else:
        # One split and not a slice per document: the gradient of a slice is a zero tensor of the
        # whole row, 64 of them here (random lengths, 4,096 tokens: 217 ms against 80).
        parts = zip(*(_heads_first(x, 1).split(lengths, dim=2) for x in (q, k, v)), strict=True)
    outputs = [
        nn.functional.scaled_dot_product_attention(
            q_, k_, v_, is_causal=True, scale=scale, enable_gqa=groups > 1
        ).transpose(1, 2)
        for q_, k_, v_ in parts
    ]
    return torch.cat(outputs, dim=1).view_as(q) if len(outputs) > 1 else outputs[0].reshape(q.shape)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Say whether torch has a kernel that does not keep all scores: it would not say so itself."""
    if not q.is_cuda:
        return True
    backend = torch.backends.cuda
    q_, k_, v_ = (_heads_first(x, 1) for x in (q, k, v))
    asked = backend.SDPAParams(q_, k_, v_, None, 0.0, True, q.shape[2] != k.shape[2])
    kinds = "flash", "efficient", "cudnn"
    return any(getattr(backend, f"can_use_{kind}_attention")(asked) for kind in kinds)


def _heads_first(x: Tensor, count: int) -> Tensor:
    """Cut `[B, S, H, D]` into `count` rows of equal length: `[count, H, B * S / count, D]`."""
    return x.reshape(count, -1, *x.shape[2:]).transpose(1, 2)
