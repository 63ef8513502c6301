"""The keys and values of earlier tokens, so that a new token costs one row of work.

A delta layer has a state of one size instead, however many tokens there were.
"""

from __future__ import annotations

from functools import partial

import attrs
import torch
from torch import Tensor, nn

from trainkit.attention.attend_delta import join_kernels, prepare_heads
from trainkit.attention.causal_conv import causal_conv, last_inputs
from trainkit.attention.gated_delta import gated_delta_with_states, step_gated_delta
from trainkit.attention.inputs import match_dtypes
from trainkit.attention.sinks import add_sink
from trainkit.attention.untraced import untraced
from trainkit.attention.varlen import varlen
from trainkit.types import Attend, AttendDelta, Convolutions, Spans


@attrs.frozen(eq=False)
class KVCache:
    """Keys and values of R rows of text, and the slots of a batch's tokens among them.

    All rows end at the same slot; shorter ones start later. So the newest tokens are in one slot:
    writing them is one copy, a sliding window is one slice, and only the start needs a mask. A
    layer allocates its tensors, with all slots, in the first forward pass; they never grow. They
    hold the keys and values of this rank's heads, also for latent attention, without its latents.

    Ranks that shard a sequence in training (ring, Ulysses) each have all slots here, and compute
    the same.

    Attributes:
        length: The number of slots of a row, L.
        keys: By the name of the layer, `[R, K, L, D]`.
        values: By the name of the layer, `[R, K, L, E]`.
        states: By the name of the layer, the state of a delta layer `[R, H, D, E]`.
        halos: By the name of the layer, what the convolution of a delta layer reads before the next
            token, `[R, W - 1, C]`.
        end: The number of slots in use after the tokens of this batch.
        rows: int64 `[T]`, the row of each token in a batch of prompts; None for a batch of the R
            newest tokens, which go to slot end - 1.
        slots: int64 `[T]`, the slot of each token in a batch of prompts.
        last: int64 `[R]`, the index in the batch of the last token of each row; only their logits
            are computed. None for a batch of the newest tokens.
        seen: bool `[R, 1, 1, L]`, False before the start of a row; None if all start at 0.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.batch import batch_from_rows
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> batch, slots = batch_from_rows(torch.tensor([[5, 6, 7]])), torch.arange(3)
        >>> cache = KVCache(8, end=3, rows=0 * slots, slots=slots, last=torch.tensor([2]))
        >>> logits = model(
        ...     batch.input_ids, position_ids=batch.position_ids, spans=batch.spans, cache=cache
        ... )
        >>> logits.shape, cache.keys["layers.0"].shape
        (torch.Size([1, 1, 272]), torch.Size([1, 4, 8, 32]))
    """

    length: int
    end: int
    rows: Tensor | None = None
    slots: Tensor | None = None
    last: Tensor | None = None
    seen: Tensor | None = None
    keys: dict[str, Tensor] = attrs.field(factory=dict)
    values: dict[str, Tensor] = attrs.field(factory=dict)
    states: dict[str, Tensor] = attrs.field(factory=dict)
    halos: dict[str, Tensor] = attrs.field(factory=dict)

    def attend(self, layer: str) -> Attend:
        """Return the attention of a layer: inside prompts, or from the newest tokens to all."""
        # Not compiled: it writes to tensors that are no inputs of a graph.
        return untraced(partial(_attend, self, layer))

    def attend_delta(self, layer: str) -> AttendDelta:
        """Return what a delta layer computes: inside prompts, or the newest tokens' step."""
        return untraced(partial(_attend_delta, self, layer))

    def select_rows(self, rows: Tensor) -> KVCache:
        """Return a cache of some of the rows.

        Args:
            rows: int64, their indices.

        Effects:
            Drops the other rows from the tensors of layers, which both caches share.
        """
        for tensors in (self.keys, self.values, self.states, self.halos):
            for layer in tensors:
                tensors[layer] = tensors[layer].index_select(0, rows)
        seen = None if self.seen is None else self.seen.index_select(0, rows)
        return attrs.evolve(self, seen=seen)


def _attend(
    cache: KVCache,
    layer: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    if not causal:
        raise ValueError(
            "KVCache: a token that is generated sees none after itself, so it needs causal "
            "attention; this model is bidirectional"
        )
    q, k, v = match_dtypes(q, k, v)
    # Prompts, concatenated in one row: they attend to themselves, as in training.
    if cache.slots is not None:
        assert cache.rows is not None
        assert cache.last is not None
        for tensors, x in ((cache.keys, k), (cache.values, v)):
            if layer not in tensors:
                # Zeros: slots without a token are masked, but a mask does not remove NaN.
                shape = len(cache.last), x.shape[2], cache.length, x.shape[3]
                tensors[layer] = x.new_zeros(shape)
            # Tokens without a slot, at the end of the batch, are row padding.
            tensors[layer][cache.rows, :, cache.slots] = x[0, : len(cache.slots)]
        return varlen(
            q, k, v, spans=spans, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    # One new token for each row of text; they stand side by side in the batch's one row.
    keys = cache.keys[layer]
    values = cache.values[layer]
    end = cache.end
    rows, heads, _, size = keys.shape
    padding = q.shape[1] - rows  # row padding after the newest tokens
    if padding:
        q, k, v = q[:, :rows], k[:, :rows], v[:, :rows]
    for tensor, x in ((keys, k), (values, v)):
        tensor.select(2, end - 1).copy_(x.reshape(rows, heads, -1))
    # All rows end at `end`, so that a window is the same slice for each of them.
    start = max(0, end - window) if window else 0
    count = end - start
    seen = None if cache.seen is None else cache.seen.narrow(3, start, count)
    keys = keys.narrow(2, start, count)
    values = values.narrow(2, start, count)
    queries = q.reshape(rows, heads, -1, size)  # the query heads of a group as queries of one head
    sinks = None if sinks is None else sinks.view(heads, -1)
    out = attend_slots(queries, keys, values, seen=seen, scale=scale, softcap=softcap, sinks=sinks)
    out = out.reshape(1, rows, -1, out.shape[-1])
    return nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


def _attend_delta(
    cache: KVCache,
    layer: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    convolutions: Convolutions,
    log_decay: Tensor,
    beta: Tensor,
    spans: Spans,
) -> Tensor:
    x = torch.cat([part.flatten(2) for part in (q, k, v)], dim=2)
    kernels = join_kernels(convolutions)
    # Prompts, each a span of the one row; row padding may follow them.
    if cache.last is not None and cache.slots is not None:
        rows = len(cache.last)
        mixed = causal_conv(x, kernels, spans=spans)
        q, k, v = prepare_heads(mixed, convolutions)
        out, states = gated_delta_with_states(q, k, v, log_decay=log_decay, beta=beta, spans=spans)
        cache.states[layer] = states[:rows]
        cache.halos[layer] = last_inputs(x, spans=spans, count=kernels.shape[1] - 1)[:rows]
        return out
    # One new token for each row of text; they stand side by side in the batch's one row.
    halo = cache.halos[layer]
    rows = len(halo)
    inputs = torch.cat([halo, x[0, :rows].unsqueeze(1)], dim=1)  # [R, W, C]
    cache.halos[layer] = inputs[:, 1:]
    mixed = (inputs * kernels.T).sum(1)
    q, k, v = prepare_heads(mixed, convolutions)
    out, cache.states[layer] = step_gated_delta(
        q,
        k,
        v,
        log_decay=log_decay[0, :rows],
        beta=beta[0, :rows],
        state=cache.states[layer],
    )
    return nn.functional.pad(out.unsqueeze(0), (0, 0, 0, 0, 0, x.shape[1] - rows))


def attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seen: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of few queries to all slots, without a causal mask.

    Args:
        q: `[R, K, G, D]`, the G query heads of each key head.
        k: `[R, K, T, D]`.
        v: `[R, K, T, E]`.
        seen: bool `[R, 1, 1, T]`; None for all.
        scale: The factor of scores; 1 / sqrt(D) by default.
        softcap: Scores s become softcap * tanh(s / softcap).
        sinks: `[K, G]`, one more logit for each query head; see `attention.add_sink`.

    Returns:
        `[R, K, G, E]`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 4, 1, 8)
        >>> torch.equal(attend_slots(q, k, v), v)
        True
    """
    # SDPA has no soft cap and no sinks, and no fused kernel on a CPU for values whose size is not
    # that of keys.
    if softcap is None and sinks is None and k.shape[-1] == v.shape[-1]:
        attention = nn.functional.scaled_dot_product_attention
        return attention(q, k, v, attn_mask=seen, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q * scale) @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v
    if sinks is None:
        return out
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return add_sink(out, scores.to(dtype).logsumexp(-1), sinks)[0].to(out.dtype)
