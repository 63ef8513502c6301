"""The compiled loops of `pack_bins`, around the fit: from lengths to pieces, and pieces to rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.jit import jit

if TYPE_CHECKING:
    from trainkit.types import IntArray

SHELF_BITS = 12
SHELF = 1 << SHELF_BITS
"""Bins that are sorted at a time: the cache holds their pieces, and a line of every shelf."""
MOST_PIECES = (1 << 31) - 1
"""The most pieces of one packing: 48 GiB of documents, starts and lengths."""


def align(lengths: IntArray, multiple_of: int) -> IntArray:
    """Return lengths as they are in a row: the next multiples of `multiple_of`."""
    if multiple_of == 1:
        return lengths
    aligned = lengths + (multiple_of - 1)
    aligned //= multiple_of
    aligned *= multiple_of
    return aligned


@jit
def survey(lengths: Any, capacity: int, most: int) -> Any:
    """Return the smallest length (at most 0), the largest, and the number of pieces.

    Above `MOST_PIECES` the number is only known to be above it: a sum of parts could overflow.
    """
    smallest = largest = num_pieces = 0
    for document in range(lengths.size):
        length = lengths[document]
        smallest, largest = min(smallest, length), max(largest, length)
        num_pieces += 1 if length > 0 else 0
    if largest > capacity:  # in a loop of its own: without this one the above runs on vectors
        for length in lengths:
            if length > capacity:
                parts = (min(length, most) - 1) // capacity
                num_pieces = min(num_pieces + parts, MOST_PIECES + 1)
    return smallest, largest, num_pieces


@jit
def cut(  # noqa: PLR0917 (an array is a parameter)
    lengths: Any,
    document: int,
    start: int,
    capacity: int,
    most: int,
    documents: Any,
    starts: Any,
    pieces: Any,
) -> Any:
    """Write the next pieces from a place in a document on; return the place after them.

    Starts of 0 are not written: the array comes with zeros.
    """
    piece = 0
    while piece < pieces.size:
        length = lengths[document]
        if length <= capacity:
            documents[piece], pieces[piece] = document, length
            piece += length > 0
            document += 1
        else:
            end = min(length, most)
            while start < end and piece < pieces.size:
                documents[piece], pieces[piece] = document, min(end - start, capacity)
                if start > 0:
                    starts[piece] = start
                start += capacity
                piece += 1
            if start >= end:
                document, start = document + 1, 0
    return document, start


@jit
def take_in_order(  # noqa: PLR0917 (an array is a parameter)
    bin_of: Any, lengths: Any, first: int, asked: Any, ends: Any, documents: Any, pieces: Any
) -> Any:
    """Write where the bins' pieces end; return the most tokens and the most pieces of a bin.

    Zeros if the bins do not come in order, without gaps and up to the last of `ends`. Pieces that
    are whole documents, from `first` on and as long as `asked`, are written in the same pass, which
    takes two thirds of the time of two; `first` is -1 where they are written already.
    """
    last = tokens = count = fullest = most = 0
    for piece in range(bin_of.size):
        bin_ = bin_of[piece]
        step = bin_ - last
        if step & -2 != 0 or bin_ >= ends.size:
            return 0, 0
        same = step - 1  # all bits set, or 0: no branch that no processor foresees
        tokens, count = (tokens & same) + lengths[piece], (count & same) + 1
        fullest, most = max(fullest, tokens), max(most, count)
        ends[bin_], last = piece + 1, bin_
        if first >= 0:
            documents[piece], pieces[piece] = first + piece, asked[piece]
    return fullest, most


@jit
def count_shelves(bin_of: Any, places: Any) -> int:
    """Write where the pieces of each shelf of `SHELF` bins begin; `places` are zeros before.

    Returns:
        The number of bins: 0 if one is below 0, or as many as there are pieces.
    """
    largest = 0
    for bin_ in bin_of:
        if bin_ < 0 or bin_ >= bin_of.size:
            return 0
        places[bin_ >> SHELF_BITS] += 1
        largest = max(largest, bin_)
    place = 0
    for shelf in range(places.size):
        places[shelf], place = place, place + places[shelf]
    return largest + 1


@jit
def deal(  # noqa: PLR0917 (an array is a parameter)
    bin_of: Any,
    lengths: Any,
    document: int,
    start: int,
    capacity: int,
    most: int,
    places: Any,
    entries: Any,
) -> None:
    """Write the next pieces from a place in a document on, sorted by shelf, stably.

    Of a piece: its document, its length, its bin in the shelf, and if there is a column for it,
    which part of the document it is. `places` move to where the shelves end.
    """
    for piece in range(bin_of.size):
        end = _end(lengths[document], capacity, most)
        while start >= end:
            document, start = document + 1, 0
            end = _end(lengths[document], capacity, most)
        shelf = bin_of[piece] >> SHELF_BITS
        place = places[shelf]
        places[shelf] = place + 1
        entries[place, 0], entries[place, 1] = document, min(end - start, capacity)
        entries[place, 2] = bin_of[piece] & (SHELF - 1)
        if entries.shape[1] > 3:
            entries[place, 3] = start // capacity
        start += capacity


@jit
def _end(length: int, capacity: int, most: int) -> int:
    return length if length <= capacity else min(length, most)


@jit
def sort_shelves(  # noqa: PLR0917 (an array is a parameter)
    places: Any,
    entries: Any,
    capacity: int,
    multiple_of: int,
    order: Any,
    ends: Any,
    documents: Any,
    starts: Any,
    pieces: Any,
) -> Any:
    """Write the columns and where the bins' pieces end, each shelf sorted by bin, stably.

    What is read here and there is one shelf, which the cache holds. `order` has room for the
    longest.

    Returns:
        The most tokens and the most pieces of a bin; zeros if a bin has none.
    """
    tokens = np.empty(SHELF, np.int64)
    first = most = fullest = 0
    for shelf in range(places.size):
        own = ends[shelf * SHELF : (shelf + 1) * SHELF]
        own[:], tokens[:] = 0, 0
        for entry in range(first, places[shelf]):
            length, bin_ = entries[entry, 1], entries[entry, 2]
            if multiple_of > 1:
                length = (length + multiple_of - 1) // multiple_of * multiple_of
            own[bin_] += 1
            tokens[bin_] += length
        place = first
        for bin_ in range(own.size):
            if own[bin_] == 0:
                return 0, 0
            most, fullest = max(most, own[bin_]), max(fullest, tokens[bin_])
            own[bin_], place = place, place + own[bin_]
        for entry in range(first, places[shelf]):
            place = own[entries[entry, 2]]
            own[entries[entry, 2]] = place + 1
            order[place - first] = entry
        for place in range(first, places[shelf]):
            entry = order[place - first]
            documents[place], pieces[place] = entries[entry, 0], entries[entry, 1]
            if entries.shape[1] > 3:
                starts[place] = entries[entry, 3] * capacity
        first = places[shelf]
    return fullest, most
