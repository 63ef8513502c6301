"""Ring attention: each rank keeps its queries, and keys and values travel around the ring.

Every rank has a zigzag shard of each document (`batch.zigzag_shard`): chunks r and 2N-1-r of 2N.
Then the visible part of another rank's scores is a rectangle, which needs no mask, and half of all:
of an earlier rank's keys all queries see the first chunk; of a later rank's keys the second chunk
of queries sees both. Only these are computed, so all ranks have equal work (Liu et al., "Ring
attention with blockwise transformers", 2023; Zhu, "Ring flash attention", 2024; the zigzag of the
Llama 3 report, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.attention.blocks import (
    BlockKernel,
    BlockSpans,
    OutLse,
    QueryKeyValue,
    attend,
    choose_block_kernel,
    matmul,
    merge_lse,
)
from trainkit.attention.inputs import check_inputs, wider
from trainkit.attention.untraced import untraced
from trainkit.attention.varlen import varlen
from trainkit.types import Attend, Axis, Spans


def ring(axis: Axis, *, kernel: BlockKernel | None = None) -> Attend:
    """Return attention over documents whose zigzag shards are on the ranks of an axis.

    It equals `sdpa` over the full rows. Each rank computes about 1/N of it, and receives the next
    keys and values meanwhile. In backward keys and values go around once more, together with their
    gradients. Key heads are not repeated.

    Args:
        axis: The ring, `ps.ring`. Rank r must have the shard of `batch.shard_sequence`: chunks r
            and 2N-1-r of every span, also of the padding of rows.
        kernel: The kernel of a block; by default the fastest that takes the tensors. If it is
            `plain_only`, windows and soft caps are computed by `blocks.matmul`, which skips keys
            outside all windows; keys still go all the way around.

    Returns:
        An `Attend` of this rank's shards: q `[B, S/N, H, D]`, k `[B, S/N, K, D]` and v `[B, S/N, K,
        E]`, and the spans of the shard, where each document has 1/N of its length. It raises
        ValueError for shapes that do not fit each other, and for a span of an odd number of tokens,
        before it communicates. `varlen` on an axis of size 1.

    Effects:
        None; the function returned communicates on `axis`, in forward and in backward, in N - 1 and
        N rounds of one message each to the next rank and from the one before. `torch.compile`
        leaves it alone (one graph break).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> ring(solo_parallel().ring) is varlen
        True
    """
    if axis.count == 1:
        return varlen
    return untraced(partial(_attend, axis=axis, kernel=kernel))


def _attend(
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
    axis: Axis,
    kernel: BlockKernel | None,
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
    multiple = 2 * axis.count
    odd = np.flatnonzero(spans.lengths % 2)
    if len(odd):
        lengths = (spans.lengths[odd] * axis.count).tolist()
        raise ValueError(
            f"ring: documents of {', '.join(map(str, lengths[:5]))} tokens in the whole row do not "
            f"divide by {multiple} (2 chunks for each of {axis.count} ranks); pack with "
            f"multiple_of={multiple} and rows of a multiple of {multiple} tokens"
        )
    # `spans` are those of a shard, with 1/N of each document.
    if window is not None and window >= spans.max_length * axis.count:
        window = None
    q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
    if causal:
        views = _make_views(spans, axis, scale=scale, window=window, softcap=softcap)
    else:  # all queries see the keys of every rank, whatever their places
        block = BlockSpans(spans, spans, causal=False, scale=scale, softcap=softcap)
        views = [_View(slice(None), slice(None), block)] * axis.count
    kernel = choose_block_kernel(wider(q_, v_)) if kernel is None else kernel
    if kernel.plain_only and not views[0].block.plain:
        kernel = matmul
    setup = _Setup(axis=axis, kernel=kernel, views=views)
    out = attend(
        (q_, k_, v_), sinks, partial(_forward, setup=setup), partial(_backward, setup=setup)
    )
    return out.unflatten(0, q.shape[:2])


# ------------------------------------------------------------------------------------------- views

_Tokens = slice | Tensor  # of this rank, or of the rank whose keys have arrived


@attrs.frozen(eq=False)
class _View:
    """The queries and keys of one step that see each other."""

    queries: _Tokens
    keys: _Tokens
    block: BlockSpans


@attrs.frozen(eq=False)
class _Setup:
    """The arguments of a call that are no tensors; view `s` is for the keys of `s` ranks before."""

    axis: Axis
    kernel: BlockKernel
    views: Sequence[_View]


def _make_views(
    spans: Spans,
    axis: Axis,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> list[_View]:
    """Return the view of each step."""
    make_block = partial(BlockSpans, scale=scale, window=window, softcap=softcap)
    half = Spans(spans.cu_seqlens // 2, spans.lengths // 2, spans.max_length // 2)
    first, second = _select_halves(half)
    everything = slice(None)
    rank = axis.index
    last = 2 * axis.count - 1
    queries = (rank, last - rank)
    block = make_block(spans, spans, causal=True, chunks=(queries, queries))
    views = [_View(everything, everything, block)]
    for step in range(1, axis.count):
        other = (rank - step) % axis.count
        if other < rank:  # its chunk s comes before all queries, and chunk 2N-1-s after all
            block = make_block(spans, half, causal=False, chunks=(queries, (other,)))
            views.append(_View(everything, first, block))
        else:  # both chunks are between the queries' chunks r and 2N-1-r
            chunks = (queries[1:], (other, last - other))
            block = make_block(half, spans, causal=False, chunks=chunks)
            views.append(_View(second, everything, block))
    return views


def _select_halves(half: Spans) -> tuple[_Tokens, _Tokens]:
    """Return the indices of the first and the second half of every document."""
    sizes = half.lengths
    if len(sizes) == 1:
        return slice(0, int(sizes[0])), slice(int(sizes[0]), None)
    # Computed on the device: an upload would wait. Token j of all first halves, in document d, is
    # at j + bounds[d]; of the second halves, at j + bounds[d + 1].
    bounds = half.cu_seqlens.long()
    token = torch.arange(int(sizes.sum()), device=bounds.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    return token + bounds[document], token + bounds[document + 1]


# ---------------------------------------------------------------------------------------- messages


@attrs.frozen(eq=False)
class _Exchange:
    """A pending message to the next rank and one from the rank before."""

    # `sent` is here only so that its memory is not freed.

    sent: Tensor
    received: Tensor
    works: Sequence[Any]


def _start_exchange(x: Tensor, axis: Axis, *, tag: int) -> _Exchange:
    received = torch.empty_like(x)
    after = (axis.index + 1) % axis.count
    before = (axis.index - 1) % axis.count
    # The tag separates keys from gradients, which gloo may deliver in another order; NCCL ignores
    # it, and delivers in the order of the calls, which is equal on all ranks.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=axis.group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, received, group=axis.group, tag=tag, group_peer=before),
        ]
    )
    return _Exchange(x, received, works)


def _finish_exchange(exchange: _Exchange) -> Tensor:
    for work in exchange.works:
        work.wait()
    return exchange.received


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate keys and values, whose sizes may differ, into one message."""
    return torch.cat([x.flatten() for x in tensors])


def _unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the keys and values in a message."""
    parts = message.split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


# ------------------------------------------------------------------------------ forward, backward


def _get_sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(qkv: QueryKeyValue, setup: _Setup) -> OutLse:
    q, *keys_values = qkv
    current = _pack(keys_values)
    out = lse = torch.empty(0)
    for step, view in enumerate(setup.views):
        is_last = step + 1 == setup.axis.count
        exchange = None if is_last else _start_exchange(current, setup.axis, tag=0)
        rows = view.queries
        k, v = (x[view.keys] for x in _unpack(current, keys_values))
        part, part_lse = setup.kernel.forward((q[rows], k, v), view.block)
        if step == 0:
            # Copies: they are written to below, and selective recomputation saves the tensors that
            # a kernel returns.
            out = part.to(_get_sum_dtype(q), copy=True)
            lse = part_lse.clone()
        else:
            merged = merge_lse(out[rows], lse[rows], part.to(out.dtype), part_lse)
            out[rows], lse[rows] = merged
        current = current if exchange is None else _finish_exchange(exchange)
    return out, lse


def _backward(d_out: Tensor, qkv: QueryKeyValue, result: OutLse, setup: _Setup) -> QueryKeyValue:
    q, *keys_values = qkv
    current = _pack(keys_values)
    d_q = torch.zeros(q.shape, dtype=_get_sum_dtype(q), device=q.device)
    d_current = torch.zeros(current.shape, dtype=_get_sum_dtype(q), device=q.device)
    d_exchange: _Exchange | None = None
    for step, view in enumerate(setup.views):
        is_last = step + 1 == setup.axis.count
        exchange = None if is_last else _start_exchange(current, setup.axis, tag=0)
        rows = view.queries
        k, v = (x[view.keys] for x in _unpack(current, keys_values))
        out, lse = (x[rows] for x in result)
        d_part, *d_parts = setup.kernel.backward(
            d_out[rows], (q[rows], k, v), (out, lse), view.block
        )
        d_q[rows] += d_part
        if d_exchange is not None:  # the gradients of the current keys from the ranks before
            d_current = _finish_exchange(d_exchange)
        for d_sum, part in zip(_unpack(d_current, keys_values), d_parts, strict=True):
            d_sum[view.keys] += part
        # The last exchange brings the gradients to the rank of their keys.
        d_exchange = _start_exchange(d_current, setup.axis, tag=1)
        current = current if exchange is None else _finish_exchange(exchange)
    assert d_exchange is not None
    d_k, d_v = _unpack(_finish_exchange(d_exchange).to(q.dtype), keys_values)
    return d_q.to(q.dtype), d_k, d_v
