"""The gated delta rule: a linear recurrence in place of attention, inside each document.

A head has a state S, a matrix `[D, E]` that maps keys to values. Each token forgets a part of it,
and replaces what is stored under its key (Yang et al., "Gated Delta Networks", 2024):

    S_t = a_t (I - b_t k_t k_t') S_{t-1} + b_t k_t v_t'        o_t = S_t' q_t

Here it is computed in chunks of tokens. Inside a chunk the updates are one triangular system (the
WY representation: Yang et al., "Parallelizing linear transformers with the delta rule", 2024); a
whole chunk maps the state before it to the one after it, S -> A S + B, so only this small affine
map is applied one chunk after another, to all documents at once. Cost and memory are linear in the
number of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.types import Spans, check_range


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    spans: Spans,
    scale: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the gated delta rule inside each span, from a state of zeros.

    Sums are in fp32, in fp64 for fp64 inputs. Documents are padded to whole chunks; the chunk
    changes only the rounding.

    Args:
        q: Queries `[B, S, K, D]`.
        k: Keys `[B, S, K, D]`. The rule is stable for keys of at most unit length, so normalize
            them.
        v: Values `[B, S, H, E]`; K divides H, and each key head serves H / K neighbouring value
            heads.
        log_decay: The logarithm of the decay a, `[B, S, H]`, at most 0 and finite.
        beta: The strength b of the update, `[B, S, H]`, between 0 and 1 (up to 2 keeps the rule
            stable as well).
        spans: The documents, over the flattened rows.
        scale: The factor of queries; 1 / sqrt(D) by default.
        chunk: The number of tokens in a chunk; by default that of `choose_chunk`.

    Returns:
        `[B, S, H, E]`, of v's dtype.

    Raises:
        ValueError: Shapes do not fit each other, the spans do not cover the tokens, or the chunk is
            below 1.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> k = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
        >>> v = torch.tensor([5.0, 6.0, 7.0]).view(1, 3, 1, 1)
        >>> zeros, ones = torch.zeros(1, 3, 1), torch.ones(1, 3, 1)
        >>> out = gated_delta(
        ...     k, k, v, log_decay=zeros, beta=ones, spans=spans_from_rows(1, 3), scale=1.0
        ... )
        >>> out.flatten().tolist()  # the newest value under this key
        [5.0, 6.0, 7.0]
    """
    return gated_delta_with_states(
        q, k, v, log_decay=log_decay, beta=beta, spans=spans, scale=scale, chunk=chunk
    )[0]


def gated_delta_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    spans: Spans,
    scale: float | None = None,
    chunk: int | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gated delta rule inside each span, and the state after each.

    Args:
        q: Queries `[B, S, K, D]`; all but `initial` as for `gated_delta`.
        k: Keys `[B, S, K, D]`.
        v: Values `[B, S, H, E]`.
        log_decay: `[B, S, H]`.
        beta: `[B, S, H]`.
        spans: The documents, over the flattened rows.
        scale: The factor of queries; 1 / sqrt(D) by default.
        chunk: The number of tokens in a chunk.
        initial: The state before each span, `[N, H, D, E]`; zeros by default.

    Returns:
        The output `[B, S, H, E]`, of v's dtype, and the states after the spans, `[N, H, D, E]`, in
        the dtype of the sums.

    Raises:
        ValueError: As `gated_delta`.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> k, v, zeros = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1), torch.zeros(1, 2, 1)
        >>> out, state = gated_delta_with_states(
        ...     k, k, v, log_decay=zeros, beta=zeros + 0.5, spans=spans_from_rows(1, 2)
        ... )
        >>> out.flatten().tolist(), state.item()
        ([0.5, 0.75], 0.75)
    """
    check_delta_inputs(q, k, v, log_decay=log_decay, beta=beta, spans=spans, chunk=chunk)
    layout = lay_out_chunks(spans, chunk or choose_chunk(spans, k.shape[3]))
    with torch.autocast(v.device.type, enabled=False):
        chunks = make_chunks(q, k, v, log_decay=log_decay, beta=beta, scale=scale, layout=layout)
        if initial is None:
            initial = chunks.offset.new_zeros(len(spans.lengths), *chunks.offset.shape[1:])
        before, after = scan_chunks(chunks, initial, layout)
        return read_states(chunks, before, layout).view_as(v).to(v.dtype), after


def step_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gated delta rule for one more token of each row of text, and the new state.

    Args:
        q: Queries `[R, K, D]`.
        k: Keys `[R, K, D]`.
        v: Values `[R, H, E]`.
        log_decay: `[R, H]`.
        beta: `[R, H]`.
        state: The state before the token, `[R, H, D, E]`, as `gated_delta` returns it.
        scale: The factor of queries; 1 / sqrt(D) by default.

    Returns:
        The output `[R, H, E]`, of v's dtype, and the new state.

    Examples:
        >>> k, v, state = torch.ones(1, 1, 1), torch.tensor([[[3.0]]]), torch.ones(1, 1, 1, 1)
        >>> half = torch.tensor([[0.5]])
        >>> out, state = step_gated_delta(k, k, v, log_decay=half.log(), beta=half, state=state)
        >>> out.item(), state.item()  # 0.5 + 0.5 * (3 - 0.5)
        (1.75, 1.75)
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = v.shape[1] // k.shape[1]
    q_, k_, v_, log_decay, beta = (x.to(state.dtype) for x in (q, k, v, log_decay, beta))
    q_, k_ = (x.repeat_interleave(groups, dim=1).unsqueeze(3) for x in (q_ * scale, k_))
    state = state * log_decay.exp()[..., None, None]
    error = v_ - (k_ * state).sum(2)
    state = state + k_ * (beta.unsqueeze(2) * error).unsqueeze(2)
    return (q_ * state).sum(2).to(v.dtype), state


def check_delta_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    spans: Spans,
    chunk: int | None,
) -> None:
    """Check the inputs of the gated delta rule, before anything is computed or communicated.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        log_decay: The logarithm of the decay.
        beta: The strength of the update.
        spans: The documents, over the flattened rows.
        chunk: The number of tokens in a chunk, or None.

    Raises:
        ValueError: Shapes do not fit each other, the spans do not cover the tokens, or the chunk is
            below 1.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.ones(3, 1, 4, 2, 8)
        >>> gates = torch.zeros(1, 4, 2)
        >>> check_delta_inputs(
        ...     q, k, v, log_decay=gates, beta=gates, spans=spans_from_rows(1, 3), chunk=64
        ... )
        Traceback (most recent call last):
        ...
        ValueError: gated_delta: the spans have 3 tokens, q has 1 x 4; give the spans of this batch
    """
    is_valid = (
        q.ndim == v.ndim == 4
        and q.shape == k.shape
        and q.shape[:2] == v.shape[:2]
        and all(x.numel() for x in (q, v))
        and v.shape[2] % k.shape[2] == 0
        and log_decay.shape == beta.shape == v.shape[:3]
    )
    if not is_valid:
        raise ValueError(
            "gated_delta: q and k must be [B, S, K, D], v [B, S, H, E] with K a divisor of H, "
            f"log_decay and beta [B, S, H], and no size 0; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, log_decay {tuple(log_decay.shape)} and "
            f"beta {tuple(beta.shape)}"
        )
    check_range("gated_delta", at_least=1, chunk=1 if chunk is None else chunk)
    if spans.lengths.sum() != q.shape[0] * q.shape[1]:
        raise ValueError(
            f"gated_delta: the spans have {spans.lengths.sum()} tokens, q has {q.shape[0]} x "
            f"{q.shape[1]}; give the spans of this batch"
        )


# ------------------------------------------------------------------------------------------ chunks


@attrs.frozen(eq=False)
class ChunkLayout:
    """Where the tokens of documents are among their chunks.

    First come the first chunks of all documents, then the second chunks of those that have two, and
    so on, the documents with most chunks in front: the order of torch's `PackedSequence`. So what
    happens at the same time lies side by side.

    Attributes:
        size: The number of tokens in a chunk.
        counts: How many documents have a first chunk, a second, and so on.
        order: int64 `[N]`, the documents by falling number of chunks.
        slots: int64 `[T]`, the place of each token in the chunks; None if they are in order.
    """

    size: int
    counts: tuple[int, ...]
    order: Tensor
    slots: Tensor | None


def choose_chunk(spans: Spans, key_size: int) -> int:
    """Return the number of tokens in a chunk, 16, 32 or 64, that multiplies least.

    A chunk C of keys of size D costs about D (5 C^2 + 3 C D + D^2) products, padding included, so
    small keys and short documents want small chunks.

    Args:
        spans: The documents.
        key_size: The size of a head of keys.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> choose_chunk(spans_from_rows(1, 4096), 128), choose_chunk(spans_from_rows(512, 8), 128)
        (64, 16)
    """

    def count(size: int) -> int:
        chunks = int((-(-spans.lengths // size)).sum())
        return chunks * (5 * size**2 + 3 * size * key_size + key_size**2)

    return min((16, 32, 64), key=count)


def lay_out_chunks(spans: Spans, size: int) -> ChunkLayout:
    """Return the layout of documents in chunks of `size` tokens.

    Args:
        spans: The documents.
        size: The number of tokens in a chunk.

    Examples:
        >>> spans = Spans(torch.tensor([0, 1, 4]), np.array([1, 3]), 3)
        >>> layout = lay_out_chunks(spans, 2)
        >>> layout.counts, layout.order.tolist(), layout.slots.tolist()
        ((2, 1), [1, 0], [2, 0, 1, 4])
    """
    # Sizes are those of the host, indices are computed on the device: an upload would wait.
    needed = -(-spans.lengths // size)
    counts = tuple((needed[:, None] > np.arange(needed.max())).sum(0).tolist())
    bounds = spans.cu_seqlens.long()
    chunks = (bounds.diff() + size - 1) // size
    order = chunks.argsort(descending=True, stable=True)
    tokens = int(spans.lengths.sum())
    # Whole chunks, all of one document or each a document: they are in order.
    if sum(counts) * size == tokens and 1 in {len(counts), max(counts)}:
        return ChunkLayout(size, counts, order, None)
    # The number of chunks at earlier times: of each document, up to its own number.
    ordered, times = chunks[order], torch.arange(len(counts), device=bounds.device)
    later = torch.searchsorted(-ordered, -times, right=False)
    before = later.cumsum(0) - later
    token = torch.arange(tokens, device=bounds.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    position = token - bounds[document]
    chunk = before[position // size] + order.argsort()[document]
    return ChunkLayout(size, counts, order, chunk * size + position % size)


class Chunks(NamedTuple):
    """What the recurrence needs of N chunks, for H heads.

    A chunk maps the state S before it to `factor @ S + offset`, and its tokens read `reads @ S +
    local`.
    """

    factor: Tensor  # [N, H, D, D]
    offset: Tensor  # [N, H, D, E]
    reads: Tensor  # [N, H, C, D]
    local: Tensor  # [N, H, C, E]


def make_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    scale: float | None,
    layout: ChunkLayout,
) -> Chunks:
    """Compute what is inside chunks, all of them at once.

    Args:
        q: Queries `[B, S, K, D]`.
        k: Keys `[B, S, K, D]`.
        v: Values `[B, S, H, E]`.
        log_decay: `[B, S, H]`.
        beta: `[B, S, H]`.
        scale: The factor of queries; 1 / sqrt(D) by default.
        layout: That of the documents.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.ones(3, 1, 4, 2, 8)
        >>> gates = torch.zeros(1, 4, 2)
        >>> layout = lay_out_chunks(spans_from_rows(1, 4), 2)
        >>> chunks = make_chunks(q, k, v, log_decay=gates, beta=gates, scale=None, layout=layout)
        >>> [tuple(x.shape) for x in chunks]
        [(2, 2, 8, 8), (2, 2, 8, 8), (2, 2, 2, 8), (2, 2, 2, 8)]
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return Chunks(*_Inside.apply(scale, layout, q, k, v, log_decay, beta))


def scan_chunks(chunks: Chunks, initial: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """Apply the chunks of each document one after another.

    Args:
        chunks: The chunks.
        initial: The state before each document, `[documents, H, D, E]`.
        layout: That of the documents.

    Returns:
        The states before the chunks, `[N, H, D, E]`, and those after the documents, as `initial`.

    Examples:
        >>> half, one = torch.full((2, 1, 1, 1), 0.5), torch.ones(2, 1, 1, 1)
        >>> layout = ChunkLayout(1, (1, 1), torch.tensor([0]), None)
        >>> before, after = scan_chunks(Chunks(half, one, one, one), torch.ones(1, 1, 1, 1), layout)
        >>> before.flatten().tolist(), after.item()
        ([1.0, 1.5], 1.75)
    """
    before, after = _Scan.apply(chunks.factor, chunks.offset, initial[layout.order], layout.counts)
    return before, after[layout.order.argsort()]


def read_states(chunks: Chunks, before: Tensor, layout: ChunkLayout) -> Tensor:
    """Return what the tokens read, `[T, H, E]`.

    Args:
        chunks: The chunks.
        before: The states before them, `[N, H, D, E]`.
        layout: That of the documents.

    Examples:
        >>> one, layout = torch.ones(1, 1, 1, 1), ChunkLayout(1, (1,), torch.tensor([0]), None)
        >>> read_states(Chunks(one, one, one, one), one, layout).tolist()
        [[[2.0]]]
    """
    out = (chunks.local + chunks.reads @ before).transpose(1, 2).flatten(0, 1)
    return out if layout.slots is None else out[layout.slots]


def _split(x: Tensor, layout: ChunkLayout) -> Tensor:
    """Return `[B, S, H, ...]` as chunks `[N, H, C, ...]`, zeros where there is no token."""
    flat = x.flatten(0, 1)
    if layout.slots is not None:
        padded = flat.new_zeros(sum(layout.counts) * layout.size, *flat.shape[1:])
        flat = padded.index_copy(0, layout.slots, flat)
    return flat.unflatten(0, (-1, layout.size)).transpose(1, 2)


class _Inside(torch.autograd.Function):
    """The insides of chunks; backward computes them again, as they take many times the inputs."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, scale: float, layout: ChunkLayout, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.options = scale, layout
        return _compute_chunks(scale, layout, *tensors)

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *d_chunks: Tensor
    ) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            x.detach().requires_grad_(is_needed)
            for x, is_needed in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            chunks = _compute_chunks(*ctx.options, *inputs)
        grads = iter(torch.autograd.grad(chunks, [x for x in inputs if x.requires_grad], d_chunks))
        return None, None, *(next(grads) if is_needed else None for is_needed in needed)


def _compute_chunks(scale: float, layout: ChunkLayout, *tensors: Tensor) -> tuple[Tensor, ...]:
    q, k, v, log_decay, beta = tensors
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    groups = v.shape[2] // k.shape[2]
    q_, k_, v_ = (_split(x, layout).to(dtype) for x in (q, k, v))  # [N, heads, C, size]
    beta_ = _split(beta, layout).to(dtype).unsqueeze(3)
    # In fp64: what a strong decay leaves of later differences would be rounding in fp32.
    total = _split(log_decay, layout).double().cumsum(2)
    pairs = (total.unsqueeze(3) - total.unsqueeze(2)).to(dtype)
    hidden = torch.ones_like(pairs[0, 0], dtype=torch.bool).triu(1)
    decays = pairs.masked_fill(hidden, -torch.inf).exp()
    since_start = total.exp().to(dtype).unsqueeze(3)
    to_end = decays[:, :, -1].unsqueeze(3)

    # Scores of key heads, then for each value head.
    keys = (k_ @ k_.mT).repeat_interleave(groups, dim=1)
    queries = ((q_ * scale) @ k_.mT).repeat_interleave(groups, dim=1)
    q_, k_ = (x.repeat_interleave(groups, dim=1) for x in (q_ * scale, k_))

    # The update of a token is what it writes without a state before the chunk, less what the
    # state has under its key, both after the updates of the tokens before it in the chunk.
    wanted = torch.cat([beta_ * v_, beta_ * since_start * k_], dim=3)
    solve = torch.linalg.solve_triangular
    solved = solve(beta_ * keys * decays, wanted, upper=False, unitriangular=True)
    written, erased = solved.split([v.shape[3], k.shape[3]], dim=3)

    weights = queries * decays
    to_state = (to_end * k_).mT
    eye = torch.eye(k.shape[3], dtype=dtype, device=k.device)
    return (
        since_start[:, :, -1:] * eye - to_state @ erased,
        to_state @ written,
        since_start * q_ - weights @ erased,
        weights @ written,
    )


class _Scan(torch.autograd.Function):
    """S -> factor @ S + offset over the chunks of documents, the longest first."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, factor: Tensor, offset: Tensor, initial: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        before = torch.empty_like(offset)
        after = initial.clone()
        start = 0
        for count in counts:
            chunks = slice(start, start + count)
            state = after[:count]
            before[chunks] = state
            after[:count] = offset[chunks] + factor[chunks] @ state
            start += count
        ctx.save_for_backward(factor, before)
        ctx.counts = counts
        return before, after

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_before: Tensor, d_after: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        factor, before = ctx.saved_tensors
        with torch.autocast(factor.device.type, enabled=False):
            d_state = d_after.clone()
            d_offset = torch.empty_like(before)
            end = len(before)
            for count in reversed(ctx.counts):
                chunks = slice(end - count, end)
                d_offset[chunks] = d_state[:count]
                d_state[:count] = d_before[chunks] + factor[chunks].mT @ d_state[:count]
                end -= count
            return d_offset @ before.mT, d_offset, d_state, None
