"""Rotary position embeddings, computed from positions: no table is kept anywhere.

Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021); the half-split
convention of Hugging Face, so that its weights load without permuting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainkit.models.config import LinearScaling, LongRopeScaling, RopeScaling, YarnScaling


def rotary_frequencies(
    head_dim: int,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Return the angle per token, in radians, of each rotary pair: `[head_dim / 2]`.

    Su et al., "RoFormer" (2021).

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
    if isinstance(scaling, LongRopeScaling):
        factors = torch.tensor(scaling.factors, dtype=dtype, device="cpu")
        return frequencies / factors.to(frequencies.device, non_blocking=True)
    if isinstance(scaling, YarnScaling):
        kept = _kept_by_number(frequencies, scaling, theta=theta)
    else:
        turns = scaling.original_length / (2 * math.pi) * frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept)


def _kept_by_number(frequencies: Tensor, scaling: YarnScaling, *, theta: float) -> Tensor:
    """Return how much of each pair's frequency YaRN keeps: 1 up to some pair, 0 from a later on."""
    size = 2 * len(frequencies)

    def number(turns: float) -> float:
        """Return the number of the pair, a fraction, that turns so often."""
        return (
            size * math.log(scaling.original_length / (2 * math.pi * turns)) / 2 / math.log(theta)
        )

    first = max(math.floor(number(scaling.beta_fast)), 0)
    last = min(math.ceil(number(scaling.beta_slow)), size - 1)
    numbers = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    return 1 - ((numbers - first) / max(last - first, 1e-3)).clamp(0, 1)


def rotary_table(
    position_ids: Tensor, frequencies: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles at each position, both `[B, S, 1, head_dim]`.

    Each pair's cosine stands at both of its elements, and so its sine, negative at the first. They
    are multiplied by `factor`, and so is what is rotated by them.

    Examples:
        >>> cos, sin = rotary_table(torch.tensor([[0, 1]]), torch.ones(1))
        >>> cos.shape, sin[0, 1].flatten()
        (torch.Size([1, 2, 1, 2]), tensor([-0.8415,  0.8415]))
    """
    angles = position_ids[:, :, None, None].to(frequencies.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + R / 2) of the first R elements of heads `[B, S, H, D]` by its angle.

    R is what the table is for; the elements after it stay as they are (Phi).

    The product is computed in the table's dtype and rounded once, to that of `x`: whether `x` is
    bf16 by autocast or by FSDP, it is rounded alike, and attention sees no wider queries.

    Examples:
        >>> x = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> rotate(x, torch.zeros(2), torch.tensor([-1.0, 1.0])).flatten()
        tensor([0., 1.])
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    turned = x * cos + x.roll(size // 2, dims=-1) * sin
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


Table = tuple[Tensor, Tensor]
"""Cosines and sines, as `rotary_table` returns them."""


def rotated(q: Tensor, k: Tensor, table: Table | None) -> tuple[Tensor, Tensor]:
    """Return queries and keys with their positions; as they are where there is no table.

    Examples:
        >>> q, k = torch.ones(2, 1, 1, 1, 2)
        >>> rotated(q, k, None)[0] is q
        True
    """
    if table is None:
        return q, k
    if torch.is_grad_enabled():
        return rotate(q, *table), rotate(k, *table)
    # Without gradients tokens may be few, and then half as many operators are worth the copy.
    both = rotate(torch.cat((q, k), dim=2), *table)
    return both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
