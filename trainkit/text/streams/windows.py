"""The windows of a stream: documents of up to a fixed number of tokens, packed together.

A document that is longer than a window is split at full rows. Documents without tokens belong to
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
    """The content of `Cursor.stream`: a window's start, its used rows, and the lost tokens so far.

    `window_hash` is the hash of the window, 0 if none of its rows is used.
    """

    document: int = 0
    token: int = 0
    rows: int = 0
    shortened_documents: int = 0
    lost_tokens: int = 0
    window_hash: int = 0


@attrs.frozen
class WindowOptions:
    """The arguments of `pack_stream` that its windows depend on."""

    pack: Callable[[IntArray], Bins]
    capacity: int
    window_tokens: int
    overlong: Overlong
    vocab_size: int | None
    seed: int
    columns: Mapping[str, Column]


@attrs.frozen(eq=False)
class Window:
    """The packed documents between two positions; rows are used in `order`."""

    start: Position
    end: Position
    corpus: TokenCorpus
    bins: Bins
    order: IntArray
    hash: int


def iterate_windows(
    source: Iterator[ArrayLike | Sample], position: Position, options: WindowOptions
) -> Iterator[Window]:
    """Split documents into windows and pack each; the first document is the one at `position`."""
    documents = _check_documents(source, position.document, options)
    pending: Document | None = None  # the rest of the document at `position`
    skip = position.token
    has_ended = False
    while not has_ended:
        start = position
        parts: list[Document] = []
        room = options.window_tokens
        while True:
            if pending is None:
                pending = next(documents, None)
                has_ended = pending is None
            if pending is None:
                break
            if skip:
                pending = _skip_tokens(pending, skip, position.document)
                skip = 0
            # The document begins the next window; one without tokens, or that is to be dropped,
            # still belongs to this one.
            size = len(pending)
            is_dropped = options.overlong == "drop" and size > options.capacity
            if not room and size and not is_dropped:
                break
            take, has_rest, end = _choose_part(pending, position, room, options)
            # A long document begins a window of its own, if this one has no room for a row.
            if has_rest and not take:
                break
            if take:
                parts.append(pending[:take])
            pending = pending[take:] if has_rest else None
            room = max(room - take, 0)
            position = end
        # Also without tokens: the documents that were dropped must be counted.
        if position != start:
            yield _pack_window(start, position, parts, options)


def _choose_part(
    document: Document, position: Position, room: int, options: WindowOptions
) -> tuple[int, bool, Position]:
    """Return the number of tokens that a window takes, whether a rest stays, and the new position.

    `room` is the number of tokens that still fit into the window.
    """
    size = len(document)
    capacity = options.capacity
    next_document = attrs.evolve(position, document=position.document + 1, token=0)
    # The window may grow beyond its size by this document: nothing is split in vain.
    if size <= capacity or (options.overlong == "split" and size <= options.window_tokens):
        return size, False, next_document
    if options.overlong == "split":
        # Longer than a window: as many full rows as fit, so that no row is cut by the window's end.
        take = room // capacity * capacity
        return take, True, attrs.evolve(position, token=position.token + take)
    if options.overlong == "error":
        raise DataError(
            f"pack_stream: document {position.document} has {size} tokens; the capacity is "
            f'{capacity}: raise it, or take overlong="split", "truncate" or "drop"',
            got=size,
            want=capacity,
        )
    # Truncated to a row, or dropped.
    take = capacity if options.overlong == "truncate" else 0
    return (
        take,
        False,
        attrs.evolve(
            next_document,
            shortened_documents=position.shortened_documents + 1,
            lost_tokens=position.lost_tokens + size - take,
        ),
    )


def _check_documents(
    source: Iterator[ArrayLike | Sample], first: int, options: WindowOptions
) -> Iterator[Document]:
    has_mask: bool | None = None
    for index, given in enumerate(note_document(source, first), first):
        document = check_document(
            given,
            options.vocab_size or 1 << 32,
            f"pack_stream: document {index}",
            columns=options.columns,
            has_mask=has_mask,
        )
        has_mask = document.loss_mask is not None
        yield document


def note_document(
    documents: Iterator[ArrayLike | Sample], first: int
) -> Iterator[ArrayLike | Sample]:
    """Yield documents; add a note with the document's index to exceptions of their iterator."""
    index = first
    try:
        for document in documents:
            yield document
            index += 1
    except Exception as error:
        # The same object with a note, as callers handle exceptions of their own source.
        error.add_note(f"stream: while reading document {index}")
        raise


def _skip_tokens(document: Document, token: int, index: int) -> Document:
    if token >= len(document):
        raise DataError(
            f"pack_stream: the cursor is at token {token} of document {index}, which has "
            f"{len(document)}: it has changed",
            got=len(document),
            want=token,
        )
    return document[token:]


def _pack_window(
    start: Position, end: Position, parts: list[Document], options: WindowOptions
) -> Window:
    corpus = copy_to_corpus(parts, options.vocab_size, options.columns)
    bins = options.pack(corpus.lengths)
    # The order depends on where the window begins, not on how many came before it.
    key = make_key(options.seed, "window", start.document, start.token)
    order = np.arange(len(bins))
    if len(bins):  # `permute` rejects a count of 0
        order = permute(order, len(bins), key)
    arrays = {
        "tokens": corpus.tokens,
        "loss_mask": np.arange(0) if corpus.loss_mask is None else corpus.loss_mask,
        # The rows hold every token, so they determine the lengths of the documents too.
        "rows": np.concatenate([bins.offsets, bins.documents, bins.starts, bins.lengths]),
        "order": order,
    }
    # The terms are added, so each has its name in its hash.
    total = hash_counters(attrs.asdict(end))
    for name, values in arrays.items():
        total += hash_box(name, values.astype(np.int64), shape=values.shape, offset=(0,))
    for name, values in corpus.values.items():
        total += hash_box(f"column {name}", values, shape=values.shape, offset=[0] * values.ndim)
    # Below 2^63: checkpoints store a cursor as int64.
    return Window(start, end, corpus, bins, order, hash=total % 2**63)


def copy_to_corpus(
    parts: Sequence[Document], vocab_size: int | None, columns: Mapping[str, Column]
) -> TokenCorpus:
    """Copy documents into a corpus."""
    # An empty array first: there may be no document to concatenate.
    tokens = np.concatenate([np.arange(0), *(part.ids for part in parts)])
    masks = [part.loss_mask for part in parts if part.loss_mask is not None]
    # Copies, so that the documents that the source yielded can be freed.
    values = {}
    for name, column in columns.items():
        empty = np.empty((0, *column.inner), column.dtype)
        values[name] = np.concatenate([empty, *(part.values[name] for part in parts)])
    return TokenCorpus(
        tokens.astype(smallest_dtype(vocab_size)),
        np.cumsum([0, *map(len, parts)]),
        vocab_size,
        loss_mask=np.concatenate(masks) if masks else None,
        columns=columns,
        values=values,
    )
