"""Attention document by document, with torch's `scaled_dot_product_attention`.

There is no mask: a document is attended by itself, so the cost grows with the sum of squared
document lengths and never with the squared row. It is the exact reference of this folder, and what
runs on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainkit.types import Spans


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose shapes do not belong together.

    Raises:
        ValueError: k and v differ, rows, tokens or head sizes differ, or K does not divide H.

    Examples:
        >>> check_heads(torch.ones(1, 4, 6, 8), torch.ones(1, 4, 3, 8), torch.ones(1, 4, 3, 8))
    """
    same = q.ndim == 4 and k.shape == v.shape and q.shape[:2] == k.shape[:2]
    if not same or q.shape[3] != k.shape[3] or q.shape[2] % max(k.shape[2], 1) != 0:
        raise ValueError(
            "attention: q must be [B, S, H, D], k and v [B, S, K, D] with K a divisor of H, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, scale: float | None = None) -> Tensor:
    """Return causal attention inside each span, one `scaled_dot_product_attention` per span.

    Spans of one common length take a single batched call. `torch.compile` leaves this function
    alone (one graph break), because the lengths are host integers that change with every batch.

    Args:
        q: Queries `[B, S, H, D]`.
        k: Keys `[B, S, K, D]`; K divides H, and each key head serves H / K neighbouring query
            heads.
        v: Values `[B, S, K, D]`.
        spans: The documents, over the flattened rows.
        scale: What scores are multiplied by; 1 / sqrt(D) by default.

    Returns:
        `[B, S, H, D]`, of q's dtype.

    Raises:
        ValueError: The shapes do not fit each other, or the spans do not cover the B * S tokens.

    Examples:
        >>> import numpy as np
        >>> from trainkit.types import Spans
        >>> spans = Spans(torch.tensor([0, 3, 4], dtype=torch.int32), np.array([3, 1]), 3)
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> out = sdpa(q, k, v, spans=spans)
        >>> torch.equal(out[:, 3], v[:, 3])  # a document of one token sees only itself
        True
    """
    if torch.compiler.is_compiling():
        # Applied here and not as a decorator: `disable` imports torch._dynamo, 1.1 s (torch 2.13).
        return torch.compiler.disable(_by_document)(q, k, v, spans, scale)
    return _by_document(q, k, v, spans, scale)


def _by_document(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float | None) -> Tensor:
    check_heads(q, k, v)
    lengths = spans.lengths.tolist()
    if sum(lengths) != q.shape[0] * q.shape[1]:
        raise ValueError(
            f"sdpa: the spans hold {sum(lengths)} tokens, q holds {q.shape[0]} x {q.shape[1]}; "
            "make the spans of this very batch"
        )
    if len(set(lengths)) == 1:
        parts = [tuple(_heads_first(x, len(lengths)) for x in (q, k, v))]
    else:
        # One split and not a slice per document: the gradient of a slice is a zero tensor of the
        # whole row, 64 of them here (random lengths, 4,096 tokens: 217 ms against 80).
        parts = zip(*(_heads_first(x, 1).split(lengths, dim=2) for x in (q, k, v)), strict=True)
    grouped = q.shape[2] != k.shape[2]
    outputs = [
        nn.functional.scaled_dot_product_attention(
            q_, k_, v_, is_causal=True, scale=scale, enable_gqa=grouped
        ).transpose(1, 2)
        for q_, k_, v_ in parts
    ]
    return torch.cat(outputs, dim=1).view_as(q) if len(outputs) > 1 else outputs[0].reshape(q.shape)


def _heads_first(x: Tensor, count: int) -> Tensor:
    """Cut `[B, S, H, D]` into `count` rows of equal length: `[count, H, B * S / count, D]`."""
    return x.reshape(count, -1, *x.shape[2:]).transpose(1, 2)
