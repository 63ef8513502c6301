"""Rounding to bf16 at random, by counters: right in the mean, which rounding to nearest is not."""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.noise.counters import mix_tensor, signed
from trainkit.noise.hashing import GOLDEN

_CHUNK = 2**22  # elements at a time: what is made of them beside takes some 20 bytes for each


def rounded_bf16(x: Tensor, key: Tensor) -> Tensor:
    """Round each element up or down to bf16, such that its mean over keys is the element.

    An element's 16 random bits are a function of the key and of its index. One that is a bf16
    number stays what it is, and so does one that is not finite. The others move by less than the
    distance of their two neighbours, at most 2^-7 of them.

    Args:
        x: fp32 `[...]`.
        key: int64, 0-d, on the device of `x`.

    Returns:
        bf16, of the shape of `x`, contiguous.

    Raises:
        ValueError: `x` is not fp32, or `key` not int64 and 0-d.

    References:
        Gupta et al., "Deep learning with limited numerical precision" (2015), section 3.

    Examples:
        >>> x = torch.full((4096,), 1 + 2.0**-9)  # a quarter of the way from 1 to the next
        >>> rounded = rounded_bf16(x, torch.tensor(7))
        >>> rounded.unique().tolist(), 0.23 < float((rounded > 1).float().mean()) < 0.27
        ([1.0, 1.0078125], True)
    """
    if x.dtype != torch.float32 or key.dtype != torch.int64 or key.ndim:
        got = f"{x.dtype}, and a key {key.dtype} {tuple(key.shape)}"
        raise ValueError(f"rounded_bf16: it rounds fp32 by a key int64 (), got {got}")
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    parts = zip(out.view(-1).split(_CHUNK), x.reshape(-1).split(_CHUNK), strict=True)
    for number, (rounded, part) in enumerate(parts):
        bits = part.view(torch.int32) + _noise(part, key + number)
        high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        rounded.copy_(torch.where(part.isfinite(), high, part.to(torch.bfloat16)))
    return out


def _noise(part: Tensor, key: Tensor) -> Tensor:
    """Return 16 random bits for each element, four from each hash."""
    words = torch.arange(-(-part.numel() // 4), device=part.device) * signed(GOLDEN)
    hashes = mix_tensor(mix_tensor(key) + words)
    return hashes.view(torch.int16)[: part.numel()].to(torch.int32) & 0xFFFF
