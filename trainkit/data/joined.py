"""Corpora whose documents follow one another, as one."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import numpy as np

from trainkit.data.corpus import TokenCorpus
from trainkit.noise.hashing import MASK64, hash_box
from trainkit.types import Corpus, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainkit.types import Column, IntArray


@attrs.frozen(eq=False)
class ConcatCorpus:
    """Corpora one after the other: a `Corpus` without flat `tokens`. `concat_corpora` makes one.

    Attributes:
        parts: The corpora; none is a joined one itself.
        first_documents: int64 `[K+1]`; part k has the documents from `first_documents[k]` up to
            `first_documents[k + 1]`.
        offsets: int64 `[N+1]`, in tokens, running on from part to part.
    """

    parts: tuple[TokenCorpus, ...]
    first_documents: IntArray
    offsets: IntArray

    @property
    def tokens(self) -> NoReturn:
        """Nothing: tokens stay in the parts, so `hasattr` says no."""
        raise AttributeError("a ConcatCorpus has no flat `tokens`: read its `parts`")

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, int64 `[N]`, computed anew at each call."""
        return np.diff(self.offsets)

    @property
    def vocab_size(self) -> int | None:
        """The largest of the parts'; None where one does not say."""
        sizes = [part.vocab_size for part in self.parts if part.vocab_size is not None]
        return max(sizes) if len(sizes) == len(self.parts) else None

    @property
    def names(self) -> Sequence[str] | None:
        """What each document is called; None where those of one part have no names."""
        names = [part.names for part in self.parts if part.names is not None]
        return list(chain.from_iterable(names)) if len(names) == len(self.parts) else None

    @property
    def digest(self) -> str | None:
        """A hash of the content; None where one part has none written down."""
        digests = [part.digest for part in self.parts if part.digest is not None]
        return joint_digest(digests) if len(digests) == len(self.parts) else None

    @property
    def sources(self) -> Mapping[str, str]:
        """A hash of each file; a name that two parts use has the part's number before it."""
        found: dict[str, str] = {}
        for number, part in enumerate(self.parts):
            for name, value in part.sources.items():
                found[name if name not in found else f"{number}:{name}"] = value
        return found

    @property
    def columns(self) -> Mapping[str, Column]:
        """What there is of each token besides, the same in all parts."""
        return self.parts[0].columns

    def read(self, document: int, start: int, length: int) -> np.ndarray[Any, Any]:
        """Return `length` tokens of a document from token `start` on, as a view."""
        if not 0 <= document < len(self.offsets) - 1:
            raise ValueError(f"read: there is no document {document} of {len(self.offsets) - 1}")
        part = int(np.searchsorted(self.first_documents, document, side="right")) - 1
        first = int(self.first_documents[part])
        return self.parts[part].read(document - first, start, length)


def concat_corpora(parts: Iterable[TokenCorpus | ConcatCorpus]) -> ConcatCorpus:
    """Return one corpus of the documents of several, in order; joined ones are taken apart.

    Args:
        parts: At least one corpus.

    Returns:
        The `ConcatCorpus`; no token is copied.

    Raises:
        ValueError: There is no corpus.
        DataError: They do not have the same columns. The message names two that differ.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> corpus = concat_corpora([make_corpus([[1, 2], [3]]), make_corpus([[4, 5, 6]])])
        >>> corpus.lengths, corpus.first_documents, corpus.read(2, 1, 2)
        (array([2, 1, 3]), array([0, 2, 3]), array([5, 6], dtype=uint32))
    """
    flat = tuple(
        chain.from_iterable(
            part.parts if isinstance(part, ConcatCorpus) else (part,) for part in parts
        )
    )
    if not flat:
        raise ValueError("concat_corpora: there is no corpus to join")
    _check_columns(flat)
    counts = [len(part.offsets) - 1 for part in flat]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    offsets, total = np.zeros(first[-1] + 1, np.int64), 0
    for part, begin in zip(flat, first.tolist(), strict=False):
        offsets[begin : begin + len(part.offsets)] = part.offsets - part.offsets[0] + total
        total = int(offsets[begin + len(part.offsets) - 1])
    return ConcatCorpus(flat, first, offsets)


def _check_columns(parts: Sequence[TokenCorpus]) -> None:
    for number, part in enumerate(parts):
        if part.columns != parts[0].columns:
            (have, one), (want, first) = (
                (", ".join(f"{name}: {x}" for name, x in p.columns.items()) or "none", [*p.sources])
                for p in (part, parts[0])
            )
            what = f"corpus {number} {one} has the columns {have}; corpus 0 {first} has {want}"
            mend = "a row of one cannot stand beside a row of the other: write them alike"
            raise DataError(f"concat_corpora: {what}: {mend}", where=number, got=have, want=want)


def joint_digest(digests: Iterable[str]) -> str:
    """Return the hash of several hashes, in order: of 16 digits each, as `fingerprint` gives."""
    return hashlib.sha256("\n".join(digest[:16] for digest in digests).encode()).hexdigest()


def fingerprint(corpus: Corpus) -> str:
    """Return a hash of all that a corpus holds: 16 hex digits, to see that it is the same.

    A token file's is read from its header, since a large one takes long to hash; `verify_corpus`
    says whether the content still has that hash.

    Examples:
        >>> fingerprint(TokenCorpus(np.arange(4), np.array([0, 4]))) == fingerprint(
        ...     TokenCorpus(np.arange(4), np.array([0, 2, 4]))
        ... )
        False
    """
    if hasattr(corpus, "parts"):
        return joint_digest(map(fingerprint, corpus.parts))[:16]
    if isinstance(corpus, TokenCorpus) and corpus.digest is not None:
        return corpus.digest[:16]
    arrays = {"tokens": np.asarray(corpus.tokens), "offsets": np.asarray(corpus.offsets)}
    trained = getattr(corpus, "trained", None)
    if trained is not None:
        arrays["trained"] = np.asarray(trained)
    for name, column in getattr(corpus, "columns", {}).items():
        own: Any = corpus
        arrays[f"column {name} {column.dtype} {column.of}"] = np.asarray(own.values[name])
    parts = (hash_box(name, x, shape=x.shape, offset=[0] * x.ndim) for name, x in arrays.items())
    return f"{sum(parts) & MASK64:016x}"
