"""From rows of pieces to tensors, and what is read off a batch without waiting for the device."""

from __future__ import annotations

from trainkit.batch.batches import (
    batch_hash,
    blank_batch,
    count_valid_tokens,
    map_tensors,
    shift_labels,
    spans,
    split_batch,
    to_device,
)
from trainkit.batch.collate import collate_bins

__all__ = [
    "batch_hash",
    "blank_batch",
    "collate_bins",
    "count_valid_tokens",
    "map_tensors",
    "shift_labels",
    "spans",
    "split_batch",
    "to_device",
]
