"""A pseudorandom permutation without a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.hashing import GOLDEN, mix
from trainkit.jit import jit
from trainkit.sampling.integers import integers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.types import IntArray

ROUNDS = 8


def permute(index: ArrayLike, count: int, key: int) -> IntArray:
    """Return where a pseudorandom permutation of [0, count) sends each index, in O(1) memory.

    A Feistel network permutes the next power of four; an image outside [0, count) is sent on until
    it falls inside (cycle walking, Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002). Each index takes constant memory and, on average, less than four passes.

    Args:
        index: Integers in [0, count), `[N]`.
        count: The size of the permutation, at least 1.
        key: A 64-bit key, as `hashing.key_of` makes; each gives another permutation.

    Returns:
        int64 `[N]`.

    Raises:
        ValueError: `count` is below 1, or an index is no integer or lies outside [0, count).

    Examples:
        >>> from trainkit.hashing import key_of
        >>> permute(np.arange(10), 10, key_of(0))
        array([6, 8, 2, 5, 7, 0, 9, 4, 1, 3])
    """
    if count < 1:
        raise ValueError(f"permute: count must be at least 1, got {count}")
    index = np.atleast_1d(integers("permute", "index", index))
    if index.size and not 0 <= index.min() <= index.max() < count:
        raise ValueError(
            f"permute: indices must lie in [0, {count}), got {index.min()} to {index.max()}"
        )
    return _permute(index, np.uint64(count), np.uint64(key), ((count - 1).bit_length() + 1) // 2)


@jit
def _permute(index: Any, count: Any, key: Any, half: int) -> Any:
    """Permute 2 * `half` bits, again and again until the image is below `count`."""
    half_ = np.uint64(half)
    mask = (np.uint64(1) << half_) - np.uint64(1)
    out = np.empty_like(index)
    for place in range(index.size):
        value = np.uint64(index[place])
        inside = False
        while not inside:
            left, right = value >> half_, value & mask
            for number in range(ROUNDS):
                noise = mix(mix(key + np.uint64(number) * np.uint64(GOLDEN)) + right)
                left, right = right, left ^ (noise & mask)
            value = (left << half_) | right
            inside = value < count
        out[place] = value
    return out
