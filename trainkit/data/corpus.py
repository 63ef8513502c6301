"""Documents of tokens in memory: what a corpus is, and how one is made of sequences of ids."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.data.documents import checked_columns, checked_document, smallest_dtype
from trainkit.types import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from trainkit.data.mapped import MappedFile
    from trainkit.types import Column, Corpus, IntArray

DTYPES = ("uint8", "uint16", "uint32")


@attrs.frozen(eq=False)
class TokenCorpus:
    """Documents of tokens, one after the other: a `Corpus`.

    Attributes:
        tokens: Unsigned integers `[T]`, in memory or mapped from a file, read-only.
        offsets: int64 `[N+1]`; document i is `tokens[offsets[i]:offsets[i + 1]]`.
        vocab_size: No token is this large or larger; None where nobody said so.
        names: What each document is called, where documents have names.
        digest: A hash of the content, where one was written down with it.
        trained: 0 for tokens that no label shall ask for, `[T]`; None where all are trained on.
        sources: A hash of the content of each file that the corpus was read from, by its name.
        file: The file that `tokens` is mapped from; `check_unchanged` looks at it.
        tokenizer_hash: Of the tokenizer that made a token file; None where the file does not say.
        columns: What there is of each token besides, by name.
        values: The columns' values, `[T]` or `[T, k]`, by name.
        template_hash: Of the template that the conversations of a token file were written with;
            None where the file does not say.
        made_with: The names of the "tokenizer" and the "template" of a token file, as they were
            given; for messages.
    """

    tokens: np.ndarray[Any, Any]
    offsets: IntArray
    vocab_size: int | None = None
    names: Sequence[str] | None = None
    digest: str | None = None
    trained: np.ndarray[Any, Any] | None = None
    sources: Mapping[str, str] = attrs.field(factory=dict)
    file: MappedFile | None = None
    tokenizer_hash: str | None = None
    columns: Mapping[str, Column] = attrs.field(factory=dict)
    values: Mapping[str, np.ndarray[Any, Any]] = attrs.field(factory=dict)
    template_hash: str | None = None
    made_with: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, int64 `[N]`, computed anew at each call."""
        return np.diff(self.offsets)

    def read(self, document: int, start: int, length: int) -> np.ndarray[Any, Any]:
        """Return `length` tokens of a document from token `start` on, as a view."""
        if not 0 <= document < len(self.offsets) - 1:
            raise ValueError(f"read: there is no document {document} of {len(self.offsets) - 1}")
        begin, end = int(self.offsets[document]), int(self.offsets[document + 1])
        if start < 0 or length < 0 or begin + start + length > end:
            raise ValueError(
                f"read: document {document} has {end - begin} tokens; "
                f"asked for {length} from {start} on"
            )
        return self.tokens[begin + start : begin + start + length]


def make_corpus(
    documents: Iterable[ArrayLike | Sample],
    *,
    vocab_size: int | None = None,
    names: Sequence[str] | None = None,
    columns: Mapping[str, Column] | None = None,
) -> TokenCorpus:
    """Return documents as a corpus in memory.

    Args:
        documents: Sequences of token ids, or `Sample`s, read once, one at a time.
        vocab_size: No token may be this large or larger; decides the dtype.
        names: What each document is called.
        columns: What there is of each token besides, by name; each `Sample` has its values.

    Returns:
        The corpus, of the smallest dtype that holds the vocabulary, or uint32.

    Raises:
        DataError: A document is not a sequence of ids that fit, some are `Sample`s and some are
            not, or one does not have the columns: a value for each token, finite and of the dtype.
            The message names it.
        ValueError: There are not as many names as documents, or a column has a name of the batch's.

    Examples:
        >>> make_corpus([[1, 2, 3], [4]], vocab_size=10).tokens
        array([1, 2, 3, 4], dtype=uint8)
        >>> from trainkit.types import Column
        >>> answer = Sample(np.arange(2), np.array([False, True]), {"advantages": [0.0, 0.5]})
        >>> make_corpus([answer], columns={"advantages": Column("float32")}).values
        {'advantages': array([0. , 0.5], dtype=float32)}
    """
    placed = ((f"make_corpus: document {number}", d) for number, d in enumerate(documents))
    declared = checked_columns("make_corpus", columns)
    corpus = gathered(placed, vocab_size=vocab_size, columns=declared)
    if names is not None and len(names) != len(corpus.offsets) - 1:
        raise ValueError(f"make_corpus: {len(names)} names for {len(corpus.offsets) - 1} documents")
    return attrs.evolve(corpus, names=names)


def gathered(
    documents: Iterable[tuple[str, ArrayLike | Sample]],
    *,
    vocab_size: int | None,
    columns: Mapping[str, Column],
) -> TokenCorpus:
    """Return documents as a corpus in memory; before each stands where it is, for messages."""
    kind, limit = smallest_dtype(vocab_size), vocab_size or 1 << 32
    if kind.name not in DTYPES:
        raise ValueError(f"a vocabulary has at most 2**32 tokens, got vocab_size={vocab_size}")
    tokens, trained, offsets = bytearray(), bytearray(), array("q", [0])
    values = {name: bytearray() for name in columns}
    with_choice: bool | None = None
    for where, given in documents:
        document = checked_document(given, limit, where, columns=columns, with_choice=with_choice)
        with_choice = document.trained is not None
        tokens += document.ids.astype(kind).tobytes()
        trained += b"" if document.trained is None else document.trained.tobytes()
        for name, own in document.values.items():
            values[name] += own.tobytes()
        offsets.append(offsets[-1] + len(document))
    return TokenCorpus(
        _read_only(tokens, kind),
        np.array(offsets, np.int64),
        vocab_size,
        trained=_read_only(trained, np.dtype("uint8")) if with_choice else None,
        columns=columns,
        values={
            name: _read_only(values[name], np.dtype(column.dtype)).reshape(-1, *column.inner)
            for name, column in columns.items()
        },
    )


def _read_only(data: bytearray, kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(memoryview(data).toreadonly(), kind)


def iterate_documents(corpus: Corpus) -> Iterator[ArrayLike | Sample]:
    """Yield the documents of a corpus, from which `make_corpus` and `write_corpus` make it anew.

    Args:
        corpus: Any; one that says more of its tokens than their ids gives `Sample`s.

    Returns:
        An iterator of views.

    Examples:
        >>> list(iterate_documents(make_corpus([[1, 2], [3]])))
        [array([1, 2], dtype=uint32), array([3], dtype=uint32)]
    """
    for part in getattr(corpus, "parts", (corpus,)):
        trained, values = getattr(part, "trained", None), getattr(part, "values", {})
        for begin, end in pairwise(part.offsets.tolist()):
            ids, own = part.tokens[begin:end], {n: x[begin:end] for n, x in values.items()}
            if trained is not None:
                yield Sample(ids, trained[begin:end].view(np.bool_), own)
            else:
                yield Sample(ids, np.ones(len(ids), np.bool_), own) if own else ids
