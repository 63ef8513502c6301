"""Ring attention: each rank keeps its queries, and keys and values travel around the ring.

Every rank holds a zigzag shard of each document (`batch.zigzag_shard`): chunks r and 2N-1-r of 2N.
Then what can be seen of another rank's keys is a rectangle, which needs no mask, and half of the
work of the whole: of an earlier rank's keys all queries see the first chunk, of a later rank's keys
the second chunk of queries sees both. Nothing else is computed, so every rank does the same work
(Liu et al., "Ring attention with blockwise transformers", 2023; Zhu, "Ring flash attention", 2024;
the zigzag of the Llama 3 report, 2024).
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
from torch.autograd.function import once_differentiable

from trainkit.attention.blocks import (
    BlockKernel,
    BlockSpans,
    OutLse,
    QueryKeyValue,
    choose_block_kernel,
    matmul,
    merge_lse,
)
from trainkit.attention.inputs import check_inputs, wider
from trainkit.attention.untraced import untraced
from trainkit.attention.varlen import varlen
from trainkit.types import Attend, Axis, Spans


def ring(axis: Axis, *, kernel: BlockKernel | None = None) -> Attend:
    """Return causal attention over documents whose zigzag shards lie on the ranks of an axis.

    It equals `sdpa` over the whole rows. Each rank computes about 1/N of it; keys and values of the
    next rank are under way while those of this one are attended to. In backward they go around
    once more, together with their gradients. Key heads are never repeated.

    Args:
        axis: The ring, `ps.ring`. Rank r must hold what `batch.shard_sequence` gives it: chunks r
            and 2N-1-r of every span, also of the padding of rows.
        kernel: What computes one block; by default the fastest that takes the tensors. Where it is
            `plain_only`, windows and soft caps are computed by `blocks.matmul`, which passes over
            all that no query's window reaches. Keys go all the way around nevertheless.

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
    axis: Axis,
    kernel: BlockKernel | None,
) -> Tensor:
    seen: dict[str, Any] = {"window": window, "softcap": softcap}
    q, k, v, scale = check_inputs(q, k, v, spans=spans, scale=scale, **seen)
    _check_lengths(spans, axis)
    if window is not None and window >= spans.max_length * axis.count:
        seen["window"] = None
    q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
    views = _views(spans, axis, scale=scale, **seen)
    kernel = choose_block_kernel(wider(q_, v_)) if kernel is None else kernel
    if kernel.plain_only and not views[0].block.plain:
        kernel = matmul
    tour = _Tour(axis=axis, kernel=kernel, views=views)
    return _Ring.apply(q_, k_, v_, tour).unflatten(0, q.shape[:2])


def _check_lengths(spans: Spans, axis: Axis) -> None:
    parts = 2 * axis.count
    odd = np.flatnonzero(spans.lengths % 2)
    if len(odd):
        lengths = (spans.lengths[odd] * axis.count).tolist()
        raise ValueError(
            f"ring: documents of {', '.join(map(str, lengths[:5]))} tokens in the whole row do not "
            f"divide by {parts} (2 chunks for each of {axis.count} ranks); pack with "
            f"multiple_of={parts} and rows of a multiple of {parts} tokens"
        )


# ------------------------------------------------------------------------------------ what is seen

_Part = slice | Tensor  # which tokens of this rank, or of the rank whose keys are here


@attrs.frozen(eq=False)
class _View:
    """What can be seen at one step: which of the queries see which of the keys that are here."""

    queries: _Part
    keys: _Part
    block: BlockSpans


@attrs.frozen(eq=False)
class _Tour:
    """What one call needs besides tensors; view `s` is for the keys of `s` ranks before."""

    axis: Axis
    kernel: BlockKernel
    views: Sequence[_View]


def _views(spans: Spans, axis: Axis, *, scale: float, **seen: Any) -> list[_View]:
    """Return what this rank sees at each step; `seen` are a window and a soft cap."""
    half = Spans(spans.cu_seqlens // 2, spans.lengths // 2, spans.max_length // 2)
    first, second = _halves(half)
    whole, rank, last = slice(None), axis.index, 2 * axis.count - 1
    known: dict[str, Any] = {"scale": scale, **seen}
    queries = rank, last - rank
    own = BlockSpans(spans, spans, causal=True, **known, chunks=(queries, queries))
    views = [_View(whole, whole, own)]
    for step in range(1, axis.count):
        other = (rank - step) % axis.count
        if other < rank:  # its chunk s comes before all queries, and chunk 2N-1-s after all
            block = BlockSpans(spans, half, causal=False, **known, chunks=(queries, (other,)))
            views.append(_View(whole, first, block))
        else:  # both chunks lie between the queries' chunks r and 2N-1-r
            chunks = queries[1:], (other, last - other)
            block = BlockSpans(half, spans, causal=False, **known, chunks=chunks)
            views.append(_View(second, whole, block))
    return views


def _halves(half: Spans) -> tuple[_Part, _Part]:
    """Return what picks the first and the second half of every document, without an upload."""
    sizes = half.lengths
    if len(sizes) == 1:
        return slice(0, int(sizes[0])), slice(int(sizes[0]), None)
    # Token j of all first halves, in document d, lies at j + bounds[d]; of the second, + its size.
    bounds = half.cu_seqlens.long()
    token = torch.arange(int(sizes.sum()), device=bounds.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    return token + bounds[document], token + bounds[document + 1]


# ------------------------------------------------------------------------------------ what travels


@attrs.frozen(eq=False)
class _UnderWay:
    """A message to the next rank and one from the rank before; what is sent must not be freed."""

    sent: Tensor
    received: Tensor
    works: Sequence[Any]


def _send_on(x: Tensor, axis: Axis, *, tag: int) -> _UnderWay:
    received = torch.empty_like(x)
    after, before = (axis.index + 1) % axis.count, (axis.index - 1) % axis.count
    # The tag keeps keys from gradients, which gloo may deliver in another order; NCCL ignores it,
    # and delivers in the order of the calls, which is one on all ranks.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=axis.group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, received, group=axis.group, tag=tag, group_peer=before),
        ]
    )
    return _UnderWay(x, received, works)


def _arrived(message: _UnderWay) -> Tensor:
    for work in message.works:
        work.wait()
    return message.received


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return keys and values as one message; values may be narrower."""
    return torch.cat([x.flatten() for x in tensors])


def _apart(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `_as_one`, by views."""
    parts = message.split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


# ------------------------------------------------------------------------------------ the ring


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which parts are summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(qkv: QueryKeyValue, tour: _Tour) -> OutLse:
    q, *keys_values = qkv
    here = _as_one(keys_values)
    out = lse = torch.empty(0)
    for step, view in enumerate(tour.views):
        message = _send_on(here, tour.axis, tag=0) if step + 1 < tour.axis.count else None
        seen = view.queries
        k, v = (x[view.keys] for x in _apart(here, keys_values))
        part, part_lse = tour.kernel.forward((q[seen], k, v), view.block)
        if step == 0:
            # Copies: they are written to below, and what a kernel returned may be kept elsewhere
            # (selective recomputation keeps the results of attention).
            out, lse = part.to(_wide(q), copy=True), part_lse.clone()
        else:
            out[seen], lse[seen] = merge_lse(out[seen], lse[seen], part.to(out.dtype), part_lse)
        here = here if message is None else _arrived(message)
    return out.to(q.dtype), lse


def _backward(d_out: Tensor, qkv: QueryKeyValue, result: OutLse, tour: _Tour) -> QueryKeyValue:
    q, *keys_values = qkv
    here = _as_one(keys_values)
    d_q = torch.zeros(q.shape, dtype=_wide(q), device=q.device)
    d_here = torch.zeros(here.shape, dtype=_wide(q), device=q.device)
    d_message: _UnderWay | None = None
    for step, view in enumerate(tour.views):
        message = _send_on(here, tour.axis, tag=0) if step + 1 < tour.axis.count else None
        seen = view.queries
        k, v = (x[view.keys] for x in _apart(here, keys_values))
        out, lse = (x[seen] for x in result)
        d_part, *d_parts = tour.kernel.backward(
            d_out[seen], (q[seen], k, v), (out, lse), view.block
        )
        d_q[seen] += d_part
        if d_message is not None:  # what the ranks before have for the keys that are here
            d_here = _arrived(d_message)
        for d_sum, part in zip(_apart(d_here, keys_values), d_parts, strict=True):
            d_sum[view.keys] += part
        d_message = _send_on(d_here, tour.axis, tag=1)  # after the last step: home
        here = here if message is None else _arrived(message)
    assert d_message is not None
    d_k, d_v = _apart(_arrived(d_message).to(q.dtype), keys_values)
    return d_q.to(q.dtype), d_k, d_v


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tour: _Tour
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward((q, k, v), tour)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tour = tour
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(d_out.device.type, enabled=False):
            d_q, d_k, d_v = _backward(d_out.contiguous(), (q, k, v), (out, lse), ctx.tour)
        return d_q, d_k, d_v, None
