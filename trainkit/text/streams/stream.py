"""A source of unknown length, packed as it is read, with a cursor that restores it exactly.

Documents are read into a window of a fixed number of tokens, the window is packed, and its rows
leave in an order of their own, `rows` for each step; then the next window is read. Documents that
give no token belong to the window before them, so that the last step counts what was left out after
it. Where a step begins is a few integers: the document and the token at which the window begins,
how many of its rows are used, and a hash of it. Reading on from there packs the same window again,
and the hash tells whether it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.data.documents import Document, check_columns
from trainkit.data.packed import PackedCorpus
from trainkit.packing import best_fit, pack_bins, select_rows
from trainkit.text.streams.windows import (
    Packing,
    Position,
    Window,
    corpus_of,
    noting_errors,
    windows,
)
from trainkit.types import Cursor, DataError, Sample, StepBatch, check_range

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.packing.bins import Overlong
    from trainkit.types import Column, Fit, IntArray

OpenDocuments = Callable[[int], "Iterator[ArrayLike | Sample]"]
"""From the number of a document to an iterator over the documents from that one on."""

_MEND = "give the documents, the arguments and the seed of the save, or begin anew with Cursor()"


@attrs.frozen(eq=False)
class StreamStep:
    """The rows of one global step of a stream, for `make_microbatches`: all of `packed`, in order.

    Attributes:
        packed: The rows, with the pieces in them as documents; at the end of the stream those that
            are left over are blank.
        cursor: Where the next step begins.
    """

    packed: PackedCorpus
    cursor: Cursor


def make_document_opener(
    make_iterator: Callable[[], Iterable[ArrayLike | Sample]],
) -> OpenDocuments:
    """Return `open_documents` for a source that can only be read from its beginning.

    Args:
        make_iterator: Begins anew at each call, with the same documents in the same order.

    Examples:
        >>> open_documents = make_document_opener(lambda: iter([[1, 2], [3], [4, 5, 6]]))
        >>> list(open_documents(1))
        [[3], [4, 5, 6]]
    """

    def open_documents(first: int) -> Iterator[ArrayLike | Sample]:
        documents = iter(make_iterator())
        number = sum(1 for _ in islice(noting_errors(documents, 0), first))
        if number < first:
            what = f"the source ends after {number} documents, the cursor is at document {first}"
            raise DataError(f"make_document_opener: {what}: it has changed", got=number, want=first)
        return documents

    return open_documents


def pack_stream(
    open_documents: OpenDocuments,
    cursor: Cursor,
    *,
    capacity: int,
    rows: int,
    seed: int,
    buffer_rows: int = 64,
    fit: Fit = best_fit,
    multiple_of: int = 1,
    max_documents: int | None = None,
    overlong: Overlong = "split",
    vocab_size: int | None = None,
    columns: Mapping[str, Column] | None = None,
) -> Iterator[StreamStep]:
    """Pack documents as they come, and give the rows of one global step after the other.

    Every token of the stream comes exactly once; only `overlong` can leave tokens out, and
    `count_stream` tells how many. A step may take rows from two windows. At the end of the stream
    blank rows fill the last step. What comes is a function of the documents, the cursor and the
    arguments, so ranks that read the same documents make the same steps.

    A cursor inside a window is held against what the window now is: all its tokens, and the rows
    that they are packed in. A cursor between two windows holds nothing that the documents after it
    could be compared with; another source that has as many documents goes unnoticed there.

    Args:
        open_documents: Gives the documents from a number on; `make_document_opener` makes one of an
            iterator. Documents are token ids or `Sample`s.
        cursor: Where to begin: `Cursor()`, or the cursor of an earlier step.
        capacity: Tokens per row.
        rows: Rows in the global batch.
        seed: The run's seed, for the order of the rows of a window.
        buffer_rows: Full rows' worth of tokens in a window. At most this much, two further
            documents and the rows of one step are held. The larger, the further a document may move
            and the fuller rows are.
        fit: As in `pack_bins`, and so the next three.
        multiple_of: What each piece is aligned to.
        max_documents: The most pieces in a row.
        overlong: What becomes of a document longer than the capacity.
        vocab_size: No token may be this large or larger.
        columns: What there is of each token besides, by name; each `Sample` has its values.

    Returns:
        An iterator that reads a window when a step needs it.

    Raises:
        ValueError: A number is out of its range, or the cursor is another source's.
        DataError: A document is no sequence of ids that fit, is too long and `overlong` is "error",
            or is shorter than the cursor says; or the window that the cursor is in has changed, or
            is gone. The message gives the document's number.
        Exception: What the source raised, the same object, with a note of the document's number.

    Examples:
        >>> open_documents = make_document_opener(lambda: iter([[1, 2], [3, 4, 5], [6]]))
        >>> steps = list(pack_stream(open_documents, Cursor(), capacity=4, rows=1, seed=0))
        >>> [step.packed.bins.lengths.tolist() for step in steps], steps[0].cursor
        ([[2], [3, 1]], Cursor(batch=1, stream=(0, 0, 1, 0, 0, ...)))
    """
    check_range("pack_stream", at_least=1, rows=rows, buffer_rows=buffer_rows)
    pack = partial(
        pack_bins,
        capacity=capacity,
        fit=fit,
        group_size=0,
        multiple_of=multiple_of,
        max_documents=max_documents,
    )
    pack([], overlong=overlong)  # checks the arguments before a document is read
    declared = check_columns("pack_stream", columns)
    window = buffer_rows * capacity
    packing = Packing(pack, capacity, window, overlong, vocab_size, seed, declared)
    return _steps(open_documents, cursor.batch, _position(cursor), rows, packing)


def count_stream(cursor: Cursor) -> dict[str, int]:
    """Return what a stream has gone through before a cursor, as far as its windows are used up.

    Returns:
        `documents`; `shortened_documents`, which `overlong` truncated or dropped; `lost_tokens`,
        which it left out.

    Examples:
        >>> count_stream(Cursor(3, (120, 0, 0, 2, 990, 0)))
        {'documents': 120, 'shortened_documents': 2, 'lost_tokens': 990}
    """
    position = _position(cursor)
    return {
        "documents": position.document,
        "shortened_documents": position.shortened_documents,
        "lost_tokens": position.lost_tokens,
    }


def make_stream_reader(
    batches_from: Callable[[Cursor], Iterator[StepBatch]],
) -> Callable[[Cursor], StepBatch | None]:
    """Return make_batch(cursor), which reads on where it is, and begins anew at any other cursor.

    Args:
        batches_from: The batches from a cursor on.

    Returns:
        A function that gives the batch at a cursor, or None when the source has ended.

    Examples:
        >>> make_batch = make_stream_reader(
        ...     lambda cursor: iter([StepBatch([], Cursor(cursor.batch + 1))])
        ... )
        >>> make_batch(Cursor(4)).cursor, make_batch(Cursor(5))
        (Cursor(batch=5, stream=()), None)
    """
    batches: Iterator[StepBatch] = iter(())
    expected: Cursor | None = None

    def make_batch(cursor: Cursor) -> StepBatch | None:
        nonlocal batches, expected
        if cursor != expected:
            batches = batches_from(cursor)
        expected = None  # what fails is begun anew: a generator that raised has ended
        batch = next(batches, None)
        expected = cursor if batch is None else batch.cursor
        return batch

    return make_batch


def _position(cursor: Cursor) -> Position:
    fields = len(attrs.fields(Position))
    if len(cursor.stream) not in (0, fields):
        what = f"a cursor of a stream holds {fields} integers, got {cursor.stream}"
        raise ValueError(f"pack_stream: {what}: it is another source's")
    return Position(*cursor.stream)


def _steps(
    open_documents: OpenDocuments, batch: int, position: Position, rows: int, packing: Packing
) -> Iterator[StreamStep]:
    held: list[tuple[Window, IntArray]] = []
    last: Window | None = None
    missing, used = rows, position.rows
    begin = attrs.evolve(position, rows=0, window_hash=0)
    for window in windows(open_documents(begin.document), begin, packing):
        if used:
            _check_window(window, position)
        while used < len(window.order):
            chosen = window.order[used : used + missing]
            held.append((window, chosen))
            used, missing = used + len(chosen), missing - len(chosen)
            if not missing:
                batch += 1
                yield _step(held, rows, _cursor(batch, window, used))
                held.clear()
                missing = rows
        last, used = window, 0
    if last is None:
        _check_end(position)
    if last is not None and held:
        yield _step(held, rows, _cursor(batch + 1, last, len(last.order)))


def _cursor(batch: int, window: Window, used: int) -> Cursor:
    if used == len(window.order):
        return Cursor(batch, attrs.astuple(window.end))
    position = attrs.evolve(window.begin, rows=used, window_hash=window.hash)
    return Cursor(batch, attrs.astuple(position))


def _check_window(window: Window, saved: Position) -> None:
    """Raise if a window of which rows are used is not the one that the cursor was saved in."""
    if window.hash == saved.window_hash and saved.rows < len(window.order):
        return
    where, got, want = f"document {saved.document}", window.hash, saved.window_hash
    was = f"the cursor is at row {saved.rows} of the window from {where} on"
    size = f"{len(window.corpus.tokens)} tokens in {len(window.order)} rows"
    now = f"now it ends before document {window.end.document} and has {size}"
    what = f"{was}, which is no longer the same: {now}, with hash {got} instead of {want}"
    raise DataError(f"pack_stream: {what}: {_MEND}", where=where, got=got, want=want)


def _check_end(position: Position) -> None:
    """Raise if a source that gave no window was left inside of one."""
    if position.rows or position.token:
        where = f"document {position.document}"
        used = f"{position.rows} rows used of the window that begins there"
        what = f"the cursor is at token {position.token} of {where}, with {used}"
        mend = f"but the source ends before it: {_MEND}"
        raise DataError(f"pack_stream: {what}, {mend}", where=where)


def _step(held: list[tuple[Window, IntArray]], rows: int, cursor: Cursor) -> StreamStep:
    """Copy the pieces of the rows that make up a step."""
    parts, sizes = list[Document](), [np.zeros(1, np.int64)]
    for window, chosen in held:
        corpus, bins = window.corpus, select_rows(window.bins, chosen)
        sizes.append(np.diff(bins.offsets))
        whole = Document(corpus.tokens, corpus.trained, corpus.values)
        begins = corpus.offsets[bins.documents] + bins.starts
        for begin, length in zip(begins.tolist(), bins.lengths.tolist(), strict=True):
            parts.append(whole[begin : begin + length])
    blanks = rows + 1 - sum(len(part) for part in sizes)
    first = held[0][0].corpus
    corpus = corpus_of(parts, first.vocab_size, first.columns)
    bins = attrs.evolve(
        held[0][0].bins,
        offsets=np.cumsum(np.concatenate([*sizes, np.zeros(blanks, np.int64)])),
        documents=np.arange(len(parts)),
        starts=np.zeros(len(parts), np.int64),
        lengths=corpus.lengths,
    )
    return StreamStep(PackedCorpus(corpus, bins), cursor)
