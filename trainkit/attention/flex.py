"""Attention of packed documents in torch's FlexAttention: windows and soft caps in one kernel."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trainkit.attention.inputs import check_inputs, pad_heads
from trainkit.attention.sinks import add_sink
from trainkit.attention.untraced import untraced
from trainkit.types import Attend, Spans

BLOCK = 128
"""The tokens of a block, the smallest unit that the kernel skips."""


def flex() -> Attend:
    """Return attention by torch's `flex_attention`, which is one compiled kernel on CUDA.

    Blocks of queries and keys without a visible pair are skipped, so the cost is that of the
    documents and windows. The mask of blocks is computed on the device, once per batch for all
    layers that share this function: it is cached by the `Spans`. On other devices torch has only a
    reference implementation, with all scores in memory, and on a CPU without gradients (torch
    2.13). The kernel has been checked by signature only, and never been run on a GPU.

    Returns:
        An `Attend`, equal to `sdpa` up to rounding.

    References:
        Dong et al., "Flex Attention: a programming model for generating optimized attention
        kernels" (2024).

    Examples:
        >>> from trainkit.models import Decoder, make_decoder_config
        >>> model = Decoder(make_decoder_config("tiny", vocab_size=256), attend=flex())
    """
    masks_of_spans: WeakKeyDictionary[Spans, dict[tuple[int | None, bool], Any]] = (
        WeakKeyDictionary()
    )

    def attend(
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
        masks = masks_of_spans.setdefault(spans, {})
        key = window, causal
        if key not in masks:
            tokens = q.shape[0] * q.shape[1]
            masks[key] = block_mask(spans, tokens, window=window, causal=causal)
        # One row of all tokens, heads first.
        q_, k_, v_ = (x.flatten(0, 1).transpose(0, 1)[None] for x in pad_heads(q, k, v))
        out = _attention(compiled=q.is_cuda)(
            q_,
            k_,
            v_,
            score_mod=_make_softcap(softcap),
            block_mask=masks[key],
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
            return_aux=None if sinks is None else _ask_lse(),
        )
        if sinks is not None:
            # Its log-sum-exp has gradients, so that sinks need none of their own.
            out, lse = out[0], out[1].lse
            out = add_sink(out, lse, sinks.unsqueeze(-1))[0].to(q.dtype)
        out = out[0].transpose(0, 1).unflatten(0, q.shape[:2])
        return out[..., : v.shape[3]]

    return untraced(attend, recursive=False)  # the kernel itself is compiled all the same


@cache
def _attention(*, compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 -- 1 s to import

    # Static shapes: with dynamic ones torch 2.13 fails on a second soft cap, as it makes the number
    # a variable.
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def _ask_lse() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest  # noqa: PLC0415 -- see _attention

    return AuxRequest(lse=True)


@cache
def _make_softcap(softcap: float | None) -> Any:
    # Cached: a new function would be compiled again.
    if softcap is None:
        return None

    def score_mod(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def block_mask(spans: Spans, tokens: int, *, window: int | None = None, causal: bool = True) -> Any:
    """Return torch's `BlockMask` of attention inside each span, without a host sync.

    `create_block_mask` evaluates every pair of tokens. Here the first and the last token of each
    block are enough, because neither the first nor the last key that a query sees ever decreases.

    Args:
        spans: The documents.
        tokens: The number of their tokens.
        window: The number of keys that a query attends to at most, including its own.
        causal: Whether a query sees no key after itself.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> block_mask(spans_from_rows(1, 300), 300, window=20).kv_num_blocks
        tensor([[[1, 2, 2]]], dtype=torch.int32)
    """
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 -- see _attention

    ends = spans.cu_seqlens
    device = ends.device
    token = torch.arange(tokens, device=device, dtype=torch.int32)
    document = torch.searchsorted(ends, token, right=True)
    first_key = ends[document - 1]
    last_key = token if causal else ends[document] - 1
    if window is not None:
        first_key = torch.maximum(first_key, token - (window - 1))
    # Rows are blocks of queries, columns blocks of keys, each by its first token.
    queries, keys = token[::BLOCK, None], token[None, ::BLOCK]
    last_queries = (queries + (BLOCK - 1)).clamp(max=tokens - 1)
    is_visible = (keys <= last_key[last_queries]) & (keys + BLOCK > first_key[queries])
    # All keys of these blocks are visible to all queries, so the kernel needs no mask inside.
    # Those of the queries' own block are not, where attention is causal.
    is_full = keys + (BLOCK - 1) <= last_key[queries]
    is_full = is_visible & is_full & (keys >= first_key[last_queries])

    def mask_mod(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= last_key[query]) & (key >= first_key[query])

    return BlockMask.from_kv_blocks(
        *_list_blocks(is_visible & ~is_full),
        *_list_blocks(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(tokens, tokens),
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and the indices of all, those first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    # One mask for all batches and heads, the first two dimensions of a `BlockMask`.
    return counts[None, None], order.to(torch.int32)[None, None]
