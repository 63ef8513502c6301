"""The inputs of attention functions: checked before anything is computed or communicated."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainkit.types import Spans, check_range


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check the inputs of attention; return queries, keys and values of one dtype, and the scale.

    Under autocast fp32 becomes autocast's dtype, as in torch's own attention: rotary tables and
    norms give fp32 queries and keys next to low-precision values.

    Args:
        q: Queries `[B, S, H, D]`.
        k: Keys `[B, S, K, D]`; K divides H.
        v: Values `[B, S, K, E]`.
        spans: The documents, over the flattened rows.
        scale: The factor of scores; 1 / sqrt(D) by default.
        window: The number of keys that a query attends to at most, including its own.
        softcap: The bound of scores, by tanh.
        sinks: One more logit for each query head, `[H]`.
        causal: Whether a query sees no key after itself.
        parts: The number of ranks over which the tokens of these rows are sharded.

    Raises:
        ValueError: Shapes or dtypes do not fit each other, there are no tokens, the spans do not
            cover them, the scale or the soft cap is not a finite number above 0, the window is
            below 1 or for attention that is not causal, or there is not one sink for each query
            head.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.ones(3, 1, 4, 2, 16)
        >>> *_, scale = check_inputs(q, k, v, spans=spans_from_rows(1, 4))
        >>> scale
        0.25
    """
    # Values may have a size of their own, and key heads serve groups of query heads.
    is_valid = (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and k.shape[2] == v.shape[2]
        and all(x.numel() for x in (q, k, v))
        and q.shape[3] == k.shape[3]
        and q.shape[2] % k.shape[2] == 0
    )
    if not is_valid:
        raise ValueError(
            "attention: q must be [B, S, H, D], k [B, S, K, D] and v [B, S, K, E] with K a divisor "
            f"of H and no size 0, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    q, k, v = match_dtypes(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    # NaN is rejected as well, since all comparisons with it are false.
    if not 0 < scale < math.inf:
        raise ValueError(
            f"attention: scale must be a finite number above 0, got {scale}; leave it out for "
            "1 / sqrt(D)"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"attention: softcap must be a finite number above 0, got {softcap}")
    check_range("attention", at_least=1, window=window)
    if window is not None and not causal:
        raise ValueError(
            f"attention: a window of {window} keys counts back from the query, and causal=False "
            "sees both sides; leave one of them out"
        )
    if sinks is not None and (sinks.shape != q.shape[2:3] or not sinks.is_floating_point()):
        raise ValueError(
            f"attention: sinks must be one logit for each of {q.shape[2]} query heads, "
            f"[{q.shape[2]}], got {sinks.dtype} {list(sinks.shape)}"
        )
    # The lengths are host integers: a compiled graph would be specialized to each batch.
    if not torch.compiler.is_compiling():
        _check_spans(q, spans, parts)
    return q, k, v, scale


def match_dtypes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in one dtype: under autocast in its dtype.

    Raises:
        ValueError: They have no common floating-point dtype.

    Examples:
        >>> q, k, v = torch.ones(3, 1, 4, 2, 16)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     match_dtypes(q, k, v)[0].dtype
        torch.bfloat16
    """
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # torch raises for meta
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(dtype) if x.dtype == torch.float32 else x for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"attention: q, k and v must have one floating-point dtype, got {q.dtype}, "
            f"{k.dtype} and {v.dtype}"
        )
    return q, k, v


def _check_spans(q: Tensor, spans: Spans, parts: int) -> None:
    # Spans are those of the full rows, of which q has a slice.
    rows, tokens = q.shape[0], q.shape[1] * parts
    if spans.lengths.sum() != rows * tokens:
        holder = "q has" if parts == 1 else f"the slices of {parts} ranks have"
        raise ValueError(
            f"attention: the spans have {spans.lengths.sum()} tokens, {holder} {rows} x {tokens}; "
            "give the spans of this batch (batch.shard_sequence makes those of a shard; Ulysses "
            "takes those of the full rows)"
        )
    if spans.lengths.min() < 0:
        raise ValueError(
            f"attention: a span has {spans.lengths.min()} tokens, it must have 0 or more"
        )


def pad_heads(*tensors: Tensor) -> list[Tensor]:
    """Pad the last dimensions of queries, keys and values with zeros to the largest of them.

    For kernels that take one head size. Zeros change no score, and what exceeds the values' own
    size in the result is zero: slice it off.

    Args:
        tensors: Tensors whose last dimension is that of a head.

    Examples:
        >>> [x.shape[-1] for x in pad_heads(torch.ones(1, 3), torch.ones(2, 2))]
        [3, 3]
    """
    size = max([x.shape[-1] for x in tensors])
    return [
        x if x.shape[-1] == size else nn.functional.pad(x, (0, size - x.shape[-1])) for x in tensors
    ]


def wider(x: Tensor, y: Tensor) -> Tensor:
    """Return the tensor with the larger last dimension, the first if they are equal.

    Examples:
        >>> wider(torch.ones(1, 3), torch.ones(1, 5)).shape[-1]
        5
    """
    return x if x.shape[-1] >= y.shape[-1] else y
