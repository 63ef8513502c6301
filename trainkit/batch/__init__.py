"""Batches: collate packed pieces, shard them along the sequence, count and hash their tokens."""

from trainkit.batch.batches import (
    batch_from_rows,
    batch_hash,
    count_documents,
    count_tokens,
    count_valid_tokens,
    count_weights,
    find_padding_rows,
    make_padding_batch,
    make_spans,
    shift_labels,
    split_batch,
    to_device,
)
from trainkit.batch.collate import collate_bins
from trainkit.batch.denominators import (
    scale_denominator,
)
from trainkit.batch.padded import pad_stack, pooling_mask, shift_tokens
from trainkit.batch.shards import (
    contiguous_shard,
    shard_batch,
    shard_sequence,
    spans_from_rows,
    zigzag_shard,
    zigzag_unshard,
)
from trainkit.batch.trees import Along, shard_tree, unshard_tree

__all__ = [
    "Along",
    "batch_from_rows",
    "batch_hash",
    "collate_bins",
    "contiguous_shard",
    "count_documents",
    "count_tokens",
    "count_valid_tokens",
    "count_weights",
    "find_padding_rows",
    "make_padding_batch",
    "make_spans",
    "pad_stack",
    "pooling_mask",
    "scale_denominator",
    "shard_batch",
    "shard_sequence",
    "shard_tree",
    "shift_labels",
    "shift_tokens",
    "spans_from_rows",
    "split_batch",
    "to_device",
    "unshard_tree",
    "zigzag_shard",
    "zigzag_unshard",
]
