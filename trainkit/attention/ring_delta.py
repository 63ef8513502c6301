"""The gated delta rule and its convolution over documents that are sharded around a ring.

Every rank has a zigzag shard of each document, as for `ring`: parts r and 2N-1-r of 2N. A part maps
the state before it to the one after it, S -> A S + B, and both matrices are known without any other
rank. So all ranks first compute theirs, then only the states travel, from part to part; then each
rank reads from the states before its parts. What is sent is one state of each document and part,
however long they are. Backward sends the gradients of the states the other way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainkit.attention.causal_conv import causal_conv, last_inputs
from trainkit.attention.gated_delta import (
    check_delta_inputs,
    choose_chunk,
    gated_delta,
    lay_out_chunks,
    make_chunks,
    read_states,
    scan_chunks,
)
from trainkit.collectives import all_gather
from trainkit.types import Axis, CausalConv, GatedDelta, Spans


def ring_gated_delta(axis: Axis) -> GatedDelta:
    """Return the gated delta rule over documents whose zigzag shards are on the ranks of an axis.

    Args:
        axis: The ring, `ps.ring`. Rank r must have the shard of `batch.shard_sequence`: parts r
            and 2N-1-r of every span.

    Returns:
        A function with the signature of `gated_delta`, of this rank's shards and the spans of the
        shard. It equals `gated_delta` over the full rows. It raises ValueError for shapes that do
        not fit, and for a span of an odd number of tokens, before it communicates. `gated_delta` on
        an axis of size 1.

    Effects:
        None; the function returned communicates on `axis`: in forward and in backward each rank
        sends and receives at most two messages, one state `[D, E]` a head and document each.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> ring_gated_delta(solo_parallel().ring) is gated_delta
        True
    """
    return gated_delta if axis.count == 1 else partial(_ring_gated_delta, axis=axis)


def ring_causal_conv(axis: Axis) -> CausalConv:
    """Return the causal convolution over documents whose zigzag shards are on the ranks of an axis.

    Args:
        axis: The ring, `ps.ring`, with shards as for `ring_gated_delta`.

    Returns:
        A function with the signature of `causal_conv`, without a halo, of this rank's shards and
        the spans of the shard. It equals `causal_conv` over the full rows. It raises ValueError for
        shapes that do not fit, and for a span of an odd number of tokens, before it communicates.
        `causal_conv` on an axis of size 1.

    Effects:
        None; the function returned communicates on `axis`: an all-gather of the last tokens of each
        part (the width of the kernel less one), and in backward a reduce-scatter.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> ring_causal_conv(solo_parallel().ring) is causal_conv
        True
    """
    return causal_conv if axis.count == 1 else partial(_ring_causal_conv, axis=axis)


def _ring_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    spans: Spans,
    scale: float | None = None,
    chunk: int | None = None,
    axis: Axis,
) -> Tensor:
    check_delta_inputs(q, k, v, log_decay=log_decay, beta=beta, spans=spans, chunk=chunk)
    halves = _halve(spans, "ring_gated_delta")
    layout = lay_out_chunks(halves, chunk or choose_chunk(halves, k.shape[3]))
    with torch.autocast(v.device.type, enabled=False):
        chunks = make_chunks(q, k, v, log_decay=log_decay, beta=beta, scale=scale, layout=layout)
        # One scan gives both matrices of a part: what becomes of the identity, and of zeros.
        sizes = [k.shape[3], v.shape[3]]
        columns = chunks._replace(offset=nn.functional.pad(chunks.offset, (sizes[0], 0)))
        eye = torch.eye(sizes[0], sum(sizes), dtype=chunks.offset.dtype, device=q.device)
        eye = eye.expand(2 * len(spans.lengths), v.shape[2], *eye.shape)
        factor, offset = scan_chunks(columns, eye, layout)[1].split(sizes, dim=3)
        initial = _Chain.apply(_by_half(factor), _by_half(offset), axis)
        before, _ = scan_chunks(chunks, initial.transpose(0, 1).flatten(0, 1), layout)
        return read_states(chunks, before, layout).view_as(v).to(v.dtype)


def _ring_causal_conv(
    x: Tensor, weight: Tensor, *, spans: Spans, bias: Tensor | None = None, axis: Axis
) -> Tensor:
    halves = _halve(spans, "ring_causal_conv")
    count = weight.shape[1] - 1
    tails = _by_half(last_inputs(x, spans=halves, count=count))
    # [2N, documents, count, C], in the order of the parts: both of rank 0, then of rank 1, ...
    gathered = all_gather(tails, axis, dim=0)
    ranks, last = axis.count, 2 * axis.count - 1
    halos = [
        _read_before(gathered, part, halves, ranks=ranks, count=count)
        for part in (axis.index, last - axis.index)
    ]
    halo = torch.stack(halos, dim=1).flatten(0, 1)
    return causal_conv(x, weight, spans=halves, bias=bias, halo=halo)


def _read_before(tails: Tensor, part: int, halves: Spans, *, ranks: int, count: int) -> Tensor:
    """Return the `count` tokens before a part of each document, `[documents, count, C]`."""
    # Parts of a document are equally long. Token -i before a part is token (i - 1) % length from
    # the end of the part 1 + (i - 1) // length before it, whose tail has it: both are below count.
    steps = torch.arange(count, 0, -1, device=tails.device) - 1
    lengths = halves.cu_seqlens.long().diff()[::2].clamp(min=1).unsqueeze(1)
    parts = part - 1 - steps // lengths
    at = count - 1 - steps % lengths
    # Part p is the first of rank p, or the second of rank 2N - 1 - p.
    place = torch.where(parts < ranks, 2 * parts, 2 * (2 * ranks - 1 - parts) + 1)
    document = torch.arange(len(lengths), device=tails.device).unsqueeze(1)
    found = tails[place.clamp(min=0), document, at]
    return found * (parts >= 0).unsqueeze(2)


def _halve(spans: Spans, name: str) -> Spans:
    """Return the two parts of each document that a rank has, as spans of their own."""
    odd = spans.lengths[spans.lengths % 2 == 1]
    if len(odd):
        raise ValueError(
            f"{name}: a rank's shard of a document must have two parts of equal length, got spans "
            f"of {', '.join(map(str, odd[:5].tolist()))} tokens; pack with multiple_of=2N and rows "
            "of a multiple of 2N tokens on N ranks"
        )
    starts = spans.cu_seqlens[:-1]
    middles = starts + spans.cu_seqlens.diff() // 2
    bounds = torch.cat([torch.stack([starts, middles], dim=1).flatten(), spans.cu_seqlens[-1:]])
    return Spans(bounds, np.repeat(spans.lengths // 2, 2), spans.max_length // 2)


def _by_half(x: Tensor) -> Tensor:
    """Return `[2 * documents, ...]` as `[2, documents, ...]`."""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).contiguous()


class _Chain(torch.autograd.Function):
    """From the maps of this rank's two parts to the states before them."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, factor: Tensor, offset: Tensor, axis: Axis
    ) -> Tensor:
        is_last = axis.index == axis.count - 1
        initial = torch.zeros_like(offset)
        # The first half of a document goes up the ranks, the second down again.
        if axis.index > 0:
            _receive(initial[0], axis, axis.index - 1)
        after = offset[0] + factor[0] @ initial[0]
        if is_last:
            initial[1] = after
        else:
            _send(after, axis, axis.index + 1)
            _receive(initial[1], axis, axis.index + 1)
        if axis.index > 0:
            _send(offset[1] + factor[1] @ initial[1], axis, axis.index - 1)
        ctx.save_for_backward(factor, initial)
        ctx.axis = axis
        return initial

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_initial: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        factor, initial = ctx.saved_tensors
        axis = ctx.axis
        with torch.autocast(factor.device.type, enabled=False):
            d_after = torch.zeros_like(initial)
            if axis.index > 0:
                _receive(d_after[1], axis, axis.index - 1)
            d_before = d_initial[1] + factor[1].mT @ d_after[1]
            if axis.index == axis.count - 1:
                d_after[0] = d_before
            else:
                _send(d_before, axis, axis.index + 1)
                _receive(d_after[0], axis, axis.index + 1)
            if axis.index > 0:
                _send(d_initial[0] + factor[0].mT @ d_after[0], axis, axis.index - 1)
            return d_after @ initial.mT, d_after, None


def _send(x: Tensor, axis: Axis, rank: int) -> None:
    dist.send(x.contiguous(), group=axis.group, group_dst=rank)


def _receive(out: Tensor, axis: Axis, rank: int) -> None:
    dist.recv(out, group=axis.group, group_src=rank)
