"""What is done with batches that are there: cut, moved to the device, counted and hashed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from trainkit.batch.shards import each_tensor, spans_of_runs
from trainkit.noise.counters import mix_bits_tensor, to_int64
from trainkit.noise.hashing import GOLDEN, make_key
from trainkit.types import EXTRA_TENSORS, IGNORED_LABEL, Batch, Spans, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


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
        >>> [part.spans.lengths.tolist() for part in split_batch(make_padding_batch(3, 4), 1)]
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


def make_padding_batch(rows: int, length: int, *, pad_id: int = 0, multiple_of: int = 1) -> Batch:
    """Return a batch of row padding: it adds 0 to every sum.

    It stands for rows that a rank lacks, and is no input to try a model with: its spans are those
    of padding, cut to about 96 tokens, across which attention does not see. `batch_from_rows` makes
    rows of tokens of your own, `spans_from_rows` the spans of plain rows. `find_padding_rows` tells
    blank rows from others.

    Args:
        rows: How many rows.
        length: Tokens of each.
        pad_id: The token id of padding.
        multiple_of: What the spans of padding are multiples of, as in `pack_bins`.

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
        torch.full((rows, length), pad_id),
        torch.full((rows, length), IGNORED_LABEL),
        torch.arange(length).repeat(rows, 1),
        torch.full((rows, length), -1),
        torch.full((rows, length), -1),
        spans_of_runs(np.full((rows, length), -1), multiple_of=multiple_of),
    )


def find_padding_rows(batch: Mapping[str, Any]) -> Tensor:
    """Return which rows of a batch hold nothing but padding, bool `[B]`, without a host sync.

    Such are the rows of a `make_padding_batch`: every document id is below 0.

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
    """Return rows that were packed elsewhere as a `Batch`.

    Where documents begin follows from `starts`, or else from `position_ids`; with neither, each row
    is one document.

    Args:
        input_ids: int64 `[B, S]` on the host.
        starts: bool `[B, S]`: where a document begins. A row always begins one.
        position_ids: int64 `[B, S]`: a document begins where one is not its left neighbour's and 1.
        padding: bool `[B, S]`: what belongs to no document; nothing by default.
        labels: int64 `[B, S]`, the next token of each, -100 where there is none; made by
            `shift_labels` by default.
        first_row: The position of the first row in the global step, from which `token_index`
            follows.
        extra: Further tensors `[B, S, ...]`.

    Returns:
        The batch. Positions are those given, or count from 0 in each document.

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
    given = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
    for name, x in (given | {"starts": starts, "padding": padding}).items():
        want = torch.int64 if name in given else torch.bool
        if x is None or (x.ndim == 2 and (x.shape, x.dtype) == (input_ids.shape, want)):
            continue
        must = f"must be {want} {list(input_ids.shape)} of two dimensions"
        raise ValueError(f"batch_from_rows: {name} {must}, got {x.dtype} {list(x.shape)}")
    begins = torch.ones_like(padding)
    begins[:, 1:] = padding[:, 1:] != padding[:, :-1]
    if starts is not None:
        begins |= starts & ~padding
    if position_ids is not None:
        begins[:, 1:] |= (position_ids[:, 1:] != position_ids[:, :-1] + 1) & ~padding[:, 1:]
    documents = torch.where(padding, -1, (begins & ~padding).cumsum(1) - 1)
    if position_ids is None:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        position_ids = places - torch.where(begins, places, 0).cummax(1).values
    return Batch(
        input_ids,
        shift_labels(input_ids, documents) if labels is None else labels,
        position_ids,
        documents,
        torch.arange(input_ids.numel()).view_as(input_ids) + first_row * input_ids.shape[1],
        make_spans(documents),
        extra or {},
    )


def shift_labels(input_ids: Tensor, document_ids: Tensor) -> Tensor:
    """Return the next token of each token of a document: -100 where there is none.

    That is where the document id is below 0, where the next id differs, and in the last column. For
    rows that `collate_bins` did not make.

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
        got = f"{tuple(input_ids.shape)} and {tuple(document_ids.shape)}"
        must = "input_ids and document_ids must have one shape [B, S]"
        raise ValueError(f"shift_labels: {must}, got {got}")
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    here, following = document_ids[:, :-1], document_ids[:, 1:]
    goes_on = (here == following) & (here >= 0)
    labels[:, :-1] = torch.where(goes_on, input_ids[:, 1:], IGNORED_LABEL)
    return labels


def make_spans(document_ids: Tensor, *, multiple_of: int = 1) -> Spans:
    """Return the spans of rows whose documents are numbered: the runs of equal ids in each row.

    The padding of a row, id -1, is cut into short spans, so that attention to it costs little; what
    aligns piece n, id -2 - n, lies in its span. This needs host data, because `Spans` has lengths
    on the host: call it where the batch is made.

    Args:
        document_ids: int64 `[B, S]` on the CPU.
        multiple_of: What the spans of padding are multiples of: 2N for a ring of N ranks.

    Returns:
        The `Spans` over the flattened rows.

    Raises:
        ValueError: `document_ids` is on another device, or not `[B, S]`.

    Examples:
        >>> make_spans(torch.tensor([[0, 0, 1, -1], [0, 0, 0, -2]])).lengths
        array([2, 1, 1, 4])
    """
    if document_ids.device.type != "cpu" or document_ids.ndim != 2:
        got = f"{tuple(document_ids.shape)} on {document_ids.device}"
        raise ValueError(f"spans: document_ids must be [B, S] on the host, got {got}")
    pieces = torch.where(document_ids < -1, -2 - document_ids, document_ids)
    return spans_of_runs(pieces.numpy(), multiple_of=multiple_of)


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
        >>> count_valid_tokens([{"labels": torch.tensor([[4, -100]])}, make_padding_batch(1, 2)])
        tensor(1)
    """
    _check_microbatches("count_valid_tokens", microbatches)
    # Added one by one, which for the usual one costs nothing; stacking costs 3 us on a CPU.
    first, *rest = [(batch["labels"] != IGNORED_LABEL).sum() for batch in microbatches]
    return functools.reduce(torch.add, rest, first) if rest else first


def count_weights(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the sum of the weights of the labels that this rank trains on, without a host sync.

    The denominator of `losses.weighted_next_token`, once it is summed over the `loss` axis: 0.3 is
    0.3.

    Args:
        microbatches: `Batch`es, or any mappings with "labels" and floating "weights" of their
            shape.

    Returns:
        An fp64 scalar on their device.

    Raises:
        ValueError: There is no microbatch, or one has no weights.

    Examples:
        >>> labels, weights = torch.tensor([[4, -100]]), torch.tensor([[0.5, 9.0]])
        >>> count_weights([{"labels": labels, "weights": weights}])
        tensor(0.5000, dtype=torch.float64)
    """
    _check_microbatches("count_weights", microbatches)

    def own(batch: Mapping[str, Any]) -> Tensor:
        if "weights" not in batch:
            has = f"it has {', '.join(batch)}"
            raise ValueError(f'count_weights: a microbatch has no "weights" ({has})')
        kept = batch["weights"].masked_fill(batch["labels"] == IGNORED_LABEL, 0)
        return kept.double().sum()

    return functools.reduce(torch.add, map(own, microbatches))


def count_documents(microbatches: Sequence[Mapping[str, Any]], *, halves: bool = False) -> Tensor:
    """Return how many documents of a step begin on this rank, without a host sync.

    A document is counted where its first token lies, of position 0, so that every layout counts
    each once: also where its tokens are dealt over several ranks.

    Args:
        microbatches: `Batch`es, or any mappings with "document_ids" and "position_ids".
        halves: Whether documents 2j and 2j + 1 of a row are a pair, of which the first counts.

    Returns:
        An int64 scalar on their device; summed over the `loss` axis it is the denominator of losses
        of sequences, and with halves that of losses of pairs.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> batch = {"document_ids": torch.tensor([[0, 0, 1, 1, -1]])}
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 1, 0]])
        >>> count_documents([batch]), count_documents([batch], halves=True)
        (tensor(2), tensor(1))
    """
    _check_microbatches("count_documents", microbatches)

    def own(batch: Mapping[str, Any]) -> Tensor:
        ids = batch["document_ids"]
        begins = (batch["position_ids"] == 0) & (ids >= 0)
        return (begins & (ids % 2 == 0) if halves else begins).sum()

    return functools.reduce(torch.add, map(own, microbatches))


def count_tokens(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return how many tokens of a step this rank works on, trained on or not, without a host sync.

    Args:
        microbatches: `Batch`es, or any mappings with "document_ids".

    Returns:
        An int64 scalar on their device, without padding: neither that of rows nor what aligns
        pieces.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> count_tokens(
        ...     [{"document_ids": torch.tensor([[0, -2, 1, -1]])}, make_padding_batch(1, 2)]
        ... )
        tensor(2)
    """
    _check_microbatches("count_tokens", microbatches)
    return functools.reduce(
        torch.add, [(batch["document_ids"] >= 0).sum() for batch in microbatches]
    )


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """Return the batch with all its tensors on a device; itself when it is there already.

    Examples:
        >>> batch = make_padding_batch(1, 4)
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
        >>> map_tensors(make_padding_batch(1, 2), lambda x: x + 1).labels
        tensor([[-99, -99]])
    """
    own = attrs.evolve(batch.spans, cu_seqlens=function(batch.spans.cu_seqlens))
    return each_tensor(batch, function, spans=own)


def batch_hash(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the hash of what a step trains on, on this rank, without a host sync.

    A sum modulo 2^64 over tokens, row padding left out, of a hash of (field, index in the global
    step, value) for input ids, labels, positions and `extra`, but for what `make_microbatches` and
    `add_noise_keys` add. So hashes of ranks and microbatches add up to the global batch's,
    whichever way it was dealt, and blank rows add 0.

    Args:
        microbatches: `Batch`es.

    Returns:
        An int64 scalar on the batches' device, which wraps around; read modulo 2^64.

    Raises:
        ValueError: There is no microbatch.

    Examples:
        >>> batch_hash([make_padding_batch(2, 4)])
        tensor(0)
    """
    _check_microbatches("batch_hash", microbatches)
    return torch.stack([_hash_of(batch) for batch in microbatches]).sum()


def _hash_of(batch: Mapping[str, Any]) -> Tensor:
    index = batch["token_index"] * to_int64(GOLDEN)
    total = torch.zeros_like(index)
    for name in ("input_ids", "labels", "position_ids"):
        total += mix_bits_tensor(mix_bits_tensor(index + to_int64(make_key(name))) + batch[name])
    for name in sorted(getattr(batch, "extra", {}).keys() - {*EXTRA_TENSORS}):
        total += _hash_of_column(name, batch[name], batch["token_index"])
    return torch.where(batch["document_ids"] != -1, total, 0).sum()


def _hash_of_column(name: str, values: Tensor, token_index: Tensor) -> Tensor:
    """Return the sum over the inner dimension of the hashes of values, int64 `[B, S]`."""
    bits = values.view(_BITS[values.dtype.itemsize]) if values.is_floating_point() else values
    bits = bits.reshape(*token_index.shape, -1)
    width = bits.shape[2]
    index = token_index.unsqueeze(2) * width + torch.arange(width, device=bits.device)
    index = index * to_int64(GOLDEN) + to_int64(make_key("column", name, width))
    return mix_bits_tensor(mix_bits_tensor(index) + bits.long()).sum(2)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _check_microbatches(where: str, microbatches: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(microbatches, Mapping) or len(microbatches) == 0:
        got = "one batch" if len(microbatches) else "none"
        must = "microbatches must be a sequence of at least one batch"
        raise ValueError(f"{where}: {must}, got {got}")
