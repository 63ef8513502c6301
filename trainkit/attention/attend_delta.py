"""The part of a delta layer that sees other tokens: a convolution, and the rule after it.

As attention functions do, it takes the queries, keys and values of some heads, so that the
projections around it are the same in every layout. In a ring its two parts are those of
`ring_delta`; `ulysses_delta` exchanges tokens for heads around it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from trainkit.attention.causal_conv import causal_conv
from trainkit.attention.gated_delta import gated_delta
from trainkit.attention.ulysses import check_heads, exchange_heads, repeat_heads
from trainkit.collectives import all_to_all
from trainkit.types import AttendDelta, Axis, CausalConv, Convolutions, GatedDelta, Spans


def attend_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    convolutions: Convolutions,
    log_decay: Tensor,
    beta: Tensor,
    spans: Spans,
    conv: CausalConv = causal_conv,
    delta: GatedDelta = gated_delta,
) -> Tensor:
    """Return the gated delta rule of convolved inputs, inside each span.

    Queries, keys and values each pass a causal convolution and SiLU; then queries and keys are
    normalized to unit length.

    Args:
        q: Queries `[B, S, K, D]`.
        k: Keys `[B, S, K, D]`.
        v: Values `[B, S, H, E]`; K divides H, and each key head serves H / K neighbouring value
            heads.
        convolutions: The kernels of the convolutions of q, k and v: `[K, D, W]` twice, and
            `[H, E, W]`.
        log_decay: The logarithm of the decay, `[B, S, H]`, at most 0 and finite.
        beta: The strength of the update, `[B, S, H]`.
        spans: The documents, over the flattened rows.
        conv: The convolution; `ring_causal_conv` in a ring.
        delta: The rule; `ring_gated_delta` in a ring.

    Returns:
        `[B, S, H, E]`, of v's dtype.

    Raises:
        ValueError: Shapes do not fit each other, or the spans do not cover the tokens.

    References:
        Yang et al., "Gated Delta Networks" (2024), section 3.4.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
        >>> gates = torch.rand(1, 5, 2)
        >>> attend_delta(
        ...     q,
        ...     k,
        ...     v,
        ...     convolutions=(torch.ones(2, 8, 4),) * 3,
        ...     log_decay=gates.log(),
        ...     beta=gates,
        ...     spans=spans_from_rows(1, 5),
        ... ).shape
        torch.Size([1, 5, 2, 8])
    """
    x = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2)
    mixed = conv(x, join_kernels(convolutions), spans=spans)
    q, k, v = prepare_heads(mixed, convolutions)
    return delta(q, k, v, log_decay=log_decay, beta=beta, spans=spans)


def join_kernels(convolutions: Convolutions) -> Tensor:
    """Return the kernels of all channels of q, k and v, `[C, W]`.

    Examples:
        >>> join_kernels((torch.ones(2, 8, 4),) * 3).shape
        torch.Size([48, 4])
    """
    return torch.cat([kernel.flatten(0, 1) for kernel in convolutions])


def prepare_heads(mixed: Tensor, convolutions: Convolutions) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the convolved channels: SiLU, then q and k of length 1.

    Args:
        mixed: `[..., C]`, the channels of q, k and v side by side.
        convolutions: The kernels, for their numbers of heads and sizes.

    Returns:
        `[..., K, D]` twice, in at least fp32, and `[..., H, E]`.

    Examples:
        >>> q, k, v = prepare_heads(torch.ones(3, 24), (torch.ones(2, 4, 4),) * 3)
        >>> q.shape, round(q[0, 0].square().sum().item(), 4)
        (torch.Size([3, 2, 4]), 1.0)
    """
    sizes = [kernel.shape[0] * kernel.shape[1] for kernel in convolutions]
    parts = nn.functional.silu(mixed).split(sizes, dim=-1)
    q, k, v = (
        part.unflatten(-1, kernel.shape[:2])
        for part, kernel in zip(parts, convolutions, strict=True)
    )
    return _normalize(q), _normalize(k), v


def _normalize(x: Tensor) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


# ----------------------------------------------------------------------------------------- layouts


def ulysses_delta(attend: AttendDelta, axis: Axis) -> AttendDelta:
    """Return a delta layer's function over rows of which every rank has a contiguous slice.

    As `ulysses` for attention: all-to-alls give each rank some of the heads over full rows.

    Args:
        attend: The function over full rows, with fewer heads.
        axis: The ranks that have the slices, `ps.ulysses`.

    Returns:
        An `AttendDelta` of this rank's slices, with the spans of the whole rows. It raises
        ValueError when N does not divide the value heads, or neither N and the key heads divides
        the other, before it communicates. `attend` itself on an axis of size 1.

    Effects:
        None; the function returned communicates on `axis`: three all-to-alls in forward, three in
        backward, and what `attend` does.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> ulysses_delta(attend_delta, solo_parallel().ulysses) is attend_delta
        True
    """
    return attend if axis.count == 1 else partial(_attend_heads, attend=attend, axis=axis)


def _attend_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    convolutions: Convolutions,
    log_decay: Tensor,
    beta: Tensor,
    spans: Spans,
    attend: AttendDelta,
    axis: Axis,
) -> Tensor:
    check_heads(v, k, axis.count)
    q, k = repeat_heads(q, axis.count), repeat_heads(k, axis.count)
    q, k, v = exchange_heads((q, k, v), axis)
    # Gates are in a dtype of their own, and need a message of their own.
    gates = exchange_heads((log_decay.unsqueeze(3), beta.unsqueeze(3)), axis)
    log_decay, beta = (gate.squeeze(3) for gate in gates)
    q_conv, k_conv, v_conv = (
        repeat_heads(kernel, axis.count, dim=0).chunk(axis.count)[axis.index]
        for kernel in convolutions
    )
    out = attend(
        q,
        k,
        v,
        convolutions=(q_conv, k_conv, v_conv),
        log_decay=log_decay,
        beta=beta,
        spans=spans,
    )
    return all_to_all(out, axis, split_dim=1, gather_dim=2)
