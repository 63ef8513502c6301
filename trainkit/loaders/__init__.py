"""For those who have a data loader of their own: pad, shift, pool, cut, and put like with like.

trainkit's own way packs documents into rows, so no recipe needs what stands here. All of it is a
function of its arguments, like the rest: an order has no state, a cut no rank.
"""

from __future__ import annotations

from trainkit.loaders.buffers import buffer_sorted_order
from trainkit.loaders.samples import TARGET_FIELDS, pad_stack, pooling_mask, shift_tokens
from trainkit.loaders.trees import Along, shard_tree, unshard_tree

__all__ = [
    "TARGET_FIELDS",
    "Along",
    "buffer_sorted_order",
    "pad_stack",
    "pooling_mask",
    "shard_tree",
    "shift_tokens",
    "unshard_tree",
]
