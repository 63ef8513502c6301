"""Which tokens of a sequence each rank holds: from a tensor and a `Share` to that share's part.

The causal half of attention makes later tokens dearer than earlier ones. The zigzag order evens
that out: it cuts a document into 2N chunks and gives rank r chunks r and 2N-1-r, so each pair costs
the same (Zhu, "Ring flash attention", 2024; the Llama 3 report, 2024). With documents packed into a
row, each document is cut on its own.
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
    """Return chunks r and 2N-1-r of every document for rank r of N, of `dim` without documents.

    Args:
        x: Any tensor.
        share: Which rank of how many.
        dim: The sequence dimension.
        cu_seqlens: Where documents begin along `dim`, and its length at the end: integers `[D+1]`
            on the host (sequence, numpy array or CPU tensor). Each document's length must divide by
            2N.

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
    length = _length("zigzag_shard", x, dim)
    if share.count == 1:
        return x
    if cu_seqlens is None:
        size = _chunk("zigzag_shard", length, 2 * share.count)
        starts = share.index * size, (2 * share.count - 1 - share.index) * size
        return torch.cat([x.narrow(dim, start, size) for start in starts], dim)
    shard = _copied(x, share, dim, cu_seqlens)
    if shard is not None:
        return shard
    bounds = _bounds("zigzag_shard", cu_seqlens, length)
    index = _zigzag_index("zigzag_shard", bounds, share.index, share.count)
    return _take(x, index, dim)


def zigzag_unshard(x: Tensor, count: int, *, dim: int = 1, cu_seqlens: Any = None) -> Tensor:
    """Undo `zigzag_shard`: put the shards of all ranks back into the order of the whole.

    Args:
        x: The `count` shards, concatenated along `dim`.
        count: The number of ranks N.
        dim: The sequence dimension.
        cu_seqlens: Of the whole, as it was given to `zigzag_shard`.

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
    length = _length("zigzag_unshard", x, dim)
    if count == 1:
        return x
    if cu_seqlens is None:
        size = _chunk("zigzag_unshard", length, 2 * count)
        places = [*range(0, 2 * count, 2), *range(2 * count - 1, 0, -2)]
        return torch.cat([x.narrow(dim, place * size, size) for place in places], dim)
    bounds = _bounds("zigzag_unshard", cu_seqlens, length)
    order = [_zigzag_index("zigzag_unshard", bounds, rank, count) for rank in range(count)]
    return _take(x, np.argsort(np.concatenate(order)), dim)


def contiguous_shard(x: Tensor, share: Share, *, dim: int = 1, cu_seqlens: Any = None) -> Tensor:
    """Return the r-th of N equal slices of `dim`, for rank r, as a view.

    `cu_seqlens` is taken, because every `Split` takes it, and not used: a slice may begin inside a
    document. That suits whoever sees all slices of a sequence before attention (Ulysses), and
    nobody else.

    Args:
        x: Any tensor.
        share: Which rank of how many.
        dim: The sequence dimension.
        cu_seqlens: Not used.

    Returns:
        A view with 1/N of the tokens; `x` itself when N is 1.

    Raises:
        ValueError: The length of `dim` does not divide by N, or there is no such dimension.

    Examples:
        >>> contiguous_shard(torch.arange(6).reshape(1, 6), Share(1, 2)).tolist()
        [[3, 4, 5]]
    """
    del cu_seqlens
    length = _length("contiguous_shard", x, dim)
    if share.count == 1:
        return x
    size = _chunk("contiguous_shard", length, share.count)
    return x.narrow(dim, share.index * size, size)


def shard_batch(batch: Batch, share: Share, *, split: Split = zigzag_shard) -> Batch:
    """Return one share of a batch's tokens: all its tensors, `extra` too, and spans that follow.

    Each row is split by its own spans, row padding included. Shift labels before, never after: the
    next token may be on another rank. Positions, documents and token indices travel with their
    tokens.

    Args:
        batch: A `Batch` of `[B, S]`; its spans end where its rows end.
        share: Which rank of how many.
        split: Which tokens a share holds. Any `Split` will do: it is asked about positions, and all
            else follows.

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
    last = _ends_of_rows(ends, rows, length)
    if split is zigzag_shard:
        return _zigzag_batch(batch, share, ends)
    if split is contiguous_shard:
        return _contiguous_batch(batch, share, ends)
    places = _places(batch.spans.lengths, last, length, share, split)
    span_of = np.repeat(np.arange(len(batch.spans.lengths)), batch.spans.lengths)
    span_of = np.take_along_axis(span_of.reshape(rows, length), places.numpy(), axis=1)
    device = batch.input_ids.device
    places += torch.arange(0, rows * length, length).unsqueeze(1)
    index = places.flatten().to(device, non_blocking=True)

    def cut(x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, index).unflatten(0, (rows, -1))

    return each_tensor(batch, cut, spans=spans_of_runs(span_of, device=device))


def shard_sequence(batch: Batch, *, ring: Share, ulysses: Share) -> Batch:
    """Return the tokens that one rank of ring x Ulysses holds of a batch.

    First a zigzag over the ring, document by document, then a contiguous slice over Ulysses. The
    spans stay those of the ring's part: attention sees them, after it has exchanged heads for
    tokens. Shift labels before, never after.

    Args:
        batch: A `Batch` of `[B, S]` whose spans end where its rows end.
        ring: Which rank of the ring, `ps.ring.share`.
        ulysses: Which rank of Ulysses, `ps.ulysses.share`.

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
    ring_part = shard_batch(batch, ring)
    if ulysses.count == 1:
        return ring_part

    def cut(x: Tensor) -> Tensor:
        return contiguous_shard(x, ulysses).contiguous()

    return each_tensor(ring_part, cut, spans=ring_part.spans)


def _zigzag_batch(batch: Batch, share: Share, ends: IntArray) -> Batch:
    """Return the zigzag part of a batch: the documents of all rows are cut as those of one row."""
    rows, length = batch.input_ids.shape
    bounds = np.zeros(len(ends) + 1, np.int64)
    bounds[1:] = ends

    def cut(x: Tensor) -> Tensor:
        shard = zigzag_shard(x.flatten(0, 1), share, dim=0, cu_seqlens=bounds)
        return shard.view(rows, length // share.count, *x.shape[2:])

    spans = spans_of_lengths(batch.spans.lengths // share.count, device=batch.input_ids.device)
    tensors = [batch[name] for name in BATCH_TENSORS]
    if not all(_is_plain(x) and x.dtype == torch.int64 for x in tensors):
        return each_tensor(batch, cut, spans=spans)
    # One piece of memory for all: five that come and go take three times as long in page faults.
    table = torch.empty(len(tensors), rows * length // share.count, dtype=torch.int64)
    for to, x in zip(table.numpy(), tensors, strict=True):
        if not _copy_chunks(
            to, x.numpy().reshape(-1), rows * length, 1, bounds, share.index, share.count
        ):
            return each_tensor(batch, cut, spans=spans)  # which says what is wrong
    parts = table.view(len(tensors), rows, -1).unbind()
    extra = {name: cut(x) for name, x in batch.extra.items()}
    return Batch(**dict(zip(BATCH_TENSORS, parts, strict=True)), spans=spans, extra=extra)


def _contiguous_batch(batch: Batch, share: Share, ends: IntArray) -> Batch:
    """Return the contiguous part of a batch: its spans are what lies of each document in it."""
    length = batch.input_ids.shape[1]
    size = _chunk("contiguous_shard", length, share.count)
    begins = ends - batch.spans.lengths
    first = (np.maximum(ends - 1, begins) // length) * length + share.index * size
    lengths = np.minimum(ends, first + size) - np.maximum(begins, first)
    spans = spans_of_lengths(lengths[lengths > 0], device=batch.input_ids.device)

    def cut(x: Tensor) -> Tensor:
        return contiguous_shard(x, share).contiguous()

    return each_tensor(batch, cut, spans=spans)


def each_tensor(batch: Batch, function: Callable[[Tensor], Tensor], *, spans: Spans) -> Batch:
    """Return a batch with a function applied to each of its tensors."""
    return Batch(
        **{name: function(batch[name]) for name in BATCH_TENSORS},
        spans=spans,
        extra={name: function(value) for name, value in batch.extra.items()},
    )


def spans_of_runs(
    ids: np.ndarray[Any, Any], *, multiple_of: int = 1, device: torch.device | str = "cpu"
) -> Spans:
    """Return the `Spans` of the runs of equal numbers in each row of a host array.

    Args:
        ids: Integers `[B, S]`. The end of a row always ends a run. Runs of negative numbers are
            padding, which `cut_padding` makes into short spans.
        multiple_of: What the spans of padding are multiples of.
        device: Where `cu_seqlens` shall live.

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
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begins = np.flatnonzero(begins)
    lengths = np.diff(np.append(begins, ids.size))
    is_padding = ids.reshape(-1)[begins] < 0
    return spans_of_lengths(
        cut_padding(lengths, is_padding, multiple_of=multiple_of), device=device
    )


def spans_of_lengths(lengths: IntArray, *, device: torch.device | str = "cpu") -> Spans:
    """Return the `Spans` of documents of these lengths, one after another.

    Examples:
        >>> spans_of_lengths(np.array([2, 1, 3])).cu_seqlens.tolist()
        [0, 2, 3, 6]
    """
    bounds = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, dtype=np.int32, out=bounds[1:])
    cu_seqlens = torch.from_numpy(bounds).to(device, non_blocking=True)
    return Spans(cu_seqlens, lengths, int(lengths.max(initial=0)))


def spans_from_rows(rows: int, length: int, *, device: torch.device | str = "cpu") -> Spans:
    """Return the `Spans` of plain rows: one document in each, and no padding.

    For models and attention functions that are given rows as they are. The spans of a
    `make_padding_batch`
    are others: its rows are padding, which is cut into short spans.

    Args:
        rows: How many rows.
        length: Tokens of each.
        device: Where `cu_seqlens` shall live.

    Raises:
        ValueError: There would be no tokens, or more than int32 `cu_seqlens` can count.

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
    """Return the lengths of spans, those of padding cut into spans of about 96 tokens.

    Attention inside a span costs its length squared. So padding costs no more than its length, in
    every kernel, and none has to know of it.

    Args:
        lengths: Tokens of each span, int64 `[N]`, at least 1.
        is_padding: Which of them are padding, bool `[N]`.
        multiple_of: What all lengths are multiples of, and shall be: 2N for a ring of N ranks.

    Returns:
        int64 `[M]`, M >= N: the others as they were.

    Examples:
        >>> cut_padding(np.array([200, 200]), np.array([False, True])).tolist()
        [200, 96, 96, 8]
        >>> cut_padding(np.array([200]), np.array([True]), multiple_of=10).tolist()
        [100, 100]
    """
    size = -(-_PADDING // multiple_of) * multiple_of
    pieces = np.where(is_padding, -(-lengths // size), 1)
    cut = np.repeat(np.where(is_padding, size, lengths), pieces)
    cut[np.cumsum(pieces) - 1] = np.where(is_padding, lengths - (pieces - 1) * size, lengths)
    return cut


_PADDING = 96
"""What a span of padding holds: it divides by 2N for rings of 2, 3, 4, 6, 8, 12, 16 and more."""


def _ends_of_rows(ends: IntArray, rows: int, length: int) -> IntArray:
    """Return the last span of each row, `[B]`, of the ends of spans; refuse any that cross rows."""
    if rows == 1 and ends[-1] == length:
        return np.array([len(ends) - 1])
    row_ends = np.arange(1, rows + 1) * length
    last = np.searchsorted(ends, row_ends)
    if ends[-1] != rows * length or not np.array_equal(ends[last], row_ends):
        what = f"the spans do not end where the {rows} rows of {length} tokens end"
        raise ValueError(f"shard_batch: {what}")
    return last


def _places(lengths: IntArray, last: IntArray, length: int, share: Share, split: Split) -> Tensor:
    """Return which columns of each row a share holds, int64 `[B, S/N]` on the host."""
    ends, columns, first = np.cumsum(lengths), torch.arange(length).unsqueeze(0), 0
    parts: list[Tensor] = []
    for row, end in enumerate(last + 1):
        bounds = np.append(0, ends[first:end] - row * length)
        parts.append(split(columns, share, dim=1, cu_seqlens=bounds))
        first = end
    return torch.cat(parts)


def _copied(x: Tensor, share: Share, dim: int, bounds: Any) -> Tensor | None:
    """Return a zigzag shard by one compiled loop over chunks, or None where that cannot be.

    It needs a plain tensor on the host, in order, without a gradient to follow, of at most 8 bytes
    an element (whose bits are copied as integers), and bounds that are as they should be. 131,072
    int64 in 128 documents over a ring of 8 take 1.6 times a copy of the result; an index takes 25
    times, a slice per chunk 150 times as long.
    """
    if not _is_plain(x) or type(bounds) is not np.ndarray or bounds.dtype.kind != "i":
        return None
    bits = _BITS.get(x.dtype.itemsize)
    if bits is None:
        return None
    source, shape = x.view(bits).numpy(), list(x.shape)
    length, inner = shape[dim], math.prod(shape[dim % len(shape) + 1 :])
    shape[dim] //= share.count
    out = np.empty(shape, source.dtype)
    flat = out.reshape(-1), source.reshape(-1)  # the loop is compiled once for a size of elements
    if _copy_chunks(*flat, length, inner, bounds, share.index, share.count):
        return torch.from_numpy(out).view(x.dtype)
    return None


def _is_plain(x: Tensor) -> bool:
    """Say whether the elements of a tensor can be copied one after another on the host."""
    if type(x) is not torch.Tensor or x.requires_grad or not x.is_cpu or not x.is_contiguous():
        return False
    return x.dtype == torch.int64 or not (x.is_conj() or x.is_neg())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit
def _copy_chunks(  # noqa: PLR0917 (keywords take numba 1 us)
    to: Any, of: Any, length: int, inner: int, bounds: Any, rank: int, count: int
) -> bool:
    """Copy chunks r and 2N-1-r of each document in each row of `length`; False if bounds are bad.

    An element of a row is `inner` numbers.
    """
    if bounds.ndim != 1 or len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != length:
        return False
    place = np.uintp(0)  # unsigned, or each index would be checked for being negative
    part = 0.5 / count  # a division of integers for each document would cost as much as its copy
    for row in range(len(of) // max(length * inner, 1)):
        end = 0
        for document in range(1, len(bounds)):
            begin, end = end, bounds[document]
            size = np.int64((end - begin) * part + 0.5)
            if end <= begin or end > length or size * 2 * count != end - begin:
                return False
            words = np.uintp(size * inner)
            for start in (begin + rank * size, end - (rank + 1) * size):
                first = np.uintp((row * length + start) * inner)
                for i in range(words):
                    to[place + i] = of[first + i]
                place += words
    return True


def _zigzag_index(where: str, bounds: IntArray, rank: int, count: int) -> IntArray:
    """Return which tokens rank r of N holds: chunks r and 2N-1-r of each document."""
    sizes, rests = np.divmod(np.diff(bounds), 2 * count)
    if rests.any():
        worst = int((rests > 0).argmax())
        want = f"no multiple of {2 * count} (2 parts for each of {count} ranks)"
        what = f"document {worst} has {bounds[worst + 1] - bounds[worst]} tokens, {want}"
        raise ValueError(f"{where}: {what}; pack with multiple_of={2 * count}")
    chunks = np.array([rank, 2 * count - 1 - rank])
    starts = (bounds[:-1, None] + sizes[:, None] * chunks).reshape(-1)
    sizes = np.repeat(sizes, 2)
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _take(x: Tensor, index: IntArray, dim: int) -> Tensor:
    return x.index_select(dim, torch.from_numpy(index).to(x.device, non_blocking=True))


def _bounds(where: str, cu_seqlens: Any, length: int) -> IntArray:
    """Check `cu_seqlens` against the length it describes and return it as int64 numpy."""
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type != "cpu":
        mend = "give it on the host, as np.append(0, spans.lengths.cumsum())"
        why = "reading it back would wait for the device"
        raise ValueError(f"{where}: cu_seqlens is on {cu_seqlens.device}; {mend}: {why}")
    bounds = np.asarray(cu_seqlens)
    if bounds.ndim != 1 or bounds.size == 0 or bounds.dtype.kind not in "iu":
        got = f"{bounds.dtype} {bounds.shape}"
        raise ValueError(f"{where}: cu_seqlens must be integers in one dimension, got {got}")
    bounds = bounds.astype(np.int64)
    if bounds[0] != 0 or bounds[-1] != length or (np.diff(bounds) <= 0).any():
        must = f"must rise from 0 to the length, {length}, got {bounds.tolist()}"
        raise ValueError(f"{where}: cu_seqlens {must}")
    return bounds


def _length(where: str, x: Tensor, dim: int) -> int:
    """Return the size of a dimension of x, and refuse one that it does not have."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{where}: there is no dimension {dim} in {tuple(x.shape)}")
    return x.shape[dim]


def _chunk(where: str, length: int, parts: int) -> int:
    """Return the size of one of `parts` equal parts."""
    if length % parts:
        what = f"a length of {length} does not divide into {parts} parts"
        raise ValueError(f"{where}: {what}; it must be a multiple of {parts}")
    return length // parts
