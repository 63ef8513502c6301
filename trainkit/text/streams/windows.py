"""The windows of a stream: so many tokens of documents at a time, packed.

A document that is longer than a window is cut at full rows. Documents that give no token belong to
the window before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.data.corpus import TokenCorpus
from trainkit.data.documents import Document, check_document, smallest_dtype
from trainkit.noise.hashing import hash_box, hash_counters, make_key
from trainkit.sampling import permute
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from trainkit.packing.bins import Overlong
    from trainkit.types import Bins, Column, IntArray, Sample


@attrs.frozen
class Position:
    """What `Cursor.stream` holds: where the window begins, its rows that are used, and losses.

    `window_hash` is the hash of the window of which rows are used, 0 where none is.
    """

    document: int = 0
    token: int = 0
    rows: int = 0
    shortened_documents: int = 0
    lost_tokens: int = 0
    window_hash: int = 0


@attrs.frozen
class Packing:
    """What a stream is asked for, as far as its windows go by it."""

    pack: Callable[[IntArray], Bins]
    capacity: int
    window: int  # tokens
    overlong: Overlong
    vocab_size: int | None
    seed: int
    columns: Mapping[str, Column]


@attrs.frozen(eq=False)
class Window:
    """Documents from one place to another, packed; its rows leave in `order`."""

    begin: Position
    end: Position
    corpus: TokenCorpus
    bins: Bins
    order: IntArray
    hash: int


def windows(
    source: Iterator[ArrayLike | Sample], position: Position, packing: Packing
) -> Iterator[Window]:
    """Cut documents into windows and pack them; the first document is the one at `position`."""
    documents = _documents(source, position.document, packing)
    pending: Document | None = None  # the rest of the document at `position`
    skip, ended = position.token, False
    while not ended:
        begin, parts, room = position, list[Document](), packing.window
        while True:
            if pending is None:
                pending = next(documents, None)
                ended = pending is None
            if pending is None:
                break
            if skip:
                pending, skip = _rest(pending, skip, position.document), 0
            if not room and not _takes_no_token(pending, packing):
                break
            take, left, position_ = _portion(pending, position, room, packing)
            if left and not take:
                break
            if take:
                parts.append(pending[:take])
            pending = pending[take:] if left else None
            room, position = max(room - take, 0), position_
        if position != begin:
            yield _packed(begin, position, parts, packing)


def _takes_no_token(document: Document, packing: Packing) -> bool:
    """Tell whether a window without room has room for a document: one that is empty or dropped."""
    size = len(document)
    return not size or (packing.overlong == "drop" and size > packing.capacity)


def _portion(
    pending: Document, position: Position, room: int, packing: Packing
) -> tuple[int, bool, Position]:
    """Return how many tokens of a document the window takes, whether some are left, and the end."""
    size, capacity = len(pending), packing.capacity
    beyond = attrs.evolve(position, document=position.document + 1, token=0)
    if size <= capacity or (packing.overlong == "split" and size <= packing.window):
        return size, False, beyond
    if packing.overlong == "split":  # longer than a window: as many full rows as there is room for
        take = room // capacity * capacity
        return take, True, attrs.evolve(position, token=position.token + take)
    if packing.overlong == "error":
        what = f"document {position.document} has {size} tokens; the capacity is {capacity}"
        mend = 'raise it, or ask for overlong="split", "truncate" or "drop"'
        raise DataError(f"pack_stream: {what}: {mend}", got=size, want=capacity)
    take = capacity if packing.overlong == "truncate" else 0
    shortened, lost = position.shortened_documents + 1, position.lost_tokens + size - take
    return take, False, attrs.evolve(beyond, shortened_documents=shortened, lost_tokens=lost)


def _documents(
    source: Iterator[ArrayLike | Sample], first: int, packing: Packing
) -> Iterator[Document]:
    with_choice: bool | None = None
    limit, columns = packing.vocab_size or 1 << 32, packing.columns
    for number, document in enumerate(noting_errors(source, first), first):
        where = f"pack_stream: document {number}"
        found = check_document(document, limit, where, columns=columns, has_mask=with_choice)
        with_choice = found.trained is not None
        yield found


def noting_errors(
    documents: Iterator[ArrayLike | Sample], first: int
) -> Iterator[ArrayLike | Sample]:
    """Yield documents; what their iterator raises gets a note of the document's number."""
    number = first
    try:
        for document in documents:
            yield document
            number += 1
    except Exception as error:
        error.add_note(f"stream: while reading document {number}")
        raise


def _rest(document: Document, token: int, number: int) -> Document:
    if token >= len(document):
        got = len(document)
        what = f"the cursor is at token {token} of document {number}, which has {got}"
        raise DataError(f"pack_stream: {what}: it has changed", got=got, want=token)
    return document[token:]


def _packed(begin: Position, end: Position, parts: list[Document], packing: Packing) -> Window:
    corpus = corpus_of(parts, packing.vocab_size, packing.columns)
    bins = packing.pack(corpus.lengths)
    key = make_key(packing.seed, "window", begin.document, begin.token)
    order = permute(np.arange(len(bins)), len(bins), key) if len(bins) else np.arange(0)
    return Window(begin, end, corpus, bins, order, _hash(end, corpus, bins, order))


def corpus_of(
    parts: Sequence[Document], vocab_size: int | None, columns: Mapping[str, Column]
) -> TokenCorpus:
    """Return a corpus of copies of documents."""
    choices = [part.trained for part in parts if part.trained is not None]
    return TokenCorpus(
        np.concatenate([np.arange(0), *(part.ids for part in parts)]).astype(
            smallest_dtype(vocab_size)
        ),
        np.cumsum([0, *map(len, parts)]),
        vocab_size,
        trained=np.concatenate(choices) if choices else None,
        columns=columns,
        values={
            name: np.concatenate(
                [np.empty((0, *column.inner), column.dtype), *(part.values[name] for part in parts)]
            )
            for name, column in columns.items()
        },
    )


def _hash(end: Position, corpus: TokenCorpus, bins: Bins, order: IntArray) -> int:
    """Return the hash, below 2^63, of a window's end, its tokens, its rows and their order.

    The rows hold every token, so that they also tell how long each document is.
    """
    arrays = {
        "tokens": corpus.tokens,
        "trained": np.arange(0) if corpus.trained is None else corpus.trained,
        "rows": np.concatenate([bins.offsets, bins.documents, bins.starts, bins.lengths]),
        "order": order,
    }
    total = hash_counters(attrs.asdict(end))
    for name, values in arrays.items():
        total += hash_box(name, values.astype(np.int64), shape=values.shape, offset=(0,))
    for name, values in corpus.values.items():
        offset = [0] * values.ndim
        total += hash_box(f"column {name}", values, shape=values.shape, offset=offset)
    return total % 2**63  # checkpoints hold it as int64
