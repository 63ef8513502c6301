"""Normal random numbers for a box of a tensor, computed on its device, equal on all devices.

Logarithms and cosines differ in the last bit between devices, and between the body of a vector and
its end. A table does not: the 16 random bits of an element select one of 2^16 equally likely
quantiles of the normal distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from trainkit.noise.counters import mix_bits_tensor, to_int64
from trainkit.noise.hashing import GOLDEN

_LEVELS = 1 << 16


def normal_by_quantile(key: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return standard normal numbers for one box of a tensor, on the device of the key.

    An element is a function of the key and of its position in the full tensor, so that a box holds
    exactly the bits of the full tensor. `normal` does the same on the host, in finer steps. No
    number is further than 4.33 from 0.

    Args:
        key: int64, 0-d.
        shape: The shape of the box, with at least one dimension.
        offset: The offset of the box in the full tensor.

    Returns:
        fp32, of `shape`.

    References:
        Devroye, "Non-uniform random variate generation" (1986), II.2, for the inverse of the
        distribution function.

    Examples:
        >>> whole = normal_by_quantile(torch.tensor(7), (4, 9), (0, 0))
        >>> part = normal_by_quantile(torch.tensor(7), (2, 3), (1, 5))
        >>> torch.equal(part, whole[1:3, 5:8])
        True
    """
    # One key for each row of the box, from the indices of all dimensions but the last.
    keys = mix_bits_tensor(key)
    for size, start in zip(shape[:-1], offset[:-1], strict=True):
        index = torch.arange(start + 1, start + 1 + size, device=key.device) * to_int64(GOLDEN)
        keys = mix_bits_tensor(keys.unsqueeze(-1) ^ index)
    start = offset[-1]
    end = offset[-1] + shape[-1]
    # A hash of 64 bits serves four elements.
    words = torch.arange(start // 4, -(-end // 4), device=key.device) * to_int64(GOLDEN)
    hashes = mix_bits_tensor(keys.unsqueeze(-1) + words)
    bits = hashes.view(torch.int16)[..., start % 4 : start % 4 + shape[-1]]
    table = _make_quantiles().to(key.device)
    # int16 is signed, so the mask makes -1 the index 65535.
    levels = bits.to(torch.int32) & (_LEVELS - 1)
    return nn.functional.embedding(levels, table).squeeze(-1)


@cache
def _make_quantiles() -> Tensor:
    """Return the quantiles in the middle of each of 2^16 equal intervals, fp32 `[2^16, 1]`."""
    middles = (torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS
    return torch.special.ndtri(middles).float().unsqueeze(-1)
