"""A short causal convolution of each channel, inside each document.

Layers with a recurrent state mix a few neighbouring tokens before it (Fu et al., "Hungry hungry
hippos", 2023; Gu and Dao, "Mamba", 2023). Documents lie side by side in a row, so every one is
moved behind a halo of its own: the tokens before it, or zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainkit.types import Spans


def causal_conv(
    x: Tensor,
    weight: Tensor,
    *,
    spans: Spans,
    bias: Tensor | None = None,
    halo: Tensor | None = None,
) -> Tensor:
    """Return the causal convolution of each channel with a kernel of its own, inside each span.

    Token t of a document reads its tokens t - W + 1 to t: `out[t, c] = sum over j of weight[c, j] *
    x[t - W + 1 + j, c]`, as torch's `conv1d` with one group for each channel computes it.

    Args:
        x: `[B, S, C]`.
        weight: `[C, W]`, in the order of tokens: the last column is for the token itself.
        spans: The documents, over the flattened rows.
        bias: `[C]`.
        halo: The W - 1 tokens before each span, `[N, W - 1, C]`; zeros by default.

    Returns:
        `[B, S, C]`, of x's dtype; under autocast of autocast's.

    Raises:
        ValueError: Shapes do not fit each other, or the spans do not cover the tokens.

    Examples:
        >>> import numpy as np
        >>> spans = Spans(torch.tensor([0, 3, 5]), np.array([3, 2]), 3)
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 5, 1)
        >>> causal_conv(x, torch.tensor([[10.0, 1.0]]), spans=spans).flatten().tolist()
        [1.0, 12.0, 23.0, 4.0, 45.0]
    """
    channels, width = weight.shape
    if x.ndim != 3 or x.shape[2] != channels:
        raise ValueError(
            f"causal_conv: x must be [B, S, C] and weight [C, W], got x {tuple(x.shape)} and "
            f"weight {tuple(weight.shape)}"
        )
    if spans.lengths.sum() != x.shape[0] * x.shape[1]:
        raise ValueError(
            f"causal_conv: the spans have {spans.lengths.sum()} tokens, x has {x.shape[0]} x "
            f"{x.shape[1]}; give the spans of this batch"
        )
    extended, places = _insert_halos(x, spans, width - 1, halo)
    out = nn.functional.conv1d(extended.T, weight.unsqueeze(1), bias, groups=channels).T
    return (out if places is None else out[places - (width - 1)]).view(x.shape)


def last_inputs(x: Tensor, *, spans: Spans, count: int, halo: Tensor | None = None) -> Tensor:
    """Return the last `count` tokens of each span: the halo of what follows it.

    Args:
        x: `[B, S, C]`.
        spans: The documents, over the flattened rows.
        count: The number of tokens; the width of the convolution's kernel less one.
        halo: The tokens before each span, `[N, count, C]`, which shorter spans return a part of;
            zeros by default.

    Returns:
        `[N, count, C]`.

    Examples:
        >>> import numpy as np
        >>> spans = Spans(torch.tensor([0, 3, 4]), np.array([3, 1]), 3)
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
        >>> last_inputs(x, spans=spans, count=2).squeeze(2).tolist()
        [[2.0, 3.0], [0.0, 4.0]]
    """
    extended, _ = _insert_halos(x, spans, count, halo)
    # Behind the last token of span n are n + 1 halos and all tokens up to its end.
    ends = spans.cu_seqlens[1:].long() + count * torch.arange(
        1, len(spans.lengths) + 1, device=x.device
    )
    return extended[ends.unsqueeze(1) + torch.arange(-count, 0, device=x.device)]


def _insert_halos(
    x: Tensor, spans: Spans, count: int, halo: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return `[T + N * count, C]`, a halo in front of each span, and the places of its tokens."""
    flat = x.flatten(0, 1)
    documents = len(spans.lengths)
    if halo is None:
        halo = flat.new_zeros(documents, count, flat.shape[1])
    halo = halo.to(flat.dtype)
    if documents == 1:
        return torch.cat([halo[0], flat]), None
    token = torch.arange(len(flat), device=x.device)
    bounds = spans.cu_seqlens.long()
    document = torch.searchsorted(bounds[1:], token, right=True)
    places = token + (document + 1) * count
    steps = torch.arange(documents, device=x.device) * count
    halos = ((bounds[:-1] + steps).unsqueeze(1) + torch.arange(count, device=x.device)).flatten()
    extended = flat.new_empty(len(flat) + documents * count, flat.shape[1])
    extended = extended.index_copy(0, places, flat).index_copy(0, halos, halo.flatten(0, 1))
    return extended, places
