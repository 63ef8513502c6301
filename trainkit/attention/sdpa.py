"""Attention document by document, with torch's `scaled_dot_product_attention`.

The cost grows with the sum of the squared document lengths, not with the squared row. With a window
a document is split into chunks of queries, each with a view of the keys of its windows; all chunks
share one small mask, so the cost grows with tokens times window. This is the reference for the
other kernels, and the default on a CPU.

Memory grows linearly with the tokens. Where CUDA has no fused kernel for grouped queries (fp32, or
a mask), key heads are repeated. Where it has none at all (fp64), and for soft caps, which torch's
attention does not support, `blocks.attend_spans` computes chunks of queries. If keys and values
differ in size, the narrower are padded with zeros, since kernels take one size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainkit.attention.blocks import attend_cpu, attend_spans
from trainkit.attention.inputs import check_inputs, pad_heads
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
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Return attention inside each span, one `scaled_dot_product_attention` per span.

    Spans of one common length take a single batched call. `torch.compile` does not trace this
    function (one graph break), because the lengths are host integers that change with every batch.

    Args:
        q: Queries `[B, S, H, D]`.
        k: Keys `[B, S, K, D]`; K divides H, and each key head serves H / K neighbouring query
            heads.
        v: Values `[B, S, K, E]`.
        spans: The documents, over the flattened rows.
        scale: The factor of scores; 1 / sqrt(D) by default.
        window: The number of keys that a query attends to at most, including its own (Beltagy et
            al., "Longformer", 2020).
        softcap: c, where a score s becomes c * tanh(s / c) (Bello et al., "Neural combinatorial
            optimization with reinforcement learning", 2016; Gemma 2).
        sinks: `[H]`, one more logit in the softmax of each head, whose value is zero; see
            `add_sink`.
        causal: Whether a query sees no key after itself; without it all of its document.

    Returns:
        `[B, S, H, E]`, of q's dtype; under autocast of autocast's.

    Raises:
        ValueError: Shapes or dtypes do not fit each other, there are no tokens, the spans do not
            cover the B * S tokens, the scale or the soft cap is not a finite number above 0, the
            window is below 1 or not causal, or there is not one sink for each query head.

    Examples:
        >>> import numpy as np
        >>> from trainkit.types import Spans
        >>> spans = Spans(torch.tensor([0, 3, 4], dtype=torch.int32), np.array([3, 1]), 3)
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> out = sdpa(q, k, v, spans=spans)
        >>> torch.equal(out[:, 3], v[:, 3])  # a document of one token sees only itself
        True
    """
    # Disabled here and not by a decorator: `disable` imports torch._dynamo, 1.1 s (torch 2.13).
    call = torch.compiler.disable(_attend) if torch.compiler.is_compiling() else _attend
    return call(
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


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
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
    # A window that hides nothing would cost a mask, and with it the flash kernel.
    if window is not None and window >= spans.max_length:
        window = None
    # A sink needs the log-sum-exp, which torch's public function does not return. On a CPU
    # `attend_cpu` has it from the operator below that function.
    if softcap is not None or (sinks is not None and q.device.type != "cpu"):
        return attend_spans(
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
    size = v.shape[3]
    q, k, v = pad_heads(q, k, v)
    out = _attend_documents(
        q, k, v, spans=spans, scale=scale, window=window, sinks=sinks, causal=causal
    )
    return out if size == out.shape[3] else out[..., :size]


def _attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
    mask = None if window is None else _make_mask(q, window, longest=spans.max_length)
    if not _has_fused_kernel(q, k, v, mask, causal=causal):
        groups = q.shape[2] // k.shape[2]
        k_, v_ = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        if not _has_fused_kernel(q, k_, v_, mask, causal=causal):
            return attend_spans(q, k, v, spans=spans, scale=scale, window=window, causal=causal)
        k, v = k_, v_
    lengths = spans.lengths.tolist()
    if mask is None and len(set(lengths)) == 1:
        parts = [tuple(_heads_first(x, len(lengths)) for x in (q, k, v))]
    else:
        # One split and not a slice per document: the gradient of a slice is a zero tensor of the
        # whole row, 64 of them here (random lengths, 4,096 tokens: 217 ms against 80).
        documents = (_heads_first(x, 1).split(lengths, dim=2) for x in (q, k, v))
        parts = zip(*documents, strict=True)
    outputs = [
        _call_torch(*chunk, scale=scale, sinks=sinks, causal=causal)
        for q_, k_, v_ in parts
        for chunk in _split_chunks(q_, k_, v_, mask)
    ]
    flat = [out.transpose(1, 2).flatten(0, 1) for out in outputs]
    return (torch.cat(flat) if len(flat) > 1 else flat[0]).view_as(q)


def _call_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
    causal = causal and mask is None
    if sinks is not None:
        return attend_cpu((q, k, v), sinks, mask=mask, scale=scale, causal=causal)
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda and k.shape[2] == 1 and groups > 1:
        # cuDNN takes no single key, and the kernel that does takes no groups of heads (torch 2.13).
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        groups = 1
    return nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=groups > 1,
    )


def _make_mask(q: Tensor, window: int, *, longest: int) -> Tensor:
    """Return the additive mask of a chunk of queries, whose keys start a window before it."""
    # Chunks of a quarter of a window compute a fourth more scores than needed, and the gradients of
    # keys temporarily take five times their size; chunks of a window would compute twice as many.
    # For a window of W the mask has 5/16 W^2 numbers, which a call saves for its backward pass.
    size = min(max(window // 4, 64), longest - window)
    hidden = q.new_full((size, size + window), -torch.inf)
    return hidden.tril() + hidden.triu(window + 1)


def _split_chunks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield queries, keys, values and mask of each call for documents of one length."""
    window = q.shape[2] if mask is None else mask.shape[1] - mask.shape[0]
    remaining = q.shape[2] - window
    if mask is None or remaining <= 0:
        yield q, k, v, None
        return
    size = min(mask.shape[0], remaining)
    last = remaining % size
    # The first `window` queries see all keys before them: plain causal attention.
    first, chunks, end = q.split([window, remaining - last, last], dim=2)
    yield first, k[:, :, :window], v[:, :, :window], None
    keys, values = (_unfold(x, size + window, size) for x in (k, v))
    yield _unfold(chunks, size, size), keys, values, mask[:size, : size + window]
    if last:
        keys, values = (x[:, :, -(last + window) :] for x in (k, v))
        yield end, keys, values, mask[:last, : last + window]


def _unfold(x: Tensor, size: int, step: int) -> Tensor:
    """Return views `[n, H, size, D]` of a document `[1, H, L, D]`, `step` tokens apart."""
    return x[0].unfold(1, size, step).permute(1, 0, 3, 2)


def _has_fused_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool
) -> bool:
    """Return whether torch has a kernel that does not store all scores."""
    # torch would silently use one that does. A kernel that takes a mask takes causal attention too.
    if not q.is_cuda:
        return True
    q_, k_, v_ = (_heads_first(x, 1) for x in (q, k, v))
    if mask is not None:
        queries, keys = mask.shape
        q_, k_, v_ = q_[:, :, :queries], k_[:, :, :keys], v_[:, :, :keys]
    backend = torch.backends.cuda
    is_grouped = q.shape[2] != k.shape[2]
    params = backend.SDPAParams(q_, k_, v_, mask, 0.0, causal and mask is None, is_grouped)
    kernels = ("flash", "efficient", "cudnn")
    return any(getattr(backend, f"can_use_{kernel}_attention")(params) for kernel in kernels)


def _heads_first(x: Tensor, count: int) -> Tensor:
    """Split `[B, S, H, D]` into `count` rows of equal length: `[count, H, B * S / count, D]`."""
    return x.reshape(count, -1, *x.shape[2:]).transpose(1, 2)
