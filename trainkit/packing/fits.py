"""Fits: which bin each piece goes to. Any function of the same signature is a `Fit` too.

A fit sees the lengths of one group, each between 1 and the capacity, and numbers the bins from 0
without gaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.jit import jit

if TYPE_CHECKING:
    from trainkit.types import IntArray


def sequential(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
    """Fill one bin after the other; a piece that does not fit opens the next (next fit).

    Args:
        lengths: int64 `[N]`, each between 1 and `capacity`.
        capacity: Tokens per bin.
        max_documents: The most pieces a bin may hold; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`.

    Examples:
        >>> sequential(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([0, 0, 1, 1])
    """
    limit = lengths.size if max_documents is None else max_documents
    return _sequential(lengths, capacity, limit)


def best_fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
    """Put each piece, the longest first, into the fullest bin that has room (best fit decreasing).

    Time and memory are linear in pieces plus capacity, without a search for the fullest bin:
    lengths only fall, so the bins with room for the present length form a stack with the fullest on
    top. A bin that is taken from the top is filled with pieces of this length as long as they fit;
    then its space is below the length, and it waits, filed under that space, until the length has
    fallen to it. Then it is fuller than all bins on the stack, and joins on top.

    Ties: pieces of one length go in arrival order, and of bins that are equally full the one filed
    first goes first.

    Args:
        lengths: int64 `[N]`, each between 1 and `capacity`.
        capacity: Tokens per bin.
        max_documents: The most pieces a bin may hold; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`. See D. S. Johnson, "Near-optimal bin packing algorithms"
        (1973).

    Examples:
        >>> best_fit(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([1, 1, 0, 0])
    """
    limit = lengths.size if max_documents is None else max_documents
    return _best_fit(lengths, capacity, limit)


@jit
def _sequential(lengths: Any, capacity: int, limit: int) -> Any:
    bin_of = np.empty(lengths.size, np.int64)
    current, used, held = -1, capacity, 0  # as if a full bin came before the first
    for piece in range(lengths.size):
        if used + lengths[piece] > capacity or held == limit:
            current, used, held = current + 1, 0, 0
        used += lengths[piece]
        held += 1
        bin_of[piece] = current
    return bin_of


@jit
def _by_length(lengths: Any, capacity: int) -> Any:
    """Sort pieces by length, stably: those of length l are order[ends[l - 1] : ends[l]]."""
    ends = np.zeros(capacity + 1, np.int64)
    for length in lengths:
        ends[length] += 1
    ends = np.cumsum(ends)
    order = np.empty(lengths.size, np.int64)
    places = np.empty_like(ends)
    places[0], places[1:] = 0, ends[:-1]
    for piece in range(lengths.size):
        order[places[lengths[piece]]] = piece
        places[lengths[piece]] += 1
    return order, ends


@jit
def _best_fit(lengths: Any, capacity: int, limit: int) -> Any:
    order, ends = _by_length(lengths, capacity)
    bin_of, space, room, ready, earlier = np.empty((5, lengths.size), np.int64)
    waiting = np.full(
        capacity + 1, -1
    )  # by space: the bin filed last; `earlier` leads to the others
    num_bins = num_ready = 0
    for length in range(capacity, 0, -1):
        bin_ = waiting[length]
        while bin_ >= 0:
            ready[num_ready] = bin_
            num_ready += 1
            bin_ = earlier[bin_]
        place = ends[length - 1]
        while place < ends[length]:
            if num_ready > 0:
                num_ready -= 1
                bin_ = ready[num_ready]
            else:
                bin_ = num_bins
                space[bin_], room[bin_] = capacity, limit
                num_bins += 1
            taken = min(space[bin_] // length, room[bin_], ends[length] - place)
            for piece in order[place : place + taken]:
                bin_of[piece] = bin_
            place += taken
            space[bin_] -= taken * length
            room[bin_] -= taken
            if room[bin_] == 0:
                continue
            if space[bin_] >= length:
                ready[num_ready] = bin_
                num_ready += 1
            else:
                earlier[bin_] = waiting[space[bin_]]
                waiting[space[bin_]] = bin_
    return bin_of
