"""Make, split, move, count and hash batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from trainkit.batch.denominators import can_read_values
from trainkit.batch.loops import sum_field_hashes
from trainkit.batch.shards import each_tensor, spans_of_runs
from trainkit.noise.counters import mix_bits_tensor, to_int64
from trainkit.noise.hashing import GOLDEN, make_key
from trainkit.types import EXTRA_TENSORS, IGNORED_LABEL, Batch, Spans, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def split_batch(batch: Batch, rows: int) -> list[Batch]:
    """Split a batch into microbatches of `rows` rows each; their tensors are views.

    Args:
        batch: `[B, S]`, where `rows` divides B.
        rows: Rows in each microbatch.

    Returns:
        B / rows batches, in order.

    Raises:
        ValueError: `rows` does not divide B.

    Examples:
        >>> [part.spans.lengths.tolist() for part in split_batch(make_padding_batch(3, 4), 1)]
        [[4], [4], [4]]
    """
    num_rows, length = batch.input_ids.shape
    if rows < 1 or num_rows % rows:
        raise ValueError(f"split_batch: {num_rows} rows do not divide into parts of {rows}")
    ends = np.cumsum(batch.spans.lengths)
    # The spans at which microbatches begin: spans end where rows do, so every cut lies between two.
    microbatch_ends = np.arange(rows, num_rows + 1, rows) * length
    cuts = [0, *(np.searchsorted(ends, microbatch_ends) + 1).tolist()]
    tensors = {name: x.split(rows) for name, x in batch.items() if isinstance(x, torch.Tensor)}
    microbatches = []
    for i, (first, end) in enumerate(pairwise(cuts)):
        lengths = batch.spans.lengths[first:end]
        # The `cu_seqlens` of a microbatch count from its own first token.
        bounds = batch.spans.cu_seqlens[first : end + 1] - i * rows * length
        microbatches.append(
            Batch(
                input_ids=tensors["input_ids"][i],
                labels=tensors["labels"][i],
                position_ids=tensors["position_ids"][i],
                document_ids=tensors["document_ids"][i],
                token_index=tensors["token_index"][i],
                spans=Spans(bounds, lengths, int(lengths.max())),
                extra={name: tensors[name][i] for name in batch.extra},
            )
        )
    return microbatches


def make_padding_batch(rows: int, length: int, *, pad_id: int = 0, multiple_of: int = 1) -> Batch:
    """Return a batch of row padding, which adds 0 to every sum.

    It fills up the step of a rank that has too few rows. Do not try out a model with it: its spans
    are short spans of padding, about 96 tokens, and attention does not cross them. Use
    `batch_from_rows` for rows of tokens, and `spans_from_rows` for the spans of plain rows.

    Args:
        rows: The number of rows.
        length: Tokens in a row.
        pad_id: The token id of padding.
        multiple_of: The spans of padding are multiples of this, as in `pack_bins`.

    Raises:
        ValueError: There would be no tokens, or `multiple_of` is below 1.

    Examples:
        >>> batch = make_padding_batch(1, 4)
        >>> batch.labels.tolist(), batch.document_ids.tolist(), batch.spans.lengths.tolist()
        ([[-100, -100, -100, -100]], [[-1, -1, -1, -1]], [4])
    """
    check_range("make_padding_batch", at_least=1, rows=rows, length=length)
    check_range("make_padding_batch", at_least=1, multiple_of=multiple_of)
    return Batch(
        input_ids=torch.full((rows, length), pad_id),
        labels=torch.full((rows, length), IGNORED_LABEL),
        position_ids=torch.arange(length).repeat(rows, 1),
        document_ids=torch.full((rows, length), -1),
        token_index=torch.full((rows, length), -1),
        spans=spans_of_runs(np.full((rows, length), -1), multiple_of=multiple_of),
    )


def find_padding_rows(batch: Mapping[str, Any]) -> Tensor:
    """Return a mask of the rows that hold only padding, bool `[B]`, without a host sync.

    In these rows, as in those of `make_padding_batch`, every document id is below 0.

    Args:
        batch: A `Batch`, or any mapping with "document_ids" `[B, S]`.

    Examples:
        >>> find_padding_rows(make_padding_batch(2, 4)).tolist()
        [True, True]
        >>> find_padding_rows({"document_ids": torch.tensor([[0, 0, -1], [-1, -1, -1]])}).tolist()
        [False, True]
    """
    return (batch["document_ids"] < 0).all(-1)


def batch_from_rows(
    input_ids: Tensor,
    *,
    starts: Tensor | None = None,
    position_ids: Tensor | None = None,
    padding: Tensor | None = None,
    labels: Tensor | None = None,
    first_row: int = 0,
    extra: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Convert rows that another program packed to a `Batch`.

    Documents begin where `starts` is True, or else where `position_ids` jump. Without either, each
    row is one document.

    Args:
        input_ids: int64 `[B, S]` on the host.
        starts: bool `[B, S]`, True where a document begins. Every row begins a document.
        position_ids: int64 `[B, S]`. A document begins where a position is not one more than that
            of its left neighbor.
        padding: bool `[B, S]`, True for tokens of no document; none by default.
        labels: int64 `[B, S]`, the next token of each, -100 where there is none; by default from
            `shift_labels`.
        first_row: The position of the first row in the global step; `token_index` follows from it.
        extra: More tensors `[B, S, ...]`.

    Returns:
        The batch. Without `position_ids`, positions count from 0 in each document.

    Raises:
        ValueError: A tensor has another shape or dtype, or is not on the host; or both `starts` and
            `position_ids` are given.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7, 8, 0]])
        >>> batch = batch_from_rows(ids, starts=ids == 7, padding=ids == 0)
        >>> batch.labels.tolist(), batch.position_ids.tolist(), batch.spans.lengths.tolist()
        ([[6, -100, 8, -100, -100]], [[0, 1, 0, 1, 0]], [2, 2, 1])
    """
    if starts is not None and position_ids is not None:
        raise ValueError("batch_from_rows: give starts or position_ids, not both")
    padding = torch.zeros_like(input_ids, dtype=torch.bool) if padding is None else padding
    for name, x, dtype in [
        ("input_ids", input_ids, torch.int64),
        ("position_ids", position_ids, torch.int64),
        ("labels", labels, torch.int64),
        ("starts", starts, torch.bool),
        ("padding", padding, torch.bool),
    ]:
        if x is not None and (x.ndim != 2 or x.shape != input_ids.shape or x.dtype != dtype):
            raise ValueError(
                f"batch_from_rows: {name} must be {dtype} {list(input_ids.shape)} of two "
                f"dimensions, got {x.dtype} {list(x.shape)}"
            )
    # Where padding begins or ends, so does a span, whatever `starts` or positions hold.
    is_start = torch.ones_like(padding)
    is_start[:, 1:] = padding[:, 1:] != padding[:, :-1]
    if starts is not None:
        is_start |= starts & ~padding
    if position_ids is not None:
        jumps = position_ids[:, 1:] != position_ids[:, :-1] + 1
        is_start[:, 1:] |= jumps & ~padding[:, 1:]
    documents = torch.where(padding, -1, (is_start & ~padding).cumsum(1) - 1)
    if position_ids is None:
        # The distance to the last start: cummax carries its column to the right.
        columns = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        position_ids = columns - torch.where(is_start, columns, 0).cummax(1).values
    index = torch.arange(input_ids.numel()).view_as(input_ids)
    return Batch(
        input_ids=input_ids,
        labels=shift_labels(input_ids, documents) if labels is None else labels,
        position_ids=position_ids,
        document_ids=documents,
        token_index=index + first_row * input_ids.shape[1],
        spans=make_spans(documents),
        extra=extra or {},
    )


def shift_labels(input_ids: Tensor, document_ids: Tensor) -> Tensor:
    """Return the next token of each token, -100 where its document has none.

    A token has no label where its document id is below 0, where the next id differs, and in the
    last column. `collate_bins` shifts labels itself; this is for rows from elsewhere.

    Args:
        input_ids: int64 `[B, S]`.
        document_ids: int64 `[B, S]`, below 0 for padding.

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
    document = document_ids[:, :-1]
    has_next = (document == document_ids[:, 1:]) & (document >= 0)
    # Shifted over the whole row, and then masked at the ends of documents: no loop over
    # documents.
    labels[:, :-1] = torch.where(has_next, input_ids[:, 1:], IGNORED_LABEL)
    return labels


def make_spans(document_ids: Tensor, *, multiple_of: int = 1) -> Spans:
    """Return the spans of rows: the runs of equal document ids in each row.

    Row padding, id -1, is split into short spans, so that attention to it costs little. Alignment
    padding of piece n, id -2 - n, lies in the span of its piece. `Spans` has lengths on the host,
    so call this where the batch is made.

    Args:
        document_ids: int64 `[B, S]` on the CPU.
        multiple_of: The spans of padding are multiples of this: 2N for a ring of N ranks.

    Returns:
        The `Spans` over the flattened rows.

    Raises:
        ValueError: `document_ids` is on another device, or not `[B, S]`.

    Examples:
        >>> make_spans(torch.tensor([[0, 0, 1, -1], [0, 0, 0, -2]])).lengths
        array([2, 1, 1, 4])
    """
    if document_ids.device.type != "cpu" or document_ids.ndim != 2:
        raise ValueError(
            "make_spans: document_ids must be [B, S] on the host, got "
            f"{tuple(document_ids.shape)} on {document_ids.device}"
        )
    # Alignment padding takes the id of its piece, so that both are one run.
    pieces = torch.where(document_ids < -1, -2 - document_ids, document_ids)
    return spans_of_runs(pieces.numpy(), multiple_of=multiple_of)


def count_valid_tokens(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the number of labels of a step on this rank that are not ignored, without a host sync.

    Args:
        microbatches: `Batch`es, or any mappings with "labels".

    Returns:
        An int64 scalar on the labels' device. Its sum over the `loss` axis is the denominator of
        the step.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> count_valid_tokens([{"labels": torch.tensor([[4, -100]])}, make_padding_batch(1, 2)])
        tensor(1)
    """
    _check_microbatches("count_valid_tokens", microbatches)
    # A running sum costs nothing for the usual single microbatch; stacking costs 3 us on a CPU.
    first, *rest = [(batch["labels"] != IGNORED_LABEL).sum() for batch in microbatches]
    return functools.reduce(torch.add, rest, first) if rest else first


def count_weights(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the sum of the weights of the labels on this rank, without a host sync.

    Summed over the `loss` axis it is the denominator of `losses.weighted_next_token`, and may be
    below 1.

    Args:
        microbatches: `Batch`es, or any mappings with "labels" and floating "weights" of their
            shape.

    Returns:
        An fp64 scalar on the weights' device.

    Raises:
        ValueError: There is no microbatch, or one has no weights.

    Examples:
        >>> labels, weights = torch.tensor([[4, -100]]), torch.tensor([[0.5, 9.0]])
        >>> count_weights([{"labels": labels, "weights": weights}])
        tensor(0.5000, dtype=torch.float64)
    """
    _check_microbatches("count_weights", microbatches)

    def sum_weights(batch: Mapping[str, Any]) -> Tensor:
        if "weights" not in batch:
            raise ValueError(
                f'count_weights: a microbatch has no "weights" (it has {", ".join(batch)})'
            )
        return batch["weights"].masked_fill(batch["labels"] == IGNORED_LABEL, 0).double().sum()

    return functools.reduce(torch.add, map(sum_weights, microbatches))


def count_documents(microbatches: Sequence[Mapping[str, Any]], *, halves: bool = False) -> Tensor:
    """Return the number of documents of a step that begin on this rank, without a host sync.

    The rank with the first token of a document, position 0, counts it. So every layout counts a
    document once, even one whose tokens are sharded over several ranks.

    Args:
        microbatches: `Batch`es, or any mappings with "document_ids" and "position_ids".
        halves: Whether documents 2j and 2j + 1 of a row are a pair; a pair counts once.

    Returns:
        An int64 scalar on the ids' device. Summed over the `loss` axis it is the denominator of
        losses of sequences, and with `halves` that of losses of pairs.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> batch = {"document_ids": torch.tensor([[0, 0, 1, 1, -1]])}
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 1, 0]])
        >>> count_documents([batch]), count_documents([batch], halves=True)
        (tensor(2), tensor(1))
    """
    _check_microbatches("count_documents", microbatches)
    ids = _join(microbatches, "document_ids")
    is_first = (_join(microbatches, "position_ids") == 0) & (ids >= 0)
    # Of a pair only the first document counts, which is in an even place.
    return (is_first & (ids % 2 == 0) if halves else is_first).sum()


def count_tokens(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the number of tokens of a step on this rank, in the loss or not, without a host sync.

    Args:
        microbatches: `Batch`es, or any mappings with "document_ids".

    Returns:
        An int64 scalar on the ids' device; neither row nor alignment padding counts.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> count_tokens(
        ...     [{"document_ids": torch.tensor([[0, -2, 1, -1]])}, make_padding_batch(1, 2)]
        ... )
        tensor(2)
    """
    _check_microbatches("count_tokens", microbatches)
    return (_join(microbatches, "document_ids") >= 0).sum()


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """Return the batch with all its tensors on a device; itself when it is already there.

    Examples:
        >>> batch = make_padding_batch(1, 4)
        >>> to_device(batch, "cpu") is batch
        True
    """
    device = torch.device(device)
    # A non-blocking copy to the host may be read before it has arrived.
    non_blocking = device.type != "cpu"
    tensors = [x for x in batch.values() if isinstance(x, torch.Tensor)]
    if all(x.device == device for x in tensors) and device.type == "cpu":
        return batch
    return map_tensors(batch, lambda x: x.to(device, non_blocking=non_blocking))


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with a function applied to each of its tensors, including `cu_seqlens`.

    Examples:
        >>> map_tensors(make_padding_batch(1, 2), lambda x: x + 1).labels
        tensor([[-99, -99]])
    """
    spans = attrs.evolve(batch.spans, cu_seqlens=function(batch.spans.cu_seqlens))
    return each_tensor(batch, function, spans=spans)


def batch_hash(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the hash of a step's tokens on this rank, without a host sync.

    It is a sum modulo 2^64, over all tokens but row padding, of a hash of (field, index in the
    global step, value). The fields are the input ids, labels, positions and `extra`, without those
    that `make_microbatches` and `add_noise_keys` add. The hashes of ranks and microbatches add up
    to that of the global batch in every layout, and padding rows add 0.

    Args:
        microbatches: `Batch`es.

    Returns:
        An int64 scalar on the batches' device, which wraps around: read it modulo 2^64.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> batch_hash([make_padding_batch(2, 4)])
        tensor(0)
    """
    _check_microbatches("batch_hash", microbatches)
    # All fields of all microbatches at once: a step launches few kernels, however it is split.
    values = torch.stack([_join(microbatches, name) for name in _FIELDS])
    index = _join(microbatches, "token_index")
    document_ids = _join(microbatches, "document_ids")
    if can_read_values(values):  # on a CPU one loop is five times as fast as the kernels
        arrays = [x.numpy() for x in (values, index, document_ids)]
        total = torch.tensor(to_int64(int(sum_field_hashes(_FIELD_KEYS, *arrays))))
    else:
        index = index * to_int64(GOLDEN)
        places = torch.stack([index + to_int64(int(key)) for key in _FIELD_KEYS])
        total = _sum_hashes(places, values, document_ids)
    # Any mapping serves as a batch, and only a `Batch` has `extra`.
    names = {name for batch in microbatches for name in getattr(batch, "extra", {})}
    for name in sorted(names - {*EXTRA_TENSORS}):
        total += _hash_column(name, [batch for batch in microbatches if name in batch])
    return total


_FIELDS = ("input_ids", "labels", "position_ids")
_FIELD_KEYS = np.array([make_key(name) for name in _FIELDS], np.uint64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _hash_column(name: str, microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the sum of the hashes of a column of `extra`."""
    values = _join(microbatches, name)
    # The bits of a float are hashed, so that the hash sees every difference: 0.0 is not -0.0.
    bits = values.view(_BITS[values.dtype.itemsize]) if values.is_floating_point() else values
    # The inner dimension comes first, as the fields do above.
    bits = bits.reshape(len(bits), -1).T
    width = len(bits)
    # The index of a number among all numbers of the column in the global step.
    numbers = torch.arange(width, device=bits.device).unsqueeze(1)
    places = (_join(microbatches, "token_index") * width + numbers) * to_int64(GOLDEN)
    places += to_int64(make_key("column", name, width))
    return _sum_hashes(places, bits.long(), _join(microbatches, "document_ids"))


def _sum_hashes(places: Tensor, values: Tensor, document_ids: Tensor) -> Tensor:
    """Return the sum of the hashes of values `[N, tokens]` at their places, but for row padding."""
    # The inner mix gives every place a key of its own, so that swapped values change the sum.
    hashes = mix_bits_tensor(mix_bits_tensor(places).add_(values))
    # Row padding has id -1; alignment padding, -2 - n, belongs to a piece.
    return hashes.masked_fill_(document_ids == -1, 0).sum()


def _join(microbatches: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """Return a tensor of all microbatches, `[tokens, ...]`."""
    parts = [batch[name].flatten(0, 1) for batch in microbatches]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _check_microbatches(function: str, microbatches: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(microbatches, Mapping) or len(microbatches) == 0:
        raise ValueError(
            f"{function}: microbatches must be a sequence of at least one batch, "
            f"got {'one batch' if len(microbatches) else 'none'}"
        )
