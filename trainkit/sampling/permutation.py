"""A pseudorandom permutation in constant memory, and an endless stream of shuffled epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.hashing import GOLDEN, make_key, mix_bits
from trainkit.noise.jit import jit
from trainkit.sampling.integers import indices_below
from trainkit.types import check_range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike

    from trainkit.types import IntArray

ROUNDS = 8
BLOCK = 1024
"""Values that are permuted at a time: they fit the cache."""


def permute(index: ArrayLike, count: int, key: int) -> IntArray:
    """Return the images of some indices under a pseudorandom permutation of [0, count).

    A Feistel network permutes the next power of four; an image outside [0, count) is permuted again
    until it falls inside (cycle walking, Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). An index takes constant memory and, on average, less than four passes.

    Args:
        index: Integers in [0, count), `[N]`.
        count: The size of the permutation, at least 1.
        key: A 64-bit key from `noise.make_key`; each gives another permutation.

    Returns:
        int64 `[N]`.

    Raises:
        ValueError: `count` is below 1, or an index is not an integer in [0, count).

    Examples:
        >>> permute(np.arange(10), 10, make_key(0))
        array([6, 8, 2, 5, 7, 0, 9, 4, 1, 3])
    """
    check_range("permute", at_least=1, count=count)
    index = indices_below(count, "permute", index)
    # Each half of the Feistel network has half the bits of count - 1, rounded up.
    half = ((count - 1).bit_length() + 1) // 2
    return _permute(index, np.uint64(count), np.uint64(key), half)


def check_batch(batch: int) -> None:
    """Raise ValueError if the number of a global batch is below 0."""
    if batch < 0:
        raise ValueError(f"rows_at: global batches are numbered from 0, got {batch}")


def draw_rows(start: int, size: int, num_rows: int, *key: int | str) -> IntArray:
    """Return `size` rows of an endless stream of shuffled epochs, from draw `start` on."""
    parts = split_by_epoch(start, size, num_rows)
    return np.concatenate(
        [permute(index, num_rows, make_key(*key, epoch)) for epoch, index in parts]
    )


def split_by_epoch(start: int, size: int, num_rows: int) -> Iterator[tuple[int, IntArray]]:
    """Yield the draws from `start` on as (epoch, draws counted from the first of the epoch).

    Examples:
        >>> list(split_by_epoch(3, 2, 4))
        [(0, array([3])), (1, array([0]))]
    """
    end = start + size
    while start < end:
        epoch, first = divmod(start, num_rows)
        index = np.arange(first, min(first + end - start, num_rows))
        yield epoch, index
        start += index.size


@jit
def _permute(index: Any, count: Any, key: Any, half: int) -> Any:
    """Permute 2 * `half` bits, repeatedly until the image is below `count`.

    A block of values goes through all rounds at a time. Values outside stay in the block, and
    others fill it up. So no value waits for another, and there is no branch to mispredict. For many
    indices a round is a lookup in a table of all its 2^`half` inputs. Together this is 4 to 13
    times as fast as one index after the other (100,000 of 100,000: 17 ns each instead of 230).
    """
    keys = np.empty(ROUNDS, np.uint64)
    for number in range(ROUNDS):
        keys[number] = mix_bits(key + np.uint64(number) * np.uint64(GOLDEN))
    # Everything is uint64: numba, as numpy, makes a float64 of uint64 and int64.
    half_ = np.uint64(half)
    side = 1 << half
    mask = np.uint64(side - 1)
    # With fewer indices than the table has entries, filling it would take longer than it saves.
    table = np.empty((ROUNDS, side if index.size >= side else 0), np.uint32)
    for number in range(ROUNDS):
        for right in range(table.shape[1]):
            table[number, right] = mix_bits(keys[number] + np.uint64(right)) & mask
    out = np.empty_like(index)
    values = np.empty(BLOCK, np.uint64)
    targets = np.empty(BLOCK, np.int64)
    size = next_index = 0
    while size > 0 or next_index < index.size:
        # New indices fill up the block, after those whose values are still outside.
        for i in range(size, min(BLOCK, size + index.size - next_index)):
            values[i] = index[next_index]
            targets[i] = next_index
            next_index += 1
            size += 1
        if table.size:
            _apply_rounds_by_table(values[:size], table, half_, mask)
        else:
            _apply_rounds(values[:size], keys, half_, mask)
        num_outside = 0
        for i in range(size):
            value = values[i]
            target = targets[i]
            out[target] = value  # overwritten until the value is inside
            values[num_outside] = value
            targets[num_outside] = target
            # No branch: an element that is inside is overwritten by the next one.
            num_outside += value >= count
        size = num_outside
    return out


@jit
def _apply_rounds(values: Any, keys: Any, half: Any, mask: Any) -> None:
    for i in range(values.size):
        left = values[i] >> half
        right = values[i] & mask
        for number in range(ROUNDS):
            # Half by half: a function of one half is added (xor) to the other, which can be undone.
            # So this is a permutation, whatever the function.
            left, right = right, left ^ (mix_bits(keys[number] + right) & mask)
        values[i] = (left << half) | right


@jit
def _apply_rounds_by_table(values: Any, table: Any, half: Any, mask: Any) -> None:
    for i in range(values.size):
        left = values[i] >> half
        right = values[i] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ table[number, right]
        values[i] = (left << half) | right
