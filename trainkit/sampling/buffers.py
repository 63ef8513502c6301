"""A random order in which items of similar length stand next to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.hashing import make_key
from trainkit.sampling.integers import indices_below
from trainkit.sampling.permutation import permute
from trainkit.types import check_range

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.types import IntArray


def buffer_sorted_order(
    index: ArrayLike,
    keys: np.ndarray[Any, Any],
    *,
    buffer_size: int,
    pack_size: int,
    seed: int,
) -> IntArray:
    """Return the items at some positions of a random order that groups items of similar key.

    Consecutive items make a buffer; the last buffer may be short. A buffer is sorted by key, with
    ties in random order, and split into packs. The packs are shuffled, and so are the items inside
    each. So a pack, which becomes one padded batch, has items of nearly equal length, and batches
    still come in a random order. Where its size does not divide a buffer, the short pack holds the
    largest keys and comes last in the buffer.

    There is no state: the order of a buffer follows from its keys, the seed and its index. To
    resume, a run needs only the count of the items taken, on any number of ranks. Memory is that of
    one buffer.

    Args:
        index: Positions, integers in [0, N), in any order.
        keys: The keys to sort by, `[N]`, such as the items' lengths: numbers of any dtype, without
            NaN. They may be memory-mapped; only the buffers of `index` are read.
        buffer_size: Items in a buffer: how far an item may move.
        pack_size: Items in a pack. Where it divides `buffer_size`, the positions between two of its
            multiples are one pack.
        seed: The seed of ties and shuffles; it does not change which items share a buffer. For a
            new order in each epoch pass `noise.make_key(seed, epoch)`.

    Returns:
        int64, one for each position. Over all positions every item comes once.

    Raises:
        ValueError: `keys` are not as above, a size is below 1, or a position is not an integer in
            [0, N).

    Examples:
        >>> lengths = np.array([9, 2, 8, 1, 3, 7, 5, 4, 6])
        >>> order = buffer_sorted_order(np.arange(9), lengths, buffer_size=6, pack_size=2, seed=4)
        >>> lengths[order]
        array([3, 7, 1, 2, 8, 9, 4, 5, 6])
        >>> buffer_sorted_order([4, 5], lengths, buffer_size=6, pack_size=2, seed=4) == order[4:6]
        array([ True,  True])

    The idea is d9d's, whose order depends on the calls made before.
    """
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "biuf":
        raise ValueError(
            "buffer_sorted_order: keys must be numbers in one dimension, got "
            f"{keys.dtype} {keys.shape}"
        )
    check_range("buffer_sorted_order", at_least=1, buffer_size=buffer_size, pack_size=pack_size)
    positions = indices_below(keys.size, "buffer_sorted_order", index)
    items = np.empty_like(positions)
    # Positions may come in any order; a buffer is sorted once for all of its positions.
    by_position = np.argsort(positions, kind="stable")
    buffers, firsts = np.unique(positions[by_position] // buffer_size, return_index=True)
    groups = np.split(by_position, firsts[1:])
    for buffer, group in zip(buffers.tolist(), groups, strict=False):
        start = buffer * buffer_size
        buffer_keys = keys[start : start + buffer_size]
        if buffer_keys.dtype.kind == "f" and np.isnan(buffer_keys).any():
            item = start + int(np.isnan(buffer_keys).argmax())
            raise ValueError(
                f"buffer_sorted_order: the key of item {item} is NaN; give it a number"
            )
        size = buffer_keys.size
        num_packs = size // pack_size
        # `lexsort` sorts by its last argument first: by key, and ties by a random number.
        by_key = np.lexsort((_shuffle(size, seed, buffer, "ties"), buffer_keys))
        # A short pack stays at the end, so that the others start at multiples of pack_size.
        rank = np.append(_shuffle(num_packs, seed, buffer, "packs"), num_packs)
        pack_of = np.arange(size) // pack_size
        order = by_key[np.lexsort((_shuffle(size, seed, buffer, "items"), rank[pack_of]))]
        items[group] = start + order[positions[group] - start]
    return items


def _shuffle(count: int, seed: int, buffer: int, name: str) -> IntArray:
    if count == 0:  # which permute refuses
        return np.empty(0, np.int64)
    return permute(np.arange(count), count, make_key(int(seed), "buffer", buffer, name))
