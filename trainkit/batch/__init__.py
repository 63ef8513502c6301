"""From rows of pieces to tensors, to parts of them, and to what is read off a batch."""

from __future__ import annotations

from trainkit.batch.batches import (
    batch_hash,
    batch_of_rows,
    blank_batch,
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
from trainkit.batch.denominators import divided, divisor_of, divisors_of, scaled
from trainkit.batch.shards import (
    contiguous_shard,
    shard_batch,
    shard_sequence,
    zigzag_shard,
    zigzag_unshard,
)

__all__ = [
    "batch_hash",
    "batch_of_rows",
    "blank_batch",
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
    "scaled",
    "shard_batch",
    "shard_sequence",
    "shift_labels",
    "spans",
    "split_batch",
    "to_device",
    "zigzag_shard",
    "zigzag_unshard",
]
