"""Batches: collate packed pieces, shard them along the sequence, count and hash their tokens."""

from trainkit.batch.batches import (
    batch_hash,
    batch_of_rows,
    blank_batch,
    blank_rows,
    count_documents,
    count_tokens,
    count_valid_tokens,
    count_weights,
    map_tensors,
    shift_labels,
    spans,
    split_batch,
    to_device,
)
from trainkit.batch.collate import collate_bins
from trainkit.batch.denominators import check_terms, divided, divisor_of, divisors_of, scaled
from trainkit.batch.padded import TARGET_FIELDS, pad_stack, pooling_mask, shift_tokens
from trainkit.batch.shards import (
    contiguous_shard,
    shard_batch,
    shard_sequence,
    spans_of_rows,
    zigzag_shard,
    zigzag_unshard,
)
from trainkit.batch.trees import Along, shard_tree, unshard_tree

__all__ = [
    "TARGET_FIELDS",
    "Along",
    "batch_hash",
    "batch_of_rows",
    "blank_batch",
    "blank_rows",
    "check_terms",
    "collate_bins",
    "contiguous_shard",
    "count_documents",
    "count_tokens",
    "count_valid_tokens",
    "count_weights",
    "divided",
    "divisor_of",
    "divisors_of",
    "map_tensors",
    "pad_stack",
    "pooling_mask",
    "scaled",
    "shard_batch",
    "shard_sequence",
    "shard_tree",
    "shift_labels",
    "shift_tokens",
    "spans",
    "spans_of_rows",
    "split_batch",
    "to_device",
    "unshard_tree",
    "zigzag_shard",
    "zigzag_unshard",
]
