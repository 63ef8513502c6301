"""From rows of pieces to tensors, and what is read off a batch without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from trainkit.hashing import GOLDEN, key_of
from trainkit.layout import spans_of_runs
from trainkit.noise import mix_tensor, signed
from trainkit.types import IGNORED_LABEL, Batch, Spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from torch import Tensor

    from trainkit.types import Bins, Corpus, IntArray


def collate_bins(
    corpus: Corpus,
    bins: Bins,
    indices: ArrayLike,
    *,
    pad_id: int = 0,
    row_positions: ArrayLike | None = None,
) -> Batch:
    """Make one batch of rows of `bins`, on the host, labels already shifted inside each piece.

    A piece is followed by its alignment padding: its document and its positions go on, its labels
    do not. What is left of a row is row padding: document -1, positions from 0, a span of its own.
    The last token of a piece has no label.

    Args:
        corpus: Where the tokens are.
        bins: Which piece is in which row; made from this corpus' lengths.
        indices: The rows, integers `[B]`; -1 makes a blank row, which is row padding throughout.
        pad_id: The token id of padding.
        row_positions: The position of each row in the global step, `[B]`, from which `token_index`
            follows; by default the rows are the whole step. Tokens of a blank row have index -1.

    Returns:
        A `Batch` of `[B, capacity]`.

    Raises:
        ValueError: An index is not a row of `bins`, `bins` does not fit the corpus, or the batch is
            too large for int32 `cu_seqlens`.

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
    chosen = _checked_indices(indices, bins)
    places = np.arange(len(chosen)) if row_positions is None else np.asarray(row_positions)
    if places.shape != chosen.shape:
        raise ValueError(
            f"collate_bins: row_positions must be [{len(chosen)}], one per row, got {places.shape}"
        )
    pieces, padded, real, documents = _spans_of_rows(bins, chosen)
    _check_pieces(corpus, bins, pieces)
    num_tokens = len(chosen) * bins.capacity
    begins = np.cumsum(padded) - padded
    position_ids = np.arange(num_tokens) - np.repeat(begins, padded)
    ids = np.full(num_tokens + 1, pad_id, np.int64)  # one more, so that the shift below has an end
    for piece, begin in zip(pieces.tolist(), begins[real > 0].tolist(), strict=True):
        length = int(bins.lengths[piece])
        ids[begin : begin + length] = corpus.read(
            int(bins.documents[piece]), int(bins.starts[piece]), length
        )
    labels = np.where(position_ids + 1 < np.repeat(real, padded), ids[1:], IGNORED_LABEL)
    first = np.where(chosen < 0, -1, places * bins.capacity)[:, None]
    step = (chosen >= 0)[:, None] * np.arange(bins.capacity)

    def tensor(x: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(x).view(len(chosen), bins.capacity)

    return Batch(
        tensor(ids[:-1]),
        tensor(labels),
        tensor(position_ids),
        tensor(np.repeat(documents, padded)),
        tensor(first + step),
        _spans(padded),
    )


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

    def move(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=non_blocking)

    tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
    if all(x.device == device for x in tensors) and device.type == "cpu":
        return batch
    return Batch(
        move(batch.input_ids),
        move(batch.labels),
        move(batch.position_ids),
        move(batch.document_ids),
        move(batch.token_index),
        attrs.evolve(batch.spans, cu_seqlens=move(batch.spans.cu_seqlens)),
        {name: move(value) for name, value in batch.extra.items()},
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


def _checked_indices(indices: ArrayLike, bins: Bins) -> IntArray:
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or chosen.size == 0 or chosen.dtype.kind not in "iu":
        raise ValueError(
            "collate_bins: indices must be at least one integer in one dimension, "
            f"got {chosen.dtype} {chosen.shape}"
        )
    wrong = chosen[(chosen < -1) | (chosen >= len(bins))]
    if wrong.size:
        raise ValueError(
            f"collate_bins: there are no rows {wrong.tolist()}: bins has {len(bins)}, from 0 "
            "(and -1 makes a blank row)"
        )
    if chosen.size * bins.capacity >= 1 << 31:
        raise ValueError(
            f"collate_bins: {chosen.size} rows of {bins.capacity} tokens are too many for int32 "
            "cu_seqlens; make smaller microbatches"
        )
    return chosen.astype(np.int64)


def _check_pieces(corpus: Corpus, bins: Bins, pieces: IntArray) -> None:
    """Refuse pieces that the corpus does not have: then the bins are another corpus'."""
    documents = bins.documents[pieces]
    known = documents < len(corpus.offsets) - 1
    if known.all():
        sizes = corpus.offsets[documents + 1] - corpus.offsets[documents]
        known = bins.starts[pieces] + bins.lengths[pieces] <= sizes
    if not known.all():
        worst = int(known.argmin())
        raise ValueError(
            "collate_bins: bins do not fit the corpus, which does not have the "
            f"{bins.lengths[pieces[worst]]} tokens of document {documents[worst]} from "
            f"{bins.starts[pieces[worst]]} on; pack this corpus' own lengths"
        )


def _spans_of_rows(bins: Bins, rows: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Lay out the spans of rows: pieces as they come, then what is left of the row.

    Returns:
        The pieces `[P]`; and for each span `[N]` its length with padding, its tokens (0 for row
        padding), and its document id (-1 for row padding).
    """
    pieces, spans_ = [np.arange(0)], [np.empty((0, 3), np.int64)]
    for row in rows.tolist():
        first, end = bins.offsets[row : row + 2] if row >= 0 else (0, 0)
        part = np.arange(first, end)
        table = np.full((len(part) + 1, 3), (0, 0, -1))
        table[:-1, 0] = -(-bins.lengths[part] // bins.multiple_of) * bins.multiple_of
        table[:-1, 1] = bins.lengths[part]
        table[:-1, 2] = np.arange(len(part))
        table[-1, 0] = bins.capacity - table[:-1, 0].sum()
        pieces.append(part)
        spans_.append(table if table[-1, 0] else table[:-1])
    padded, real, documents = np.ascontiguousarray(np.concatenate(spans_).T)
    return np.concatenate(pieces), padded, real, documents


def _spans(lengths: IntArray) -> Spans:
    bounds = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return Spans(torch.from_numpy(bounds), lengths, int(lengths.max()))
