"""What a decoder keeps of the tokens that it has seen, so that a new one costs one row of work."""

from __future__ import annotations

from functools import partial

import attrs
import torch
from torch import Tensor, nn

from trainkit.attention.inputs import match_dtypes
from trainkit.attention.varlen import varlen
from trainkit.types import Attend, Spans


@attrs.frozen(eq=False)
class KVCache:
    """Keys and values of R rows of text, and where the tokens of a batch stand among them.

    All rows end at the same slot, the shorter ones begin later. So the newest tokens stand side by
    side: writing them is one copy, a sliding window is one slice, and only the beginning needs a
    mask. A layer makes its tensors at the first forward pass, with all their slots, and they never
    grow. They are plain keys and values of the heads that this rank has, for latent attention too.

    Every rank that splits a sequence (ring, Ulysses) holds it whole here, and computes the same.

    Attributes:
        length: How many slots a row has, L.
        keys: By the name of the layer, `[R, K, L, D]`.
        values: Likewise, `[R, K, L, E]`.
        end: How many slots are in use after the tokens of this batch.
        rows: int64 `[T]`, of a batch of prompts the row of each of its tokens; None for a batch of
            the R newest tokens, which go to the last slot.
        slots: int64 `[T]`, its slot.
        last: int64 `[R]`, where in the batch the last token of each row stands: only their logits
            are computed; None where the batch is these tokens.
        seen: bool `[R, 1, 1, L]`, False before the beginning of a row; None if all begin at 0.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.batch import batch_from_rows
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> batch, places = batch_from_rows(torch.tensor([[5, 6, 7]])), torch.arange(3)
        >>> cache = KVCache(8, end=3, rows=0 * places, slots=places, last=torch.tensor([2]))
        >>> how = {"position_ids": batch.position_ids, "spans": batch.spans}
        >>> model(batch.input_ids, **how, cache=cache).shape, cache.keys["layers.0"].shape
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

    def attend(self, layer: str) -> Attend:
        """Return the attention of a layer: over a prompt by itself, or from new tokens to all."""
        return partial(_attend, self, layer)

    def of_rows(self, kept: Tensor) -> KVCache:
        """Return a cache of some of the rows.

        Args:
            kept: int64, their numbers.

        Effects:
            Takes the others out of `keys` and `values`, which both caches share.
        """
        for held in (self.keys, self.values):
            for layer in held:
                held[layer] = held[layer].index_select(0, kept)
        seen = None if self.seen is None else self.seen.index_select(0, kept)
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
) -> Tensor:
    if torch.compiler.is_compiling():  # it writes to tensors that no graph knows
        how = {"spans": spans, "scale": scale, "window": window, "softcap": softcap}
        return torch.compiler.disable(_attend)(cache, layer, q, k, v, **how)
    q, k, v = match_dtypes(q, k, v)
    if cache.slots is not None:
        _write_prompts(cache, layer, k, v)
        return varlen(q, k, v, spans=spans, scale=scale, window=window, softcap=softcap)
    keys, values, end = cache.keys[layer], cache.values[layer], cache.end
    rows, heads, _, size = keys.shape
    padding = q.shape[1] - rows
    if padding:
        q, k, v = q[:, :rows], k[:, :rows], v[:, :rows]
    for held, x in ((keys, k), (values, v)):
        held.select(2, end - 1).copy_(x.reshape(rows, heads, -1))
    begin = max(0, end - window) if window else 0
    seen = None if cache.seen is None else cache.seen.narrow(3, begin, end - begin)
    keys, values = keys.narrow(2, begin, end - begin), values.narrow(2, begin, end - begin)
    own = q.reshape(rows, heads, -1, size)  # a group's query heads, as one head's queries
    out = attend_slots(own, keys, values, seen=seen, scale=scale, softcap=softcap)
    out = out.reshape(1, rows, -1, out.shape[-1])
    return nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


def _write_prompts(cache: KVCache, layer: str, k: Tensor, v: Tensor) -> None:
    """Write keys and values of prompts to their slots, in tensors that are made if none are there.

    They begin as zeros: what no row has written is masked, but not if it were NaN.
    """
    assert cache.rows is not None
    assert cache.slots is not None
    assert cache.last is not None
    for held, x in ((cache.keys, k), (cache.values, v)):
        if layer not in held:
            held[layer] = x.new_zeros(len(cache.last), x.shape[2], cache.length, x.shape[3])
        held[layer][cache.rows, :, cache.slots] = x[0, : len(cache.slots)]


def attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seen: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return attention of few queries to all slots, without a causal mask.

    Args:
        q: `[R, K, G, D]`: the G query heads that share a key head stand as its queries.
        k: `[R, K, T, D]`.
        v: `[R, K, T, E]`.
        seen: bool `[R, 1, 1, T]`; None for all.
        scale: What scores are multiplied by; 1 / sqrt(D) by default.
        softcap: Scores s become softcap * tanh(s / softcap).

    Returns:
        `[R, K, G, E]`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 4, 1, 8)
        >>> torch.equal(attend_slots(q, k, v), v)
        True
    """
    if softcap is None and k.shape[-1] == v.shape[-1]:
        attention = nn.functional.scaled_dot_product_attention
        return attention(q, k, v, attn_mask=seen, scale=scale)
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v
