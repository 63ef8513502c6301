"""What a packing costs: padding, what the policies did to documents, and the work of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainkit.noise.hashing import MASK64, hash_box, hash_counters
from trainkit.packing.pieces import align
from trainkit.sampling.integers import integers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.types import Bins, IntArray


def report_packing(bins: Bins, lengths: ArrayLike | None = None) -> dict[str, int | float]:
    """Return what a packing costs: rows, pieces, tokens, padding of both kinds, and the efficiency.

    Args:
        bins: What `pack_bins` returned.
        lengths: What it was given, integers `[N]`, to count what became of the documents too.

    Returns:
        `rows` and `pieces`; `tokens`, without padding; `alignment_padding` and `row_padding`, in
        tokens; `efficiency`, tokens over places, which is 1 for no rows. With lengths also
        `documents`; how many of these are `empty_documents` (no tokens), `split_documents` (several
        pieces), `truncated_documents` (only their beginning is kept) and `dropped_documents`; and
        `dropped_tokens`, those of the last two that are in no row.

    Raises:
        ValueError: The bins were made from other lengths, or these are no integers.

    Examples:
        >>> from trainkit.packing import pack_bins
        >>> report = report_packing(pack_bins([5, 3, 7], 8, multiple_of=2))
        >>> report["rows"], report["alignment_padding"], report["row_padding"]
        (3, 3, 6)
        >>> lengths = [5, 0, 11]
        >>> report = report_packing(pack_bins(lengths, 8, overlong="truncate"), lengths)
        >>> report["empty_documents"], report["truncated_documents"], report["dropped_tokens"]
        (1, 1, 3)
    """
    aligned = int(align(bins.lengths, bins.multiple_of).sum())
    tokens, places = int(bins.lengths.sum()), len(bins) * bins.capacity
    report: dict[str, int | float] = {
        "rows": len(bins),
        "pieces": len(bins.lengths),
        "tokens": tokens,
        "alignment_padding": aligned - tokens,
        "row_padding": places - aligned,
        "efficiency": tokens / places if places else 1.0,
    }
    if lengths is None:
        return report
    return report | _fates(bins, integers("packing_report", "lengths", lengths))


def format_overlong_warning(
    total: int, *, capacity: int, truncated: int = 0, dropped: int = 0, what: str = "documents"
) -> str:
    """Return a warning of how many documents are not trained on whole; "" where all of them are.

    Args:
        total: How many documents there are.
        capacity: The most tokens of one.
        truncated: How many lose their end.
        dropped: How many are left out.
        what: What a document is called.

    Examples:
        >>> format_overlong_warning(
        ...     300, capacity=256, truncated=40, dropped=60, what="conversations"
        ... )
        'warning: 100 of 300 conversations are longer than 256 tokens: 33 % (40 cut, 60 dropped)'
        >>> format_overlong_warning(300, capacity=256)
        ''
    """
    found = truncated + dropped
    if not found:
        return ""
    share = 100 * found / total
    figure = f"{share:.0f}" if share >= 1 else f"{share:.1g}"
    return (
        f"warning: {found:,} of {total:,} {what} are longer than {capacity:,} tokens: {figure} % "
        f"({truncated:,} cut, {dropped:,} dropped)"
    )


def row_costs(bins: Bins) -> IntArray:
    """Return what attention costs in each row: the sum over its pieces of length squared.

    Aligned lengths, since kernels work on padding too. Rows that cost the same take the same time,
    so `make_microbatches` deals a step's rows to the ranks by it.

    Returns:
        int64 `[B]`, in tokens squared.

    Examples:
        >>> from trainkit.packing import pack_bins
        >>> row_costs(pack_bins([4, 4, 3, 3, 2, 8], 8, group_size=0))
        array([64, 32, 22])
    """
    # Differences of running sums: a row without pieces costs 0, and overflow of the sum cancels.
    sums = np.concatenate([[0], np.cumsum(align(bins.lengths, bins.multiple_of) ** 2)])
    return np.diff(sums[bins.offsets])


def bins_hash(bins: Bins) -> str:
    """Return a hash of what is in which row: 16 hex digits, to see that a run goes on with it.

    Examples:
        >>> from trainkit.packing import pack_bins
        >>> bins_hash(pack_bins([4, 4], 8)) == bins_hash(pack_bins([4, 4], 4))
        False
    """
    columns = ("offsets", "documents", "starts", "lengths")
    arrays = {name: np.asarray(getattr(bins, name)) for name in columns}
    parts = [hash_box(name, x, shape=x.shape, offset=(0,)) for name, x in arrays.items()]
    parts.append(hash_counters({"capacity": bins.capacity, "multiple_of": bins.multiple_of}))
    return f"{sum(parts) & MASK64:016x}"


def _fates(bins: Bins, lengths: IntArray) -> dict[str, int]:
    """Count what became of the documents."""
    num_pieces = np.bincount(bins.documents, minlength=lengths.size)
    # Through float64, which is exact up to 2^53 tokens of one document.
    kept = np.bincount(bins.documents, bins.lengths, lengths.size).astype(np.int64)
    if kept.size > lengths.size or (kept > lengths).any():
        what = f"they hold document {kept.size - 1}, and there are {lengths.size}"
        if kept.size == lengths.size:
            wrong = int(np.argmax(kept > lengths))
            what = f"they hold {kept[wrong]} tokens of document {wrong}, which has {lengths[wrong]}"
        raise ValueError(f"packing_report: the bins were made from other lengths: {what}")
    return {
        "documents": lengths.size,
        "empty_documents": int((lengths == 0).sum()),
        "split_documents": int((num_pieces > 1).sum()),
        "truncated_documents": int(((kept > 0) & (kept < lengths)).sum()),
        "dropped_documents": int(((kept == 0) & (lengths > 0)).sum()),
        "dropped_tokens": int(lengths.sum() - kept.sum()),
    }
