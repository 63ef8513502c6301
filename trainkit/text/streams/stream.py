"""Pack a source of unknown length as it is read, with a cursor that restores it exactly.

Documents are read into a window of a fixed number of tokens. The window is packed, and its rows are
used in a random order, `rows` for each step; then the next window is read. Documents without tokens
belong to the window before them, so that the last step counts the dropped ones after it. The cursor
of a step is a few integers: the document and the token at which the window begins, the number of
its rows that are used, and a hash of it. A resumed run packs the same window again, and compares
the hash.
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
from trainkit.packing import best_fit, pack_bins
from trainkit.packing.bins import select_rows
from trainkit.text.streams.windows import (
    Position,
    Window,
    WindowOptions,
    copy_to_corpus,
    iterate_windows,
    note_document,
)
from trainkit.types import Cursor, DataError, Sample, StepBatch, check_range

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from trainkit.packing.bins import Overlong
    from trainkit.types import Column, Fit, IntArray

OpenDocuments = Callable[[int], "Iterator[ArrayLike | Sample]"]
"""Returns an iterator over the documents from an index on."""


@attrs.frozen(eq=False)
class StreamStep:
    """The rows of one global step of a stream, for `make_microbatches`: all of `packed`, in order.

    Attributes:
        packed: The rows, with their pieces as documents. The last step of a stream may have padding
            rows at its end.
        cursor: The start of the next step.
    """

    packed: PackedCorpus
    cursor: Cursor


def make_document_opener(
    make_iterator: Callable[[], Iterable[ArrayLike | Sample]],
) -> OpenDocuments:
    """Make an `open_documents` for a source that can only be read from its beginning.

    Args:
        make_iterator: Returns a new iterator, over the same documents in the same order.

    Examples:
        >>> open_documents = make_document_opener(lambda: iter([[1, 2], [3], [4, 5, 6]]))
        >>> list(open_documents(1))
        [[3], [4, 5, 6]]
    """

    def open_documents(first: int) -> Iterator[ArrayLike | Sample]:
        documents = iter(make_iterator())
        # Read and thrown away: an iterator has no other way to a later document.
        count = sum(1 for _ in islice(note_document(documents, 0), first))
        if count < first:
            raise DataError(
                f"make_document_opener: the source ends after {count} documents, the cursor is at "
                f"document {first}: it has changed",
                got=count,
                want=first,
            )
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
    """Pack documents as they are read, and yield the rows of one global step at a time.

    Every token of the stream occurs exactly once; only `overlong` can leave tokens out, and
    `count_stream` counts them. A step may take rows from two windows. At the end of the stream
    padding rows fill the last step. The result is a function of the documents, the cursor and the
    arguments, so ranks that read the same documents make the same steps.

    A cursor inside a window is compared with the window: all its tokens, and the rows that they are
    packed in. A cursor between two windows holds nothing to compare, so another source with as many
    documents is not detected there.

    Args:
        open_documents: Returns the documents from an index on; `make_document_opener` makes one of
            an iterator. Documents are token ids or `Sample`s.
        cursor: The start: `Cursor()`, or the cursor of an earlier step.
        capacity: Tokens per row.
        rows: Rows in the global batch.
        seed: The run's seed, for the order of the rows of a window.
        buffer_rows: The size of a window, in full rows. At most this many, two further documents
            and the rows of one step are in memory. A larger window shuffles documents more widely,
            and fills rows better.
        fit: As in `pack_bins`, and so the next three.
        multiple_of: The alignment of each piece.
        max_documents: The maximum number of pieces in a row.
        overlong: What happens to a document longer than the capacity.
        vocab_size: Exclusive upper bound of the ids.
        columns: Further columns of a token, by name; each `Sample` has values for them.

    Returns:
        An iterator that reads a window when a step needs it.

    Raises:
        ValueError: A number is out of range, or the cursor is another source's.
        DataError: A document is no sequence of ids in range, is too long and `overlong` is "error",
            or is shorter than the cursor requires; or the window of the cursor has changed, or no
            longer exists. The message names the document.
        Exception: What the source raised, the same object, with a note of the document's index.

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
        # A window is one group: it is what shuffles documents, and bounds the memory.
        group_size=0,
        multiple_of=multiple_of,
        max_documents=max_documents,
    )
    pack([], overlong=overlong)  # checks the arguments before a document is read
    options = WindowOptions(
        pack=pack,
        capacity=capacity,
        window_tokens=buffer_rows * capacity,
        overlong=overlong,
        vocab_size=vocab_size,
        seed=seed,
        columns=check_columns("pack_stream", columns),
    )
    position = _read_position(cursor)
    return _iterate_steps(open_documents, cursor.batch, position, rows, options)


def count_stream(cursor: Cursor) -> dict[str, int]:
    """Count the documents of a stream before a cursor, up to the end of its last used-up window.

    Returns:
        `documents`; `shortened_documents`, which `overlong` truncated or dropped; `lost_tokens`,
        which it left out.

    Examples:
        >>> count_stream(Cursor(3, (120, 0, 0, 2, 990, 0)))
        {'documents': 120, 'shortened_documents': 2, 'lost_tokens': 990}
    """
    position = _read_position(cursor)
    return {
        "documents": position.document,
        "shortened_documents": position.shortened_documents,
        "lost_tokens": position.lost_tokens,
    }


def make_stream_reader(
    batches_from: Callable[[Cursor], Iterator[StepBatch]],
) -> Callable[[Cursor], StepBatch | None]:
    """Make a function from a cursor to its batch, which reads on from the batch before.

    At any other cursor it opens the source again.

    Args:
        batches_from: Returns an iterator over the batches from a cursor on.

    Returns:
        `make_batch(cursor)`, which returns a batch, or None at the end of the source.

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
        expected = None  # a generator that raised has ended: open the source again after a failure
        batch = next(batches, None)
        # At the end another call with the same cursor must not open the source again.
        expected = cursor if batch is None else batch.cursor
        return batch

    return make_batch


def _read_position(cursor: Cursor) -> Position:
    num_fields = len(attrs.fields(Position))
    # A cursor at the very start has none.
    if len(cursor.stream) not in (0, num_fields):
        raise ValueError(
            f"pack_stream: a cursor of a stream holds {num_fields} integers, got {cursor.stream}: "
            "it is another source's"
        )
    return Position(*cursor.stream)


def _iterate_steps(
    open_documents: OpenDocuments,
    batch: int,
    position: Position,
    rows: int,
    options: WindowOptions,
) -> Iterator[StreamStep]:
    step_rows: list[tuple[Window, IntArray]] = []
    last: Window | None = None
    # Rows that the step in the making still needs.
    num_missing = rows
    # Rows of the first window that were used before the cursor was saved.
    num_used = position.rows
    # The window is packed from its beginning, although some of its rows are used.
    start = attrs.evolve(position, rows=0, window_hash=0)
    for window in iterate_windows(open_documents(start.document), start, options):
        if num_used:
            _check_window(window, position)
        while num_used < len(window.order):
            # Of this window, up to the end of the step: the next window may fill the rest.
            chosen = window.order[num_used : num_used + num_missing]
            step_rows.append((window, chosen))
            num_used += len(chosen)
            num_missing -= len(chosen)
            if not num_missing:
                batch += 1
                yield _make_step(step_rows, rows, _make_cursor(batch, window, num_used))
                step_rows.clear()
                num_missing = rows
        last = window
        num_used = 0
    if last is None and (position.rows or position.token):
        raise DataError(
            f"pack_stream: the cursor is at token {position.token} of document "
            f"{position.document}, with {position.rows} rows used of the window that begins "
            "there, but the source ends before it: give the documents, the arguments and the seed "
            "of the save, or start from scratch with Cursor()",
            where=f"document {position.document}",
        )
    # The end of the stream: padding rows fill its last step.
    if last is not None and step_rows:
        yield _make_step(step_rows, rows, _make_cursor(batch + 1, last, len(last.order)))


def _make_cursor(batch: int, window: Window, num_used: int) -> Cursor:
    # A window that is used up need not be packed again: the next one begins at its end.
    if num_used == len(window.order):
        return Cursor(batch, attrs.astuple(window.end))
    position = attrs.evolve(window.start, rows=num_used, window_hash=window.hash)
    return Cursor(batch, attrs.astuple(position))


def _check_window(window: Window, saved: Position) -> None:
    """Raise DataError if a window is not the one that the cursor was saved in."""
    if window.hash == saved.window_hash and saved.rows < len(window.order):
        return
    raise DataError(
        f"pack_stream: the cursor is at row {saved.rows} of the window from document "
        f"{saved.document} on, which is no longer the same: now it ends before document "
        f"{window.end.document} and has {len(window.corpus.tokens)} tokens in {len(window.order)} "
        f"rows, with hash {window.hash} instead of {saved.window_hash}: give the documents, the "
        "arguments and the seed of the save, or start from scratch with Cursor()",
        where=f"document {saved.document}",
        got=window.hash,
        want=saved.window_hash,
    )


def _make_step(step_rows: list[tuple[Window, IntArray]], rows: int, cursor: Cursor) -> StreamStep:
    """Copy the pieces of a step's rows, so that their windows can be freed."""
    parts: list[Document] = []
    # The leading 0 of the offsets, then the number of pieces of each row.
    counts = [np.zeros(1, np.int64)]
    for window, chosen in step_rows:
        corpus = window.corpus
        bins = select_rows(window.bins, chosen)
        counts.append(np.diff(bins.offsets))
        tokens = Document(corpus.tokens, corpus.loss_mask, corpus.values)
        # Pieces as ranges of the window's tokens.
        starts = corpus.offsets[bins.documents] + bins.starts
        for start, length in zip(starts.tolist(), bins.lengths.tolist(), strict=True):
            parts.append(tokens[start : start + length])
    # `counts` has a leading 0 besides the rows.
    num_padding_rows = rows + 1 - sum(map(len, counts))
    counts.append(np.zeros(num_padding_rows, np.int64))
    # All windows have the same options: vocabulary, columns, capacity.
    first = step_rows[0][0]
    corpus = copy_to_corpus(parts, first.corpus.vocab_size, first.corpus.columns)
    bins = attrs.evolve(
        first.bins,
        offsets=np.cumsum(np.concatenate(counts)),
        documents=np.arange(len(parts)),
        starts=np.zeros(len(parts), np.int64),
        lengths=corpus.lengths,
    )
    return StreamStep(PackedCorpus(corpus, bins), cursor)
