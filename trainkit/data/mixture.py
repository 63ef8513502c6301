"""Corpora that are packed each on its own, as one table of rows to draw a mixture from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.corpora.joined import JoinedCorpus, join_corpora
from trainkit.types import Bins

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainkit.corpora.tokens import TokenCorpus
    from trainkit.types import IntArray


@attrs.frozen(eq=False)
class Mixture:
    """Several packed corpora as one; the rows of each follow those of the one before.

    Attributes:
        corpus: All documents.
        bins: All rows; every row holds documents of one corpus.
        names: What the corpora are called.
        num_rows: The rows of each, by name, for `sampling.rows_of_mixture`.
        source_of_row: Which of `names` each row comes from, int64 `[B]`, for `step_batch`.
    """

    corpus: JoinedCorpus
    bins: Bins
    names: tuple[str, ...]
    num_rows: Mapping[str, int]
    source_of_row: IntArray


def join_packed(packed: Mapping[str, tuple[TokenCorpus | JoinedCorpus, Bins]]) -> Mixture:
    """Join corpora that are packed each on its own into one table of rows.

    Packing each alone keeps a row to one corpus, so that a mixture of rows is one of tokens, as far
    as rows are full. No token is copied. Of one corpus no table is copied either; those of several
    are written anew, in memory of this process: 8 bytes for each document, 24 for each piece and 8
    for each row, also where the bins are mapped from a plan that processes share.

    Args:
        packed: For each name a corpus and its bins, all of one `capacity` and `multiple_of`.

    Returns:
        The `Mixture`.

    Raises:
        ValueError: There is no corpus, the bins differ in their measures, or bins name a document
            that their corpus does not have.

    Examples:
        >>> from trainkit.corpora.tokens import memory_corpus
        >>> from trainkit.packing import pack_bins
        >>> web, code = memory_corpus([[1, 2, 3], [4]]), memory_corpus([[5, 6]])
        >>> mix = join_packed(
        ...     {"web": (web, pack_bins([3, 1], 3)), "code": (code, pack_bins([2], 3))}
        ... )
        >>> mix.num_rows, mix.source_of_row, mix.bins[2]
        ({'web': 2, 'code': 1}, array([0, 0, 1]), [(2, 0, 2)])
    """
    if not packed:
        raise ValueError("join_packed: there is no corpus to join")
    _check_measures({name: bins for name, (_, bins) in packed.items()})
    for name, (part, bins) in packed.items():
        documents = len(part.offsets) - 1
        if bins.documents.size and bins.documents.max() >= documents:
            raise ValueError(
                f"join_packed: the bins of {name!r} hold document {bins.documents.max()}, its "
                f"corpus has {documents}; pack this corpus' own lengths"
            )
    corpora = [corpus for corpus, _ in packed.values()]
    tables = [bins for _, bins in packed.values()]
    alone = len(tables) == 1
    counts = [len(bins) for bins in tables]
    return Mixture(
        _as_joined(corpora[0]) if alone else join_corpora(corpora),
        tables[0] if alone else _join_bins(tables, [len(part.offsets) - 1 for part in corpora]),
        tuple(packed),
        dict(zip(packed, counts, strict=True)),
        np.repeat(np.arange(len(tables)), counts),
    )


def _as_joined(corpus: TokenCorpus | JoinedCorpus) -> JoinedCorpus:
    """Return one corpus as a joined one, with its own offsets instead of a copy."""
    if isinstance(corpus, JoinedCorpus):
        return corpus
    return JoinedCorpus((corpus,), np.array([0, len(corpus.offsets) - 1]), corpus.offsets)


def _join_bins(tables: Sequence[Bins], documents: Sequence[int]) -> Bins:
    """Return the rows of several bins, whose corpora have so many documents, one after the other.

    Each array is written once, in place: tables of 10^9 documents leave no room for a second copy.
    """
    pieces = np.cumsum([0, *(len(bins.documents) for bins in tables)]).tolist()
    rows = np.cumsum([0, *(len(bins) for bins in tables)]).tolist()
    first_documents = np.cumsum([0, *documents]).tolist()
    offsets, numbers = np.zeros(rows[-1] + 1, np.int64), np.empty(pieces[-1], np.int64)
    for i, bins in enumerate(tables):
        np.add(bins.offsets[1:], pieces[i], out=offsets[rows[i] + 1 : rows[i + 1] + 1])
        np.add(bins.documents, first_documents[i], out=numbers[pieces[i] : pieces[i + 1]])
    return Bins(
        offsets,
        numbers,
        np.concatenate([bins.starts for bins in tables]),
        np.concatenate([bins.lengths for bins in tables]),
        capacity=tables[0].capacity,
        multiple_of=tables[0].multiple_of,
    )


def _check_measures(bins: Mapping[str, Bins]) -> None:
    (first, one), *others = bins.items()
    for name, other in others:
        for measure in ("capacity", "multiple_of"):
            have, want = getattr(other, measure), getattr(one, measure)
            if have != want:
                raise ValueError(
                    f"join_packed: bins must have one {measure}: {first!r} has {want}, {name!r} "
                    f"has {have}; pack them alike"
                )
