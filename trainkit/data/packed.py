"""Packed corpora: a corpus with its rows, split into training and held-out rows, or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.data.cache import load_or_pack_bins
from trainkit.data.concat import ConcatCorpus, concat_corpora, fingerprint
from trainkit.packing import report_packing
from trainkit.packing.bins import select_rows
from trainkit.packing.report import bins_hash
from trainkit.types import SOLO, Bins, Log, log_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike

    from trainkit.data.corpus import TokenCorpus
    from trainkit.packing.bins import Overlong
    from trainkit.types import Axis, Corpus, IntArray


@attrs.frozen(eq=False)
class PackedCorpus:
    """A corpus and the rows that it is packed into.

    Attributes:
        corpus: All documents.
        bins: The rows, equal on all ranks.
        num_rows: The number of rows of each source by name, where there are several; rows are in
            this order. Batches then have "source", the index of each token's source.
    """

    corpus: Corpus
    bins: Bins
    num_rows: Mapping[str, int] | None = attrs.field(default=None)

    @num_rows.validator
    def _check_num_rows(self, _: Any, num_rows: Mapping[str, int] | None) -> None:
        if num_rows is not None and sum(num_rows.values()) != len(self.bins):
            raise ValueError(
                f"PackedCorpus: num_rows must add up to the {len(self.bins)} rows of bins, got "
                f"{dict(num_rows)}"
            )

    def __len__(self) -> int:
        return len(self.bins)

    @property
    def report(self) -> dict[str, Any]:
        """How full the rows are: the result of `report_packing`."""
        return report_packing(self.bins)

    def source_of(self, rows: ArrayLike) -> IntArray | None:
        """Return the index of the source of each row, or None without `num_rows`."""
        if self.num_rows is None:
            return None
        # From the right, which skips sources without rows.
        return np.searchsorted(np.cumsum(list(self.num_rows.values())), rows, side="right")

    def count_by_source(self, rows: ArrayLike) -> dict[str, int]:
        """Return how many of some rows, and of their tokens, are of each source.

        Args:
            rows: Integers `[R]`: the rows of a global batch.

        Returns:
            "rows/NAME" and "tokens/NAME" for each source, without padding; {} without `num_rows`.

        Examples:
            >>> from trainkit.data.corpus import make_corpus
            >>> from trainkit.packing import pack_bins
            >>> corpus = make_corpus([[1, 2, 3], [4, 5]])
            >>> packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 3), {"web": 1, "code": 1})
            >>> packed.count_by_source([0])
            {'rows/web': 1, 'rows/code': 0, 'tokens/web': 3, 'tokens/code': 0}
        """
        sources = self.source_of(rows)
        if sources is None or self.num_rows is None:
            return {}
        chosen = select_rows(self.bins, rows)
        num_rows = np.bincount(sources, minlength=len(self.num_rows))
        # A row has at least one piece, as `reduceat` needs.
        row_tokens = np.add.reduceat(chosen.lengths, chosen.offsets[:-1])
        num_tokens = np.bincount(sources, weights=row_tokens, minlength=len(self.num_rows))
        return {
            f"{kind}/{name}": int(count)
            for kind, counts in (("rows", num_rows), ("tokens", num_tokens))
            for name, count in zip(self.num_rows, counts, strict=True)
        }


def split_held_out(
    corpus: TokenCorpus | ConcatCorpus,
    held_out: ArrayLike,
    capacity: int,
    *,
    cache_dir: Path | str | None = None,
    axis: Axis = SOLO,
    log: Log = log_info,
    overlong: Overlong = "split",
    multiple_of: int = 1,
    seed: int | None = None,
) -> tuple[PackedCorpus, PackedCorpus]:
    """Pack a corpus into training rows and held-out rows; no document is in both.

    Args:
        corpus: The corpus.
        held_out: A mask of the held-out documents, bool `[N]`: `corpora.held_out_documents`, or
            `corpora.hold_out`.
        capacity: Tokens per row.
        cache_dir: As in `load_or_pack_bins`, like all arguments that follow.
        axis: The ranks that call this together.
        log: Called with a sentence when a packing is written or damaged.
        overlong: The policy for documents longer than the capacity.
        multiple_of: Pieces are padded to a multiple of this many tokens.
        seed: The seed of the packing.

    Returns:
        The training rows and the held-out rows.

    Raises:
        ValueError: As `load_or_pack_bins`.
        DataError: As `load_or_pack_bins`.
        DiskError: As `load_or_pack_bins`.

    Effects:
        Those of `load_or_pack_bins`, twice: it writes two packings, and communicates on `axis`.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> rows, held = split_held_out(make_corpus([[1, 2], [3], [4, 5]]), [False, True, False], 4)
        >>> rows.bins[0], held.bins[0]
        ([(0, 0, 2), (2, 0, 2)], [(1, 0, 1)])
    """
    # Once for both packings: without a stored digest it takes a pass over all tokens.
    content = fingerprint(corpus)

    def pack(lengths: IntArray) -> PackedCorpus:
        bins = load_or_pack_bins(
            cache_dir,
            lengths,
            capacity,
            content=content,
            axis=axis,
            log=log,
            overlong=overlong,
            multiple_of=multiple_of,
            seed=seed,
        )
        return PackedCorpus(corpus, bins)

    # A document of length 0 gives no piece, so that both packings use the corpus' own numbers.
    training_lengths = np.where(held_out, 0, corpus.lengths)
    return pack(training_lengths), pack(corpus.lengths - training_lengths)


def make_data_facts(packed: PackedCorpus) -> dict[str, Any]:
    """Return the facts of a run about its data, which a resumed run compares.

    Args:
        packed: A corpus in memory, or one of token files, and its rows.

    Returns:
        "files", a hash of each by name, the "fingerprint" of the corpus and a hash of its "rows".
        The fingerprint is of the content of the files, which may be renamed: see
        `make_resume_rules`.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.packing import pack_bins
        >>> facts = make_data_facts(PackedCorpus(make_corpus([[1, 2]]), pack_bins([2], 4)))
        >>> list(facts), facts["files"]
        (['files', 'fingerprint', 'rows'], {})
    """
    corpus: Any = packed.corpus
    return {
        "files": corpus.sources,
        "fingerprint": fingerprint(corpus),
        "rows": bins_hash(packed.bins),
    }


def concat_packed(packed: Mapping[str, PackedCorpus]) -> PackedCorpus:
    """Concatenate separately packed corpora into one table of rows.

    With separate packing a row has documents of one corpus, so that a mixture of rows is a mixture
    of tokens, as far as rows are full. No token is copied. The table of a single corpus is not
    copied either. Several tables are copied to memory of this process: 8 bytes for each document,
    24 for each piece and 8 for each row, even where the bins are mapped from a shared file.

    Args:
        packed: The corpora by name, with bins of equal `capacity` and `multiple_of`.

    Returns:
        All rows, corpus after corpus; `num_rows` counts them.

    Raises:
        ValueError: There is no corpus, the bins differ in capacity or multiple_of, or bins name a
            document that their corpus does not have.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.packing import pack_bins
        >>> web, code = make_corpus([[1, 2, 3], [4]]), make_corpus([[5, 6]])
        >>> mix = concat_packed(
        ...     {
        ...         "web": PackedCorpus(web, pack_bins([3, 1], 3)),
        ...         "code": PackedCorpus(code, pack_bins([2], 3)),
        ...     }
        ... )
        >>> mix.num_rows, mix.source_of([0, 1, 2]), mix.bins[2]
        ({'web': 2, 'code': 1}, array([0, 0, 1]), [(2, 0, 2)])
    """
    if not packed:
        raise ValueError("concat_packed: there is no corpus to join")
    (first_name, first), *others = packed.items()
    # Rows of one batch have one length, and one alignment of pieces.
    for name, other in others:
        for field in ("capacity", "multiple_of"):
            expected = getattr(first.bins, field)
            actual = getattr(other.bins, field)
            if actual != expected:
                raise ValueError(
                    f"concat_packed: bins must have one {field}: {first_name!r} has {expected}, "
                    f"{name!r} has {actual}; pack them with the same one"
                )
    for name, part in packed.items():
        # Concatenated, such a document would silently be one of the next corpus.
        last = part.bins.documents.max(initial=-1)
        num_documents = len(part.corpus.offsets) - 1
        if last >= num_documents:
            raise ValueError(
                f"concat_packed: the bins of {name!r} hold document {last}, its corpus has "
                f"{num_documents}; pack the lengths of this corpus"
            )
    num_rows = {name: len(part) for name, part in packed.items()}
    corpora: list[Any] = [part.corpus for part in packed.values()]
    if others:
        bins = _concat_bins(
            [part.bins for part in packed.values()], [len(corpus.offsets) - 1 for corpus in corpora]
        )
        return PackedCorpus(concat_corpora(corpora), bins, num_rows)
    # A single table stays as it is, possibly mapped from a file.
    corpus = corpora[0]
    if not isinstance(corpus, ConcatCorpus):
        # Not concat_corpora, which would copy the offsets.
        first_documents = np.array([0, len(corpus.offsets) - 1])
        corpus = ConcatCorpus((corpus,), first_documents, corpus.offsets)
    return PackedCorpus(corpus, first.bins, num_rows)


def _concat_bins(tables: Sequence[Bins], num_documents: Sequence[int]) -> Bins:
    """Concatenate the rows of several bins, given the number of documents of each corpus.

    Each array is written once, in place: tables of 10^9 documents leave no room for a second copy.
    """
    # Of each table the first piece, row and document in the result.
    pieces = np.cumsum([0, *(len(bins.documents) for bins in tables)]).tolist()
    rows = np.cumsum([0, *(len(bins) for bins in tables)]).tolist()
    first_documents = np.cumsum([0, *num_documents]).tolist()
    offsets = np.zeros(rows[-1] + 1, np.int64)
    documents = np.empty(pieces[-1], np.int64)
    for i, bins in enumerate(tables):
        # Each table's first offset is the last one of the table before, so it is left out.
        row_ends = offsets[rows[i] + 1 : rows[i + 1] + 1]
        np.add(bins.offsets[1:], pieces[i], out=row_ends)
        np.add(bins.documents, first_documents[i], out=documents[pieces[i] : pieces[i + 1]])
    return Bins(
        offsets=offsets,
        documents=documents,
        # Starts and lengths count within a document, so they need no shift.
        starts=np.concatenate([bins.starts for bins in tables]),
        lengths=np.concatenate([bins.lengths for bins in tables]),
        capacity=tables[0].capacity,
        multiple_of=tables[0].multiple_of,
    )
