"""From rows of pieces to tensors, and what is read off a batch without waiting for the device."""

from __future__ import annotations

from trainkit.batch.batches import (
    batch_hash,
    batch_of_rows,
    blank_batch,
    count_tokens,
    count_valid_tokens,
    map_tensors,
    shift_labels,
    spans,
    split_batch,
    to_device,
)
from trainkit.batch.collate import collate_bins
from trainkit.batch.samples import TARGET_FIELDS, pad_stack, pooling_mask, shift_tokens
from trainkit.batch.trees import Along, shard_tree, unshard_tree

__all__ = [
    "TARGET_FIELDS",
    "Along",
    "batch_hash",
    "batch_of_rows",
    "blank_batch",
    "collate_bins",
    "count_tokens",
    "count_valid_tokens",
    "map_tensors",
    "pad_stack",
    "pooling_mask",
    "shard_tree",
    "shift_labels",
    "shift_tokens",
    "spans",
    "split_batch",
    "to_device",
    "unshard_tree",
]
