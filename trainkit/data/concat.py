"""Concatenated corpora: the documents of several corpora as one."""

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
    """Concatenated corpora: a `Corpus` without flat `tokens`. `concat_corpora` makes one.

    Attributes:
        parts: The corpora, flattened: none of them is concatenated itself.
        first_documents: int64 `[K+1]`; part k has documents `first_documents[k]` up to
            `first_documents[k + 1]`.
        offsets: int64 `[N+1]`, in tokens, cumulative over all parts.
    """

    parts: tuple[TokenCorpus, ...]
    first_documents: IntArray
    offsets: IntArray

    @property
    def tokens(self) -> NoReturn:
        """Not available: tokens stay in the parts, and `hasattr` is False."""
        # An AttributeError, as collation asks `hasattr` whether a corpus is flat.
        raise AttributeError("a ConcatCorpus has no flat `tokens`: read its `parts`")

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of each document, int64 `[N]`, computed on each access."""
        return np.diff(self.offsets)

    @property
    def vocab_size(self) -> int | None:
        """The largest vocabulary of the parts; None if that of any part is unknown."""
        sizes = [part.vocab_size for part in self.parts if part.vocab_size is not None]
        return max(sizes) if len(sizes) == len(self.parts) else None

    @property
    def names(self) -> Sequence[str] | None:
        """The names of the documents; None if any part has no names."""
        names = [part.names for part in self.parts if part.names is not None]
        return list(chain.from_iterable(names)) if len(names) == len(self.parts) else None

    @property
    def digest(self) -> str | None:
        """A hash of the content; None if any part has no stored hash."""
        digests = [part.digest for part in self.parts if part.digest is not None]
        return combine_digests(digests) if len(digests) == len(self.parts) else None

    @property
    def sources(self) -> Mapping[str, str]:
        """File name -> hash; a name that occurs twice is prefixed with the index of its part."""
        hashes: dict[str, str] = {}
        for index, part in enumerate(self.parts):
            for name, value in part.sources.items():
                # Files in different folders may have one name.
                hashes[f"{index}:{name}" if name in hashes else name] = value
        return hashes

    @property
    def columns(self) -> Mapping[str, Column]:
        """The further columns of a token, by name, the same in all parts."""
        # `concat_corpora` has compared them with those of the other parts.
        return self.parts[0].columns

    def read(self, document: int, start: int, length: int) -> np.ndarray[Any, Any]:
        """Return a view of `length` tokens of a document, from token `start` on."""
        if not 0 <= document < len(self.offsets) - 1:
            raise ValueError(f"read: there is no document {document} of {len(self.offsets) - 1}")
        # From the right: empty parts have the same first document as the part after them.
        part = int(np.searchsorted(self.first_documents, document, side="right")) - 1
        first = int(self.first_documents[part])
        return self.parts[part].read(document - first, start, length)


def concat_corpora(parts: Iterable[TokenCorpus | ConcatCorpus]) -> ConcatCorpus:
    """Concatenate corpora: the documents of each one in order, without a copy of the tokens.

    Args:
        parts: At least one corpus; concatenated ones are flattened.

    Raises:
        ValueError: There is no corpus.
        DataError: The corpora have different columns. The message names two that differ.

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
    for index, part in enumerate(flat):
        if part.columns != flat[0].columns:
            raise DataError(
                f"concat_corpora: corpus {index} {[*part.sources]} has the columns "
                f"{_format_columns(part)}; corpus 0 {[*flat[0].sources]} has "
                f"{_format_columns(flat[0])}: rows of a batch need equal columns, so write both "
                "corpora with the same ones",
                where=index,
                got=_format_columns(part),
                want=_format_columns(flat[0]),
            )
    counts = [len(part.offsets) - 1 for part in flat]
    first_documents = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    offsets = np.zeros(first_documents[-1] + 1, np.int64)
    total = 0
    # `total` counts the tokens of all parts so far.
    for part, first in zip(flat, first_documents.tolist(), strict=False):
        # A view of a longer corpus may begin anywhere in its tokens, so the first offset goes.
        offsets[first : first + len(part.offsets)] = part.offsets - part.offsets[0] + total
        total = int(offsets[first + len(part.offsets) - 1])
    return ConcatCorpus(flat, first_documents, offsets)


def _format_columns(corpus: TokenCorpus) -> str:
    return ", ".join(f"{name}: {column}" for name, column in corpus.columns.items()) or "none"


def combine_digests(digests: Iterable[str]) -> str:
    """Return the SHA-256 of several hashes in order, each cut to the 16 digits of `fingerprint`."""
    return hashlib.sha256("\n".join(digest[:16] for digest in digests).encode()).hexdigest()


def fingerprint(corpus: Corpus) -> str:
    """Hash the content of a corpus to 16 hex digits, so that a resumed run can compare it.

    The hash of a token file is read from its header, since hashing a large one takes long;
    `verify_corpus` compares the content with that hash.

    Examples:
        >>> fingerprint(TokenCorpus(np.arange(4), np.array([0, 4]))) == fingerprint(
        ...     TokenCorpus(np.arange(4), np.array([0, 2, 4]))
        ... )
        False
    """
    # Of the hashes of the parts, so that token files need not be read.
    if hasattr(corpus, "parts"):
        return combine_digests(map(fingerprint, corpus.parts))[:16]
    if isinstance(corpus, TokenCorpus) and corpus.digest is not None:
        return corpus.digest[:16]
    arrays = {"tokens": np.asarray(corpus.tokens), "offsets": np.asarray(corpus.offsets)}
    loss_mask = getattr(corpus, "loss_mask", None)
    if loss_mask is not None:
        arrays["loss_mask"] = np.asarray(loss_mask)
    values: Mapping[str, Any] = getattr(corpus, "values", {})
    for name, column in getattr(corpus, "columns", {}).items():
        # The declaration is part of the name, so that it counts in the hash too.
        arrays[f"column {name} {column.dtype} {column.of}"] = np.asarray(values[name])
    # Hashes of elements add up modulo 2^64, so the order of the arrays does not matter.
    total = sum(
        hash_box(name, array, shape=array.shape, offset=[0] * array.ndim)
        for name, array in arrays.items()
    )
    return f"{total & MASK64:016x}"
