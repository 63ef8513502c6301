"""Corpora in memory: the record, and the functions that build one from sequences of ids."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.data.documents import check_columns, check_document, smallest_dtype
from trainkit.types import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from trainkit.data.memory_map import MappedFile
    from trainkit.types import Column, Corpus, IntArray

DTYPES = ("uint8", "uint16", "uint32")


@attrs.frozen(eq=False)
class TokenCorpus:
    """Documents of tokens in one flat array: a `Corpus`.

    Attributes:
        tokens: Unsigned integers `[T]`, in memory or mapped from a file, read-only.
        offsets: int64 `[N+1]`; document i is `tokens[offsets[i]:offsets[i + 1]]`.
        vocab_size: Exclusive upper bound of the token ids; None if unknown.
        names: The names of the documents, if they have any.
        digest: A hash of the content that was stored with the content.
        loss_mask: The loss mask, uint8 `[T]`: 0 for tokens that are never labels. None if all are.
        sources: File name -> hash of the file's content.
        file: The file that `tokens` is mapped from; `check_unchanged` looks at it.
        tokenizer_hash: Hash of the tokenizer that made a token file; None if unknown.
        columns: The further columns of a token, by name.
        values: The columns' values, `[T]` or `[T, k]`, by name.
        template_hash: Hash of the chat template of a token file of conversations; None if unknown.
        made_with: The names of the "tokenizer" and the "template" of a token file, as the user
            gave them. They appear in error messages.
    """

    tokens: np.ndarray[Any, Any]
    offsets: IntArray
    vocab_size: int | None = None
    names: Sequence[str] | None = None
    digest: str | None = None
    loss_mask: np.ndarray[Any, Any] | None = None
    sources: Mapping[str, str] = attrs.field(factory=dict)
    file: MappedFile | None = None
    tokenizer_hash: str | None = None
    columns: Mapping[str, Column] = attrs.field(factory=dict)
    values: Mapping[str, np.ndarray[Any, Any]] = attrs.field(factory=dict)
    template_hash: str | None = None
    made_with: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of each document, int64 `[N]`, computed on each access."""
        return np.diff(self.offsets)

    def read(self, document: int, start: int, length: int) -> np.ndarray[Any, Any]:
        """Return a view of `length` tokens of a document, from token `start` on."""
        # Checked by hand: numpy would wrap negative indices and shorten slices silently.
        if not 0 <= document < len(self.offsets) - 1:
            raise ValueError(f"read: there is no document {document} of {len(self.offsets) - 1}")
        first = int(self.offsets[document])
        size = int(self.offsets[document + 1]) - first
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(
                f"read: document {document} has {size} tokens, "
                f"but {length} were requested from {start} on"
            )
        return self.tokens[first + start : first + start + length]


def make_corpus(
    documents: Iterable[ArrayLike | Sample],
    *,
    vocab_size: int | None = None,
    names: Sequence[str] | None = None,
    columns: Mapping[str, Column] | None = None,
) -> TokenCorpus:
    """Build a corpus in memory.

    Args:
        documents: Sequences of token ids, or `Sample`s; read once, one at a time.
        vocab_size: Exclusive upper bound of the token ids; decides the dtype.
        names: The names of the documents.
        columns: Further columns of a token, by name; each `Sample` has values for them.

    Returns:
        The corpus, in the smallest dtype that fits the vocabulary, or in uint32.

    Raises:
        DataError: A document is not a sequence of ids in range, some documents are `Sample`s and
            others are not, or the columns are missing or not finite. The message names it.
        ValueError: The number of names differs from the number of documents, or a column has the
            name of one of the batch's tensors.

    Examples:
        >>> make_corpus([[1, 2, 3], [4]], vocab_size=10).tokens
        array([1, 2, 3, 4], dtype=uint8)
        >>> from trainkit.types import Column
        >>> answer = Sample(np.arange(2), np.array([False, True]), {"advantages": [0.0, 0.5]})
        >>> make_corpus([answer], columns={"advantages": Column("float32")}).values
        {'advantages': array([0. , 0.5], dtype=float32)}
    """
    corpus = collect_documents(
        ((f"make_corpus: document {index}", x) for index, x in enumerate(documents)),
        vocab_size=vocab_size,
        columns=check_columns("make_corpus", columns),
    )
    # Checked last: documents may be a generator, whose number is known only now.
    if names is not None and len(names) != len(corpus.offsets) - 1:
        raise ValueError(f"make_corpus: {len(names)} names for {len(corpus.offsets) - 1} documents")
    return attrs.evolve(corpus, names=names)


def collect_documents(
    documents: Iterable[tuple[str, ArrayLike | Sample]],
    *,
    vocab_size: int | None,
    columns: Mapping[str, Column],
) -> TokenCorpus:
    """Build a corpus in memory from (origin, document) pairs; messages begin with the origin."""
    dtype = smallest_dtype(vocab_size)
    if dtype.name not in DTYPES:
        raise ValueError(f"a vocabulary has at most 2**32 tokens, got vocab_size={vocab_size}")
    # Without a vocabulary an id only has to fit uint32.
    limit = vocab_size or 1 << 32
    # Byte arrays grow in place, so a stream of documents takes its final size once, not twice.
    tokens = bytearray()
    loss_mask = bytearray()
    values = {name: bytearray() for name in columns}
    offsets = array("q", [0])
    # None until the first document decides it for all.
    has_mask: bool | None = None
    for origin, given in documents:
        document = check_document(given, limit, origin, columns=columns, has_mask=has_mask)
        has_mask = document.loss_mask is not None
        tokens += document.ids.astype(dtype).tobytes()
        if document.loss_mask is not None:
            loss_mask += document.loss_mask.tobytes()
        for name, column_values in document.values.items():
            values[name] += column_values.tobytes()
        offsets.append(offsets[-1] + len(document))
    return TokenCorpus(
        _read_only_array(tokens, dtype),
        np.array(offsets, np.int64),
        vocab_size,
        loss_mask=_read_only_array(loss_mask, np.dtype("uint8")) if has_mask else None,
        columns=columns,
        values={
            name: _read_only_array(values[name], np.dtype(column.dtype)).reshape(-1, *column.inner)
            for name, column in columns.items()
        },
    )


def _read_only_array(data: bytearray, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    # A view of the byte array, without a copy; read-only, as mapped corpora are.
    return np.frombuffer(memoryview(data).toreadonly(), dtype)


def iterate_documents(corpus: Corpus) -> Iterator[ArrayLike | Sample]:
    """Iterate over the documents of a corpus; `make_corpus` and `write_corpus` take them.

    Args:
        corpus: Any corpus. One with a loss mask or with columns yields `Sample`s.

    Returns:
        An iterator of views.

    Examples:
        >>> list(iterate_documents(make_corpus([[1, 2], [3]])))
        [array([1, 2], dtype=uint32), array([3], dtype=uint32)]
    """
    # A concatenated corpus has no flat tokens, but its parts have.
    for part in getattr(corpus, "parts", (corpus,)):
        mask = getattr(part, "loss_mask", None)
        columns = getattr(part, "values", {})
        for start, end in pairwise(part.offsets.tolist()):
            ids = part.tokens[start:end]
            values = {name: x[start:end] for name, x in columns.items()}
            if mask is not None:
                # The mask is stored as bytes of 0 and 1, so a view will do.
                yield Sample(ids, mask[start:end].view(np.bool_), values)
            elif values:
                # Columns without a mask: a `Sample` needs one, and every token may be a label.
                yield Sample(ids, np.ones(len(ids), np.bool_), values)
            else:
                yield ids
