"""Documents of tokens, in memory or in trainkit's token file, which is mapped into memory."""

from __future__ import annotations

import hashlib
from array import array
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from trainkit.corpora.content import write_content
from trainkit.corpora.documents import checked_columns, checked_document, smallest_dtype
from trainkit.corpora.mapped import MappedFile, map_file
from trainkit.corpora.text import check_readable, opened
from trainkit.corpora.token_file import (
    BLOCK,
    DTYPES,
    SAMPLED,
    Header,
    broken,
    check_chunks,
    check_ids,
    read_header,
    sampled,
)
from trainkit.files import replacing
from trainkit.types import Sample

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, DTypeLike

    from trainkit.types import Column, Corpus, IntArray

SUFFIX = ".tokens"
Check = Literal["sample", "full", "none"]
"""How much of a file's content is read when it is opened."""


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


# ---------------------------------------------------------------------------------------- in memory


def memory_corpus(
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
        >>> memory_corpus([[1, 2, 3], [4]], vocab_size=10).tokens
        array([1, 2, 3, 4], dtype=uint8)
        >>> from trainkit.types import Column
        >>> answer = Sample(np.arange(2), np.array([False, True]), {"advantages": [0.0, 0.5]})
        >>> memory_corpus([answer], columns={"advantages": Column("float32")}).values
        {'advantages': array([0. , 0.5], dtype=float32)}
    """
    placed = ((f"memory_corpus: document {number}", d) for number, d in enumerate(documents))
    declared = checked_columns("memory_corpus", columns)
    corpus = gathered(placed, vocab_size=vocab_size, columns=declared)
    if names is not None and len(names) != len(corpus.offsets) - 1:
        raise ValueError(
            f"memory_corpus: {len(names)} names for {len(corpus.offsets) - 1} documents"
        )
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


def documents_of(corpus: Corpus) -> Iterator[ArrayLike | Sample]:
    """Yield the documents of a corpus, from which `memory_corpus` and `write_corpus` make it anew.

    Args:
        corpus: Any; one that says more of its tokens than their ids gives `Sample`s.

    Returns:
        An iterator of views.

    Examples:
        >>> list(documents_of(memory_corpus([[1, 2], [3]])))
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


# ---------------------------------------------------------------------------------------- in a file


def write_corpus(
    path: str | os.PathLike[str],
    documents: Iterable[ArrayLike | Sample],
    *,
    dtype: DTypeLike | None = None,
    vocab_size: int | None = None,
    tokenizer_hash: str | None = None,
    columns: Mapping[str, Column] | None = None,
    template_hash: str | None = None,
    made_with: Mapping[str, str] | None = None,
) -> TokenCorpus:
    """Write documents of tokens into a token file, whole or not at all, and open it.

    Args:
        path: The file to make, which ends in `.tokens`; a file that is there is replaced at the
            end, in one step.
        documents: Sequences of token ids, or `Sample`s, read once, one at a time; only offsets
            stay in memory.
        dtype: uint8, uint16 or uint32; by default the smallest that holds `vocab_size`, or uint32.
        vocab_size: No token may be this large or larger; written down, and checked when the file is
            opened with a tokenizer.
        tokenizer_hash: Of the tokenizer that made the ids, as the function of that name gives it;
            written down, and compared when the file is opened with a tokenizer.
        columns: What there is of each token besides, by name; each `Sample` has its values.
        template_hash: Of the template that conversations were written with, as the function of that
            name gives it; written down, and compared when the file is opened with a template.
        made_with: The names of the "tokenizer" and the "template", which messages give to whoever
            opens the file with another.

    Returns:
        The corpus, mapped from the file.

    Raises:
        ValueError: The suffix or the dtype is not one of the above, or a column has a name of the
            batch's.
        DataError: A document is not a sequence of ids that fit, there is no document, some are
            `Sample`s and some are not, or one does not have the columns. The message names it.
        DiskError: The file cannot be written, or the disk is full.

    Effects:
        Writes `path`, through a temporary file beside it that is removed on failure (and more for
        `Sample`s, which have no names); both reach the disk before this returns.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     corpus = write_corpus(Path(folder) / "two.tokens", [[1, 2, 3], [4]], vocab_size=10)
        ...     corpus.lengths, corpus.read(0, 1, 2), corpus.tokens.dtype
        (array([3, 1]), array([2, 3], dtype=uint8), dtype('uint8'))
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"write_corpus: the file must end in {SUFFIX}, got {path}")
    kind = np.dtype(dtype) if dtype is not None else smallest_dtype(vocab_size)
    if kind.name not in DTYPES:
        raise ValueError(f"write_corpus: dtype must be one of {', '.join(DTYPES)}, got {kind}")
    with replacing(path, by="write_corpus") as file:
        write_content(
            file,
            path,
            documents,
            kind=kind,
            vocab_size=vocab_size,
            tokenizer_hash=tokenizer_hash,
            columns=checked_columns("write_corpus", columns),
            template_hash=template_hash,
            made_with=made_with or {},
        )
    return open_tokens(path, check="none")


def open_tokens(path: str | os.PathLike[str], *, check: Check = "sample") -> TokenCorpus:
    """Open a token file: check its header, its size, its offsets and its content, and map it.

    Args:
        path: The file.
        check: "sample" reads up to 32 chunks of 4 MiB, others at each start: all of a file of up to
            128 MiB. "full" compares all hashes with the content, and all tokens with the
            vocabulary; "none" reads only the header and the offsets.

    Raises:
        DataError: The file is missing, truncated, damaged, no token file of this version, or holds
            a token outside its vocabulary. The message names the byte.
    """
    most = {"sample": SAMPLED, "full": None, "none": 0}
    if check not in most:
        raise ValueError(f"open_tokens: check must be one of {', '.join(most)}, got {check!r}")
    return open_part(Path(path), most=most[check])


def open_part(path: Path, *, most: int | None, vocab_size: int | None = None) -> TokenCorpus:
    """Open a token file, reading up to `most` chunks of its content (None: all).

    Args:
        path: The file.
        most: How many chunks are compared with their hashes.
        vocab_size: What the file's tokens have to stay below where the file itself does not say.
    """
    check_readable(path)
    with opened(path) as file:
        header = read_header(file, path)
        parts = list(check_chunks(file, header, sampled(header.chunks, most), path))
        data, told = map_file(file, path)
    size = header.kind.itemsize
    tokens = data[BLOCK : BLOCK + header.tokens * size].view(header.kind)
    trained = (
        data[header.trained_at : header.trained_at + header.tokens] if header.trained else None
    )
    values = {
        name: data[begin:end].view(column.dtype)[: header.tokens * column.width]
        for (name, column), (begin, end) in zip(
            header.columns.items(), pairwise(header.values_at), strict=True
        )
    }
    offsets = data[header.offsets_at : header.table_at].view("<i8")
    _check_offsets(offsets, header, path, hashed=most != 0)
    limit = header.vocab_size or vocab_size
    for begin, end in parts:
        first, past = ((place - BLOCK) // size for place in (begin, end))
        ids = tokens[first:past]
        check_ids(ids, first, vocab_size=limit, offsets=offsets, first_byte=BLOCK, path=path)
    return TokenCorpus(
        tokens,
        offsets,
        header.vocab_size,
        digest=header.digest,
        trained=trained,
        sources={path.name: header.digest[:16]},
        file=told,
        tokenizer_hash=header.tokenizer,
        columns=header.columns,
        values={name: x.reshape(-1, *header.columns[name].inner) for name, x in values.items()},
        template_hash=header.template,
        made_with=header.made_with,
    )


def _check_offsets(
    offsets: np.ndarray[Any, Any], header: Header, path: Path, *, hashed: bool
) -> None:
    if offsets[0] != 0 or offsets[-1] != header.tokens or (offsets[1:] < offsets[:-1]).any():
        raise broken(path, f"offsets that do not rise from 0 to {header.tokens}")
    if hashed and hashlib.sha256(offsets.tobytes()).hexdigest() != header.offsets_sha256:
        raise broken(path, "offsets that were changed after they were written")
