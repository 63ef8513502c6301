"""From rows of pieces to tensors, and what is read off a batch without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import numpy as np
import torch

from trainkit.hashing import GOLDEN, key_of
from trainkit.jit import jit
from trainkit.layout import spans_of_runs
from trainkit.noise import mix_tensor, signed
from trainkit.types import IGNORED_LABEL, Batch, DataError, Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike
    from torch import Tensor

    from trainkit.types import Bins, Corpus, IntArray

Layout = np.ndarray[tuple[int, int], np.dtype[np.int64]]

# The rows of the table that says where the spans of a batch lie and what is in them.
_BEGIN, _LENGTH, _SIZE, _NUMBER, _DOCUMENT, _SOURCE = range(6)


def collate_bins(
    corpus: Corpus,
    bins: Bins,
    indices: ArrayLike,
    *,
    pad_id: int = 0,
    row_positions: ArrayLike | None = None,
    out: np.ndarray[Any, Any] | None = None,
) -> Batch:
    """Make one batch of rows of `bins`, on the host, labels already shifted inside each piece.

    A piece is followed by its alignment padding: its document and its positions go on, its labels
    do not. What is left of a row is row padding: document -1, positions from 0, a span of its own.
    The last token of a piece has no label, and no label asks for a token that is not trained.

    A few compiled loops write all rows, one loop per field: 64 rows of 8,192 at six to seven tenths
    of the speed at which five int64 per token can be written at all.

    Args:
        corpus: Where the tokens are; its `trained` and `parts` count where it has them.
        bins: Which piece is in which row; made from this corpus' lengths.
        indices: The rows, integers `[B]`; -1 makes a blank row, which is row padding throughout.
        pad_id: The token id of padding.
        row_positions: The position of each row in the global step, `[B]`, from which `token_index`
            follows; by default the rows are the whole step. Tokens of a blank row have index -1.
        out: int64 `[5, B, capacity]`, C-contiguous, that the batch's tensors shall lie in; new
            memory by default. New memory comes in pages that the system has to clear first, which
            can take longer than all the rest.

    Returns:
        A `Batch` of `[B, capacity]`.

    Raises:
        ValueError: An index is not a row of `bins`, `bins` does not fit the corpus, the batch is
            too large for int32 `cu_seqlens`, or `out` is not as above.
        DataError: A token is negative or outside the corpus' vocabulary, or the corpus' arrays are
            no arrays of integers. The message names the file, the document and the offset.

    Examples:
        >>> from trainkit.corpora import TokenCorpus
        >>> from trainkit.packing import pack_bins
        >>> corpus = TokenCorpus(np.arange(10, 17), np.array([0, 4, 7]))
        >>> batch = collate_bins(corpus, pack_bins(corpus.lengths, 8), [0])
        >>> batch.input_ids.tolist(), batch.labels.tolist()
        ([[10, 11, 12, 13, 14, 15, 16, 0]], [[11, 12, 13, -100, 15, 16, -100, -100]])
        >>> batch.document_ids.tolist(), batch.spans.lengths.tolist()
        ([[0, 0, 0, 0, 1, 1, 1, -1]], [4, 3, 1])
    """
    rows = _checked_rows(indices, bins)
    positions = _checked_positions(row_positions, rows)
    # In one piece: from 4 MiB on numpy asks for huge pages, which torch does not. To take and fill
    # such memory for 64 rows of 8,192, again and again: 660 million tokens a second, 410 in five
    # torch.empty.
    shape = (5, rows.size, bins.capacity)
    fields = np.empty(shape, np.int64) if out is None else _checked_out(out, shape)
    layout, spans_ = _write_rows(fields, corpus, bins, rows, positions, pad_id=pad_id)
    _copy_tokens(fields, corpus, layout)
    input_ids, labels, position_ids, document_ids, token_index = torch.from_numpy(fields).unbind()
    return Batch(input_ids, labels, position_ids, document_ids, token_index, spans_)


def split_batch(batch: Batch, rows: int) -> list[Batch]:
    """Cut a batch into microbatches of `rows` rows each; their tensors are views of the batch's.

    Args:
        batch: `[B, S]`, where `rows` divides B.
        rows: Rows in each microbatch.

    Returns:
        B / rows batches, in order.

    Raises:
        ValueError: `rows` does not divide B.

    Examples:
        >>> [part.spans.lengths.tolist() for part in split_batch(blank_batch(3, 4), 1)]
        [[4], [4], [4]]
    """
    num_rows, length = batch.input_ids.shape
    if rows < 1 or num_rows % rows:
        raise ValueError(f"split_batch: {num_rows} rows do not divide into parts of {rows}")
    ends = np.cumsum(batch.spans.lengths)
    cuts = [0, *(np.searchsorted(ends, np.arange(rows, num_rows + 1, rows) * length) + 1).tolist()]
    tensors = {name: x.split(rows) for name, x in batch.items() if isinstance(x, torch.Tensor)}
    parts = []
    for part, (first, end) in enumerate(pairwise(cuts)):
        lengths = batch.spans.lengths[first:end]
        bounds = batch.spans.cu_seqlens[first : end + 1] - part * rows * length
        own = {name: tensors[name][part] for name in tensors if name not in batch.extra}
        extra = {name: tensors[name][part] for name in batch.extra}
        parts.append(Batch(**own, spans=Spans(bounds, lengths, int(lengths.max())), extra=extra))
    return parts


def blank_batch(rows: int, length: int, *, pad_id: int = 0) -> Batch:
    """Return a batch of row padding: it adds 0 to every sum.

    Examples:
        >>> batch = blank_batch(1, 4)
        >>> batch.labels.tolist(), batch.document_ids.tolist(), batch.spans.lengths.tolist()
        ([[-100, -100, -100, -100]], [[-1, -1, -1, -1]], [4])
    """
    if rows < 1 or length < 1:
        raise ValueError(
            f"blank_batch: rows and length must be at least 1, got {rows} and {length}"
        )
    return Batch(
        torch.full((rows, length), pad_id),
        torch.full((rows, length), IGNORED_LABEL),
        torch.arange(length).repeat(rows, 1),
        torch.full((rows, length), -1),
        torch.full((rows, length), -1),
        _spans(np.full(rows, length)),
    )


def shift_labels(input_ids: Tensor, document_ids: Tensor) -> Tensor:
    """Return the next token of each token of a document: -100 where there is none.

    That is where the document id is -1, where the next id differs, and in the last column. For rows
    that `collate_bins` did not make; alignment padding, which shares its piece's id, cannot be told
    from tokens here.

    Args:
        input_ids: int64 `[B, S]`.
        document_ids: int64 `[B, S]`, -1 for padding.

    Returns:
        int64 `[B, S]`.

    Raises:
        ValueError: The shapes differ, or are not `[B, S]`.

    Examples:
        >>> shift_labels(torch.tensor([[5, 6, 7, 8, 0]]), torch.tensor([[0, 0, 1, 1, -1]])).tolist()
        [[6, -100, 8, -100, -100]]
    """
    if input_ids.shape != document_ids.shape or input_ids.ndim != 2:
        raise ValueError(
            "shift_labels: input_ids and document_ids must have one shape [B, S], got "
            f"{tuple(input_ids.shape)} and {tuple(document_ids.shape)}"
        )
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    here, following = document_ids[:, :-1], document_ids[:, 1:]
    goes_on = (here == following) & (here >= 0)
    labels[:, :-1] = torch.where(goes_on, input_ids[:, 1:], IGNORED_LABEL)
    return labels


def spans(document_ids: Tensor) -> Spans:
    """Return the spans of rows whose documents are numbered: the runs of equal ids in each row.

    This needs host data, because `Spans` has lengths on the host: call it where the batch is made.

    Args:
        document_ids: int64 `[B, S]` on the CPU.

    Returns:
        The `Spans` over the flattened rows.

    Raises:
        ValueError: `document_ids` is on another device, or not `[B, S]`.

    Examples:
        >>> spans(torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0]])).lengths
        array([2, 1, 1, 4])
    """
    if document_ids.device.type != "cpu" or document_ids.ndim != 2:
        raise ValueError(
            "spans: document_ids must be [B, S] on the host, got "
            f"{tuple(document_ids.shape)} on {document_ids.device}"
        )
    return spans_of_runs(document_ids.numpy())


def count_valid_tokens(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return how many tokens of a step this rank trains on, without a host sync.

    Args:
        microbatches: `Batch`es, or any mappings with "labels".

    Returns:
        An int64 scalar on the labels' device; sum it over the `loss` axis for the denominator of
        the step.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> count_valid_tokens([{"labels": torch.tensor([[4, -100]])}, blank_batch(1, 2)])
        tensor(1)
    """
    _check_microbatches("count_valid_tokens", microbatches)
    # Added one by one, which for the usual one costs nothing; stacking costs 3 us on a CPU.
    return functools.reduce(
        torch.add, [(batch["labels"] != IGNORED_LABEL).sum() for batch in microbatches]
    )


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """Return the batch with all its tensors on a device; itself when it is there already.

    Examples:
        >>> batch = blank_batch(1, 4)
        >>> to_device(batch, "cpu") is batch
        True
    """
    device = torch.device(device)
    # A copy to the host that does not block may be read before it has arrived.
    non_blocking = device.type != "cpu"
    tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
    if all(x.device == device for x in tensors) and device.type == "cpu":
        return batch
    return map_tensors(batch, lambda x: x.to(device, non_blocking=non_blocking))


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with a function applied to each of its tensors, `cu_seqlens` among them.

    Examples:
        >>> map_tensors(blank_batch(1, 2), lambda x: x + 1).labels
        tensor([[-99, -99]])
    """
    return Batch(
        function(batch.input_ids),
        function(batch.labels),
        function(batch.position_ids),
        function(batch.document_ids),
        function(batch.token_index),
        attrs.evolve(batch.spans, cu_seqlens=function(batch.spans.cu_seqlens)),
        {name: function(value) for name, value in batch.extra.items()},
    )


def batch_hash(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the hash of what a step trains on, on this rank, without a host sync.

    A sum modulo 2^64 over tokens, row padding left out, of a hash of (field, index in the global
    step, value) for input ids, labels and positions. So hashes of ranks and microbatches add up to
    the global batch's, whichever way it was dealt, and blank rows add 0.

    Args:
        microbatches: `Batch`es.

    Returns:
        An int64 scalar on the batches' device, which wraps around; read modulo 2^64.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> batch_hash([blank_batch(2, 4)])
        tensor(0)
    """
    _check_microbatches("batch_hash", microbatches)
    return torch.stack([_hash_of(batch) for batch in microbatches]).sum()


def _hash_of(batch: Mapping[str, Any]) -> Tensor:
    index = batch["token_index"] * signed(GOLDEN)
    total = torch.zeros_like(index)
    for name in ("input_ids", "labels", "position_ids"):
        total += mix_tensor(mix_tensor(index + signed(key_of(name))) + batch[name])
    return torch.where(batch["document_ids"] >= 0, total, 0).sum()


def _check_microbatches(where: str, microbatches: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(microbatches, Mapping) or len(microbatches) == 0:
        raise ValueError(
            f"{where}: microbatches must be a sequence of at least one batch, "
            f"got {'one batch' if len(microbatches) else 'none'}"
        )


def _checked_rows(indices: ArrayLike, bins: Bins) -> IntArray:
    chosen = _integers("indices", indices)
    if chosen.ndim != 1 or chosen.size == 0:
        raise ValueError(
            "collate_bins: indices must be at least one integer in one dimension, "
            f"got {chosen.dtype} {chosen.shape}"
        )
    if chosen.size * bins.capacity >= 1 << 31:
        raise ValueError(
            f"collate_bins: {chosen.size} rows of {bins.capacity} tokens are too many for int32 "
            "cu_seqlens; make smaller microbatches"
        )
    return chosen


def _checked_positions(row_positions: ArrayLike | None, rows: IntArray) -> IntArray:
    if row_positions is None:
        return np.arange(rows.size)
    positions = _integers("row_positions", row_positions)
    if positions.shape != rows.shape:
        raise ValueError(
            f"collate_bins: row_positions must be [{rows.size}], one per row, got {positions.shape}"
        )
    return positions


def _integers(name: str, values: ArrayLike) -> IntArray:
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(
            f"collate_bins: {name} must be one list of integers, not a ragged one"
        ) from None
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"collate_bins: {name} must be at least one integer in one dimension, "
            f"got {array.dtype} {array.shape}"
        )
    return array.astype(np.int64)


def _write_rows(
    fields: np.ndarray[Any, Any],
    corpus: Corpus,
    bins: Bins,
    rows: IntArray,
    positions: IntArray,
    *,
    pad_id: int,
) -> tuple[Layout, Spans]:
    """Lay out the spans of rows, and write all that does not depend on tokens.

    The spans of a row are its pieces as they come, then what is left of it.

    Returns:
        int64 `[6, N]`, for each span: where it begins in the batch; its length with padding; its
        tokens (0 for row padding); its document id (-1 for row padding); the document in the corpus
        and the token in the corpus from which it begins. And the same as `Spans`.
    """
    flat = getattr(corpus, "parts", None) is None
    layout, wrong = _lay_out(
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
    bounds, longest = _write_fields(fields.reshape(5, -1), layout, rows, positions, pad_id)
    return layout, Spans(torch.from_numpy(bounds), layout[_LENGTH], longest)


def _refuse_row(corpus: Corpus, bins: Bins, rows: IntArray, number: int) -> NoReturn:
    """Say what is wrong with a row that cannot be collated."""
    unknown = rows[(rows < -1) | (rows >= len(bins))]
    if unknown.size:
        raise ValueError(
            f"collate_bins: there are no rows {unknown.tolist()}: bins has {len(bins)}, from 0 "
            "(and -1 makes a blank row)"
        )
    row = int(rows[number])
    for document, start, length in bins[row]:
        known = 0 <= document < len(corpus.offsets) - 1
        if not known or start + length > corpus.offsets[document + 1] - corpus.offsets[document]:
            raise ValueError(
                f"collate_bins: bins do not fit the corpus, which does not have the {length} "
                f"tokens of document {document} from {start} on; pack this corpus' own lengths"
            )
    raise ValueError(
        f"collate_bins: row {row} of bins, {bins[row]}, does not fit {bins.capacity} tokens in "
        f"multiples of {bins.multiple_of}, or the corpus has fewer tokens than its offsets say"
    )


def _copy_tokens(fields: np.ndarray[Any, Any], corpus: Corpus, layout: Layout) -> None:
    """Copy the tokens of spans into the ids and, one place to the left, into the labels."""
    if getattr(corpus, "parts", None) is not None:
        for part, spans_ in _by_part(corpus, layout):
            _copy_tokens(fields, part, spans_)
        return
    tokens, limit = _checked_tokens(corpus)
    ids, labels = fields[:2].reshape(2, -1)
    if _copy_spans(ids, labels, tokens, layout) >= limit:
        _refuse_token(corpus, layout)
    trained = getattr(corpus, "trained", None)
    if trained is not None:
        _mask_labels(labels, _checked_mask(corpus, trained), layout)


def _by_part(corpus: Any, layout: Layout) -> Iterator[tuple[Corpus, Layout]]:
    """Yield each part that has some of the spans, with these as they lie in the part."""
    firsts, offsets = np.asarray(corpus.first_documents), corpus.offsets
    layout = np.compress(layout[_DOCUMENT] >= 0, layout, axis=1)
    part_of = np.searchsorted(firsts, layout[_DOCUMENT], side="right") - 1
    for number in np.unique(part_of).tolist():
        part, own = corpus.parts[number], np.compress(part_of == number, layout, axis=1)
        own[_DOCUMENT] -= firsts[number]
        own[_SOURCE] -= offsets[firsts[number]] - part.offsets[0]
        if (own[_SOURCE] + own[_SIZE]).max() > len(part.tokens):
            raise DataError(
                f"collate_bins: {_name_of(part)}: its {len(part.tokens)} tokens are fewer than its "
                "offsets say"
            )
        yield part, own


def _checked_tokens(corpus: Corpus) -> tuple[np.ndarray[Any, Any], int]:
    """Return the tokens as unsigned integers, and the number they must be below.

    A negative token is a large one then, so that one comparison finds both kinds.
    """
    tokens = np.asarray(corpus.tokens)
    kind = tokens.dtype
    if tokens.ndim != 1 or kind.kind not in "iu" or not kind.isnative:
        raise DataError(
            f"collate_bins: {_name_of(corpus)}: tokens must be integers in one dimension, in this "
            f"machine's byte order, got {kind} {tokens.shape}",
            got=str(kind),
        )
    limit = 1 << (8 * kind.itemsize - (kind.kind == "i" or kind.itemsize == 8))
    vocab_size = getattr(corpus, "vocab_size", None)
    limit = limit if vocab_size is None else min(limit, vocab_size)
    return _read_only(tokens.view(f"u{kind.itemsize}")), limit


def _checked_mask(corpus: Corpus, trained: Any) -> np.ndarray[Any, Any]:
    mask = np.asarray(trained)
    if mask.shape != np.shape(corpus.tokens) or mask.dtype not in (np.bool_, np.uint8):
        raise DataError(
            f"collate_bins: {_name_of(corpus)}: trained must be bool or uint8 for each of "
            f"{len(corpus.tokens)} tokens, got {mask.dtype} {mask.shape}"
        )
    return _read_only(mask.view(np.uint8))


def _refuse_token(corpus: Corpus, layout: Layout) -> NoReturn:
    """Name the first token that is negative or outside the vocabulary."""
    tokens, limit = _checked_tokens(corpus)
    sizes, documents, sources = layout[[_SIZE, _DOCUMENT, _SOURCE]].tolist()
    span, offset = next(
        (span, int(wrong.argmax()))
        for span, (size, source) in enumerate(zip(sizes, sources, strict=True))
        if (wrong := tokens[source : source + size] >= limit).any()
    )
    document, place = documents[span], sources[span] + offset
    token = int(corpus.tokens[place])
    raise DataError(
        f"collate_bins: {_name_of(corpus, document)}, offset {place - corpus.offsets[document]}: "
        f"token {token} is outside the vocabulary, [0, {limit}); write the corpus again with the "
        "tokenizer of this vocabulary",
        where=_name_of(corpus, document),
        got=token,
        want=limit,
    )


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


def _checked_out(out: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    fits = out.shape == shape and out.dtype == np.int64
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"collate_bins: out must be int64 {shape}, C-contiguous and writeable, got "
            f"{out.dtype} {out.shape}"
        )
    return out


def _read_only(x: Any) -> np.ndarray[Any, Any]:
    """Return a view that cannot be written: numba compiles for such arrays apart from others."""
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view


@jit
def _lay_out(  # noqa: PLR0917 (an array is a parameter)
    rows: Any,
    offsets: Any,
    pieces: Any,
    corpus_offsets: Any,
    num_tokens: int,
    capacity: int,
    multiple_of: int,
) -> Any:
    """Return the table of `_spans_of_rows`, and -1 or the number of the first row that is wrong.

    Whatever the bins hold, neither this nor the loops below reach beyond an array.
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
    layout = np.empty((6, count), np.int64)
    span = 0
    for number in range(rows.size):
        row, filled = rows[number], 0
        first, end = (offsets[row], offsets[row + 1]) if row >= 0 else (0, 0)
        for piece in range(first, end):
            document, start, length = documents[piece], starts[piece], lengths[piece]
            if document < 0 or document >= corpus_offsets.size - 1 or start < 0 or length < 1:
                return layout, number
            source = corpus_offsets[document] + start
            padded = (length + multiple_of - 1) // multiple_of * multiple_of
            last = min(corpus_offsets[document + 1], num_tokens)
            if source < 0 or source + length > last or filled + padded > capacity:
                return layout, number
            layout[_BEGIN, span], layout[_LENGTH, span] = number * capacity + filled, padded
            layout[_SIZE, span], layout[_NUMBER, span] = length, piece - first
            layout[_DOCUMENT, span], layout[_SOURCE, span] = document, source
            filled += padded
            span += 1
        if filled < capacity:
            layout[_BEGIN, span], layout[_LENGTH, span] = (
                number * capacity + filled,
                capacity - filled,
            )
            layout[_SIZE, span], layout[_NUMBER, span] = 0, -1
            layout[_DOCUMENT, span], layout[_SOURCE, span] = -1, 0
            span += 1
    return layout[:, :span].copy(), -1


@jit
def _write_fields(fields: Any, layout: Any, rows: Any, positions: Any, pad_id: int) -> Any:
    """Write all that does not depend on tokens; return `cu_seqlens` and the longest span."""
    _write_index(fields[4], rows, positions)
    return _write_spans(fields[:4], layout, pad_id)


@jit
def _write_spans(fields: Any, layout: Any, pad_id: int) -> Any:
    """Write positions, documents and padding; return `cu_seqlens` and the longest span."""
    ids, labels, position_ids, document_ids = fields
    begins, ends = layout[_BEGIN], layout[_BEGIN] + layout[_LENGTH]
    bounds = np.zeros(begins.size + 1, np.int32)
    for span in range(begins.size):
        bounds[span + 1] = ends[span]
        part = position_ids[begins[span] : ends[span]]
        for i in range(part.size):
            part[i] = i
    for span in range(begins.size):
        document_ids[begins[span] : ends[span]] = layout[_NUMBER, span]
    for span in range(begins.size):
        size = layout[_SIZE, span]
        ids[begins[span] + size : ends[span]] = pad_id
        labels[begins[span] + max(size - 1, 0) : ends[span]] = IGNORED_LABEL
    return bounds, layout[_LENGTH].max()


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
def _copy_spans(ids: Any, labels: Any, tokens: Any, layout: Any) -> Any:
    """Copy tokens into ids and, one place to the left, into labels; return the largest."""
    largest = tokens.dtype.type(0)
    for span in range(layout.shape[1]):
        begin, size, first = layout[_BEGIN, span], layout[_SIZE, span], layout[_SOURCE, span]
        part, source = ids[begin : begin + size], tokens[first : first + size]
        for i in range(part.size):
            part[i] = source[i]
            largest = max(largest, source[i])
        part, source = labels[begin : begin + max(size - 1, 0)], source[1:]
        for i in range(part.size):
            part[i] = source[i]
    return largest


@jit
def _mask_labels(labels: Any, trained: Any, layout: Any) -> None:
    for span in range(layout.shape[1]):
        begin, size, first = layout[_BEGIN, span], layout[_SIZE, span], layout[_SOURCE, span]
        part = labels[begin : begin + max(size - 1, 0)]
        asked_for = trained[first + 1 : first + size]
        for i in range(part.size):
            part[i] = part[i] if asked_for[i] else IGNORED_LABEL


def _spans(lengths: IntArray) -> Spans:
    bounds = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, dtype=np.int32, out=bounds[1:])
    return Spans(torch.from_numpy(bounds), lengths, int(lengths.max()))
