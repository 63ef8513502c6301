"""A permutation without a table, and the endless stream of epochs that is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.hashing import GOLDEN, key_of, mix
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


def rows_of_step(step: int, *, rows_per_step: int, num_rows: int, seed: int) -> IntArray:
    """Return the rows of global batch `step`: its part of the endless stream of epochs.

    Every row comes once per epoch. A batch may straddle epochs: no row is left out to make them
    even.

    Args:
        step: The global batch, from 0.
        rows_per_step: Rows in the global batch, over all ranks and microbatches.
        num_rows: Rows in the corpus.
        seed: The run's seed; each epoch's order is made from it and the epoch's number.

    Returns:
        int64 `[rows_per_step]`, each in [0, num_rows).

    Raises:
        ValueError: `step` is below 0, or a number of rows below 1.

    Examples:
        >>> [rows_of_step(step, rows_per_step=3, num_rows=4, seed=0).tolist() for step in range(4)]
        [[3, 0, 2], [1, 0, 2], [1, 3, 2], [0, 3, 1]]
    """
    if step < 0 or rows_per_step < 1 or num_rows < 1:
        raise ValueError(
            "rows_of_step: step must be at least 0, rows_per_step and num_rows at least 1, got "
            f"step={step}, rows_per_step={rows_per_step}, num_rows={num_rows}"
        )
    return draws(step * rows_per_step, rows_per_step, num_rows, seed, "epoch")


def draws(place: int, size: int, num_rows: int, *key: int | str) -> IntArray:
    """Return `size` rows of an endless stream of epochs, from draw `place` on."""
    parts: list[IntArray] = []
    end = place + size
    while place < end:
        epoch, first = divmod(place, num_rows)
        index = np.arange(first, min(first + end - place, num_rows))
        parts.append(permute(index, num_rows, key_of(*key, epoch)))
        place += index.size
    return np.concatenate(parts)


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
