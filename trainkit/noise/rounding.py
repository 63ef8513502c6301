"""Counter-based stochastic rounding to bf16, which unlike rounding to nearest is unbiased."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from trainkit.noise.counters import mix_bits_tensor, row_keys, to_int64
from trainkit.noise.hashing import GOLDEN
from trainkit.noise.jit import jit

_CHUNK = 2**22  # elements at a time: temporary tensors take about 20 bytes per element


def round_bf16_stochastic(x: Tensor, key: Tensor) -> Tensor:
    """Round each element up or down to bf16, so that its mean over keys is the element.

    The 16 random bits of an element are a function of the key and of its index. Elements that are
    bf16 numbers, or not finite, do not change. The others move by less than the distance of their
    two neighbors, at most a fraction of 2^-7.

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
        >>> rounded = round_bf16_stochastic(x, torch.tensor(7))
        >>> rounded.unique().tolist(), 0.23 < float((rounded > 1).float().mean()) < 0.27
        ([1.0, 1.0078125], True)
    """
    if x.dtype != torch.float32 or key.dtype != torch.int64 or key.ndim:
        raise ValueError(
            "round_bf16_stochastic: it rounds fp32 by a key int64 (), got "
            f"{x.dtype}, and a key {key.dtype} {tuple(key.shape)}"
        )
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    chunks = zip(out.view(-1).split(_CHUNK), x.reshape(-1).split(_CHUNK), strict=True)
    for i, (rounded, chunk) in enumerate(chunks):
        words = torch.arange(-(-chunk.numel() // 4), device=x.device) * to_int64(GOLDEN)
        hashes = mix_bits_tensor(mix_bits_tensor(key + i) + words)  # each serves four elements
        noise = hashes.view(torch.int16)[: chunk.numel()].to(torch.int32) & 0xFFFF
        # Adding noise below the bits of bf16 carries into them with probability (low bits) / 2^16.
        bits = chunk.view(torch.int32) + noise
        high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        rounded.copy_(torch.where(chunk.isfinite(), high, chunk.to(torch.bfloat16)))
    return out


# -------------------------------------------------------------------------------- by name and index


def rounding_keys(key: int, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return the keys with which `round_rows` rounds the rows of a box of a tensor.

    Args:
        key: The whole tensor's, for instance `make_key(seed, name)`.
        shape: The shape of the box.
        offset: The offset of the box in the full tensor.

    Returns:
        int32 `[rows]`, for the box flattened to rows.

    Examples:
        >>> whole = rounding_keys(7, (4, 6), (0, 0))
        >>> torch.equal(rounding_keys(7, (2, 3), (1, 2)), whole[1:3])
        True
    """
    keys = row_keys(key, tuple(shape) or (1,), tuple(offset) or (0,))
    # The upper half of each 64-bit key, which is as random as the whole.
    upper = (keys >> np.uint64(32)).astype(np.uint32)
    return torch.from_numpy(upper.view(np.int32))


def keys_at(keys: Tensor, step: Tensor | float) -> Tensor:
    """Return the keys of rows for one step, which may be a counter on the device.

    Args:
        keys: int32 `[rows]`, from `rounding_keys`.
        step: The count of steps, 0-d on the device of the keys, or a number.

    Returns:
        int64 `[rows]`, from 0 to 2^32 - 1.

    Examples:
        >>> keys = rounding_keys(7, (4, 6), (0, 0))
        >>> torch.equal(keys_at(keys, 3), keys_at(keys, torch.tensor(3.0)))
        True
    """
    counted = torch.as_tensor(step, device=keys.device).to(torch.int64)
    return _mix_32(keys.to(torch.int64) + counted * GOLDEN_32)


def _mix_32(x: Tensor) -> Tensor:
    """Return a 32-bit hash of int64, without its last xor-shift (Wellons, "lowbias32")."""
    x = x & MASK_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    return ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32


def round_rows(
    x: Tensor,
    keys: Tensor,
    *,
    columns: int,
    begin: int,
    first: int,
    lower: bool = False,
) -> Tensor:
    """Round a shard to bf16 as `round_bf16_stochastic` rounds it in the full tensor.

    The 16 random bits of an element are a function of its row's key and of its column, so that
    every shard is rounded as in the full tensor. A key gives 32 bits, so that the same keys can
    round two tensors independently, one with the upper half and one with the lower half.

    Args:
        x: fp32, flat: row after row of a box; it may start and end inside of one.
        keys: From `rounding_keys` or `keys_at`, of all rows of the box, on the device of `x`.
        columns: The length of a row of the box.
        begin: The index of `x[0]` in the flat box.
        first: The index of the box's first column in the full tensor.
        lower: Round by the lower half of the bits instead of the upper half.

    Returns:
        bf16, of the shape of `x`.

    Examples:
        >>> keys, x = rounding_keys(7, (2, 500), (0, 0)), torch.full((1000,), 1 + 2.0**-8)
        >>> whole = round_rows(x, keys, columns=500, begin=0, first=0)
        >>> 450 < int((whole > 1).sum()) < 550
        True
        >>> torch.equal(round_rows(x[7:], keys, columns=500, begin=7, first=0), whole[7:])
        True
    """
    # Flat indices in the box, from which follow the row and the column in the full tensor.
    index = torch.arange(begin, begin + x.numel(), device=x.device)
    # One expression, which frees its int64 tensors at once: shards may be large.
    noise = _mix_32(keys[index // columns].to(torch.int64) + (index % columns + first) * GOLDEN_32)
    noise = (noise ^ (noise >> 16)) & 0xFFFF if lower else noise >> 16
    bits = x.view(torch.int32) + noise.to(torch.int32)
    high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isfinite(), high, x.to(torch.bfloat16))


GOLDEN_32 = 0x9E3779B9
MASK_32 = 0xFFFFFFFF


@jit
def fill_noise(  # noqa: PLR0917 (compiled code)
    keys: Any,
    step: Any,
    columns: int,
    first: int,
    begin: int,
    out: Any,
) -> None:
    """Fill an array with the random bits of `round_rows` at a step, in a compiled loop.

    Args:
        keys: uint32 `[rows]`, from `rounding_keys`; the loop computes `keys_at` itself.
        step: The count of steps, an int.
        columns: As in `round_rows`, and so are `first` and `begin`.
        first: The index of the box's first column.
        begin: The index of `out[0]` in the flat box.
        out: uint32, flat; both halves of each element are those of `round_rows`.
    """
    # Numba widens uint32 to 64 bits in every operation, so each result is cast back.
    counted = np.uint32(np.uint32(step) * np.uint32(GOLDEN_32))
    # Row by row of the box; a shard may start and end inside of one.
    done = 0
    while done < out.size:
        row, inside = divmod(begin + done, columns)
        part = out[done : done + columns - inside]
        key = _mix(np.uint32(keys[row] + counted))
        key = np.uint32(key + np.uint32(np.uint32(inside + first) * np.uint32(GOLDEN_32)))
        for i in range(part.size):
            part[i] = np.uint32(key + np.uint32(np.uint32(i) * np.uint32(GOLDEN_32)))
        done += part.size
    for i in range(out.size):
        noise = _mix(out[i])
        out[i] = np.uint32(noise ^ np.uint32(noise >> np.uint32(16)))


@register_jitable
def _mix(x: Any) -> Any:
    """Return `_mix_32` of a uint32."""
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    return np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
