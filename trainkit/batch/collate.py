"""Collate rows of packed pieces into one `Batch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainkit.batch.loops import (
    DOCUMENT,
    LENGTH,
    NUMBER,
    SIZE,
    SOURCE,
    clear_column,
    copy_column,
    copy_spans,
    lay_out,
    mask_labels,
    write_fields,
)
from trainkit.batch.shards import cut_padding, spans_of_lengths
from trainkit.sampling.integers import integers
from trainkit.types import Batch, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import ArrayLike

    from trainkit.batch.loops import SpanTable
    from trainkit.types import Bins, Column, Corpus, IntArray, Spans


def collate_bins(
    corpus: Corpus,
    bins: Bins,
    indices: ArrayLike,
    *,
    pad_id: int = 0,
    row_positions: ArrayLike | None = None,
) -> Batch:
    """Collate rows of `bins` into one batch on the host, with labels shifted inside each piece.

    Alignment padding follows its piece: the span and the positions of the piece continue, its
    labels do not, and its document id n becomes -2 - n. Row padding fills the rest of a row:
    document -1, positions from 0, and short spans of its own (`shards.cut_padding`), which cost
    attention little. The last token of a piece has no label, and neither has a token whose next one
    is outside the loss mask.

    The columns of the corpus become `extra`. Columns of labels are shifted with the labels and are
    0 where a piece has no next token; columns of tokens stay with their tokens; padding is 0. A
    label outside the loss mask keeps its values.

    A few compiled loops write all rows, one loop per field: 64 rows of 8,192 at 60 to 70 % of the
    speed of only writing five int64 per token.

    Args:
        corpus: The tokens, with `loss_mask`, with `columns` and their `values`, and with `parts`
            where it has these.
        bins: The pieces of each row, made from the lengths of this corpus.
        indices: The rows, integers `[B]`.
        pad_id: The token id of padding.
        row_positions: The position of each row in the global step, `[B]`, from which `token_index`
            follows; by default the rows are the whole step. Index -1 with position -1 is a padding
            row, with -1 for `token_index`.

    Returns:
        A `Batch` of `[B, capacity]`.

    Raises:
        ValueError: An index is not a row of `bins`, `bins` does not fit the corpus, or the batch
            is too large for int32 `cu_seqlens`.
        DataError: A token is negative or outside the vocabulary of the corpus, or an array of the
            corpus has a wrong dtype or shape. The message names the file, the document and the
            offset.

    Examples:
        >>> from trainkit.data import TokenCorpus
        >>> from trainkit.packing import pack_bins
        >>> corpus = TokenCorpus(np.arange(10, 17), np.array([0, 4, 7]))
        >>> batch = collate_bins(corpus, pack_bins(corpus.lengths, 8), [0])
        >>> batch.input_ids.tolist(), batch.labels.tolist()
        ([[10, 11, 12, 13, 14, 15, 16, 0]], [[11, 12, 13, -100, 15, 16, -100, -100]])
        >>> batch.document_ids.tolist(), batch.spans.lengths.tolist()
        ([[0, 0, 0, 0, 1, 1, 1, -1]], [4, 3, 1])
    """
    rows = integers("collate_bins", "indices", indices)
    if rows.ndim != 1 or rows.size == 0:
        raise ValueError(
            "collate_bins: indices must be at least one integer in one dimension, "
            f"got {rows.dtype} {rows.shape}"
        )
    if rows.size * bins.capacity >= 1 << 31:
        raise ValueError(
            f"collate_bins: {rows.size} rows of {bins.capacity} tokens are too many for int32 "
            "cu_seqlens; make smaller microbatches"
        )
    positions = _make_positions(row_positions, rows, len(bins))
    shape = (rows.size, bins.capacity)
    # One array, not five: from 4 MiB on numpy asks for huge pages, which torch does not. Allocating
    # and filling such memory for 64 rows of 8,192, again and again: 660 million tokens a second,
    # against 410 with five torch.empty.
    out = np.empty((5, *shape), np.int64)
    table, spans = _write_rows(out, corpus, bins, rows, positions, pad_id=pad_id)
    columns = _clear_columns(corpus, table, shape)
    for part, part_table in _split_by_part(corpus, table):
        _copy_tokens(out, part, part_table)
        for name, (column, values) in columns.items():
            _copy_column(values, part, part_table, name, column)
    input_ids, labels, position_ids, document_ids, token_index = torch.from_numpy(out).unbind()
    extra = {name: torch.from_numpy(values) for name, (_, values) in columns.items()}
    return Batch(input_ids, labels, position_ids, document_ids, token_index, spans, extra)


def _make_positions(row_positions: ArrayLike | None, rows: IntArray, num_rows: int) -> IntArray:
    """Return the positions of rows in the step, after checking rows and positions together."""
    if row_positions is None:
        positions = np.arange(rows.size)
    else:
        positions = integers("collate_bins", "row_positions", row_positions)
    if positions.shape != rows.shape:
        raise ValueError(
            f"collate_bins: row_positions must be [{rows.size}], one per row, got {positions.shape}"
        )
    is_outside = (rows < -1) | (rows >= num_rows) | (positions < -1)
    # Index -1 alone is not a padding row: numpy would read it as the last row.
    wrong = is_outside | ((rows < 0) != (positions < 0))
    if wrong.any():
        raise ValueError(
            f"collate_bins: there are no rows {rows[wrong].tolist()}: bins has {num_rows}, from 0; "
            "a padding row has -1 both as its index and in row_positions, got "
            f"{positions[wrong].tolist()} there"
        )
    return positions


def _write_rows(
    fields: np.ndarray[Any, Any],
    corpus: Corpus,
    bins: Bins,
    rows: IntArray,
    positions: IntArray,
    *,
    pad_id: int,
) -> tuple[SpanTable, Spans]:
    """Write the fields that do not depend on tokens; return the table of spans and the `Spans`."""
    is_flat = getattr(corpus, "parts", None) is None
    # A compiled loop checks everything that could lead outside of an array, and gives the first
    # wrong row; only then its error is worked out.
    table, wrong = lay_out(
        rows,
        _view_read_only(bins.offsets),
        (
            _view_read_only(bins.documents),
            _view_read_only(bins.starts),
            _view_read_only(bins.lengths),
        ),
        _view_read_only(corpus.offsets),
        # Of a concatenated corpus only the parts have tokens; `_split_by_part` checks each of them.
        num_tokens=len(corpus.tokens) if is_flat else int(corpus.offsets[-1]),
        capacity=bins.capacity,
        multiple_of=bins.multiple_of,
    )
    if wrong >= 0:
        row = int(rows[wrong])
        for document, start, length in bins[row]:
            is_known = 0 <= document < len(corpus.offsets) - 1
            if (
                not is_known
                or start + length > corpus.offsets[document + 1] - corpus.offsets[document]
            ):
                raise ValueError(
                    "collate_bins: bins do not fit the corpus, which does not have the "
                    f"{length} tokens of document {document} from {start} on; pack the lengths of "
                    "this corpus"
                )
        raise ValueError(
            f"collate_bins: row {row} of bins, {bins[row]}, does not fit {bins.capacity} tokens in "
            f"multiples of {bins.multiple_of}, or the corpus has fewer tokens than its offsets say"
        )
    write_fields(fields.reshape(5, -1), table, rows, positions, pad_id)
    # Here the padding of a row is one span; for attention it becomes several short ones.
    lengths = cut_padding(table[LENGTH], table[NUMBER] < 0, multiple_of=bins.multiple_of)
    return table, spans_of_lengths(lengths)


def _copy_tokens(fields: np.ndarray[Any, Any], corpus: Corpus, table: SpanTable) -> None:
    """Copy the tokens of spans into the ids and, one place to the left, into the labels."""
    given, spans = _read_spans(corpus.tokens, table)
    tokens, limit = _view_unsigned(given, corpus)
    ids, labels = fields[:2].reshape(2, -1)
    if copy_spans(ids, labels, tokens, spans) >= limit:
        # The loop finds only the largest token, as keeping the place of one would slow it.
        sizes, documents, sources = spans[[SIZE, DOCUMENT, SOURCE]].tolist()
        span, offset = next(
            (span, int(wrong.argmax()))
            for span, (size, source) in enumerate(zip(sizes, sources, strict=True))
            if (wrong := tokens[source : source + size] >= limit).any()
        )
        document = documents[span]
        index = int(table[SOURCE, span]) + offset
        token = int(corpus.tokens[index])
        origin = _describe_source(corpus, document)
        raise DataError(
            f"collate_bins: {origin}, offset {index - corpus.offsets[document]}: token {token} is "
            f"outside the vocabulary, [0, {limit}); write the corpus again with the tokenizer of "
            "this vocabulary",
            where=origin,
            got=token,
            want=limit,
        )
    loss_mask = getattr(corpus, "loss_mask", None)
    if loss_mask is None:
        return
    mask, spans = _read_spans(loss_mask, table)
    if np.shape(loss_mask) != np.shape(corpus.tokens) or mask.dtype not in (np.bool_, np.uint8):
        raise DataError(
            f"collate_bins: {_describe_source(corpus)}: loss_mask must be bool or uint8 for each "
            f"of {len(corpus.tokens)} tokens, got {mask.dtype} {np.shape(loss_mask)}"
        )
    mask_labels(labels, _view_read_only(mask.view(np.uint8)), spans)


def _read_spans(array: Any, table: SpanTable) -> tuple[np.ndarray[Any, Any], SpanTable]:
    """Return an array in memory, and the table of spans in it.

    Of one that is read by ranges (`buckets.RangeArray`) it is the spans alone, in one call, so that
    what is missing of all of them is fetched at the same time.
    """
    if not hasattr(array, "read_spans"):
        return np.asarray(array), table
    sizes = table[SIZE]
    moved = table.copy()
    moved[SOURCE] = np.cumsum(sizes) - sizes
    return array.read_spans(table[SOURCE], sizes), moved


def _split_by_part(corpus: Any, table: SpanTable) -> Iterator[tuple[Corpus, SpanTable]]:
    """Yield each part of a corpus that has some of the spans, with their table within the part."""
    if getattr(corpus, "parts", None) is None:
        yield corpus, table
        return
    firsts = np.asarray(corpus.first_documents)
    # Row padding belongs to no part, and was written already.
    table = np.compress(table[DOCUMENT] >= 0, table, axis=1)
    part_of = np.searchsorted(firsts, table[DOCUMENT], side="right") - 1
    for index in np.unique(part_of).tolist():
        part = corpus.parts[index]
        part_table = np.compress(part_of == index, table, axis=1)
        part_table[DOCUMENT] -= firsts[index]
        # From offsets of the concatenated corpus to places in the part's own tokens, which may
        # begin anywhere in a longer array.
        part_table[SOURCE] -= corpus.offsets[firsts[index]] - part.offsets[0]
        if (part_table[SOURCE] + part_table[SIZE]).max() > len(part.tokens):
            raise DataError(
                f"collate_bins: {_describe_source(part)}: its {len(part.tokens)} tokens are fewer "
                "than its offsets say"
            )
        yield from _split_by_part(part, part_table)


def _clear_columns(
    corpus: Any, table: SpanTable, shape: tuple[int, ...]
) -> dict[str, tuple[Column, np.ndarray[Any, Any]]]:
    """Allocate memory for each column of a corpus, and write 0 where it will have no value."""
    parts = getattr(corpus, "parts", None)
    # All parts declare the same columns, as `concat_corpora` has checked.
    declared: Mapping[str, Column] = getattr(parts[0] if parts else corpus, "columns", {})
    columns = {}
    for name, column in declared.items():
        dtype = _WIDER.get(column.dtype, column.dtype)
        values = np.empty((*shape, *column.inner), dtype)
        # Only the places that no part will write: most of the memory is touched once.
        clear_column(_view_bits(values), table, column.width, int(column.of == "label"))
        columns[name] = column, values
    return columns


_WIDER = {"uint16": "int32", "uint32": "int64"}  # torch has few operators for these dtypes


def _copy_column(
    out: np.ndarray[Any, Any], corpus: Any, table: SpanTable, name: str, column: Column
) -> None:
    """Copy the values of spans, those of labels one place to the left."""
    values = getattr(corpus, "values", {}).get(name)
    shape = (len(corpus.tokens), *column.inner)
    if values is None or values.shape != shape or values.dtype != column.dtype:
        got = "none" if values is None else f"{values.dtype} {values.shape}"
        raise DataError(
            f"collate_bins: {_describe_source(corpus)}: column {name!r} must be {column.dtype} "
            f"{shape}, got {got}",
            got=got,
        )
    # Numbers that are widened are converted by the loop; others are copied as bits of their size,
    # so that the loop is compiled for few types.
    is_widened = column.dtype in _WIDER
    array, spans = _read_spans(values, table)
    source = array if is_widened else _view_bits(array)
    target = out if is_widened else _view_bits(out)
    copy_column(
        target.reshape(-1),
        _view_read_only(source.reshape(-1)),
        spans,
        column.width,
        int(column.of == "label"),
    )


def _view_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View numbers as integers of their size, so that numba compiles a loop once per size."""
    return values.reshape(-1).view(f"i{values.dtype.itemsize}")


def _view_unsigned(
    tokens: np.ndarray[Any, Any], corpus: Corpus
) -> tuple[np.ndarray[Any, Any], int]:
    """View tokens of a corpus as unsigned integers; return them with the bound of their values.

    A negative token then is a large one, so that one comparison finds both kinds of error.
    """
    dtype = tokens.dtype
    if tokens.ndim != 1 or dtype.kind not in "iu" or not dtype.isnative:
        raise DataError(
            f"collate_bins: {_describe_source(corpus)}: tokens must be integers in one dimension, "
            f"in this machine's byte order, got {dtype} {tokens.shape}",
            got=str(dtype),
        )
    # One more than the largest token of the dtype; for uint64 that of int64, as batches are
    # int64.
    limit = 1 << (8 * dtype.itemsize - (dtype.kind == "i" or dtype.itemsize == 8))
    vocab_size = getattr(corpus, "vocab_size", None)
    limit = limit if vocab_size is None else min(limit, vocab_size)
    return _view_read_only(tokens.view(f"u{dtype.itemsize}")), limit


def _describe_source(corpus: Any, document: int | None = None) -> str:
    """Name the files of a corpus, as far as it knows them, and one of its documents."""
    files = list(getattr(corpus, "sources", ()))
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    source = f"file {', '.join(files[:3])}{more}" if files else "a corpus without a file"
    if document is None:
        return source
    names = getattr(corpus, "names", None)
    name = "" if names is None else f" ({names[document]})"
    return f"{source}: document {document}{name}"


def _view_read_only(x: Any) -> np.ndarray[Any, Any]:
    """View an array as read-only: numba compiles a loop separately for writeable arrays."""
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view
