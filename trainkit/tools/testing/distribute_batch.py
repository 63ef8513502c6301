"""Shard a global batch over the ranks of a layout, for batches without a corpus."""

from __future__ import annotations

import math

import attrs
import numpy as np
import torch

from trainkit.batch import make_padding_batch, split_batch
from trainkit.batch.shards import shard_sequence, spans_of_lengths
from trainkit.sampling import assign_rows
from trainkit.types import BATCH_TENSORS, Batch, DataShard


def distribute_batch(
    batch: Batch, data_shard: DataShard, *, rows_per_microbatch: int | None = None
) -> list[Batch]:
    """Return one rank's microbatches of a global batch, sharded as by `make_microbatches`.

    Args:
        batch: The global batch, `[R, S]`.
        data_shard: The rank's data shard, `ps.data_shard`.
        rows_per_microbatch: Rows in each microbatch, filled with padding rows if they do not
            divide; None for one microbatch.

    Raises:
        ValueError: There are more ranks than rows, or the ranks do not divide a sequence.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> from trainkit.types import Share
        >>> microbatches = distribute_batch(
        ...     make_padding_batch(4, 8), DataShard(Share(1, 2)), rows_per_microbatch=1
        ... )
        >>> len(microbatches), microbatches[0].input_ids.shape
        (2, torch.Size([1, 8]))
    """
    total, length = batch.input_ids.shape
    # Spans of a ring of N ranks must divide by 2N, those of padding too.
    padding = make_padding_batch(1, length, multiple_of=2 * data_shard.ring.count)
    zeros = {name: torch.zeros_like(batch[name][:1]) for name in batch.extra}
    # assign_rows uses the index -1 for padding rows.
    singles = [*split_batch(batch, 1), attrs.evolve(padding, extra=zeros)]
    # One microbatch takes the rows of the rank that has most.
    rows_per_microbatch = rows_per_microbatch or math.ceil(total / data_shard.rows.count)
    microbatches = []
    for indices in assign_rows(total, data_shard.rows, rows_per_microbatch=rows_per_microbatch):
        rows = [singles[index] for index in indices]
        tensors = {
            name: torch.cat([row[name] for row in rows]) for name in (*BATCH_TENSORS, *batch.extra)
        }
        own = [tensors.pop(name) for name in BATCH_TENSORS]
        spans = spans_of_lengths(np.concatenate([row.spans.lengths for row in rows]))
        microbatches.append(
            shard_sequence(
                Batch(*own, spans=spans, extra=tensors),
                ring=data_shard.ring,
                ulysses=data_shard.ulysses,
            )
        )
    return microbatches
