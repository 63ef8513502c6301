"""The compiled loops of `collate_bins` and `batch_hash`.

No loop reads or writes outside an array, whatever the bins hold.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from trainkit.noise.hashing import mix_bits
from trainkit.noise.jit import jit
from trainkit.types import IGNORED_LABEL

SpanTable = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""The spans of a batch, one column each, with the rows that are named below.

The padding of a row is one column here; attention gets shorter spans of it (`cut_padding`).

`START`: the first token of a span in the batch. `LENGTH`: its length with padding. `SIZE`: its
number of tokens, 0 for row padding. `NUMBER`: its document id, -1 for row padding. `DOCUMENT` and
`SOURCE`: its document in the corpus, and its first token in the corpus.
"""
START, LENGTH, SIZE, NUMBER, DOCUMENT, SOURCE = range(6)


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
    """Return the `SpanTable` of rows, and the index of the first row that is wrong, or -1.

    The spans of a row are its pieces in order, then its padding.
    """
    documents, starts, lengths = pieces
    # The first pass counts spans, at most one of padding in each row, so that memory is allocated
    # once.
    count = rows.size
    for index in range(rows.size):
        # Compiled code reads outside of an array without an error, so every index is checked
        # before.
        if rows[index] < -1 or rows[index] >= offsets.size - 1:
            return np.empty((6, 0), np.int64), index
        if rows[index] >= 0:
            first, end = offsets[rows[index]], offsets[rows[index] + 1]
            if first < 0 or end < first or end > documents.size:
                return np.empty((6, 0), np.int64), index
            count += end - first
    table = np.zeros((6, count), np.int64)
    # The second pass writes them; a row's padding comes after its pieces.
    span = 0
    for index in range(rows.size):
        row = rows[index]
        filled = 0
        first, end = (offsets[row], offsets[row + 1]) if row >= 0 else (0, 0)
        for piece in range(first, end):
            document, start, length = documents[piece], starts[piece], lengths[piece]
            if document < 0 or document >= corpus_offsets.size - 1 or start < 0 or length < 1:
                return table, index
            source = corpus_offsets[document] + start
            padded = (length + multiple_of - 1) // multiple_of * multiple_of
            # A corpus whose file was cut has fewer tokens than its offsets say.
            last = min(corpus_offsets[document + 1], num_tokens)
            if source < 0 or source + length > last or filled + padded > capacity:
                return table, index
            table[START, span] = index * capacity + filled
            table[LENGTH, span] = padded
            table[SIZE, span] = length
            table[NUMBER, span] = piece - first
            table[DOCUMENT, span] = document
            table[SOURCE, span] = source
            filled += padded
            span += 1
        if filled < capacity:
            table[START, span] = index * capacity + filled
            table[LENGTH, span] = capacity - filled
            table[NUMBER, span] = -1
            table[DOCUMENT, span] = -1
            span += 1
    # Rows that are full have no span of padding, so the table may be shorter than planned.
    return table[:, :span].copy(), -1


@jit
def write_fields(fields: Any, table: Any, rows: Any, positions: Any, pad_id: int) -> None:
    """Write everything that does not depend on tokens."""
    write_spans(fields[:4], table, pad_id)
    token_index = fields[4]
    capacity = token_index.size // rows.size
    for row in range(rows.size):
        target = token_index[row * capacity : (row + 1) * capacity]
        # `token_index` counts the tokens of the global step, in which each row has a position.
        first = positions[row] * capacity
        if rows[row] < 0:
            target[:] = -1
        else:
            for i in range(target.size):
                target[i] = first + i


@jit
def write_spans(fields: Any, table: Any, pad_id: int) -> None:
    """Write positions, document ids and padding."""
    # One loop per field: a loop that writes to one array at a time runs at the memory's speed.
    ids, labels, position_ids, document_ids = fields
    starts = table[START]
    ends = table[START] + table[LENGTH]
    for span in range(starts.size):
        positions = position_ids[starts[span] : ends[span]]
        for i in range(positions.size):
            positions[i] = i
    for span in range(starts.size):
        number = table[NUMBER, span]
        end = starts[span] + table[SIZE, span]
        document_ids[starts[span] : end] = number
        document_ids[end : ends[span]] = -2 - number  # -1 in row padding, whose number is -1
    for span in range(starts.size):
        size = table[SIZE, span]
        ids[starts[span] + size : ends[span]] = pad_id
        # The last token of a piece predicts nothing; `max` is for row padding, whose size is 0.
        labels[starts[span] + max(size - 1, 0) : ends[span]] = IGNORED_LABEL


@jit
def copy_spans(ids: Any, labels: Any, tokens: Any, table: Any) -> Any:
    """Copy tokens into ids and, one place to the left, into labels; return the largest token."""
    # In the tokens' dtype: numba makes a float64 of uint64 and int64.
    largest = tokens.dtype.type(0)
    for span in range(table.shape[1]):
        start = table[START, span]
        size = table[SIZE, span]
        first = table[SOURCE, span]
        target = ids[start : start + size]
        source = tokens[first : first + size]
        for i in range(target.size):
            target[i] = source[i]
            largest = max(largest, source[i])
        target = labels[start : start + max(size - 1, 0)]
        source = source[1:]
        for i in range(target.size):
            target[i] = source[i]
    return largest


@jit
def mask_labels(labels: Any, trained: Any, table: Any) -> None:
    """Ignore the labels that are outside the loss mask."""
    for span in range(table.shape[1]):
        start = table[START, span]
        size = table[SIZE, span]
        first = table[SOURCE, span]
        target = labels[start : start + max(size - 1, 0)]
        # Place i has token i + 1 as its label, so it takes that token's mask.
        mask = trained[first + 1 : first + size]
        for i in range(target.size):
            target[i] = target[i] if mask[i] else IGNORED_LABEL


@jit
def clear_column(out: Any, table: Any, width: int, shift: int) -> None:
    """Write 0 where a column has no value: in padding and at the last `shift` tokens of a piece.

    A column has `width` values per token.
    """
    for span in range(table.shape[1]):
        start = table[START, span]
        end = start + table[LENGTH, span]
        out[(start + max(table[SIZE, span] - shift, 0)) * width : end * width] = 0


@jit
def copy_column(out: Any, values: Any, table: Any, width: int, shift: int) -> None:
    """Copy the values of a column, `width` per token, `shift` places to the left in each piece."""
    for span in range(table.shape[1]):
        start = table[START, span] * width
        # `shift` is 1 for a column of labels, and 0 for one of tokens.
        first = (table[SOURCE, span] + shift) * width
        size = max(table[SIZE, span] - shift, 0) * width
        target = out[start : start + size]
        source = values[first : first + size]
        for i in range(target.size):
            target[i] = source[i]


@partial(jit, uses=(mix_bits,))
def sum_field_hashes(keys: Any, values: Any, token_index: Any, document_ids: Any) -> np.uint64:
    """Return the sum of the hashes of fields `[fields, tokens]`, but for row padding."""
    total = np.uint64(0)
    for field in range(keys.size):
        for i in range(token_index.size):
            # The constant is `GOLDEN`.
            place = keys[field] + np.uint64(token_index[i]) * np.uint64(0x9E3779B97F4A7C15)
            # The inner mix gives every place a key of its own, so that swapped values change the
            # sum.
            if document_ids[i] != -1:
                total += mix_bits(mix_bits(place) + np.uint64(values[field, i]))
    return total
