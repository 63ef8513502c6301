"""Shard the tokens of a sequence over ranks.

In causal attention later tokens cost more than earlier ones. The zigzag order balances the cost: it
splits a document into 2N chunks, and rank r holds chunks r and 2N-1-r, so that each pair costs the
same (Zhu, "Ring flash attention", 2024; the Llama 3 report, 2024). In a packed row each document is
sharded separately.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainkit.noise.jit import jit
from trainkit.types import BATCH_TENSORS, Batch, Share, Spans, check_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trainkit.types import IntArray, Split


def zigzag_shard(x: Tensor, share: Share, *, dim: int = 1, cu_seqlens: Any = None) -> Tensor:
    """Return chunks r and 2N-1-r of every document, for rank r of N.

    Args:
        x: Any tensor.
        share: The rank r and the number of ranks N.
        dim: The sequence dimension.
        cu_seqlens: The starts of documents along `dim`, and its length at the end: integers `[D+1]`
            on the host (sequence, numpy array or CPU tensor). Each document's length must divide by
            2N. By default `dim` is one document.

    Returns:
        A tensor with 1/N of the tokens, documents in the same order; `x` itself when N is 1.

    Raises:
        ValueError: A length does not divide by 2N, `cu_seqlens` does not describe `dim`, or there
            is no such dimension.

    Examples:
        >>> x = torch.arange(16).reshape(1, 16)
        >>> zigzag_shard(x, Share(0, 2)).tolist()
        [[0, 1, 2, 3, 12, 13, 14, 15]]
        >>> zigzag_shard(x, Share(0, 2), cu_seqlens=[0, 4, 16]).tolist()
        [[0, 3, 4, 5, 6, 13, 14, 15]]
    """
    length = _get_length("zigzag_shard", x, dim)
    if share.count == 1:
        return x
    if cu_seqlens is None:
        size = _get_chunk_size("zigzag_shard", length, 2 * share.count)
        # Chunks r and 2N-1-r of 2N: an early, cheap one and a late, expensive one.
        starts = share.index * size, (2 * share.count - 1 - share.index) * size
        return torch.cat([x.narrow(dim, start, size) for start in starts], dim)
    shard = _copy_shard(x, share, dim, cu_seqlens)
    if shard is not None:
        return shard
    bounds = _check_bounds("zigzag_shard", cu_seqlens, length)
    index = _make_zigzag_index("zigzag_shard", bounds, share.index, share.count)
    return _select(x, index, dim)


def zigzag_unshard(x: Tensor, count: int, *, dim: int = 1, cu_seqlens: Any = None) -> Tensor:
    """Reorder the concatenated shards of all ranks: the inverse of `zigzag_shard`.

    Args:
        x: The `count` shards, concatenated along `dim`.
        count: The number of ranks N.
        dim: The sequence dimension.
        cu_seqlens: Of the full sequence, as for `zigzag_shard`.

    Returns:
        A tensor like `x`; `x` itself when `count` is 1.

    Raises:
        ValueError: A length does not divide by 2N, `cu_seqlens` does not describe `dim`, there is
            no such dimension, or `count` is below 1.

    Examples:
        >>> x = torch.arange(8).reshape(1, 8)
        >>> shards = [zigzag_shard(x, Share(rank, 2)) for rank in (0, 1)]
        >>> torch.equal(zigzag_unshard(torch.cat(shards, dim=1), 2), x)
        True
    """
    Share(0, count)  # refuses a count below 1
    length = _get_length("zigzag_unshard", x, dim)
    if count == 1:
        return x
    if cu_seqlens is None:
        size = _get_chunk_size("zigzag_unshard", length, 2 * count)
        # Rank r gave chunks 2r and 2r + 1 of x, which are chunks r and 2N-1-r of the sequence.
        chunks = [*range(0, 2 * count, 2), *range(2 * count - 1, 0, -2)]
        return torch.cat([x.narrow(dim, chunk * size, size) for chunk in chunks], dim)
    bounds = _check_bounds("zigzag_unshard", cu_seqlens, length)
    order = [_make_zigzag_index("zigzag_unshard", bounds, rank, count) for rank in range(count)]
    return _select(x, np.argsort(np.concatenate(order)), dim)


def contiguous_shard(x: Tensor, share: Share, *, dim: int = 1, cu_seqlens: Any = None) -> Tensor:
    """Return the r-th of N equal slices of `dim`, for rank r, as a view.

    A slice may begin inside a document. This is right only where a rank gets all slices of a
    sequence before attention (Ulysses).

    Args:
        x: Any tensor.
        share: The rank r and the number of ranks N.
        dim: The sequence dimension.
        cu_seqlens: Not used; every `Split` has it.

    Returns:
        A view with 1/N of the tokens; `x` itself when N is 1.

    Raises:
        ValueError: The length of `dim` does not divide by N, or there is no such dimension.

    Examples:
        >>> contiguous_shard(torch.arange(6).reshape(1, 6), Share(1, 2)).tolist()
        [[3, 4, 5]]
    """
    del cu_seqlens
    length = _get_length("contiguous_shard", x, dim)
    if share.count == 1:
        return x
    size = _get_chunk_size("contiguous_shard", length, share.count)
    return x.narrow(dim, share.index * size, size)


def shard_batch(batch: Batch, share: Share, *, split: Split = zigzag_shard) -> Batch:
    """Shard a batch along the sequence: all its tensors, with `extra`, and its spans.

    Each row is split by its own spans, including row padding. Shift labels before, never after: the
    next token may be on another rank. Positions, documents and token indices stay with their
    tokens.

    Args:
        batch: A `Batch` of `[B, S]` whose spans end where its rows end.
        share: The rank and the number of ranks N.
        split: Any `Split`. A custom one is called on column numbers, and all tensors follow them.

    Returns:
        A `Batch` of `[B, S/N]`; the batch itself when N is 1.

    Raises:
        ValueError: A span does not divide as `split` needs it (pack with `multiple_of`), or spans
            cross rows.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> half = shard_batch(make_padding_batch(2, 8), Share(1, 2))
        >>> half.position_ids.tolist(), half.spans.lengths.tolist()
        ([[2, 3, 4, 5], [2, 3, 4, 5]], [4, 4])
    """
    if share.count == 1:
        return batch
    rows, length = batch.input_ids.shape
    ends = np.cumsum(batch.spans.lengths)
    row_ends = np.arange(1, rows + 1) * length
    last = np.searchsorted(ends, row_ends)  # the last span of each row
    if ends[-1] != rows * length or not np.array_equal(ends[last], row_ends):
        raise ValueError(
            f"shard_batch: the spans do not end where the {rows} rows of {length} tokens end"
        )
    if split is zigzag_shard:
        return _zigzag_batch(batch, share, ends)
    if split is contiguous_shard:
        return _contiguous_batch(batch, share, ends)
    row_columns = torch.arange(length).unsqueeze(0)
    shards = []
    first = 0
    for row, end in enumerate(last + 1):
        bounds = np.append(0, ends[first:end] - row * length)
        shards.append(split(row_columns, share, dim=1, cu_seqlens=bounds))
        first = end
    columns = torch.cat(shards)  # [B, S/N], on the host
    span_of = np.repeat(np.arange(len(batch.spans.lengths)), batch.spans.lengths)
    span_of = np.take_along_axis(span_of.reshape(rows, length), columns.numpy(), axis=1)
    device = batch.input_ids.device
    # From columns of each row to positions in the flattened batch.
    columns += torch.arange(0, rows * length, length).unsqueeze(1)
    index = columns.flatten().to(device, non_blocking=True)

    def select(x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, index).unflatten(0, (rows, -1))

    return each_tensor(batch, select, spans=spans_of_runs(span_of, device=device))


def shard_sequence(batch: Batch, *, ring: Share, ulysses: Share) -> Batch:
    """Shard a batch along the sequence over ring x Ulysses.

    The ring gets a zigzag of each document, and Ulysses a contiguous slice of that. The spans are
    those of the ring's shard, because attention runs on it after Ulysses has exchanged heads for
    tokens. Shift labels before, never after.

    Args:
        batch: A `Batch` of `[B, S]` whose spans end where its rows end.
        ring: The rank in the ring, `ps.ring.share`.
        ulysses: The rank in Ulysses, `ps.ulysses.share`.

    Returns:
        A `Batch` of `[B, S / (ring * ulysses)]`, its spans over B rows of S / ring tokens; the
        batch itself when both counts are 1.

    Raises:
        ValueError: A document does not divide by 2 * ring, a row over the ring not by Ulysses,
            or spans cross rows.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> part = shard_sequence(make_padding_batch(1, 16), ring=Share(0, 2), ulysses=Share(1, 2))
        >>> part.position_ids.tolist(), part.spans.lengths.tolist()
        ([[12, 13, 14, 15]], [8])
    """
    ring_shard = shard_batch(batch, ring)
    if ulysses.count == 1:
        return ring_shard

    def shard(x: Tensor) -> Tensor:
        return contiguous_shard(x, ulysses).contiguous()

    return each_tensor(ring_shard, shard, spans=ring_shard.spans)


def _zigzag_batch(batch: Batch, share: Share, ends: IntArray) -> Batch:
    """Return the zigzag shard of a batch, with all its rows handled as one long row."""
    rows, length = batch.input_ids.shape
    bounds = np.zeros(len(ends) + 1, np.int64)
    bounds[1:] = ends

    def shard_tensor(x: Tensor) -> Tensor:
        shard = zigzag_shard(x.flatten(0, 1), share, dim=0, cu_seqlens=bounds)
        return shard.view(rows, length // share.count, *x.shape[2:])

    # Every rank gets two chunks of each document, so a shard has as many spans, each 1/N as long.
    spans = spans_of_lengths(batch.spans.lengths // share.count, device=batch.input_ids.device)
    tensors = [batch[name] for name in BATCH_TENSORS]
    if not all(_is_plain(x) and x.dtype == torch.int64 for x in tensors):
        return each_tensor(batch, shard_tensor, spans=spans)
    # One allocation for all five: separate ones take three times as long, in page faults.
    table = torch.empty(len(tensors), rows * length // share.count, dtype=torch.int64)
    for to, x in zip(table.numpy(), tensors, strict=True):
        is_copied = _copy_chunks(
            to, x.numpy().reshape(-1), rows * length, 1, bounds, share.index, share.count
        )
        if not is_copied:
            return each_tensor(batch, shard_tensor, spans=spans)  # which raises the right error
    input_ids, labels, position_ids, document_ids, token_index = table.view(5, rows, -1).unbind()
    extra = {name: shard_tensor(x) for name, x in batch.extra.items()}
    return Batch(input_ids, labels, position_ids, document_ids, token_index, spans, extra)


def _contiguous_batch(batch: Batch, share: Share, ends: IntArray) -> Batch:
    """Return the contiguous shard of a batch; its spans are the overlaps with the documents."""
    length = batch.input_ids.shape[1]
    size = _get_chunk_size("contiguous_shard", length, share.count)
    starts = ends - batch.spans.lengths
    # Where this rank's slice begins in the row of each span, which is the row of its last token.
    first = (np.maximum(ends - 1, starts) // length) * length + share.index * size
    # The overlap of each span with the slice of its row; it is below 1 for spans outside.
    lengths = np.minimum(ends, first + size) - np.maximum(starts, first)
    spans = spans_of_lengths(lengths[lengths > 0], device=batch.input_ids.device)

    def shard(x: Tensor) -> Tensor:
        return contiguous_shard(x, share).contiguous()

    return each_tensor(batch, shard, spans=spans)


def each_tensor(batch: Batch, function: Callable[[Tensor], Tensor], *, spans: Spans) -> Batch:
    """Return a batch with a function applied to each of its tensors."""
    return Batch(
        input_ids=function(batch.input_ids),
        labels=function(batch.labels),
        position_ids=function(batch.position_ids),
        document_ids=function(batch.document_ids),
        token_index=function(batch.token_index),
        spans=spans,
        extra={name: function(value) for name, value in batch.extra.items()},
    )


def spans_of_runs(
    ids: np.ndarray[Any, Any], *, multiple_of: int = 1, device: torch.device | str = "cpu"
) -> Spans:
    """Return the `Spans` of the runs of equal numbers in each row of a host array.

    Args:
        ids: Integers `[B, S]`. The end of a row always ends a run. Runs of negative numbers are
            padding, which `cut_padding` splits into short spans.
        multiple_of: The spans of padding are multiples of this.
        device: The device of `cu_seqlens`.

    Returns:
        The `Spans` over the flattened rows.

    Raises:
        ValueError: There are 2^31 tokens or more, which int32 `cu_seqlens` cannot count.

    Examples:
        >>> spans_of_runs(np.array([[0, 0, 1], [1, 1, 1]])).cu_seqlens.tolist()
        [0, 2, 3, 6]
    """
    if ids.size >= 1 << 31:
        raise ValueError(f"spans_of_runs: {ids.size} tokens are too many for int32 cu_seqlens")
    is_start = np.ones(ids.shape, bool)
    # The first column is a start whatever stood at the end of the row before.
    is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = np.flatnonzero(is_start)
    lengths = np.diff(np.append(starts, ids.size))
    is_padding = ids.reshape(-1)[starts] < 0
    return spans_of_lengths(
        cut_padding(lengths, is_padding, multiple_of=multiple_of), device=device
    )


def spans_of_lengths(lengths: IntArray, *, device: torch.device | str = "cpu") -> Spans:
    """Return the `Spans` of consecutive documents of given lengths.

    Examples:
        >>> spans_of_lengths(np.array([2, 1, 3])).cu_seqlens.tolist()
        [0, 2, 3, 6]
    """
    bounds = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, dtype=np.int32, out=bounds[1:])
    cu_seqlens = torch.from_numpy(bounds).to(device, non_blocking=True)
    return Spans(cu_seqlens, lengths, int(lengths.max(initial=0)))


def spans_from_rows(rows: int, length: int, *, device: torch.device | str = "cpu") -> Spans:
    """Return the `Spans` of plain rows: one document each, without padding.

    Use it to call a model or an attention function on unpacked rows. A `make_padding_batch` has
    other spans: its rows are padding, which is split into short spans.

    Args:
        rows: The number of rows.
        length: Tokens in a row.
        device: The device of `cu_seqlens`.

    Raises:
        ValueError: There are no tokens, or more than int32 `cu_seqlens` can count.

    Examples:
        >>> spans_from_rows(2, 128).lengths.tolist()
        [128, 128]
    """
    check_range("spans_from_rows", at_least=1, rows=rows, length=length)
    check_range("spans_from_rows", below=1 << 31, tokens=rows * length)
    return spans_of_lengths(np.full(rows, length), device=device)


def cut_padding(
    lengths: IntArray, is_padding: np.ndarray[Any, Any], *, multiple_of: int = 1
) -> IntArray:
    """Split spans of padding into spans of about 96 tokens; return the lengths of all spans.

    Attention inside a span costs its length squared. With short spans the cost of padding is linear
    in its length, and no kernel needs a special case for it.

    Args:
        lengths: Tokens of each span, int64 `[N]`, at least 1.
        is_padding: A mask of the spans of padding, bool `[N]`.
        multiple_of: All lengths are, and stay, multiples of this: 2N for a ring of N ranks.

    Returns:
        int64 `[M]`, M >= N; other spans are unchanged.

    Examples:
        >>> cut_padding(np.array([200, 200]), np.array([False, True])).tolist()
        [200, 96, 96, 8]
        >>> cut_padding(np.array([200]), np.array([True]), multiple_of=10).tolist()
        [100, 100]
    """
    size = -(-_PADDING_SPAN // multiple_of) * multiple_of
    # Spans of `size`, and the last of each as long as what remains.
    num_spans = np.where(is_padding, -(-lengths // size), 1)
    split = np.repeat(np.where(is_padding, size, lengths), num_spans)
    split[np.cumsum(num_spans) - 1] = np.where(
        is_padding, lengths - (num_spans - 1) * size, lengths
    )
    return split


_PADDING_SPAN = 96
"""Tokens in a span of padding; it divides by 2N for rings of 2, 3, 4, 6, 8, 12, 16 and more."""


def _copy_shard(x: Tensor, share: Share, dim: int, bounds: Any) -> Tensor | None:
    """Copy a zigzag shard with one compiled loop over chunks; return None if that is impossible.

    The loop needs valid bounds and a plain, contiguous tensor on the host, without a gradient, of
    at most 8 bytes an element, whose bits it copies as integers. 131,072 int64 in 128 documents
    over a ring of 8 take 1.6 times as long as a copy of the result; an index takes 25 times, a
    slice per chunk 150 times as long.
    """
    if not _is_plain(x) or type(bounds) is not np.ndarray or bounds.dtype.kind != "i":
        return None
    bits = _BITS.get(x.dtype.itemsize)
    if bits is None:
        return None
    source = x.view(bits).numpy()
    shape = list(x.shape)
    length = shape[dim]
    # How many numbers one step along `dim` spans: those of all dimensions after it.
    inner = math.prod(shape[dim % len(shape) + 1 :])
    shape[dim] //= share.count
    out = np.empty(shape, source.dtype)
    # Flat arrays, so that numba compiles the loop once per size of elements, not per rank.
    is_copied = _copy_chunks(
        out.reshape(-1), source.reshape(-1), length, inner, bounds, share.index, share.count
    )
    return torch.from_numpy(out).view(x.dtype) if is_copied else None


def _is_plain(x: Tensor) -> bool:
    """Return whether the elements of a tensor can be copied one after another on the host."""
    if type(x) is not torch.Tensor or x.requires_grad or not x.is_cpu or not x.is_contiguous():
        return False
    return x.dtype == torch.int64 or not (x.is_conj() or x.is_neg())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit
def _copy_chunks(  # noqa: PLR0917 (keywords take numba 1 us)
    to: Any, source: Any, length: int, inner: int, bounds: Any, rank: int, count: int
) -> bool:
    """Copy chunks r and 2N-1-r of each document in each row of `length`; False if bounds are bad.

    An element of a row is `inner` numbers.
    """
    if bounds.ndim != 1 or len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != length:
        return False
    position = np.uintp(0)  # unsigned: numba checks every signed index for being negative
    fraction = 0.5 / count  # an integer division per document would cost as much as its copy
    for row in range(len(source) // max(length * inner, 1)):
        end = 0
        for document in range(1, len(bounds)):
            start = end
            end = bounds[document]
            # Rounding may be wrong for lengths that do not divide; the product below finds these.
            size = np.int64((end - start) * fraction + 0.5)
            if end <= start or end > length or size * 2 * count != end - start:
                return False
            num_values = np.uintp(size * inner)
            # Chunk r counts from the front, chunk 2N-1-r as many from the back.
            for chunk in (start + rank * size, end - (rank + 1) * size):
                first = np.uintp((row * length + chunk) * inner)
                for i in range(num_values):
                    to[position + i] = source[first + i]
                position += num_values
    return True


def _make_zigzag_index(function: str, bounds: IntArray, rank: int, count: int) -> IntArray:
    """Return the indices of the tokens of rank r of N: chunks r and 2N-1-r of each document."""
    sizes, remainders = np.divmod(np.diff(bounds), 2 * count)
    if remainders.any():
        document = int((remainders > 0).argmax())
        raise ValueError(
            f"{function}: document {document} has {bounds[document + 1] - bounds[document]} "
            f"tokens, no multiple of {2 * count} (2 parts for each of {count} ranks); pack with "
            f"multiple_of={2 * count}"
        )
    chunks = np.array([rank, 2 * count - 1 - rank])
    # The ranges [start, start + size) of all chunks, as one array: each index is the start of its
    # range less the lengths of the ranges before it, plus a running number.
    starts = (bounds[:-1, None] + sizes[:, None] * chunks).reshape(-1)
    sizes = np.repeat(sizes, 2)
    lengths_before = np.cumsum(sizes) - sizes
    return np.repeat(starts - lengths_before, sizes) + np.arange(sizes.sum())


def _select(x: Tensor, index: IntArray, dim: int) -> Tensor:
    return x.index_select(dim, torch.from_numpy(index).to(x.device, non_blocking=True))


def _check_bounds(function: str, cu_seqlens: Any, length: int) -> IntArray:
    """Check `cu_seqlens` against the length of the sequence, and return it as int64 numpy."""
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"{function}: cu_seqlens is on {cu_seqlens.device}; give it on the host, as "
            "np.append(0, spans.lengths.cumsum()): reading it back would wait for the device"
        )
    bounds = np.asarray(cu_seqlens)
    if bounds.ndim != 1 or bounds.size == 0 or bounds.dtype.kind not in "iu":
        raise ValueError(
            f"{function}: cu_seqlens must be integers in one dimension, got "
            f"{bounds.dtype} {bounds.shape}"
        )
    bounds = bounds.astype(np.int64)
    has_ends = bounds[0] == 0 and bounds[-1] == length
    if not has_ends or (np.diff(bounds) <= 0).any():
        raise ValueError(
            f"{function}: cu_seqlens must rise from 0 to the length, {length}, got "
            f"{bounds.tolist()}"
        )
    return bounds


def _get_length(function: str, x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{function}: there is no dimension {dim} in {tuple(x.shape)}")
    return x.shape[dim]


def _get_chunk_size(function: str, length: int, num_chunks: int) -> int:
    if length % num_chunks:
        raise ValueError(
            f"{function}: a length of {length} does not divide into {num_chunks} parts; it must be "
            f"a multiple of {num_chunks}"
        )
    return length // num_chunks
