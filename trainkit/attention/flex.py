"""Attention of packed documents in torch's FlexAttention: windows and soft caps in one kernel."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trainkit.attention.inputs import check_inputs, of_one_size
from trainkit.types import Attend, Spans

BLOCK = 128
"""Tokens of a block, the least unit that the kernel leaves out."""


def flex() -> Attend:
    """Return attention by torch's `flex_attention`, compiled where it is a kernel.

    Blocks of queries and keys that see nothing of each other are left out, so the cost is that of
    the documents and windows. Which these are is computed on the device, once for all layers of a
    batch that share this function: the answers go with the `Spans`. Off CUDA it is the plain form
    that torch has for looking at, with all scores in memory, and on a CPU without gradients (torch
    2.13 refuses them). Its kernel has so far been checked by signature only, and never been run on
    a GPU.

    Returns:
        An `Attend`, equal to `sdpa` up to rounding.

    References:
        Dong et al., "Flex Attention: a programming model for generating optimized attention
        kernels" (2024).

    Examples:
        >>> from trainkit.models import Decoder, make_decoder_config
        >>> model = Decoder(make_decoder_config("tiny", vocab_size=256), attend=flex())
    """
    known: WeakKeyDictionary[Spans, dict[int | None, Any]] = WeakKeyDictionary()

    def attend(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **how: Any) -> Tensor:
        q, k, v, scale = check_inputs(q, k, v, spans=spans, **how)
        masks, window = known.setdefault(spans, {}), how.get("window")
        if window not in masks:
            masks[window] = block_mask(spans, q.shape[0] * q.shape[1], window=window)
        # One row of all tokens, heads first.
        q_, k_, v_ = (x.flatten(0, 1).transpose(0, 1)[None] for x in of_one_size(q, k, v))
        out = _attention(compiled=q.is_cuda)(
            q_,
            k_,
            v_,
            score_mod=_capped(how.get("softcap")),
            block_mask=masks[window],
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out[0].transpose(0, 1).unflatten(0, q.shape[:2])[..., : v.shape[3]]

    def run(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **how: Any) -> Tensor:
        if torch.compiler.is_compiling():  # this frame alone: the kernel is compiled all the same
            return torch.compiler.disable(attend, recursive=False)(q, k, v, spans=spans, **how)
        return attend(q, k, v, spans=spans, **how)

    return run


@cache
def _attention(*, compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 -- 1 s to import

    # Static: torch 2.13 fails on a second soft cap that it would take for a variable.
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


@cache
def _capped(softcap: float | None) -> Any:
    """Return what becomes of a score."""
    if softcap is None:
        return None

    def score_mod(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def block_mask(spans: Spans, tokens: int, *, window: int | None = None) -> Any:
    """Return torch's `BlockMask` of causal attention inside each span, without a host sync.

    What `create_block_mask` finds by looking at every pair of tokens follows here from two tokens
    of each block, as the first key that a query sees never moves back.

    Args:
        spans: The documents.
        tokens: How many tokens they hold.
        window: How many keys a query sees at most, itself among them.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> block_mask(spans_from_rows(1, 300), 300, window=20).kv_num_blocks
        tensor([[[1, 2, 2]]], dtype=torch.int32)
    """
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 -- see _attention

    ends, device = spans.cu_seqlens, spans.cu_seqlens.device
    token = torch.arange(tokens, device=device, dtype=torch.int32)
    first_key = ends[torch.searchsorted(ends, token, right=True) - 1]
    if window is not None:
        first_key = torch.maximum(first_key, token - (window - 1))
    begins = token[::BLOCK]
    lasts = (begins + (BLOCK - 1)).clamp(max=tokens - 1)
    keys, lowest, highest = begins[None], first_key[::BLOCK, None], first_key[lasts][:, None]
    seen = (keys <= begins[:, None]) & (keys + BLOCK > lowest)
    whole = seen & (keys < begins[:, None]) & (keys >= highest)

    def mask_mod(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_key[query])

    how: dict[str, Any] = {"BLOCK_SIZE": BLOCK, "seq_lengths": (tokens, tokens)}
    parts = *_in_order(seen & ~whole), *_in_order(whole)
    return BlockMask.from_kv_blocks(*parts, mask_mod=mask_mod, **how)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which, those first."""
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
