"""`pack_bins`: from the lengths of documents to the table of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from trainkit.noise.hashing import make_key
from trainkit.packing.fits import (
    INT32,
    MOST_TOKENS,
    best_fit,
    check_whole,
    read_only,
    sorted_by,
)
from trainkit.packing.pieces import (
    MOST_PIECES,
    SHELF,
    SHELF_BITS,
    align,
    count_shelves,
    cut,
    deal,
    sort_shelves,
    survey,
    take_in_order,
)
from trainkit.sampling.integers import integers
from trainkit.sampling.permutation import permute
from trainkit.types import Bins, check_choice

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.types import Fit, IntArray

Overlong = Literal["split", "truncate", "drop", "error"]
_LONGEST = 1 << 40
"""The longest document; as the most tokens that are kept of one: all of them."""


def pack_bins(
    lengths: ArrayLike,
    capacity: int,
    *,
    fit: Fit = best_fit,
    group_size: int = 100_000,
    overlong: Overlong = "split",
    multiple_of: int = 1,
    max_documents: int | None = None,
    seed: int | None = None,
) -> Bins:
    """Pack documents into rows of `capacity` tokens.

    Documents are cut into pieces, pieces are aligned, and each group of pieces is packed by `fit`.
    Inside a row pieces keep corpus order. The result is a function of the arguments alone.

    Args:
        lengths: Tokens of each document, integers `[N]`, at most 2^40 each. A document without
            tokens gives no piece; all together may give 2^31 - 1.
        capacity: Tokens per row, at most 2^31 - 1: a batch holds places in a row as int32.
        fit: Which bin each piece goes to: `best_fit`, `first_fit`, `sequential`, `balanced(rows)`,
            or any other `Fit`.
        group_size: How many consecutive pieces are packed together, so how far a document may move;
            0 means all.
        overlong: What becomes of a document longer than the capacity: "split" into pieces of
            `capacity` and a rest, "truncate" to `capacity`, "drop", or "error".
        multiple_of: In its row a piece takes the next multiple of this many tokens. A split of each
            document over N ring ranks needs 2N.
        max_documents: The most pieces a row may hold; None sets no limit.
        seed: None groups neighbours, which arrive in corpus order. With a seed the documents are
            dealt at random to groups of about `group_size` pieces, and the pieces of a group arrive
            in random order, so that a row mixes documents from all over the corpus.

    Returns:
        The `Bins`.

    Raises:
        ValueError: An argument is out of its range, or a document is too long and `overlong` is
            "error".

    Examples:
        >>> bins = pack_bins([5, 3, 2, 6], 8)
        >>> [bins[row] for row in range(len(bins))]
        [[(2, 0, 2), (3, 0, 6)], [(0, 0, 5), (1, 0, 3)]]
        >>> pack_bins([11], 8)[0]
        [(0, 0, 8)]
    """
    array = checked_lengths(lengths)
    rule = _checked_rule(capacity, multiple_of, overlong, max_documents)
    _check_fit(fit)
    check_whole("pack_bins", "group_size", group_size, least=0)
    if seed is not None:
        check_whole("pack_bins", "seed", seed)
    num_pieces, largest = _surveyed(array, rule, overlong)
    dealt, counts = _groups(array, rule, num_pieces, int(group_size), seed)
    chosen = array if dealt is None else read_only(array[dealt])
    offsets, documents, starts, pieces = _packed(
        fit, chosen, counts, rule, seed=seed, largest=largest
    )
    if dealt is not None:
        documents[:] = dealt[documents]
    return Bins(offsets, documents, starts, pieces, rule.capacity, rule.multiple_of)


def select_rows(bins: Bins, rows: ArrayLike) -> Bins:
    """Return some rows of bins, in the order asked for, as bins of their own.

    Args:
        bins: The table.
        rows: Integers `[B]` in [0, len(bins)).

    Examples:
        >>> select_rows(pack_bins([4, 4, 3, 3, 2, 8], 8, group_size=0), [2, 0])[0]
        [(2, 0, 3), (3, 0, 3), (4, 0, 2)]
    """
    rows = np.asarray(rows)
    begins = bins.offsets[rows]
    sizes = bins.offsets[rows + 1] - begins
    offsets = np.append(0, np.cumsum(sizes))
    pieces = np.repeat(begins - offsets[:-1], sizes) + np.arange(offsets[-1])
    columns = (column[pieces] for column in (bins.documents, bins.starts, bins.lengths))
    return Bins(offsets, *columns, capacity=bins.capacity, multiple_of=bins.multiple_of)


# ---------------------------------------------------------------------------------- what is checked


@attrs.frozen
class _Rule:
    """What a row may hold; of a document beyond the capacity at most `most` tokens are kept."""

    capacity: int
    multiple_of: int
    max_documents: int | None
    most: int


def checked_lengths(lengths: ArrayLike) -> IntArray:
    """Return lengths in the one form that the compiled loops take: int64, contiguous, read-only."""
    # numpy makes unsigned integers, objects or floats of integers beyond int64.
    if isinstance(lengths, Sequence) and all(type(length) is int for length in lengths):
        exact = np.asarray(lengths, object)
        _check_longest(exact, exact.max(initial=0))
    array = integers("pack_bins", "lengths", lengths)
    if array.ndim != 1:
        raise ValueError(f"pack_bins: lengths must have one dimension, got shape {array.shape}")
    return read_only(np.ascontiguousarray(array))


def _check_longest(lengths: np.ndarray[Any, Any], longest: int) -> None:
    """Refuse a document that is too long: in int64 by the survey, else before it becomes int64."""
    if longest > _LONGEST:
        raise ValueError(
            f"pack_bins: document {int(lengths.argmax())} has {longest} tokens; the most are 2^40: "
            "look for a fault in lengths"
        )


def _check_fit(fit: Fit) -> None:
    if not callable(fit):
        known = {"best_fit", "first_fit", "sequential", "balanced"}
        name = str(fit) if str(fit) in known else "best_fit"
        asked = f"the function packing.{name}" + "(rows)" * (name == "balanced")
        raise ValueError(f"pack_bins: fit must be a function, got {fit!r}: give {asked}")  # noqa: TRY004 -- as of all arguments


def _checked_rule(
    capacity: int, multiple_of: int, overlong: Overlong, max_documents: int | None
) -> _Rule:
    check_whole("pack_bins", "capacity", capacity, least=1, most=MOST_TOKENS)
    check_whole("pack_bins", "multiple_of", multiple_of, least=1, most=MOST_TOKENS)
    if max_documents is not None:
        check_whole("pack_bins", "max_documents", max_documents, least=1)
    capacity, multiple_of = int(capacity), int(multiple_of)
    below = capacity // multiple_of * multiple_of
    if below != capacity:
        nearest = [n for n in (below, below + multiple_of) if 1 <= n <= MOST_TOKENS]
        raise ValueError(
            f"pack_bins: capacity {capacity} is no multiple of multiple_of={multiple_of}; "
            f"take {' or '.join(map(str, nearest))}"
        )
    most = {"split": _LONGEST, "error": _LONGEST, "truncate": capacity, "drop": 0}
    check_choice(tuple(most), "pack_bins", overlong=overlong)
    limit = None if max_documents is None else int(max_documents)
    return _Rule(capacity, multiple_of, limit, most[overlong])


def _surveyed(lengths: IntArray, rule: _Rule, overlong: Overlong) -> tuple[int, int]:
    """Return the number of pieces and the longest length, after a look at every length."""
    smallest, largest, num_pieces = survey(lengths, rule.capacity, rule.most)
    _check_longest(lengths, largest)
    if smallest < 0:
        worst = int(lengths.argmin())
        raise ValueError(f"pack_bins: document {worst} has length {lengths[worst]}, below 0")
    if overlong == "error" and largest > rule.capacity:
        first = int((lengths > rule.capacity).argmax())
        raise ValueError(
            f"pack_bins: document {first} has {lengths[first]} tokens; the capacity is "
            f"{rule.capacity}: raise it (--row-length of a recipe, --capacity of pack), or let "
            "`overlong` split, truncate or drop such documents (--overlong of pack)"
        )
    if num_pieces > MOST_PIECES:
        raise ValueError(
            f"pack_bins: lengths come to more than 2^31 - 1 pieces of capacity {rule.capacity}; "
            f"the longest, document {int(lengths.argmax())}, has {largest} tokens: raise the "
            "capacity, or pack parts of the corpus"
        )
    return num_pieces, largest


# ------------------------------------------------------------------------------ groups of pieces


def _groups(
    lengths: IntArray, rule: _Rule, num_pieces: int, group_size: int, seed: int | None
) -> tuple[np.ndarray[Any, Any] | None, list[int]]:
    """Return the order in which documents come (None: as they are) and the pieces of each group."""
    size = group_size or num_pieces
    if seed is None or size >= num_pieces:
        whole, rest = divmod(num_pieces, max(size, 1))
        return None, [size] * whole + [rest] * (rest > 0)
    num_groups = -(-num_pieces // size)
    group_of = _shuffled(lengths.size, seed, "group") * num_groups // lengths.size
    dealt, ends = sorted_by(read_only(group_of), num_groups)
    parts = (read_only(lengths[dealt[a:b]]) for a, b in pairwise([0, *ends.tolist()]))
    return dealt, [survey(part, rule.capacity, rule.most)[2] for part in parts]


def _shuffled(count: int, seed: int, *names: str | int) -> IntArray:
    """Return [0, count) in an order that the seed and the names make."""
    return permute(np.arange(count), count, make_key(int(seed), "packing", *names))


def _packed(
    fit: Fit, lengths: IntArray, counts: list[int], rule: _Rule, *, seed: int | None, largest: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Pack groups of so many pieces: offsets `[B+1]`; documents, starts, lengths `[P]`.

    Where pieces are whole documents the lengths are what the fit is asked, and pieces are written
    once, when it has answered.
    """
    documents, pieces = np.empty((2, sum(counts)), np.int64)
    starts = np.zeros(len(pieces), np.int64)  # whose memory is never touched if nothing is split
    # int32 takes half the memory of int64, and less time.
    integer = np.int32 if lengths.size < INT32 else np.int64
    splits = rule.most > rule.capacity and largest > rule.capacity
    whole = lengths.size == len(pieces) and largest <= rule.capacity  # pieces are the documents
    offsets, first = [np.zeros(1, np.int64)], 0
    place: tuple[int, int] = 0, 0
    for size in filter(None, counts):
        group = slice(first, first + size)
        columns = documents[group], starts[group], pieces[group]
        begin, place, asked = place, (first + size, 0), lengths[group]
        if not whole:
            place = cut(lengths, begin[0], begin[1], rule.capacity, rule.most, *columns)
            asked = pieces[group]
        aligned = read_only(align(asked, rule.multiple_of))
        arrival = None if seed is None else _shuffled(size, seed, "arrival", first)
        bin_of = _asked(fit, aligned, rule, arrival)
        origin = begin[0] if whole else -1
        ends = _take_in_order(fit, bin_of, aligned, rule, origin, asked, columns)
        if ends is None:
            entries = np.empty((size, 4 if splits else 3), integer)
            ends = _sort(fit, bin_of, lengths, begin, rule, entries, columns)
        ends += first
        offsets.append(ends)
        first += size
    return np.concatenate(offsets), documents, starts, pieces


# -------------------------------------------------------------------------------- what a fit says


def _asked(fit: Fit, lengths: IntArray, rule: _Rule, arrival: IntArray | None) -> IntArray:
    """Return the bin of each piece, as the fit says when they arrive in an order of their own."""
    arriving = lengths if arrival is None else read_only(lengths[arrival])
    found = np.asarray(fit(arriving, rule.capacity, max_documents=rule.max_documents))
    if found.shape != lengths.shape or found.dtype.kind not in "iu":
        raise ValueError(
            f"pack_bins: {_name(fit)} must return one integer per piece, for {len(lengths)} pieces "
            f"it gave {found.dtype} {found.shape}"
        )
    found = np.ascontiguousarray(found, np.int64)
    if arrival is None:
        return read_only(found)
    bin_of = np.empty_like(found)
    bin_of[arrival] = found
    return read_only(bin_of)


def _take_in_order(  # noqa: PLR0917 (an array is a parameter)
    fit: Fit,
    bin_of: IntArray,
    lengths: IntArray,
    rule: _Rule,
    origin: int,
    asked: IntArray,
    columns: tuple[IntArray, IntArray, IntArray],
) -> IntArray | None:
    """Write the pieces, and return where those of each bin end, if the bins come in order."""
    in_range = bin_of[0] == 0 <= bin_of[-1] < bin_of.size
    ends = np.empty(int(bin_of[-1]) + 1 if in_range else 0, np.int64)
    documents, _, pieces = columns
    fullest, most = take_in_order(
        bin_of, lengths, origin, read_only(asked), ends, documents, pieces
    )
    if most == 0:
        return None
    _check_bins(fit, fullest, most, rule)
    return ends


def _sort(  # noqa: PLR0917 (an array is a parameter)
    fit: Fit,
    bin_of: IntArray,
    lengths: IntArray,
    begin: tuple[int, int],
    rule: _Rule,
    entries: np.ndarray[Any, Any],
    columns: tuple[IntArray, IntArray, IntArray],
) -> IntArray:
    """Write the pieces from a place in a document on, sorted by bin; return where the bins end."""
    places = np.zeros((bin_of.size >> SHELF_BITS) + 1, np.int64)
    ends = np.empty(count_shelves(bin_of, places), np.int64)
    fullest = most = 0
    if ends.size > 0:
        places = places[: (ends.size + SHELF - 1) >> SHELF_BITS]
        deal(bin_of, lengths, *begin, rule.capacity, rule.most, places, entries)
        order = np.empty(np.diff(places, prepend=0).max(), entries.dtype)
        fullest, most = sort_shelves(
            places, entries, rule.capacity, rule.multiple_of, order, ends, *columns
        )
    _check_bins(fit, fullest, most, rule)
    return ends


def _check_bins(fit: Fit, fullest: int, most: int, rule: _Rule) -> None:
    """Refuse the answer of a fit, which may be anybody's, unless every piece has a place."""
    if most == 0:
        raise ValueError(f"pack_bins: {_name(fit)} must number its bins from 0 without gaps")
    if fullest > rule.capacity or (rule.max_documents is not None and most > rule.max_documents):
        raise ValueError(
            f"pack_bins: {_name(fit)} put {fullest} tokens or {most} pieces into one bin of "
            f"capacity {rule.capacity} (max_documents {rule.max_documents})"
        )


def _name(fit: Fit) -> str:
    return getattr(fit, "__name__", repr(fit))
