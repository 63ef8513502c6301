"""The compiled loops of `collate_bins`: where the spans of a batch lie, its fields and columns.

Whatever the bins hold, no loop reaches beyond an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainkit.noise.jit import jit
from trainkit.types import IGNORED_LABEL

SpanTable = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""Where the spans of a batch lie and what is in them: a column for each; its rows are named below.

All the padding of a row is one column here; attention is told of shorter spans (`cut_padding`).

`BEGIN`: where a span begins in the batch. `LENGTH`: its length with padding. `SIZE`: its tokens (0
for row padding). `NUMBER`: its document id (-1 for row padding). `DOCUMENT` and `SOURCE`: the
document in the corpus, and the token in the corpus from which it begins.
"""
BEGIN, LENGTH, SIZE, NUMBER, DOCUMENT, SOURCE = range(6)


@jit
def lay_out(  # noqa: PLR0917 (an array is a parameter)
    rows: Any,
    offsets: Any,
    pieces: Any,
    corpus_offsets: Any,
    num_tokens: int,
    capacity: int,
    multiple_of: int,
) -> Any:
    """Return the `SpanTable` of rows, and -1 or the number of the first row that is wrong.

    The spans of a row are its pieces as they come, then what is left of it.
    """
    documents, starts, lengths = pieces
    count = rows.size
    for number in range(rows.size):
        if rows[number] < -1 or rows[number] >= offsets.size - 1:
            return np.empty((6, 0), np.int64), number
        if rows[number] >= 0:
            first, end = offsets[rows[number]], offsets[rows[number] + 1]
            if first < 0 or end < first or end > documents.size:
                return np.empty((6, 0), np.int64), number
            count += end - first
    table = np.empty((6, count), np.int64)
    span = 0
    for number in range(rows.size):
        row, filled = rows[number], 0
        first, end = (offsets[row], offsets[row + 1]) if row >= 0 else (0, 0)
        for piece in range(first, end):
            document, start, length = documents[piece], starts[piece], lengths[piece]
            if document < 0 or document >= corpus_offsets.size - 1 or start < 0 or length < 1:
                return table, number
            source = corpus_offsets[document] + start
            padded = (length + multiple_of - 1) // multiple_of * multiple_of
            last = min(corpus_offsets[document + 1], num_tokens)
            if source < 0 or source + length > last or filled + padded > capacity:
                return table, number
            table[BEGIN, span], table[LENGTH, span] = number * capacity + filled, padded
            table[SIZE, span], table[NUMBER, span] = length, piece - first
            table[DOCUMENT, span], table[SOURCE, span] = document, source
            filled += padded
            span += 1
        if filled < capacity:
            table[BEGIN, span], table[LENGTH, span] = (
                number * capacity + filled,
                capacity - filled,
            )
            table[SIZE, span], table[NUMBER, span] = 0, -1
            table[DOCUMENT, span], table[SOURCE, span] = -1, 0
            span += 1
    return table[:, :span].copy(), -1


@jit
def write_fields(fields: Any, table: Any, rows: Any, positions: Any, pad_id: int) -> None:
    """Write all that does not depend on tokens."""
    _write_index(fields[4], rows, positions)
    write_spans(fields[:4], table, pad_id)


@jit
def write_spans(fields: Any, table: Any, pad_id: int) -> None:
    """Write positions, documents and padding."""
    ids, labels, position_ids, document_ids = fields
    begins, ends = table[BEGIN], table[BEGIN] + table[LENGTH]
    for span in range(begins.size):
        part = position_ids[begins[span] : ends[span]]
        for i in range(part.size):
            part[i] = i
    for span in range(begins.size):
        number, end = table[NUMBER, span], begins[span] + table[SIZE, span]
        document_ids[begins[span] : end] = number
        document_ids[end : ends[span]] = -2 - number  # -1 for that of a row, whose number is -1
    for span in range(begins.size):
        size = table[SIZE, span]
        ids[begins[span] + size : ends[span]] = pad_id
        labels[begins[span] + max(size - 1, 0) : ends[span]] = IGNORED_LABEL


@jit
def _write_index(token_index: Any, rows: Any, positions: Any) -> None:
    capacity = token_index.size // rows.size
    for row in range(rows.size):
        part, first = token_index[row * capacity : (row + 1) * capacity], positions[row] * capacity
        if rows[row] < 0:
            part[:] = -1
        else:
            for i in range(part.size):
                part[i] = first + i


@jit
def copy_spans(ids: Any, labels: Any, tokens: Any, table: Any) -> Any:
    """Copy tokens into ids and, one place to the left, into labels; return the largest."""
    largest = tokens.dtype.type(0)
    for span in range(table.shape[1]):
        begin, size, first = table[BEGIN, span], table[SIZE, span], table[SOURCE, span]
        part, source = ids[begin : begin + size], tokens[first : first + size]
        for i in range(part.size):
            part[i] = source[i]
            largest = max(largest, source[i])
        part, source = labels[begin : begin + max(size - 1, 0)], source[1:]
        for i in range(part.size):
            part[i] = source[i]
    return largest


@jit
def mask_labels(labels: Any, trained: Any, table: Any) -> None:
    """Ignore the labels that ask for tokens which are not trained."""
    for span in range(table.shape[1]):
        begin, size, first = table[BEGIN, span], table[SIZE, span], table[SOURCE, span]
        part = labels[begin : begin + max(size - 1, 0)]
        asked_for = trained[first + 1 : first + size]
        for i in range(part.size):
            part[i] = part[i] if asked_for[i] else IGNORED_LABEL


@jit
def clear_column(out: Any, table: Any, width: int, shift: int) -> None:
    """Write 0 where a column of `width` values a token has none: the last `shift` of each piece."""
    for span in range(table.shape[1]):
        begin, end = table[BEGIN, span], table[BEGIN, span] + table[LENGTH, span]
        out[(begin + max(table[SIZE, span] - shift, 0)) * width : end * width] = 0


@jit
def copy_column(out: Any, values: Any, table: Any, width: int, shift: int) -> None:
    """Copy a column's values, `width` a token, `shift` places to the left inside each piece."""
    for span in range(table.shape[1]):
        begin, first = table[BEGIN, span] * width, (table[SOURCE, span] + shift) * width
        size = max(table[SIZE, span] - shift, 0) * width
        part, source = out[begin : begin + size], values[first : first + size]
        for i in range(part.size):
            part[i] = source[i]
