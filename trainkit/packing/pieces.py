"""The compiled loops of `pack_bins`, around the fit: from lengths to pieces, and pieces to rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.noise.jit import jit

if TYPE_CHECKING:
    from trainkit.types import IntArray

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
def sort_pieces(  # noqa: PLR0917 (an array is a parameter)
    bin_of: Any,
    lengths: Any,
    ends: Any,
    documents: Any,
    starts: Any,
    pieces: Any,
    to_documents: Any,
    to_starts: Any,
    to_pieces: Any,
) -> Any:
    """Write pieces sorted by bin, stably, and where those of each bin end.

    Starts of 0 are not written: the array comes with zeros.

    Returns:
        The most tokens and the most pieces of a bin; zeros if a bin has none.
    """
    if ends.size == 0:
        return 0, 0
    tokens = count = fullest = most = 0
    last = 0 if bin_of[0] == 0 else -2  # which no bin comes after
    for piece in range(bin_of.size):
        bin_ = bin_of[piece]
        step = bin_ - last
        if step & -2 != 0:
            break
        same = step - 1  # all bits set, or 0: no branch that no processor foresees
        tokens, count = (tokens & same) + lengths[piece], (count & same) + 1
        fullest, most = max(fullest, tokens), max(most, count)
        ends[bin_], last = piece + 1, bin_
        to_documents[piece], to_pieces[piece] = documents[piece], pieces[piece]
        if starts[piece] > 0:
            to_starts[piece] = starts[piece]
    else:  # they come in order
        return fullest, most
    ends[:] = 0
    for bin_ in bin_of:
        ends[bin_] += 1
    place = most = 0
    for bin_ in range(ends.size):  # now where each bin begins
        if ends[bin_] == 0:
            return 0, 0
        most = max(most, ends[bin_])
        ends[bin_], place = place, place + ends[bin_]
    filled = np.zeros(ends.size, np.int64)
    for piece in range(bin_of.size):
        bin_ = bin_of[piece]
        place = ends[bin_]
        ends[bin_] = place + 1
        filled[bin_] += lengths[piece]
        to_documents[place], to_pieces[place] = documents[piece], pieces[piece]
        if starts[piece] > 0:
            to_starts[place] = starts[piece]
    return filled.max(), most
