"""Attention of one block of queries to one block of keys, and the merging of blocks.

A softmax over many keys can be computed from softmaxes over parts of them: `merge_lse` weights the
results of the parts by the log-sum-exp of their scores (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). A `BlockKernel` computes one
such part, forward and backward; `ring` merges them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.attention.inputs import pad_heads, wider
from trainkit.attention.sinks import add_sink, sink_gradient
from trainkit.types import Spans


@attrs.frozen(eq=False)
class BlockSpans:
    """The keys that a block of queries attends to: those of its document, causally or all of them.

    Queries and keys have the same number of documents, and with `causal` the same spans.

    Attributes:
        queries: The documents of the queries.
        keys: The documents of the keys.
        causal: Whether a query attends to no key after itself.
        scale: The factor of scores.
        window: The number of keys that a query attends to at most, counted back from itself in the
            full document.
        softcap: c, where a score s becomes c * tanh(s / c).
        chunks: The indices, in rising order, of the equal chunks of a document that the queries
            are, and the keys. Only a window depends on them.
    """

    queries: Spans
    keys: Spans
    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    chunks: tuple[Sequence[int], Sequence[int]] = ((0,), (0,))

    @property
    def plain(self) -> bool:
        """Whether there is no window and no soft cap."""
        return self.window is None and self.softcap is None


QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""q `[T, H, D]`, k `[U, K, D]` and v `[U, K, E]`, where K divides H; or their gradients."""

OutLse = tuple[Tensor, Tensor]
"""Attention `[T, H, E]` in q's dtype; the log-sum-exp of scores `[T, H]`, fp32 (fp64 for fp64)."""


@attrs.frozen
class BlockKernel:
    """The computation of one block.

    Attributes:
        forward: From q, k and v to the result over these keys alone.
        backward: From the gradient of the output, q, k and v, and the result over *all* keys, to
            this block's part of the gradients. The weights of the block are exp(scores - lse), so
            the other blocks are not needed.
        plain_only: Whether it supports no windows and no soft caps; `matmul` replaces it there.
    """

    forward: Callable[[QueryKeyValue, BlockSpans], OutLse]
    backward: Callable[[Tensor, QueryKeyValue, OutLse, BlockSpans], QueryKeyValue]
    plain_only: bool = True


def merge_lse(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> OutLse:
    """Return attention over two sets of keys from attention over each.

    Args:
        out_a: `[..., D]`, attention over the first set, in the dtype to merge in; finite also
            where no key can be seen.
        lse_a: `[...]`, the log-sum-exp of its scores; -inf where no key can be seen.
        out_b: As `out_a`, over the second set.
        lse_b: As `lse_a`, over the second set.

    Returns:
        The output and the log-sum-exp over both; 0 and -inf where neither set has a visible key.

    Examples:
        >>> nothing = torch.zeros(1, 2), torch.tensor([-torch.inf])
        >>> merge_lse(torch.ones(1, 2), torch.tensor([3.0]), *nothing)
        (tensor([[1., 1.]]), tensor([3.]))
        >>> merge_lse(*nothing, *nothing)
        (tensor([[0., 0.]]), tensor([-inf]))
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # -inf - -inf is NaN. Where no key is visible, both weights are exp(-inf) = 0 with base 0.
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    weight_a, weight_b = (torch.exp(x - base).unsqueeze(-1) for x in (lse_a, lse_b))
    return out_a * weight_a + out_b * weight_b, lse


def choose_block_kernel(q: Tensor) -> BlockKernel:
    """Return the fastest kernel that takes a tensor's device, dtype and head size.

    Examples:
        >>> choose_block_kernel(torch.ones(4, 2, 8)) is cpu_flash
        True
    """
    if q.device.type == "cpu":
        return cpu_flash
    return cuda_flash if flash_takes(q) else matmul


def flash_takes(q: Tensor) -> bool:
    """Return whether CUDA's flash kernel for packed documents takes tensors like this one.

    It needs fp16 or bf16, a head size that is a multiple of 8 and at most 256, and Ampere or later.

    Examples:
        >>> flash_takes(torch.ones(4, 2, 8))
        False
    """
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    can_take_size = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return can_take_size and torch.cuda.get_device_properties(q.device).major >= 8


def make_last_dim_dense(x: Tensor) -> Tensor:
    """Return `[T, H, D]` with a stride of 1 in the last dimension, as the operators below assume.

    Torch's public functions ensure it. Called directly, the operator for CPUs gives wrong results.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _remove_padding(gradients: Iterable[Tensor], qkv: QueryKeyValue) -> QueryKeyValue:
    """Undo `pad_heads` in the gradients of q, k and v."""
    d_q, d_k, d_v = (x[..., : y.shape[-1]] for x, y in zip(gradients, qkv, strict=True))
    return d_q, d_k, d_v


# ------------------------------------------------------------------------------- torch on the CPU


def _split_documents(x: Tensor, spans: Spans) -> list[Tensor]:
    """Split `[T, H, ...]` into documents `[n, H, L, ...]`, n > 1 if all have one length."""
    x = make_last_dim_dense(x) if x.ndim == 3 else x
    lengths = spans.lengths.tolist()
    if min(lengths) == max(lengths):
        return [x.unflatten(0, (len(lengths), -1)).transpose(1, 2)]
    return [part.transpose(0, 1).unsqueeze(0) for part in x.split(lengths)]


def _concat_documents(documents: Iterable[Tensor]) -> Tensor:
    """Undo `_split_documents`."""
    parts = [document.transpose(1, 2).flatten(0, 1) for document in documents]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cpu_op(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None, scale: float
) -> OutLse:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 (the one that gives the lse)
    return op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_backward_op(
    d_out: Tensor,
    qkv: QueryKeyValue,
    result: OutLse,
    *,
    causal: bool,
    mask: Tensor | None = None,
    scale: float,
) -> QueryKeyValue:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001 (see _cpu_op)
    return op(d_out, *qkv, *result, 0.0, causal, attn_mask=mask, scale=scale)


def attend_cpu(
    qkv: QueryKeyValue, sinks: Tensor, *, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """Return attention with sinks on a CPU, of documents `[n, H, L, D]`; causal or with a mask.

    Examples:
        >>> qkv = tuple(torch.ones(3, 1, 2, 4, 8))
        >>> attend_cpu(qkv, torch.zeros(2), mask=None, scale=0.5, causal=True).shape
        torch.Size([1, 2, 4, 8])
    """
    q, k, v = map(make_last_dim_dense, qkv)
    return attend(
        (q, k, v),
        sinks.unsqueeze(-1),  # [H, 1], for every query
        lambda qkv: _cpu_op(*qkv, causal=causal, mask=mask, scale=scale),
        lambda d_out, qkv, result: _cpu_backward_op(
            d_out, qkv, result, causal=causal, mask=mask, scale=scale
        ),
    )


def _cpu_forward(qkv: QueryKeyValue, block: BlockSpans) -> OutLse:
    spans = block.queries, block.keys, block.keys
    documents = zip(*map(_split_documents, pad_heads(*qkv), spans), strict=True)
    parts = [_cpu_op(*x, causal=block.causal, scale=block.scale) for x in documents]
    out = _concat_documents(out for out, _ in parts)
    return out[..., : qkv[2].shape[-1]], _concat_documents(lse for _, lse in parts)


def _cpu_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    spans = (block.queries, block.queries, block.keys, block.keys, block.queries, block.queries)
    out, lse = result
    d_out, *padded, out = pad_heads(d_out, *qkv, out)
    documents = zip(*map(_split_documents, (d_out, *padded, out, lse), spans), strict=True)
    parts = [
        _cpu_backward_op(d, (q, k, v), (o, s), causal=block.causal, scale=block.scale)
        for d, q, k, v, o, s in documents
    ]
    return _remove_padding(map(_concat_documents, zip(*parts, strict=True)), qkv)


cpu_flash = BlockKernel(_cpu_forward, _cpu_backward)
"""torch's flash operator for CPUs, in fp64, fp32, bf16 and fp16; key heads are not repeated.

Documents of one common length take one call, others a call each. Batching the equal ones among them
saves 10 us for a document of 8 tokens, and is slower from 64 tokens on (measured). The operator's
mask is not used: it gives lse = 0 for a query without a visible key.
"""


# ----------------------------------------------------------------------------------- torch on CUDA


def _list_bounds(block: BlockSpans) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = block.queries, block.keys
    return queries.cu_seqlens, keys.cu_seqlens, queries.max_length, keys.max_length


def _window_bounds(block: BlockSpans) -> tuple[int | None, int | None]:
    # Queries and keys must be whole documents, see `attend_spans`; a ring's are not.
    return (None, None) if block.window is None else (block.window - 1, 0)


def _cuda_forward(qkv: QueryKeyValue, block: BlockSpans) -> OutLse:
    left, right = _window_bounds(block)
    op = torch.ops.aten._flash_attention_forward.default  # noqa: SLF001 (as torch's varlen_attn)
    out, lse, *_ = op(
        *map(make_last_dim_dense, pad_heads(*qkv)),
        *_list_bounds(block),
        0.0,  # dropout
        block.causal,
        return_debug_mask=False,
        scale=block.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out[..., : qkv[2].shape[-1]], lse.transpose(0, 1)


def _cuda_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    left, right = _window_bounds(block)
    op = torch.ops.aten._flash_attention_backward.default  # noqa: SLF001 (as torch's varlen_attn)
    out, lse = result
    gradients = op(
        *map(make_last_dim_dense, pad_heads(d_out, *qkv, out)),
        lse.transpose(0, 1).contiguous(),
        *_list_bounds(block),
        0.0,  # dropout, hence no random state
        block.causal,
        # Seed and offset of dropout, and a tensor that is not used.
        torch.zeros(2, dtype=torch.uint64, device=out.device),
        out.new_empty(0),
        scale=block.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return _remove_padding(gradients, qkv)


cuda_flash = BlockKernel(_cuda_forward, _cuda_backward)
"""torch's flash operators for packed documents, in fp16 and bf16 on CUDA.

They have been checked against their schemas and their use by torch's `varlen_attn` only, and never
been run.
"""


# ------------------------------------------------------------------------------------- written out

_MAX_SCORES = 1 << 26
"""The number of scores in memory at once: 256 MiB in fp32. It bounds the queries of a chunk."""


def _split_in_fp32(x: Tensor, spans: Spans) -> Iterator[Tensor]:
    x = x if x.dtype == torch.float64 else x.float()
    return iter(x.split(spans.lengths.tolist()))


@attrs.frozen(eq=False)
class _Chunk:
    """Some queries of a document, the keys that any of them sees, and a mask of hidden keys."""

    queries: slice
    keys: slice
    hidden: Tensor | None


def _split_queries(q: Tensor, k: Tensor, block: BlockSpans) -> Iterator[_Chunk]:
    """Yield chunks of the queries of a document, in order."""
    # A chunk has at most a window of queries, which see at most two windows of keys.
    num_keys = len(k) if block.window is None else min(len(k), 2 * block.window)
    size = max(_MAX_SCORES // (q.shape[1] * max(num_keys, 1)), 16)
    if block.window is None:
        for first in range(0, len(q), size):
            queries = slice(first, min(first + size, len(q)))
            if not block.causal:
                yield _Chunk(queries, slice(0, len(k)), None)
                continue
            # The last key is that of the last query, so the diagonal ends in the lower right.
            rows = queries.stop - first
            columns = queries.stop
            hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
            yield _Chunk(queries, slice(0, columns), hidden.triu(columns - rows + 1))
        return
    q_positions = _Positions(len(q), block.chunks[0])
    k_positions = _Positions(len(k), block.chunks[1])
    size = min(size, max(block.window, 16))
    for first in range(0, len(q), size):
        queries = slice(first, min(first + size, len(q)))
        # From the first query's window to the last query's own position.
        keys = slice(
            k_positions.count_until(q_positions.get(first) - block.window),
            k_positions.count_until(q_positions.get(queries.stop - 1)),
        )
        distance = q_positions.make_tensor(q.device)[queries, None]
        distance = distance - k_positions.make_tensor(q.device)[keys]
        yield _Chunk(queries, keys, (distance < 0) | (distance >= block.window))


@attrs.frozen
class _Positions:
    """The positions in their document of `length` tokens, which are some of its equal chunks."""

    length: int
    chunks: Sequence[int]

    @property
    def chunk_length(self) -> int:
        return self.length // len(self.chunks)

    def get(self, index: int) -> int:
        chunk, offset = divmod(index, self.chunk_length)
        return self.chunks[chunk] * self.chunk_length + offset

    def count_until(self, position: int) -> int:
        """Return the number of tokens at or before a position."""
        size = self.chunk_length
        return sum(min(max(position + 1 - chunk * size, 0), size) for chunk in self.chunks)

    def make_tensor(self, device: torch.device) -> Tensor:
        """Return all positions, made on the device, since an upload would wait for it."""
        starts = [chunk * self.chunk_length for chunk in self.chunks]
        return torch.cat([torch.arange(x, x + self.chunk_length, device=device) for x in starts])


def _compute_scores(q: Tensor, k: Tensor, block: BlockSpans, chunk: _Chunk) -> Tensor:
    """Return the scores `[K, G, L, M]` of a chunk, for G query heads per key head."""
    # k: key heads, g: query heads of each, l: queries, m: keys, d: features.
    queries = rearrange(q[chunk.queries], "l (k g) d -> k g l d", k=k.shape[1])
    scores = torch.einsum("kgld,mkd->kglm", queries, k[chunk.keys]) * block.scale
    if block.softcap is not None:
        scores.div_(block.softcap).tanh_().mul_(block.softcap)
    return scores if chunk.hidden is None else scores.masked_fill_(chunk.hidden, -torch.inf)


def _matmul_forward(qkv: QueryKeyValue, block: BlockSpans) -> OutLse:
    outs = list[Tensor]()
    lses = list[Tensor]()
    spans = block.queries, block.keys, block.keys
    for q, k, v in zip(*map(_split_in_fp32, qkv, spans), strict=True):
        for chunk in _split_queries(q, k, block):
            scores = _compute_scores(q, k, block, chunk)
            # [K, G, L], -inf where the mask hides all keys of this block.
            lse = scores.logsumexp(-1)
            if block.window is None:
                weights = scores.softmax(-1)
            else:  # a query may see none of these keys, where softmax would give NaN
                weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()
            outs.append(torch.einsum("kglm,mkd->lkgd", weights, v[chunk.keys]).flatten(1, 2))
            lses.append(rearrange(lse, "k g l -> l (k g)"))
    return torch.cat(outs).to(qkv[0].dtype), torch.cat(lses)


def _matmul_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    spans = (block.queries, block.queries, block.keys, block.keys, block.queries, block.queries)
    columns = map(_split_in_fp32, (d_out, *qkv, *result), spans)
    parts = [
        _document_backward(d_rows, (q, k, v), (out, lse), block)
        for d_rows, q, k, v, out, lse in zip(*columns, strict=True)
    ]
    by_tensor = zip(*parts, strict=True)
    d_q, d_k, d_v = (torch.cat(documents).to(qkv[0].dtype) for documents in by_tensor)
    return d_q, d_k, d_v


def _document_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    # With weights P = exp(S - lse) and dP = dO Vᵀ: dS = P (dP - rowsum(dO O)), so that no sum over
    # all keys is needed (Dao et al., 2022, algorithm 4).
    q, k, v = qkv
    out, lse = result
    row_sums = (d_out * out).sum(-1, keepdim=True)
    bases = lse.unsqueeze(-1)
    d_q = torch.empty_like(q)
    d_k = torch.zeros_like(k)
    d_v = torch.zeros_like(v)
    for chunk in _split_queries(q, k, block):
        rows, keys = chunk.queries, chunk.keys
        q_, d_out_, row_sums_, bases_ = (
            rearrange(x[rows], "l (k g) d -> k g l d", k=k.shape[1])
            for x in (q, d_out, row_sums, bases)
        )
        scores = _compute_scores(q, k, block, chunk)
        slope = None
        if block.softcap is not None:  # the derivative of tanh, 0 for hidden keys
            slope = 1 - scores.div(block.softcap).clamp_(min=-1).square_()
        weights = scores.sub_(bases_).exp_()
        d_v[keys] += torch.einsum("kglm,kgld->mkd", weights, d_out_)
        d_weights = torch.einsum("kgld,mkd->kglm", d_out_, v[keys])
        d_scores = d_weights.sub_(row_sums_).mul_(weights).mul_(block.scale)
        d_scores = d_scores if slope is None else d_scores.mul_(slope)
        d_q[rows] = torch.einsum("kglm,mkd->lkgd", d_scores, k[keys]).flatten(1, 2)
        d_k[keys] += torch.einsum("kglm,kgld->mkd", d_scores, q_)
    return d_q, d_k, d_v


matmul = BlockKernel(_matmul_forward, _matmul_backward, plain_only=False)
"""Matrix products, for a chunk of queries at a time: any device and dtype, windows, soft caps."""


# ------------------------------------------------------------------------------- differentiable


def attend(
    qkv: QueryKeyValue,
    sinks: Tensor | None,
    forward: Callable[[QueryKeyValue], OutLse],
    backward: Callable[[Tensor, QueryKeyValue, OutLse], QueryKeyValue],
) -> Tensor:
    """Return attention from its forward and backward pass, with a sink for each head or without.

    A sink is one more key with a value of zero. It is added to the result over all other keys, and
    `backward` gets the result over all of them. So no kernel needs a gradient of its log-sum-exp,
    and none knows of sinks.

    Args:
        qkv: Queries, keys and values.
        sinks: Logits that broadcast to the log-sum-exp of scores; None for none.
        forward: As that of a `BlockKernel`, in the dtype to add the sink in.
        backward: As that of a `BlockKernel`.

    Returns:
        The output, in the dtype of queries.
    """
    return _Attention.apply(*qkv, sinks, forward, backward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # pyrefly: ignore[bad-override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, forward: Any, backward: Any
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward((q, k, v))
            if sinks is not None:
                out, lse = add_sink(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.backward_pass = backward
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with torch.autocast(d_out.device.type, enabled=False):
            gradients = ctx.backward_pass(d_out.contiguous(), (q, k, v), (out, lse))
            d_sinks = None if sinks is None else sink_gradient(d_out, out, lse, sinks)
        return *gradients, d_sinks, None, None


def attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    kernel: BlockKernel | None = None,
) -> Tensor:
    """Return attention inside each span by a kernel, in memory linear in the tokens.

    Other arguments and the result are those of `sdpa`. The kernel is by default the fastest that
    takes the tensors, the window and the soft cap.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.ones(3, 1, 4, 2, 8)
        >>> attend_spans(q, k, v, spans=spans_from_rows(1, 4), scale=1.0).shape
        torch.Size([1, 4, 2, 8])
    """
    block = BlockSpans(spans, spans, causal=causal, scale=scale, window=window, softcap=softcap)
    if kernel is None:
        kernel = choose_block_kernel(wider(q, v))
        # Of whole documents the flash kernel for CUDA knows the window.
        takes = block.plain or (kernel is cuda_flash and softcap is None)
        kernel = kernel if takes else matmul
    q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
    out = attend(
        (q_, k_, v_),
        sinks,
        lambda qkv: kernel.forward(qkv, block),
        lambda d_out, qkv, result: kernel.backward(d_out, qkv, result, block),
    )
    return out.unflatten(0, q.shape[:2])
