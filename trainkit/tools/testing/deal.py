"""The global batch of a step, dealt to the ranks of a layout, for batches that no corpus made."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from trainkit.batch import make_padding_batch, split_batch
from trainkit.batch.shards import shard_sequence, spans_of_lengths
from trainkit.sampling import assign_rows
from trainkit.types import BATCH_TENSORS, Batch, DataShard


def deal_batch(
    batch: Batch, place: DataShard, *, rows_per_microbatch: int | None = None
) -> list[Batch]:
    """Return one rank's microbatches of a global batch, as `make_microbatches` shards rows.

    Args:
        batch: The global batch, `[R, S]`.
        place: Which part of it the rank holds, `ps.place`.
        rows_per_microbatch: Rows in each microbatch, blank ones where they do not divide; None for
            all of this rank's rows at once.

    Raises:
        ValueError: There are more ranks than rows, or a sequence does not divide.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> from trainkit.types import Share
        >>> dealt = deal_batch(
        ...     make_padding_batch(4, 8), DataShard(Share(1, 2)), rows_per_microbatch=1
        ... )
        >>> len(dealt), dealt[0].input_ids.shape
        (2, torch.Size([1, 8]))
    """
    total, length = batch.input_ids.shape
    rows = rows_per_microbatch or -(-total // place.rows.count)
    blank = make_padding_batch(1, length, multiple_of=2 * place.ring.count)
    nothing = {name: torch.zeros_like(batch[name][:1]) for name in batch.extra}
    singles = [*split_batch(batch, 1), attrs.evolve(blank, extra=nothing)]  # -1 is a blank one
    dealt = assign_rows(total, place.rows, rows_per_microbatch=rows)
    parts = [_joined([singles[row] for row in microbatch]) for microbatch in dealt]
    return [shard_sequence(part, ring=place.ring, ulysses=place.ulysses) for part in parts]


def _joined(rows: Sequence[Batch]) -> Batch:
    joined = {
        name: torch.cat([row[name] for row in rows]) for name in (*BATCH_TENSORS, *rows[0].extra)
    }
    lengths = np.concatenate([row.spans.lengths for row in rows])
    own = [joined.pop(name) for name in BATCH_TENSORS]
    return Batch(*own, spans=spans_of_lengths(lengths), extra=joined)
