"""From rows of pieces to a batch: what is checked, and what is said when it is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

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
    """Make one batch of rows of `bins`, on the host, labels already shifted inside each piece.

    A piece is followed by its alignment padding: its span and its positions go on, its labels do
    not, and its document n becomes -2 - n. What is left of a row is row padding: document -1,
    positions from 0, short spans of its own (`shards.cut_padding`), which cost attention little.
    The last token of a piece has no label, and no label asks for a token that is not trained.

    The columns of the corpus become `extra`: those of labels are shifted with the labels and 0
    where there is no next token of the piece, those of tokens stand with their tokens; padding is
    0. A label that is not trained keeps what belongs to it.

    A few compiled loops write all rows, one loop per field: 64 rows of 8,192 at six to seven tenths
    of the speed at which five int64 per token can be written at all.

    Args:
        corpus: Where the tokens are; its `trained`, its `columns` with their `values`, and its
            `parts` count where it has them.
        bins: Which piece is in which row; made from this corpus' lengths.
        indices: The rows, integers `[B]`.
        pad_id: The token id of padding.
        row_positions: The position of each row in the global step, `[B]`, from which `token_index`
            follows; by default the rows are the whole step. A row of index -1 and position -1 is
            blank: row padding throughout, with -1 for `token_index`.

    Returns:
        A `Batch` of `[B, capacity]`.

    Raises:
        ValueError: An index is no row of `bins`, `bins` does not fit the corpus, or the batch is
            too large for int32 `cu_seqlens`.
        DataError: A token is negative or outside the corpus' vocabulary, or the corpus' arrays are
            not what they must be. The message names the file, the document and the offset.

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
    rows = _checked_rows(indices, bins)
    positions = _checked_positions(row_positions, rows, len(bins))
    # In one piece: from 4 MiB on numpy asks for huge pages, which torch does not. To take and fill
    # such memory for 64 rows of 8,192, again and again: 660 million tokens a second, 410 in five
    # torch.empty.
    shape = (5, rows.size, bins.capacity)
    fields = np.empty(shape, np.int64)
    table, spans_ = _write_rows(fields, corpus, bins, rows, positions, pad_id=pad_id)
    columns = _clear_columns(corpus, table, shape[1:])
    for part, own in _by_part(corpus, table):
        _copy_tokens(fields, part, own)
        for name, (column, values) in columns.items():
            _copy_column(values, part, own, name, column)
    input_ids, labels, position_ids, document_ids, token_index = torch.from_numpy(fields).unbind()
    extra = {name: torch.from_numpy(values) for name, (_, values) in columns.items()}
    return Batch(input_ids, labels, position_ids, document_ids, token_index, spans_, extra)


def _checked_rows(indices: ArrayLike, bins: Bins) -> IntArray:
    chosen = integers("collate_bins", "indices", indices)
    if chosen.ndim != 1 or chosen.size == 0:
        must = "indices must be at least one integer in one dimension"
        raise ValueError(f"collate_bins: {must}, got {chosen.dtype} {chosen.shape}")
    if chosen.size * bins.capacity >= 1 << 31:
        what = f"{chosen.size} rows of {bins.capacity} tokens are too many for int32 cu_seqlens"
        raise ValueError(f"collate_bins: {what}; make smaller microbatches")
    return chosen


def _checked_positions(row_positions: ArrayLike | None, rows: IntArray, num_rows: int) -> IntArray:
    """Return the positions; a blank row is one that is meant as such, not a row from the end."""
    if row_positions is None:
        positions = np.arange(rows.size)
    else:
        positions = integers("collate_bins", "row_positions", row_positions)
    if positions.shape != rows.shape:
        must = f"must be [{rows.size}], one per row, got {positions.shape}"
        raise ValueError(f"collate_bins: row_positions {must}")
    wrong = (rows < -1) | (rows >= num_rows) | ((rows < 0) != (positions < 0)) | (positions < -1)
    if wrong.any():
        what = f"there are no rows {rows[wrong].tolist()}: bins has {num_rows}, from 0"
        mend = "a blank row has -1 both as its index and in row_positions"
        raise ValueError(f"collate_bins: {what}; {mend}, got {positions[wrong].tolist()} there")
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
    """Lay out the spans of rows, also as `Spans`, and write all that does not depend on tokens."""
    flat = getattr(corpus, "parts", None) is None
    table, wrong = lay_out(
        rows,
        _read_only(bins.offsets),
        (_read_only(bins.documents), _read_only(bins.starts), _read_only(bins.lengths)),
        _read_only(corpus.offsets),
        num_tokens=len(corpus.tokens) if flat else int(corpus.offsets[-1]),
        capacity=bins.capacity,
        multiple_of=bins.multiple_of,
    )
    if wrong >= 0:
        _refuse_row(corpus, bins, rows, wrong)
    write_fields(fields.reshape(5, -1), table, rows, positions, pad_id)
    lengths = cut_padding(table[LENGTH], table[NUMBER] < 0, multiple_of=bins.multiple_of)
    return table, spans_of_lengths(lengths)


def _refuse_row(corpus: Corpus, bins: Bins, rows: IntArray, number: int) -> NoReturn:
    """Say what is wrong with a row that cannot be collated."""
    row = int(rows[number])
    for document, start, length in bins[row]:
        known = 0 <= document < len(corpus.offsets) - 1
        if not known or start + length > corpus.offsets[document + 1] - corpus.offsets[document]:
            lacks = f"the {length} tokens of document {document} from {start} on"
            what = f"bins do not fit the corpus, which does not have {lacks}"
            raise ValueError(f"collate_bins: {what}; pack this corpus' own lengths")
    room = f"{bins.capacity} tokens in multiples of {bins.multiple_of}"
    what = f"row {row} of bins, {bins[row]}, does not fit {room}"
    raise ValueError(f"collate_bins: {what}, or the corpus has fewer tokens than its offsets say")


def _copy_tokens(fields: np.ndarray[Any, Any], corpus: Corpus, table: SpanTable) -> None:
    """Copy the tokens of spans into the ids and, one place to the left, into the labels."""
    tokens, limit = _checked_tokens(corpus)
    ids, labels = fields[:2].reshape(2, -1)
    if copy_spans(ids, labels, tokens, table) >= limit:
        _refuse_token(corpus, table)
    trained = getattr(corpus, "trained", None)
    if trained is not None:
        mask_labels(labels, _checked_mask(corpus, trained), table)


def _by_part(corpus: Any, table: SpanTable) -> Iterator[tuple[Corpus, SpanTable]]:
    """Yield each part that has some of the spans, with these as they lie in the part."""
    if getattr(corpus, "parts", None) is None:
        yield corpus, table
        return
    firsts, offsets = np.asarray(corpus.first_documents), corpus.offsets
    table = np.compress(table[DOCUMENT] >= 0, table, axis=1)
    part_of = np.searchsorted(firsts, table[DOCUMENT], side="right") - 1
    for number in np.unique(part_of).tolist():
        part, own = corpus.parts[number], np.compress(part_of == number, table, axis=1)
        own[DOCUMENT] -= firsts[number]
        own[SOURCE] -= offsets[firsts[number]] - part.offsets[0]
        if (own[SOURCE] + own[SIZE]).max() > len(part.tokens):
            what = f"its {len(part.tokens)} tokens are fewer than its offsets say"
            raise DataError(f"collate_bins: {_name_of(part)}: {what}")
        yield from _by_part(part, own)


def _clear_columns(
    corpus: Any, table: SpanTable, shape: tuple[int, ...]
) -> dict[str, tuple[Column, np.ndarray[Any, Any]]]:
    """Return the columns of a corpus, each with memory for a batch, 0 where it has no value."""
    parts = getattr(corpus, "parts", None)
    declared: Mapping[str, Column] = getattr(parts[0] if parts else corpus, "columns", {})
    found = {}
    for name, column in declared.items():
        values = np.empty((*shape, *column.inner), _WIDER.get(column.dtype, column.dtype))
        clear_column(_bits_of(values), table, column.width, int(column.of == "label"))
        found[name] = column, values
    return found


_WIDER = {"uint16": "int32", "uint32": "int64"}  # torch has next to no functions of these two


def _copy_column(
    out: np.ndarray[Any, Any], corpus: Any, table: SpanTable, name: str, column: Column
) -> None:
    """Copy the values of spans, those of labels one place to the left."""
    values, want = getattr(corpus, "values", {}).get(name), (len(corpus.tokens), *column.inner)
    if values is None or values.shape != want or values.dtype != column.dtype:
        got = "none" if values is None else f"{values.dtype} {values.shape}"
        what = f"column {name!r} must be {column.dtype} {want}, got {got}"
        raise DataError(f"collate_bins: {_name_of(corpus)}: {what}", got=got)
    source = values if column.dtype in _WIDER else _bits_of(values)
    target = out if column.dtype in _WIDER else _bits_of(out)
    width, shift = column.width, int(column.of == "label")
    copy_column(target.reshape(-1), _read_only(source.reshape(-1)), table, width, shift)


def _bits_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return numbers as integers of their size, so that a loop is compiled once for a size."""
    return values.reshape(-1).view(f"i{values.dtype.itemsize}")


def _checked_tokens(corpus: Corpus) -> tuple[np.ndarray[Any, Any], int]:
    """Return the tokens as unsigned integers, and the number they must be below.

    A negative token is a large one then, so that one comparison finds both kinds.
    """
    tokens = np.asarray(corpus.tokens)
    kind = tokens.dtype
    if tokens.ndim != 1 or kind.kind not in "iu" or not kind.isnative:
        must = "tokens must be integers in one dimension, in this machine's byte order"
        what = f"{_name_of(corpus)}: {must}, got {kind} {tokens.shape}"
        raise DataError(f"collate_bins: {what}", got=str(kind))
    limit = 1 << (8 * kind.itemsize - (kind.kind == "i" or kind.itemsize == 8))
    vocab_size = getattr(corpus, "vocab_size", None)
    limit = limit if vocab_size is None else min(limit, vocab_size)
    return _read_only(tokens.view(f"u{kind.itemsize}")), limit


def _checked_mask(corpus: Corpus, trained: Any) -> np.ndarray[Any, Any]:
    mask = np.asarray(trained)
    if mask.shape != np.shape(corpus.tokens) or mask.dtype not in (np.bool_, np.uint8):
        must = f"trained must be bool or uint8 for each of {len(corpus.tokens)} tokens"
        what = f"{_name_of(corpus)}: {must}, got {mask.dtype} {mask.shape}"
        raise DataError(f"collate_bins: {what}")
    return _read_only(mask.view(np.uint8))


def _refuse_token(corpus: Corpus, table: SpanTable) -> NoReturn:
    """Name the first token that is negative or outside the vocabulary."""
    tokens, limit = _checked_tokens(corpus)
    sizes, documents, sources = table[[SIZE, DOCUMENT, SOURCE]].tolist()
    span, offset = next(
        (span, int(wrong.argmax()))
        for span, (size, source) in enumerate(zip(sizes, sources, strict=True))
        if (wrong := tokens[source : source + size] >= limit).any()
    )
    document, place = documents[span], sources[span] + offset
    token, name = int(corpus.tokens[place]), _name_of(corpus, document)
    what = f"token {token} is outside the vocabulary, [0, {limit})"
    what = f"{name}, offset {place - corpus.offsets[document]}: {what}"
    mend = "write the corpus again with the tokenizer of this vocabulary"
    raise DataError(f"collate_bins: {what}; {mend}", where=name, got=token, want=limit)


def _name_of(corpus: Any, document: int | None = None) -> str:
    """Name the files of a corpus, as far as it knows them, and one of its documents."""
    files = list(getattr(corpus, "sources", ()))
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    whole = f"file {', '.join(files[:3])}{more}" if files else "a corpus without a file"
    if document is None:
        return whole
    names = getattr(corpus, "names", None)
    named = "" if names is None else f" ({names[document]})"
    return f"{whole}: document {document}{named}"


def _read_only(x: Any) -> np.ndarray[Any, Any]:
    """Return a view that cannot be written: numba compiles for such arrays apart from others."""
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view
