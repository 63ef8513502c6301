"""Report a packing: padding, split and dropped documents, the cost of each row, and a hash."""

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
    """Return statistics of a packing: rows, pieces, tokens, padding and efficiency.

    Args:
        bins: The bins, from `pack_bins`.
        lengths: The lengths that were packed, integers `[N]`, for statistics of documents too.

    Returns:
        `rows` and `pieces`; `tokens`, without padding; `alignment_padding` and `row_padding`, in
        tokens; `efficiency`, tokens divided by the size of all rows, 1 for no rows. With lengths
        also the numbers of `documents`, `empty_documents` (no tokens), `split_documents` (several
        pieces), `truncated_documents` (only their start is in a row) and `dropped_documents`; and
        `dropped_tokens`, the tokens of the last two that are in no row.

    Raises:
        ValueError: The bins were made from other lengths, or these are not integers.

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
    # Alignment padding is inside of pieces, row padding after the last of a row.
    aligned = int(align(bins.lengths, bins.multiple_of).sum())
    tokens = int(bins.lengths.sum())
    size = len(bins) * bins.capacity
    report: dict[str, int | float] = {
        "rows": len(bins),
        "pieces": len(bins.lengths),
        "tokens": tokens,
        "alignment_padding": aligned - tokens,
        "row_padding": size - aligned,
        "efficiency": tokens / size if size else 1.0,
    }
    if lengths is None:
        return report
    lengths = integers("report_packing", "lengths", lengths)
    num_pieces = np.bincount(bins.documents, minlength=lengths.size)
    # bincount sums in float64, which is exact up to 2^53 tokens of one document.
    packed = np.bincount(bins.documents, bins.lengths, lengths.size).astype(np.int64)
    # `minlength` is only a minimum: the result is longer where the bins hold a later document.
    if packed.size > lengths.size:
        raise ValueError(
            "report_packing: the bins were made from other lengths: they hold document "
            f"{packed.size - 1}, and there are {lengths.size}"
        )
    if (packed > lengths).any():
        document = int(np.argmax(packed > lengths))
        raise ValueError(
            f"report_packing: the bins were made from other lengths: they hold {packed[document]} "
            f"tokens of document {document}, which has {lengths[document]}"
        )
    return report | {
        "documents": lengths.size,
        "empty_documents": int((lengths == 0).sum()),
        "split_documents": int((num_pieces > 1).sum()),
        "truncated_documents": int(((packed > 0) & (packed < lengths)).sum()),
        "dropped_documents": int(((packed == 0) & (lengths > 0)).sum()),
        "dropped_tokens": int(lengths.sum() - packed.sum()),
    }


def format_overlong_warning(
    total: int, *, capacity: int, truncated: int = 0, dropped: int = 0, what: str = "documents"
) -> str:
    """Return a warning with the number of truncated and dropped documents; "" without any.

    Args:
        total: The number of documents.
        capacity: The maximum length of a document.
        truncated: The number of truncated documents.
        dropped: The number of dropped documents.
        what: The word for documents.

    Examples:
        >>> format_overlong_warning(
        ...     300, capacity=256, truncated=40, dropped=60, what="conversations"
        ... )
        'warning: 100 of 300 conversations are longer than 256 tokens: 33 % (40 cut, 60 dropped)'
        >>> format_overlong_warning(300, capacity=256)
        ''
    """
    overlong = truncated + dropped
    if not overlong:
        return ""
    percent = 100 * overlong / total
    # Below 1 % one significant digit: a few of millions are not 0 %.
    figure = f"{percent:.0f}" if percent >= 1 else f"{percent:.1g}"
    return (
        f"warning: {overlong:,} of {total:,} {what} are longer than {capacity:,} tokens: "
        f"{figure} % ({truncated:,} cut, {dropped:,} dropped)"
    )


def row_costs(bins: Bins) -> IntArray:
    """Return the cost of attention in each row: the sum over its pieces of length squared.

    Lengths are aligned, because kernels work on padding too. Rows of equal cost take equal time, so
    `make_microbatches` assigns rows to ranks by it.

    Returns:
        int64 `[B]`, in tokens squared.

    Examples:
        >>> from trainkit.packing import pack_bins
        >>> row_costs(pack_bins([4, 4, 3, 3, 2, 8], 8, group_size=0))
        array([64, 32, 22])
    """
    # With differences of running sums a row without pieces costs 0, and overflow cancels.
    lengths = align(bins.lengths, bins.multiple_of)
    sums = np.concatenate([[0], np.cumsum(lengths**2)])
    return np.diff(sums[bins.offsets])


def bins_hash(bins: Bins) -> str:
    """Return a hash of all rows, 16 hex digits, by which a resumed run recognizes its packing.

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
