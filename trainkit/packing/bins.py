"""Pack documents into rows: from their lengths to a table of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from trainkit.noise.hashing import make_key
from trainkit.packing.fits import (
    INT32,
    MAX_TOKENS,
    argsort_keys,
    best_fit,
    check_integer,
    read_only,
)
from trainkit.packing.pieces import (
    MAX_PIECES,
    SHELF,
    SHELF_BITS,
    align,
    count_shelves,
    sort_into_shelves,
    sort_shelves,
    survey,
    write_in_order,
    write_pieces,
)
from trainkit.sampling.integers import integers
from trainkit.sampling.permutation import permute
from trainkit.types import Bins, check_choice

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.types import Fit, IntArray

Overlong = Literal["split", "truncate", "drop", "error"]
_LONGEST = 1 << 40
"""The maximum length of a document, and the limit that truncates none."""


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

    Documents are split into pieces, pieces are aligned, and `fit` packs each group of pieces.
    Inside a row pieces are in corpus order. The result depends on the arguments alone.

    Args:
        lengths: Tokens of each document, integers `[N]`, at most 2^40 each. A document without
            tokens gives no piece. There may be at most 2^31 - 1 pieces.
        capacity: Tokens per row, at most 2^31 - 1, because `cu_seqlens` is int32.
        fit: Which bin each piece goes to: `best_fit`, `first_fit`, `next_fit`,
            `make_balanced_fit(rows)`, or any other `Fit`.
        group_size: The number of consecutive pieces that are packed together, so how far a document
            may move; 0 means all.
        overlong: The policy for documents longer than the capacity: "split" into pieces of
            `capacity` and a remainder, "truncate" to `capacity`, "drop", or "error".
        multiple_of: Pieces are padded to a multiple of this many tokens. A ring of N ranks needs
            2N.
        max_documents: The maximum number of pieces in a row; None sets no limit.
        seed: By default a group is consecutive documents in corpus order. With a seed documents go
            to random groups of about `group_size` pieces, and the fit sees the pieces of a group in
            random order, so that a row mixes documents from the whole corpus.

    Returns:
        The `Bins`.

    Raises:
        ValueError: An argument is out of range, or a document is too long and `overlong` is
            "error".

    Examples:
        >>> bins = pack_bins([5, 3, 2, 6], 8)
        >>> [bins[row] for row in range(len(bins))]
        [[(2, 0, 2), (3, 0, 6)], [(0, 0, 5), (1, 0, 3)]]
        >>> pack_bins([11], 8)[0]
        [(0, 0, 8)]
    """
    array = check_lengths(lengths)
    rule = _make_rule(capacity, multiple_of, overlong, max_documents)
    if not callable(fit):
        # A name, as a configuration has it, is the likely mistake.
        name = {"first_fit": "first_fit", "next_fit": "next_fit"}.get(str(fit), "best_fit")
        name = "make_balanced_fit(rows)" if "balanced" in str(fit) else name
        raise ValueError(  # noqa: TRY004 -- as for all bad arguments
            f"pack_bins: fit must be a function, got {fit!r}: give the function packing.{name}"
        )
    check_integer("pack_bins", "group_size", group_size, min_value=0)
    if seed is not None:
        check_integer("pack_bins", "seed", seed)
    num_pieces, largest = _survey_lengths(array, rule, overlong)
    order, counts = _make_groups(array, rule, num_pieces, int(group_size), seed)
    grouped = array if order is None else read_only(array[order])
    offsets, documents, starts, pieces = _pack_groups(
        fit, grouped, counts, rule, seed=seed, largest=largest
    )
    if order is not None:
        # From positions in the shuffled order back to the corpus' own numbers.
        documents[:] = order[documents]
    return Bins(
        offsets=offsets,
        documents=documents,
        starts=starts,
        lengths=pieces,
        capacity=rule.capacity,
        multiple_of=rule.multiple_of,
    )


def select_rows(bins: Bins, rows: ArrayLike) -> Bins:
    """Return new bins with some rows, in the given order.

    Args:
        bins: The table.
        rows: Integers `[B]` in [0, len(bins)).

    Examples:
        >>> select_rows(pack_bins([4, 4, 3, 3, 2, 8], 8, group_size=0), [2, 0])[0]
        [(2, 0, 3), (3, 0, 3), (4, 0, 2)]
    """
    rows = np.asarray(rows)
    starts = bins.offsets[rows]
    sizes = bins.offsets[rows + 1] - starts
    offsets = np.append(0, np.cumsum(sizes))
    # The index in the old table of each piece of the new one.
    pieces = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
    return Bins(
        offsets=offsets,
        documents=bins.documents[pieces],
        starts=bins.starts[pieces],
        lengths=bins.lengths[pieces],
        capacity=bins.capacity,
        multiple_of=bins.multiple_of,
    )


# ------------------------------------------------------------------------------------------ checks


@attrs.frozen
class _Rule:
    """The limits of a row; documents longer than the capacity are truncated to `max_tokens`."""

    capacity: int
    multiple_of: int
    max_documents: int | None
    max_tokens: int


def check_lengths(lengths: ArrayLike) -> IntArray:
    """Convert lengths to the form of the compiled loops: int64, contiguous, read-only."""
    # numpy converts integers beyond int64 to unsigned integers, objects or floats.
    if isinstance(lengths, Sequence) and all(type(length) is int for length in lengths):
        exact = np.asarray(lengths, object)
        _check_longest(exact, exact.max(initial=0))
    array = integers("pack_bins", "lengths", lengths)
    if array.ndim != 1:
        raise ValueError(f"pack_bins: lengths must have one dimension, got shape {array.shape}")
    return read_only(np.ascontiguousarray(array))


def _check_longest(lengths: np.ndarray[Any, Any], longest: int) -> None:
    """Raise ValueError if the longest document has more than 2^40 tokens."""
    if longest > _LONGEST:
        raise ValueError(
            f"pack_bins: document {int(lengths.argmax())} has {longest} tokens; the most are 2^40: "
            "look for a fault in lengths"
        )


def _make_rule(
    capacity: int, multiple_of: int, overlong: Overlong, max_documents: int | None
) -> _Rule:
    check_integer("pack_bins", "capacity", capacity, min_value=1, max_value=MAX_TOKENS)
    check_integer("pack_bins", "multiple_of", multiple_of, min_value=1, max_value=MAX_TOKENS)
    if max_documents is not None:
        check_integer("pack_bins", "max_documents", max_documents, min_value=1)
    capacity = int(capacity)
    multiple_of = int(multiple_of)
    below = capacity // multiple_of * multiple_of
    if below != capacity:
        nearest = [n for n in (below, below + multiple_of) if 1 <= n <= MAX_TOKENS]
        raise ValueError(
            f"pack_bins: capacity {capacity} is no multiple of multiple_of={multiple_of}; "
            f"take {' or '.join(map(str, nearest))}"
        )
    # What is left of a document that is longer than the capacity; nothing if it is dropped.
    max_tokens = {"split": _LONGEST, "error": _LONGEST, "truncate": capacity, "drop": 0}
    check_choice(tuple(max_tokens), "pack_bins", overlong=overlong)
    limit = None if max_documents is None else int(max_documents)
    return _Rule(capacity, multiple_of, limit, max_tokens[overlong])


def _survey_lengths(lengths: IntArray, rule: _Rule, overlong: Overlong) -> tuple[int, int]:
    """Check all lengths; return the number of pieces and the longest length."""
    smallest, largest, num_pieces = survey(lengths, rule.capacity, rule.max_tokens)
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
    if num_pieces > MAX_PIECES:
        raise ValueError(
            f"pack_bins: lengths come to more than 2^31 - 1 pieces of capacity {rule.capacity}; "
            f"the longest, document {int(lengths.argmax())}, has {largest} tokens: raise the "
            "capacity, or pack parts of the corpus"
        )
    return num_pieces, largest


# ------------------------------------------------------------------------------ groups of pieces


def _make_groups(
    lengths: IntArray, rule: _Rule, num_pieces: int, group_size: int, seed: int | None
) -> tuple[np.ndarray[Any, Any] | None, list[int]]:
    """Return the order of documents (None for corpus order) and the number of pieces per group."""
    size = group_size or num_pieces
    if seed is None or size >= num_pieces:
        num_full, remainder = divmod(num_pieces, max(size, 1))
        return None, [size] * num_full + [remainder] * (remainder > 0)
    num_groups = -(-num_pieces // size)
    # Equal parts of a permutation. The sort is stable, so that a group keeps corpus order.
    group_of = _shuffle(lengths.size, seed, "group") * num_groups // lengths.size
    order, ends = argsort_keys(read_only(group_of), num_groups)
    # Groups of equally many documents have different numbers of pieces.
    bounds = pairwise([0, *ends.tolist()])
    groups = (read_only(lengths[order[start:end]]) for start, end in bounds)
    return order, [survey(group, rule.capacity, rule.max_tokens)[2] for group in groups]


def _shuffle(count: int, seed: int, *names: str | int) -> IntArray:
    """Return a permutation of [0, count) that depends on the seed and the names."""
    return permute(np.arange(count), count, make_key(int(seed), "packing", *names))


def _pack_groups(
    fit: Fit, lengths: IntArray, counts: list[int], rule: _Rule, *, seed: int | None, largest: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Pack groups of given numbers of pieces: offsets `[B+1]`; documents, starts, lengths `[P]`."""
    documents, pieces = np.empty((2, sum(counts)), np.int64)
    starts = np.zeros(len(pieces), np.int64)  # its memory is never touched if nothing is split
    # int32 takes half the memory of int64, and less time.
    integer = np.int32 if lengths.size < INT32 else np.int64
    has_splits = rule.max_tokens > rule.capacity and largest > rule.capacity
    # Where the pieces are the documents, the fit gets the lengths themselves, and the pieces are
    # written once, after it has answered.
    is_plain = lengths.size == len(pieces) and largest <= rule.capacity
    offsets = [np.zeros(1, np.int64)]
    first = 0
    position: tuple[int, int] = 0, 0  # a document and a start in it
    for size in filter(None, counts):
        group = slice(first, first + size)
        columns = documents[group], starts[group], pieces[group]
        start = position
        if is_plain:
            position = (first + size, 0)
            group_lengths = lengths[group]
        else:
            position = write_pieces(
                lengths, start[0], start[1], rule.capacity, rule.max_tokens, *columns
            )
            group_lengths = pieces[group]
        aligned = read_only(align(group_lengths, rule.multiple_of))
        arrival = None if seed is None else _shuffle(size, seed, "arrival", first)
        bin_of = _call_fit(fit, aligned, rule, arrival)
        # A guess: the bins are in order, and the last piece is in the last bin.
        in_range = bin_of[0] == 0 <= bin_of[-1] < bin_of.size
        ends = np.empty(int(bin_of[-1]) + 1 if in_range else 0, np.int64)
        max_tokens, max_pieces = write_in_order(
            bin_of,
            aligned,
            start[0] if is_plain else -1,
            read_only(group_lengths),
            ends,
            columns[0],
            columns[2],
        )
        # The bins come in any order, so pieces are sorted by bin. An entry has a fourth column
        # where a document may have several pieces: the index of the piece.
        if max_pieces == 0:  # a wrong one
            entries = np.empty((size, 4 if has_splits else 3), integer)
            ends, max_tokens, max_pieces = _write_sorted(
                bin_of, lengths, start, rule, entries, columns
            )
        _check_bins(fit, max_tokens, max_pieces, rule)
        # From pieces of this group to pieces of all groups.
        ends += first
        offsets.append(ends)
        first += size
    return np.concatenate(offsets), documents, starts, pieces


# ---------------------------------------------------------------------------- the answer of a fit


def _call_fit(fit: Fit, lengths: IntArray, rule: _Rule, arrival: IntArray | None) -> IntArray:
    """Return the bin of each piece, with the pieces given to the fit in order of arrival."""
    arriving = lengths if arrival is None else read_only(lengths[arrival])
    bins = np.asarray(fit(arriving, rule.capacity, max_documents=rule.max_documents))
    if bins.shape != lengths.shape or bins.dtype.kind not in "iu":
        raise ValueError(
            f"pack_bins: {_get_name(fit)} must return one integer per piece, for {len(lengths)} "
            f"pieces it gave {bins.dtype} {bins.shape}"
        )
    bins = np.ascontiguousarray(bins, np.int64)
    if arrival is None:
        return read_only(bins)
    bin_of = np.empty_like(bins)
    bin_of[arrival] = bins
    return read_only(bin_of)


def _write_sorted(  # noqa: PLR0917 (an array is a parameter)
    bin_of: IntArray,
    lengths: IntArray,
    start: tuple[int, int],
    rule: _Rule,
    entries: np.ndarray[Any, Any],
    columns: tuple[IntArray, IntArray, IntArray],
) -> tuple[IntArray, int, int]:
    """Write the pieces from a position on, sorted by bin.

    Returns:
        The ends of bins, the maximum tokens and the maximum pieces of a bin; no ends, or zeros, if
        bins are not numbered from 0 without gaps.
    """
    places = np.zeros((bin_of.size >> SHELF_BITS) + 1, np.int64)
    ends = np.empty(count_shelves(bin_of, places), np.int64)
    if ends.size == 0:
        return ends, 0, 0
    places = places[: (ends.size + SHELF - 1) >> SHELF_BITS]
    sort_into_shelves(bin_of, lengths, *start, rule.capacity, rule.max_tokens, places, entries)
    order = np.empty(np.diff(places, prepend=0).max(), entries.dtype)
    max_tokens, max_pieces = sort_shelves(
        places, entries, rule.capacity, rule.multiple_of, order, ends, *columns
    )
    return ends, max_tokens, max_pieces


def _check_bins(fit: Fit, max_tokens: int, max_pieces: int, rule: _Rule) -> None:
    """Raise ValueError unless the answer of a fit, which may be a user's, is valid."""
    if max_pieces == 0:
        raise ValueError(f"pack_bins: {_get_name(fit)} must number its bins from 0 without gaps")
    limit = rule.max_documents
    if max_tokens > rule.capacity or (limit is not None and max_pieces > limit):
        raise ValueError(
            f"pack_bins: {_get_name(fit)} put {max_tokens} tokens or {max_pieces} pieces into one "
            f"bin of capacity {rule.capacity} (max_documents {limit})"
        )


def _get_name(fit: Fit) -> str:
    return getattr(fit, "__name__", repr(fit))
