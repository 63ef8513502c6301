"""The compiled loops of `pack_bins` before and after the fit: split documents, sort pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.jit import jit

if TYPE_CHECKING:
    from trainkit.types import IntArray

SHELF_BITS = 12
SHELF = 1 << SHELF_BITS
"""Bins that are sorted at a time: their pieces, and a line of every shelf, fit the cache."""
MAX_PIECES = (1 << 31) - 1
"""The maximum number of pieces: 48 GiB of documents, starts and lengths."""


def align(lengths: IntArray, multiple_of: int) -> IntArray:
    """Round lengths up to multiples of `multiple_of`."""
    if multiple_of == 1:
        return lengths
    # In place: an expression would make two more arrays of all pieces.
    aligned = lengths + (multiple_of - 1)
    aligned //= multiple_of
    aligned *= multiple_of
    return aligned


@jit
def survey(lengths: Any, capacity: int, max_tokens: int) -> Any:
    """Return the smallest length (at max_tokens 0), the largest, and the number of pieces.

    A number above `MAX_PIECES` is not exact, because the sum could overflow.
    """
    smallest = largest = num_pieces = 0
    for document in range(lengths.size):
        length = lengths[document]
        smallest = min(smallest, length)
        largest = max(largest, length)
        num_pieces += 1 if length > 0 else 0
    if largest > capacity:  # in a second loop, so that the compiler can vectorize the first
        for length in lengths:
            if length > capacity:
                # Pieces beyond the first, which is counted above. With `max_tokens` 0 (drop) this
                # is -1, and takes back the first.
                parts = (min(length, max_tokens) - 1) // capacity
                num_pieces = min(num_pieces + parts, MAX_PIECES + 1)
    return smallest, largest, num_pieces


@jit
def write_pieces(  # noqa: PLR0917 (an array is a parameter)
    lengths: Any,
    document: int,
    start: int,
    capacity: int,
    max_tokens: int,
    documents: Any,
    starts: Any,
    pieces: Any,
) -> Any:
    """Write the next pieces from a position in a document on; return the position after them.

    Starts of 0 are not written, because the array is zeros.
    """
    piece = 0
    while piece < pieces.size:
        length = lengths[document]
        if length <= capacity:
            # Written even for a document without tokens, and then overwritten by the next one.
            documents[piece] = document
            pieces[piece] = length
            piece += length > 0
            document += 1
        else:
            end = min(length, max_tokens)
            while start < end and piece < pieces.size:
                documents[piece] = document
                pieces[piece] = min(end - start, capacity)
                if start > 0:
                    starts[piece] = start
                start += capacity
                piece += 1
            if start >= end:
                document += 1
                start = 0
    return document, start


@jit
def write_in_order(  # noqa: PLR0917 (an array is a parameter)
    bin_of: Any, aligned: Any, first: int, lengths: Any, ends: Any, documents: Any, pieces: Any
) -> Any:
    """Write the ends of bins; return the maximum tokens and the maximum pieces of a bin.

    Returns zeros if the bins are not in order, without gaps and up to the last of `ends`. Pieces
    that are documents, from `first` on with these `lengths`, are written in the same pass, which
    takes two thirds of the time of two; `first` is -1 if they are written already.
    """
    last = tokens = count = max_tokens = max_pieces = 0
    for piece in range(bin_of.size):
        bin_ = bin_of[piece]
        step = bin_ - last
        # One comparison for step < 0 and step > 1.
        if step & -2 != 0 or bin_ >= ends.size:
            return 0, 0
        same = step - 1  # all bits set, or 0: a branch here could not be predicted
        tokens = (tokens & same) + aligned[piece]
        count = (count & same) + 1
        max_tokens = max(max_tokens, tokens)
        max_pieces = max(max_pieces, count)
        ends[bin_] = piece + 1
        last = bin_
        if first >= 0:
            documents[piece] = first + piece
            pieces[piece] = lengths[piece]
    return max_tokens, max_pieces


@jit
def count_shelves(bin_of: Any, places: Any) -> int:
    """Write the starts of the pieces of each shelf of `SHELF` bins to `places`, which are zeros.

    Returns:
        The number of bins, or 0 if a bin is not in [0, number of pieces).
    """
    largest = 0
    for bin_ in bin_of:
        if bin_ < 0 or bin_ >= bin_of.size:
            return 0
        places[bin_ >> SHELF_BITS] += 1
        largest = max(largest, bin_)
    # From counts to starts: a running sum that leaves out the shelf itself.
    place = 0
    for shelf in range(places.size):
        places[shelf], place = place, place + places[shelf]
    return largest + 1


@jit
def sort_into_shelves(  # noqa: PLR0917 (an array is a parameter)
    bin_of: Any,
    lengths: Any,
    document: int,
    start: int,
    capacity: int,
    max_tokens: int,
    places: Any,
    entries: Any,
) -> None:
    """Write the next pieces from a position in a document on, stably sorted by shelf.

    An entry is the document, the length, the bin in the shelf and, if there is a fourth column, the
    index of the piece in its document. `places` move to the ends of the shelves.
    """
    for piece in range(bin_of.size):
        end = _get_end(lengths[document], capacity, max_tokens)
        # Goes on to the next document with pieces; one that is empty or dropped has end 0.
        while start >= end:
            document += 1
            start = 0
            end = _get_end(lengths[document], capacity, max_tokens)
        shelf = bin_of[piece] >> SHELF_BITS
        place = places[shelf]
        places[shelf] = place + 1
        entries[place, 0] = document
        entries[place, 1] = min(end - start, capacity)
        entries[place, 2] = bin_of[piece] & (SHELF - 1)
        if entries.shape[1] > 3:
            entries[place, 3] = start // capacity
        start += capacity


@jit
def _get_end(length: int, capacity: int, max_tokens: int) -> int:
    return length if length <= capacity else min(length, max_tokens)


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
    """Write the columns and the ends of bins, each shelf stably sorted by bin.

    Random access stays inside a shelf, which fits the cache. `order` has room for the longest
    shelf.

    Returns:
        The maximum tokens and the maximum pieces of a bin; zeros if a bin is empty.
    """
    tokens = np.empty(SHELF, np.int64)
    first = max_pieces = max_tokens = 0
    for shelf in range(places.size):
        # `shelf_ends` first counts the pieces of each bin, then has their starts, and at last their
        # ends.
        shelf_ends = ends[shelf * SHELF : (shelf + 1) * SHELF]
        shelf_ends[:], tokens[:] = 0, 0
        for entry in range(first, places[shelf]):
            length = entries[entry, 1]
            bin_ = entries[entry, 2]
            if multiple_of > 1:
                length = (length + multiple_of - 1) // multiple_of * multiple_of
            shelf_ends[bin_] += 1
            tokens[bin_] += length
        place = first
        for bin_ in range(shelf_ends.size):
            if shelf_ends[bin_] == 0:
                return 0, 0
            max_pieces = max(max_pieces, shelf_ends[bin_])
            max_tokens = max(max_tokens, tokens[bin_])
            shelf_ends[bin_], place = place, place + shelf_ends[bin_]
        # A counting sort, which is stable: the pieces of a bin keep their order.
        for entry in range(first, places[shelf]):
            place = shelf_ends[entries[entry, 2]]
            shelf_ends[entries[entry, 2]] = place + 1
            order[place - first] = entry
        # In the order of the columns, which are long; only reads from the cache are random.
        for place in range(first, places[shelf]):
            entry = order[place - first]
            documents[place] = entries[entry, 0]
            pieces[place] = entries[entry, 1]
            if entries.shape[1] > 3:
                starts[place] = entries[entry, 3] * capacity
        first = places[shelf]
    return max_tokens, max_pieces
