"""Ulysses attention: an all-to-all exchanges a shard of the sequence for a shard of the heads.

Outside of attention each rank has a contiguous slice of every row; inside, some of the heads over
full rows, so any attention function works. There are two all-to-alls in place of a ring (Jacobs et
al., "DeepSpeed Ulysses", 2023). The number of heads bounds the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from trainkit.attention.inputs import check_inputs
from trainkit.attention.untraced import untraced
from trainkit.collectives import all_to_all
from trainkit.types import Attend, Axis, Spans


def ulysses(attend: Attend, axis: Axis) -> Attend:
    """Return attention over rows of which every rank of an axis has a contiguous slice.

    Heads are sharded in order, key heads together with their query heads. If there are fewer key
    heads than ranks, each is sent to several ranks. `ulysses(ring(...), ...)` composes: the rows
    are then those of a ring shard.

    Args:
        attend: Attention over full rows, with fewer heads.
        axis: The ranks that have the slices, `ps.ulysses`.

    Returns:
        An `Attend` of this rank's slices: q `[B, S/N, H, D]`, k `[B, S/N, K, D]` and v `[B, S/N, K,
        E]`, with the spans of the whole rows (B * S tokens), which `batch.shard_sequence` leaves in
        the batch. It raises ValueError when N does not divide H, or neither K and N divides the
        other, before it communicates. `attend` itself on an axis of size 1.

    Effects:
        None; the function returned communicates on `axis`: two all-to-alls in forward, two in
        backward, and what `attend` does.

    Examples:
        >>> from trainkit.attention import sdpa
        >>> from trainkit.mesh import solo_parallel
        >>> ulysses(sdpa, solo_parallel().ulysses) is sdpa
        True
    """
    if axis.count == 1:
        return attend
    return untraced(partial(_attend, attend=attend, axis=axis))


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
    attend: Attend,
    axis: Axis,
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
        parts=axis.count,
    )
    check_heads(q, k, axis.count)
    k, v = repeat_heads(k, axis.count), repeat_heads(v, axis.count)
    q, k, v = exchange_heads((q, k, v), axis)
    if sinks is not None:
        sinks = sinks.chunk(axis.count)[axis.index]
    if not causal:  # a kernel of the caller's own may have no such option
        attend = partial(attend, causal=False)
    out = attend(q, k, v, spans=spans, scale=scale, window=window, softcap=softcap, sinks=sinks)
    # Back to this rank's tokens, with all heads.
    return all_to_all(out, axis, split_dim=1, gather_dim=2)


def repeat_heads(x: Tensor, ranks: int, *, dim: int = 2) -> Tensor:
    """Return heads that are repeated until there is one for each rank.

    Args:
        x: Heads along `dim`; the number of ranks divides theirs, or is a multiple of it.
        ranks: The number of ranks.
        dim: The dimension of heads.

    Examples:
        >>> repeat_heads(torch.ones(1, 2, 3, 4), 6).shape
        torch.Size([1, 2, 6, 4])
    """
    # A rank's query heads all belong to one key head then, which is its only one.
    heads = x.shape[dim]
    return x if heads >= ranks else x.repeat_interleave(ranks // heads, dim=dim)


def exchange_heads(tensors: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Return this rank's heads of all tokens, for its tokens of all heads, in one all-to-all.

    Args:
        tensors: `[B, S/N, heads, size]` each, of one dtype; N divides their heads.
        axis: The N ranks.

    Returns:
        `[B, S, heads/N, size]` each.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> (out,) = exchange_heads([torch.ones(1, 2, 3, 4)], solo_parallel().ulysses)
        >>> out.shape
        torch.Size([1, 2, 3, 4])
    """
    # One message: for each rank its heads of the first tensor, of the second, and so on.
    by_rank = [rearrange(x, "b s (n h) d -> b s n (h d)", n=axis.count) for x in tensors]
    message = torch.cat(by_rank, dim=3).flatten(2, 3)
    # [B, S, features of this rank's heads]: those of the first tensor, then of the second, ...
    received = all_to_all(message, axis, split_dim=2, gather_dim=1)
    own = received.split([x.shape[3] for x in by_rank], dim=2)
    return [
        features.unflatten(2, (-1, x.shape[3])) for features, x in zip(own, tensors, strict=True)
    ]


def check_heads(q: Tensor, k: Tensor, ranks: int) -> None:
    """Check that ranks can divide the heads among them, before anything is sent.

    Args:
        q: Queries `[B, S, H, D]`, or the values of a delta layer.
        k: Keys `[B, S, K, D]`.
        ranks: The number of ranks.

    Raises:
        ValueError: It does not divide H, or neither it and K divides the other.

    Examples:
        >>> check_heads(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 2, 8), 4)
    """
    heads = q.shape[2]
    kv_heads = k.shape[2]
    if heads % ranks:
        raise ValueError(
            f"ulysses: {heads} query heads do not divide over {ranks} ranks; choose a degree that "
            f"divides {heads}"
        )
    # Fewer key heads than ranks are repeated, which needs equally many copies of each.
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"ulysses: {kv_heads} key heads and {ranks} ranks: one must divide the other; choose "
            f"a degree that divides {kv_heads}, or a multiple of it"
        )
