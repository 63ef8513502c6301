"""An order that keeps items of like length together, and is random all the same."""

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
    """Return which item stands at each place of an order that puts items of like key together.

    Items that follow each other make a buffer, the last one perhaps a short one. A buffer is sorted
    by key, equal keys in random order, and cut into packs; the packs are shuffled, and the items
    inside each. So a pack, which becomes one padded batch, has items of nearly equal length, and
    batches still come in a random order. A pack that is short, because its buffer does not divide,
    holds the largest keys and comes last in its buffer.

    Nothing is remembered: each buffer's order follows from its keys, the seed and its number. So a
    count of the items taken is all that a run needs to go on, on any number of ranks, and memory is
    a buffer's.

    Args:
        index: Places, integers in [0, N), in any order.
        keys: What to sort by, `[N]`, for instance the items' lengths: numbers of any dtype, none of
            them NaN. It may be memory-mapped: only buffers that are asked for are read.
        buffer_size: Items in a buffer: how far an item may move.
        pack_size: Items in a pack. Where it divides `buffer_size`, places from a multiple of it on
            to the next are one pack.
        seed: Makes ties and shuffles; which items share a buffer does not depend on it. For another
            order in each epoch take `noise.key_of(seed, epoch)`.

    Returns:
        int64, as many as places. Over all places every item comes once.

    Raises:
        ValueError: `keys` are not as above, a size is below 1, or a place is no integer or lies
            outside [0, N).

    Examples:
        >>> lengths = np.array([9, 2, 8, 1, 3, 7, 5, 4, 6])
        >>> sizes = {"buffer_size": 6, "pack_size": 2}
        >>> order = buffer_sorted_order(np.arange(9), lengths, **sizes, seed=4)
        >>> lengths[order]
        array([3, 7, 1, 2, 8, 9, 4, 5, 6])
        >>> buffer_sorted_order([4, 5], lengths, **sizes, seed=4) == order[4:6]
        array([ True,  True])

    The idea is d9d's, whose order depends on who asks, and when.
    """
    keys = _checked_keys(keys)
    check_range("buffer_sorted_order", at_least=1, buffer_size=buffer_size, pack_size=pack_size)
    places = indices_below(keys.size, "buffer_sorted_order", index)
    items = np.empty_like(places)
    by_place = np.argsort(places, kind="stable")
    buffers, firsts = np.unique(places[by_place] // buffer_size, return_index=True)
    for number, asked in zip(buffers.tolist(), np.split(by_place, firsts[1:]), strict=False):
        begin = number * buffer_size
        own = keys[begin : begin + buffer_size]
        if own.dtype.kind == "f" and np.isnan(own).any():
            nan = begin + int(np.isnan(own).argmax())
            raise ValueError(f"buffer_sorted_order: the key of item {nan} is NaN; give it a number")
        order = _order_of_buffer(own, pack_size, seed, number)
        items[asked] = begin + order[places[asked] - begin]
    return items


def _order_of_buffer(keys: np.ndarray[Any, Any], pack_size: int, seed: int, number: int) -> Any:
    """Return the items of one buffer in order, counted from its first."""
    whole = keys.size // pack_size
    by_key = np.lexsort((_shuffled(keys.size, seed, number, "ties"), keys))
    pack_of = np.arange(keys.size) // pack_size
    rank = np.append(_shuffled(whole, seed, number, "packs"), whole)  # the short pack is the last
    return by_key[np.lexsort((_shuffled(keys.size, seed, number, "items"), rank[pack_of]))]


def _shuffled(count: int, seed: int, number: int, name: str) -> IntArray:
    if count == 0:
        return np.empty(0, np.int64)
    return permute(np.arange(count), count, make_key(int(seed), "buffer", number, name))


def _checked_keys(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "biuf":
        got = f"{keys.dtype} {keys.shape}"
        raise ValueError(f"buffer_sorted_order: keys must be numbers in one dimension, got {got}")
    return keys
