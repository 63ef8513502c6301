"""Attention of one block of queries to one block of keys, with what is needed to merge blocks.

A softmax over many keys can be had from softmaxes over parts of them: each part gives its result
and the log-sum-exp of its scores, and `merge_lse` weighs the parts by these (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).
A `BlockKernel` computes one such part, forward and backward; `ring` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.attention.inputs import of_one_size
from trainkit.types import Spans


@attrs.frozen(eq=False)
class BlockSpans:
    """Which keys a block of queries sees: in each document all, or (`causal`) none after itself.

    Queries and keys have as many documents; with `causal` they have the same spans. Scores are
    multiplied by `scale`, and then kept between -`softcap` and `softcap` by tanh. With a `window` a
    query sees only keys that are fewer tokens before it; `chunks` says for that which of the equal
    chunks of a document the queries are, and the keys, in rising order.
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
        """Whether there is neither a window nor a soft cap."""
        return self.window is None and self.softcap is None


QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""q `[T, H, D]`, k `[U, K, D]` and v `[U, K, E]`, where K divides H; or their gradients."""

OutLse = tuple[Tensor, Tensor]
"""Attention `[T, H, E]` in q's dtype; the log-sum-exp of scores `[T, H]`, fp32 (fp64 for fp64)."""


@attrs.frozen
class BlockKernel:
    """How one block is computed.

    Attributes:
        forward: From q, k and v to the result over these keys alone.
        backward: From the gradient of the output, q, k and v, and the result over *all* keys, to
            this block's part of the gradients. The weights of the block are exp(scores - lse), so
            what other blocks hold needs no second look.
        plain_only: Whether it knows neither windows nor soft caps; `matmul` takes its place there.
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
    # -inf - -inf is NaN: where nothing can be seen at all, any finite number will do.
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
    """Say whether CUDA's flash kernel for packed documents takes tensors like this one.

    It wants fp16 or bf16, a head size that is a multiple of 8 and at most 256, and Ampere or later.

    Examples:
        >>> flash_takes(torch.ones(4, 2, 8))
        False
    """
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    known_size = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return known_size and torch.cuda.get_device_properties(q.device).major >= 8


def in_order(x: Tensor) -> Tensor:
    """Return `[T, H, D]` whose last dimension lies in order, as the operators below assume.

    Torch's own front sees to it. The operator for CPUs reads on regardless, and is wrong.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _without_zeros(gradients: Iterable[Tensor], qkv: QueryKeyValue) -> QueryKeyValue:
    """Return the gradients of what was there before `of_one_size`."""
    d_q, d_k, d_v = (x[..., : y.shape[-1]] for x, y in zip(gradients, qkv, strict=True))
    return d_q, d_k, d_v


# ------------------------------------------------------------------------------- torch on the CPU


def _documents(x: Tensor, spans: Spans) -> list[Tensor]:
    """Cut `[T, H, ...]` into documents `[n, H, L, ...]`: one batch of them if all are as long."""
    x = in_order(x) if x.ndim == 3 else x
    lengths = spans.lengths.tolist()
    if min(lengths) == max(lengths):
        return [x.unflatten(0, (len(lengths), -1)).transpose(1, 2)]
    return [part.transpose(0, 1).unsqueeze(0) for part in x.split(lengths)]


def _joined(documents: Iterable[Tensor]) -> Tensor:
    """Undo `_documents`."""
    parts = [document.transpose(1, 2).flatten(0, 1) for document in documents]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cpu_forward(qkv: QueryKeyValue, block: BlockSpans) -> OutLse:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 (the one that gives the lse)
    spans = block.queries, block.keys, block.keys
    documents = zip(*map(_documents, of_one_size(*qkv), spans), strict=True)
    parts = [op(*document, 0.0, block.causal, scale=block.scale) for document in documents]
    out = _joined(out for out, _ in parts)
    return out[..., : qkv[2].shape[-1]], _joined(lse for _, lse in parts)


def _cpu_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001 (see _cpu_forward)
    spans = (block.queries, block.queries, block.keys, block.keys, block.queries, block.queries)
    out, lse = result
    d_out, *others, out = of_one_size(d_out, *qkv, out)
    documents = zip(*map(_documents, (d_out, *others, out, lse), spans), strict=True)
    parts = [op(*document, 0.0, block.causal, scale=block.scale) for document in documents]
    return _without_zeros((_joined(column) for column in zip(*parts, strict=True)), qkv)


cpu_flash = BlockKernel(_cpu_forward, _cpu_backward)
"""torch's flash operator for CPUs, in fp64, fp32, bf16 and fp16; key heads are not repeated.

Documents of one common length take one call, others a call each: putting the equal ones among them
together was measured to save 10 us for a document of 8 tokens, and to lose from 64 on. The
operator's mask is not used: it gives lse = 0 for a row that sees nothing.
"""


# ----------------------------------------------------------------------------------- torch on CUDA


def _bounds(block: BlockSpans) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = block.queries, block.keys
    return queries.cu_seqlens, keys.cu_seqlens, queries.max_length, keys.max_length


def _cuda_forward(qkv: QueryKeyValue, block: BlockSpans) -> OutLse:
    op = torch.ops.aten._flash_attention_forward.default  # noqa: SLF001 (as torch's varlen_attn)
    options = {"return_debug_mask": False, "scale": block.scale}
    known = map(in_order, of_one_size(*qkv))
    out, lse, *_ = op(*known, *_bounds(block), 0.0, block.causal, **options)
    return out[..., : qkv[2].shape[-1]], lse.transpose(0, 1)


def _cuda_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    op = torch.ops.aten._flash_attention_backward.default  # noqa: SLF001 (as torch's varlen_attn)
    out, lse = result
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=out.device), out.new_empty(0)
    known = *map(in_order, of_one_size(d_out, *qkv, out)), lse.transpose(0, 1).contiguous()
    whole = op(*known, *_bounds(block), 0.0, block.causal, *no_dropout, scale=block.scale)
    return _without_zeros(whole, qkv)


cuda_flash = BlockKernel(_cuda_forward, _cuda_backward)
"""torch's flash operators for packed documents, in fp16 and bf16 on CUDA.

They have so far been checked against their schemas and their use by torch's `varlen_attn` only, and
never been run.
"""


# ------------------------------------------------------------------------------------- written out

_SCORES = 1 << 26
"""How many scores are in memory at once: 256 MiB in fp32. Fewer queries at a time keep to it."""


def _wide_documents(x: Tensor, spans: Spans) -> Iterator[Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    return iter(wide.split(spans.lengths.tolist()))


@attrs.frozen(eq=False)
class _Chunk:
    """Some queries of a document, the keys that any of them sees, and which each does not see."""

    rows: slice
    seen: slice
    hidden: Tensor | None


def _chunks(q: Tensor, k: Tensor, block: BlockSpans) -> Iterator[_Chunk]:
    """Yield all queries of a document in turn."""
    wide = len(k) if block.window is None else min(len(k), 2 * block.window)
    size = max(_SCORES // (q.shape[1] * max(wide, 1)), 16)
    if block.window is None:
        for first in range(0, len(q), size):
            rows = slice(first, min(first + size, len(q)))
            seen = slice(0, rows.stop if block.causal else len(k))
            yield _Chunk(rows, seen, _later(rows, seen, q.device) if block.causal else None)
        return
    of_q, of_k = (_Places(len(x), own) for x, own in zip((q, k), block.chunks, strict=True))
    size = min(size, max(block.window, 16))
    for first in range(0, len(q), size):
        rows = slice(first, min(first + size, len(q)))
        seen = slice(
            of_k.before(of_q.at(first) - block.window), of_k.before(of_q.at(rows.stop - 1))
        )
        before = of_q.on(q.device, rows).unsqueeze(-1) - of_k.on(q.device, seen)
        yield _Chunk(rows, seen, (before < 0) | (before >= block.window))


def _later(rows: slice, seen: slice, device: torch.device) -> Tensor:
    """Return which keys come after each query; the last key seen is that of the last query."""
    queries, keys = rows.stop - rows.start, seen.stop - seen.start
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


@attrs.frozen
class _Places:
    """Where in its document each of `length` tokens is, which are some of its equal chunks."""

    length: int
    chunks: Sequence[int]

    @property
    def size(self) -> int:
        return self.length // len(self.chunks)

    def at(self, index: int) -> int:
        chunk, rest = divmod(index, self.size)
        return self.chunks[chunk] * self.size + rest

    def before(self, place: int) -> int:
        """Return how many of the tokens are at a place or before it."""
        return sum(min(max(place + 1 - chunk * self.size, 0), self.size) for chunk in self.chunks)

    def on(self, device: torch.device, part: slice) -> Tensor:
        """Return the places of a part of the tokens, made on the device."""
        starts = [chunk * self.size for chunk in self.chunks]
        parts = [torch.arange(first, first + self.size, device=device) for first in starts]
        return torch.cat(parts)[part]


def _scores(q: Tensor, k: Tensor, block: BlockSpans, chunk: _Chunk) -> Tensor:
    """Return the scores `[K, G, L, M]` of a chunk, for G query heads per key head."""
    queries = rearrange(q[chunk.rows], "l (k g) d -> k g l d", k=k.shape[1])
    scores = torch.einsum("kgld,mkd->kglm", queries, k[chunk.seen]) * block.scale
    if block.softcap is not None:
        scores.div_(block.softcap).tanh_().mul_(block.softcap)
    return scores if chunk.hidden is None else scores.masked_fill_(chunk.hidden, -torch.inf)


def _weights(scores: Tensor, lse: Tensor, block: BlockSpans) -> Tensor:
    """Return the softmax of scores; beyond all windows of a block a query has none."""
    if block.window is None:
        return scores.softmax(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()


def _matmul_forward(qkv: QueryKeyValue, block: BlockSpans) -> OutLse:
    outs, lses = list[Tensor](), list[Tensor]()
    spans = block.queries, block.keys, block.keys
    for q, k, v in zip(*map(_wide_documents, qkv, spans), strict=True):
        for chunk in _chunks(q, k, block):
            scores = _scores(q, k, block, chunk)
            lse = scores.logsumexp(-1)
            weights = _weights(scores, lse, block)
            outs.append(torch.einsum("kglm,mkd->lkgd", weights, v[chunk.seen]).flatten(1, 2))
            lses.append(rearrange(lse, "k g l -> l (k g)"))
    return torch.cat(outs).to(qkv[0].dtype), torch.cat(lses)


def _matmul_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    spans = (block.queries, block.queries, block.keys, block.keys, block.queries, block.queries)
    columns = map(_wide_documents, (d_out, *qkv, *result), spans)
    parts = [
        _document_backward(d_rows, (q, k, v), (out, lse), block)
        for d_rows, q, k, v, out, lse in zip(*columns, strict=True)
    ]
    d_q, d_k, d_v = (torch.cat(column).to(qkv[0].dtype) for column in zip(*parts, strict=True))
    return d_q, d_k, d_v


def _document_backward(
    d_out: Tensor, qkv: QueryKeyValue, result: OutLse, block: BlockSpans
) -> QueryKeyValue:
    (q, k, v), (out, lse) = qkv, result
    means, bases = (d_out * out).sum(-1, keepdim=True), lse.unsqueeze(-1)
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for chunk in _chunks(q, k, block):
        rows, seen = chunk.rows, chunk.seen
        q_, d_out_, means_, bases_ = (
            rearrange(x[rows], "l (k g) d -> k g l d", k=k.shape[1])
            for x in (q, d_out, means, bases)
        )
        scores = _scores(q, k, block, chunk)
        slope = None
        if block.softcap is not None:  # the derivative of tanh, 0 for what is hidden
            slope = 1 - scores.div(block.softcap).clamp_(min=-1).square_()
        weights = scores.sub_(bases_).exp_()
        d_v[seen] += torch.einsum("kglm,kgld->mkd", weights, d_out_)
        d_weights = torch.einsum("kgld,mkd->kglm", d_out_, v[seen])
        d_scores = d_weights.sub_(means_).mul_(weights).mul_(block.scale)
        d_scores = d_scores if slope is None else d_scores.mul_(slope)
        d_q[rows] = torch.einsum("kglm,mkd->lkgd", d_scores, k[seen]).flatten(1, 2)
        d_k[seen] += torch.einsum("kglm,kgld->mkd", d_scores, q_)
    return d_q, d_k, d_v


matmul = BlockKernel(_matmul_forward, _matmul_backward, plain_only=False)
"""Attention written out, some queries at a time: any device and dtype, windows and soft caps."""


class _WrittenOut(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: BlockSpans
    ) -> Tensor:
        out, lse = matmul.forward((q, k, v), block)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.block = block
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *matmul.backward(d_out, (q, k, v), (out, lse), ctx.block), None


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention inside each span by `matmul`: in linear memory, without a kernel.

    Arguments and result are those of `sdpa`.

    Examples:
        >>> from trainkit.batch import spans_from_rows
        >>> q, k, v = torch.ones(3, 1, 4, 2, 8)
        >>> written_out(q, k, v, spans=spans_from_rows(1, 4), scale=1.0).shape
        torch.Size([1, 4, 2, 8])
    """
    block = BlockSpans(spans, spans, causal=True, scale=scale, window=window, softcap=softcap)
    out = _WrittenOut.apply(*(x.flatten(0, 1) for x in (q, k, v)), block)
    return out.unflatten(0, q.shape[:2])
