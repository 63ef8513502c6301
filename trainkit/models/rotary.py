"""Rotary position embeddings, computed from the positions of each batch: no table is stored.

Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021); the half-split
convention of Hugging Face, so that its weights load without a permutation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainkit.models.config import (
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)


def rotary_frequencies(
    head_dim: int,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Return the angle per token, in radians, of each rotary pair: theta^(-2i / head_dim), scaled.

    Returns:
        `[head_dim / 2]`.

    Examples:
        >>> rotary_frequencies(4, theta=100.0)
        tensor([1.0000, 0.1000])
    """
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, ProportionalScaling):
        pairs = torch.arange(len(frequencies), device=frequencies.device)
        return frequencies * (pairs < int(scaling.part * head_dim // 2))
    if isinstance(scaling, LongRopeScaling):
        # On the CPU whatever the default device is, which may be meta.
        factors = torch.tensor(scaling.factors, dtype=dtype, device="cpu")
        return frequencies / factors.to(frequencies.device, non_blocking=True)
    if isinstance(scaling, YarnScaling):
        unscaled = _find_unscaled(frequencies, scaling, theta=theta)
    else:
        # Llama 3: the full turns within the original context decide how much is scaled.
        turns = scaling.original_length / (2 * math.pi) * frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / scaling.factor, frequencies, unscaled)


def _find_unscaled(frequencies: Tensor, scaling: YarnScaling, *, theta: float) -> Tensor:
    """Return YaRN's weight of each unscaled frequency: a ramp from 1 to 0 over the pairs."""
    head_dim = 2 * len(frequencies)

    def find_pair(turns: float) -> float:
        # Pair i turns original_length / (2 pi) * theta^(-2i / head_dim) times; solved for i.
        inverse_frequency = scaling.original_length / (2 * math.pi * turns)
        return head_dim * math.log(inverse_frequency) / 2 / math.log(theta)

    first = find_pair(scaling.beta_fast)
    last = find_pair(scaling.beta_slow)
    # The bounds, among them head_dim - 1 and not the last pair, are those of DeepSeek's code.
    if not scaling.fractional:
        first, last = math.floor(first), math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    ramp = (pairs - first) / max(last - first, 1e-3)
    return 1 - ramp.clamp(0, 1)


def rotary_table(
    position_ids: Tensor, frequencies: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles at each position, both `[B, S, 1, head_dim]`.

    Both elements of a pair have its cosine, and its sine, which is negative at the first. Both are
    multiplied by `factor`, and so are the heads that `rotate` applies them to.

    Examples:
        >>> cos, sin = rotary_table(torch.tensor([[0, 1]]), torch.ones(1))
        >>> cos.shape, sin[0, 1].flatten()
        (torch.Size([1, 2, 1, 2]), tensor([-0.8415,  0.8415]))
    """
    # [B, S, 1, R / 2]; the dimension of size 1 is that of heads.
    angles = position_ids[:, :, None, None].to(frequencies.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    cos = torch.cat((cos, cos), dim=-1)
    sin = torch.cat((-sin, sin), dim=-1)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + R / 2) of the first R elements of heads `[B, S, H, D]` by its angle.

    R is the size of the table; later elements do not change (Phi). The product is computed in the
    table's dtype and rounded once, to that of `x`. So the result is the same whether `x` is bf16 by
    autocast or by FSDP, and queries have the dtype of values.

    Examples:
        >>> x = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> rotate(x, torch.zeros(2), torch.tensor([-1.0, 1.0])).flatten()
        tensor([0., 1.])
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        rotated_part = rotate(x[..., :size], cos, sin)
        return torch.cat((rotated_part, x[..., size:]), dim=-1)
    # (a, b) -> (a cos - b sin, b cos + a sin): the roll swaps the halves, `sin` has the sign.
    return (x * cos + x.roll(size // 2, dims=-1) * sin).to(x.dtype)


Table = tuple[Tensor, Tensor]
"""Cosines and sines, as `rotary_table` returns them."""


def rotate_qk(q: Tensor, k: Tensor, table: Table | None) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys; without a table, the tensors themselves.

    Examples:
        >>> q, k = torch.ones(2, 1, 1, 1, 2)
        >>> rotate_qk(q, k, None)[0] is q
        True
    """
    if table is None:
        return q, k
    if torch.is_grad_enabled():
        return rotate(q, *table), rotate(k, *table)
    # In generation there are few tokens, and half the operators save more than the copy costs.
    both = rotate(torch.cat((q, k), dim=2), *table)
    heads = q.shape[2]
    return both[:, :, :heads], both[:, :, heads:]
