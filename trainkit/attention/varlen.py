"""Attention of packed documents in one kernel: torch's `varlen_attn` on CUDA, `sdpa` elsewhere."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from trainkit.attention.blocks import flash_takes, make_last_dim_dense
from trainkit.attention.inputs import check_inputs, pad_heads, wider
from trainkit.attention.sdpa import sdpa
from trainkit.types import Spans


def varlen(
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
) -> Tensor:
    """Return attention inside each span, causal by default, in one kernel where torch has one.

    `torch.nn.attention.varlen.varlen_attn` is used where it works: on CUDA, from Ampere on, in fp16
    and bf16 (under autocast in fp32 too), with head sizes that are multiples of 8, up to 256. The
    narrower of keys and values are padded with zeros. It supports windows, but no soft caps. All
    other cases use `sdpa`, to which this function is equal up to rounding. The CUDA branch has been
    checked against the signatures of torch 2.11 and 2.13 only, and never been run.

    Args:
        q: Queries `[B, S, H, D]`.
        k: Keys `[B, S, K, D]`; K divides H, and each key head serves H / K neighbouring query
            heads.
        v: Values `[B, S, K, E]`.
        spans: The documents, over the flattened rows.
        scale: The factor of scores; 1 / sqrt(D) by default.
        window: The number of keys that a query attends to at most, including its own.
        softcap: The bound of scores, by tanh.
        sinks: One more logit in the softmax of each query head, `[H]`; see `add_sink`.
        causal: Whether a query sees no key after itself.

    Returns:
        `[B, S, H, E]`, of q's dtype; under autocast of autocast's.

    Raises:
        ValueError: As `sdpa`.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from trainkit.types import Spans
        >>> spans = Spans(torch.tensor([0, 3, 4], dtype=torch.int32), np.array([3, 1]), 3)
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> torch.equal(varlen(q, k, v, spans=spans), sdpa(q, k, v, spans=spans))
        True
    """
    q, k, v, scale = check_inputs(
        q,
        k,
        v,
        spans=spans,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        causal=causal,
    )
    if softcap is None and sinks is None and flash_takes(wider(q, v)):
        return flash_varlen(q, k, v, spans=spans, scale=scale, window=window, causal=causal)
    return sdpa(
        q,
        k,
        v,
        spans=spans,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        causal=causal,
    )


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Call torch's `varlen_attn` for a packed batch, on CUDA only, without the checks of `varlen`.

    Arguments and result are those of `varlen`.
    """
    # Imported here: the module imports torch._dynamo, 1.1 s (torch 2.13).
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - see above

    if q.shape[2] != k.shape[2]:
        if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
            varlen_attn = partial(varlen_attn, enable_gqa=True)
        else:  # torch 2.11: the kernel wants one key head per query head
            groups = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q_, k_, v_ = (make_last_dim_dense(x.flatten(0, 1)) for x in pad_heads(q, k, v))
    out = varlen_attn(
        q_,
        k_,
        v_,
        spans.cu_seqlens,
        spans.cu_seqlens,
        spans.max_length,
        spans.max_length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0 if causal else -1),
    )
    assert isinstance(out, Tensor)  # a tuple only when asked for the log-sum-exp
    return out[..., : v.shape[3]].unflatten(0, q.shape[:2])
