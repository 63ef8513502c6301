"""What the attentions of this folder are given: checked before anything is computed or sent."""

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
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return queries, keys and values of one dtype, and the scale; refuse what does not fit.

    Under autocast fp32 becomes autocast's dtype, as in torch's own attention: rotary tables and
    norms make queries and keys wider than the values.

    Args:
        q: Queries `[B, S, H, D]`.
        k: Keys `[B, S, K, D]`; K divides H.
        v: Values `[B, S, K, E]`.
        spans: The documents, over the flattened rows.
        scale: What scores are multiplied by; 1 / sqrt(D) by default.
        window: How many keys a query sees at most, itself among them; all by default.
        softcap: What scores are kept between, by tanh; nothing by default.
        parts: How many ranks hold as many tokens of these rows.

    Raises:
        ValueError: Shapes or dtypes do not belong together, there are no tokens, the spans do not
            cover them, the scale or the soft cap is not a finite number above 0, or the window is
            below 1.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.ones(3, 1, 4, 2, 16)
        >>> *_, scale = check_inputs(q, k, v, spans=spans_from_rows(1, 4))
        >>> scale
        0.25
    """
    _check_shapes(q, k, v)
    q, k, v = in_one_dtype(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(
            f"attention: scale must be a finite number above 0, got {scale}; scores times that are "
            "no attention. Leave it out for 1 / sqrt(D)"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"attention: softcap must be a finite number above 0, got {softcap}")
    check_range("attention", at_least=1, window=window)
    if not torch.compiler.is_compiling():  # host arrays, which a graph must not be made for
        _check_spans(q, spans, parts)
    return q, k, v, scale


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    same = q.ndim == k.ndim == v.ndim == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    same = same and k.shape[2] == v.shape[2]
    whole = same and q.numel() > 0 and k.numel() > 0 and v.numel() > 0
    if not whole or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            "attention: q must be [B, S, H, D], k [B, S, K, D] and v [B, S, K, E] with K a divisor "
            f"of H and no size 0, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


def in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in autocast's dtype, or refuse different ones.

    Raises:
        ValueError: They have no common floating-point dtype.

    Examples:
        >>> q, k, v = torch.ones(3, 1, 4, 2, 16)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     in_one_dtype(q, k, v)[0].dtype
        torch.bfloat16
    """
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # meta has none
        low = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(low) if x.dtype == torch.float32 else x for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"attention: q, k and v must have one dtype, a floating-point one, got {q.dtype}, "
            f"{k.dtype} and {v.dtype}"
        )
    return q, k, v


def _check_spans(q: Tensor, spans: Spans, parts: int) -> None:
    rows, tokens = q.shape[0], q.shape[1] * parts
    if spans.lengths.sum() != rows * tokens:
        held = f"q holds {rows} x" if parts == 1 else f"the slices of {parts} ranks hold {rows} x"
        raise ValueError(
            f"attention: the spans hold {spans.lengths.sum()} tokens, {held} {tokens}; give the "
            "spans of this very batch (batch.shard_sequence makes those of a shard, and leaves "
            "Ulysses those of the whole rows)"
        )
    if spans.lengths.min() < 0:
        raise ValueError(
            f"attention: a span has {spans.lengths.min()} tokens, which must be 0 or more"
        )


def of_one_size(*tensors: Tensor) -> list[Tensor]:
    """Return queries, keys and values whose heads are as wide as the widest of them, by zeros.

    For kernels that take one head size. Zeros change no score, and of the result what is beyond the
    values' own size is zeros too: it is cut off.

    Args:
        tensors: Of one number of dimensions, the last of which is the head's.

    Examples:
        >>> [x.shape[-1] for x in of_one_size(torch.ones(1, 3), torch.ones(2, 2))]
        [3, 3]
    """
    size = max([x.shape[-1] for x in tensors])
    return [
        x if x.shape[-1] == size else nn.functional.pad(x, (0, size - x.shape[-1])) for x in tensors
    ]


def wider(x: Tensor, y: Tensor) -> Tensor:
    """Return which of two tensors has the larger last dimension, for equal ones the first.

    Examples:
        >>> wider(torch.ones(1, 3), torch.ones(1, 5)).shape[-1]
        5
    """
    return x if x.shape[-1] >= y.shape[-1] else y
