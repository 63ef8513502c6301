"""`pack_bins`: from the lengths of documents to the table of rows, and a report on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainkit.jit import jit
from trainkit.packing.fits import best_fit
from trainkit.types import Bins

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.types import Fit, IntArray

Overlong = Literal["split", "truncate", "drop", "error"]


def pack_bins(
    lengths: ArrayLike,
    capacity: int,
    *,
    fit: Fit = best_fit,
    group_size: int = 100_000,
    overlong: Overlong = "split",
    multiple_of: int = 1,
    max_documents: int | None = None,
) -> Bins:
    """Pack documents into rows of `capacity` tokens.

    Documents are cut into pieces, pieces are aligned, and each group of consecutive pieces is
    packed by `fit`. Inside a row pieces keep corpus order. The result is a function of the
    arguments alone.

    Args:
        lengths: Tokens of each document, integers `[N]`. A document without tokens gives no piece.
        capacity: Tokens per row.
        fit: Which bin each piece goes to: `best_fit`, `sequential`, or any other `Fit`.
        group_size: How many consecutive pieces are packed together, so how far a document may move;
            0 means all.
        overlong: What becomes of a document longer than the capacity: "split" into pieces of
            `capacity` and a rest, "truncate" to `capacity`, "drop", or "error".
        multiple_of: In its row a piece takes the next multiple of this many tokens. A split of each
            document over N ring ranks needs 2N.
        max_documents: The most pieces a row may hold; None sets no limit.

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
    checked = _checked_lengths(lengths)
    _check_whole("capacity", capacity, least=1)
    _check_whole("group_size", group_size, least=0)
    _check_whole("multiple_of", multiple_of, least=1)
    if max_documents is not None:
        _check_whole("max_documents", max_documents, least=1)
    _check_divides(capacity, multiple_of)
    documents, starts, pieces = _cut(_shortened(checked, capacity, overlong), capacity)
    aligned = pieces if multiple_of == 1 else -(-pieces // multiple_of) * multiple_of
    bin_of = np.empty_like(pieces)
    num_bins, size = 0, group_size or max(len(pieces), 1)
    for first in range(0, len(pieces), size):
        group = slice(first, first + size)
        found = fit(aligned[group], capacity, max_documents=max_documents)
        bin_of[group] = _checked_fit(fit, found, aligned[group], capacity, max_documents) + num_bins
        num_bins = int(bin_of[group].max()) + 1
    offsets, *columns = _table(bin_of, num_bins, documents, starts, pieces)
    return Bins(offsets, *columns, capacity=capacity, multiple_of=multiple_of)


def _checked_fit(
    fit: Fit, found: Any, lengths: IntArray, capacity: int, max_documents: int | None
) -> IntArray:
    """Refuse the answer of a `Fit`, which may be anybody's, unless every piece has a place."""
    name, bins = getattr(fit, "__name__", repr(fit)), np.asarray(found)
    if bins.shape != lengths.shape or bins.dtype.kind not in "iu":
        raise ValueError(
            f"pack_bins: {name} must return one integer per piece, for {len(lengths)} pieces it "
            f"gave {bins.dtype} {bins.shape}"
        )
    counts = np.bincount(bins) if bins.size and bins.min() >= 0 else np.zeros(1, np.int64)
    if bins.size and not counts.all():
        raise ValueError(f"pack_bins: {name} must number its bins from 0 without gaps")
    fullest = np.bincount(bins, weights=lengths).max(initial=0)
    most = counts.max(initial=0)
    if fullest > capacity or (max_documents is not None and most > max_documents):
        raise ValueError(
            f"pack_bins: {name} put {int(fullest)} tokens or {most} pieces into one bin of "
            f"capacity {capacity} (max_documents {max_documents})"
        )
    return bins.astype(np.int64)


def packing_report(bins: Bins) -> dict[str, int | float]:
    """Return what a packing costs: rows, pieces, tokens, padding of both kinds, and the efficiency.

    Returns:
        `rows` and `pieces`; `tokens`, without padding; `alignment_padding` and `row_padding`, in
        tokens; `efficiency`, tokens over places, which is 1 for no rows.

    Examples:
        >>> report = packing_report(pack_bins([5, 3, 7], 8, multiple_of=2))
        >>> report["rows"], report["alignment_padding"], report["row_padding"]
        (3, 3, 6)
    """
    aligned = int((-(-bins.lengths // bins.multiple_of) * bins.multiple_of).sum())
    tokens, places = int(bins.lengths.sum()), len(bins) * bins.capacity
    return {
        "rows": len(bins),
        "pieces": len(bins.lengths),
        "tokens": tokens,
        "alignment_padding": aligned - tokens,
        "row_padding": places - aligned,
        "efficiency": tokens / places if places else 1.0,
    }


def _checked_lengths(lengths: ArrayLike) -> IntArray:
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise ValueError(
            "pack_bins: lengths must be one list of integers, not a ragged one"
        ) from None
    if array.ndim != 1:
        raise ValueError(f"pack_bins: lengths must have one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"pack_bins: lengths must be integers, got {array.dtype}")
    array = array.astype(np.int64, copy=False)
    if array.size and array.min() < 0:
        worst = int(array.argmin())
        raise ValueError(f"pack_bins: document {worst} has length {array[worst]}, below 0")
    return array


def _check_whole(name: str, value: int, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"pack_bins: {name} must be an integer of at least {least}, got {value!r}")


def _check_divides(capacity: int, multiple_of: int) -> None:
    below = capacity // multiple_of * multiple_of
    if below != capacity:
        nearest = f"{below} or {below + multiple_of}" if below else f"{multiple_of}"
        raise ValueError(
            f"pack_bins: capacity {capacity} is no multiple of multiple_of={multiple_of}; "
            f"take {nearest}"
        )


def _shortened(lengths: IntArray, capacity: int, overlong: Overlong) -> IntArray:
    """Apply the policy for documents longer than the capacity; "split" leaves them as they are."""
    match overlong:
        case "split":
            return lengths
        case "truncate":
            return np.minimum(lengths, capacity)
        case "drop":
            return np.where(lengths > capacity, 0, lengths)
        case "error":
            if lengths.size and lengths.max() > capacity:
                first = int((lengths > capacity).argmax())
                raise ValueError(
                    f"pack_bins: document {first} has {lengths[first]} tokens; the capacity is "
                    f'{capacity}: raise it, or ask for overlong="split", "truncate" or "drop"'
                )
            return lengths
    raise ValueError(
        f'pack_bins: overlong must be "split", "truncate", "drop" or "error", got {overlong!r}'
    )


@jit
def _cut(lengths: Any, capacity: int) -> Any:
    """Cut documents into pieces of `capacity` and a rest: documents, starts, lengths `[P]`."""
    count = 0
    for length in lengths:
        count += (length + capacity - 1) // capacity
    documents, starts, pieces = np.empty((3, count), np.int64)
    piece = 0
    for document in range(lengths.size):
        for start in range(0, lengths[document], capacity):
            documents[piece], starts[piece] = document, start
            pieces[piece] = min(lengths[document] - start, capacity)
            piece += 1
    return documents, starts, pieces


@jit
def _table(bin_of: Any, num_bins: int, documents: Any, starts: Any, lengths: Any) -> Any:
    """Sort pieces by bin, stably: (offsets `[B+1]`, documents, starts, lengths)."""
    offsets = np.zeros(num_bins + 1, np.int64)
    for bin_ in bin_of:
        offsets[bin_ + 1] += 1
    offsets = np.cumsum(offsets)
    places = offsets[:-1].copy()
    new_documents, new_starts, new_lengths = np.empty((3, bin_of.size), np.int64)
    for piece in range(bin_of.size):
        place = places[bin_of[piece]]
        places[bin_of[piece]] += 1
        new_documents[place] = documents[piece]
        new_starts[place] = starts[piece]
        new_lengths[place] = lengths[piece]
    return offsets, new_documents, new_starts, new_lengths
