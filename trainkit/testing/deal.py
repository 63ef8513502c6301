"""The global batch of a step, dealt to the ranks of a layout, for batches that no corpus made."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainkit.batch import blank_batch, split_batch
from trainkit.batch.shards import shard_sequence, spans_of_lengths
from trainkit.sampling import share_of_rows
from trainkit.types import BATCH_TENSORS, IGNORED_LABEL, Batch, Place


def deal_batch(
    batch: Batch, place: Place, *, rows_per_microbatch: int | None = None
) -> list[Batch]:
    """Return one rank's microbatches of a global batch, as `deal_rows` deals those of a corpus.

    Args:
        batch: The global batch, `[R, S]`.
        place: Which part of it the rank holds, `ps.place`.
        rows_per_microbatch: Rows in each microbatch, blank ones where they do not divide; None for
            all of this rank's rows at once.

    Raises:
        ValueError: There are more ranks than rows, or a sequence does not divide.

    Examples:
        >>> from trainkit.batch import blank_batch
        >>> from trainkit.types import Share
        >>> dealt = deal_batch(blank_batch(4, 8), Place(Share(1, 2)), rows_per_microbatch=1)
        >>> len(dealt), dealt[0].input_ids.shape
        (2, torch.Size([1, 8]))
    """
    total = batch.input_ids.shape[0]
    rows = rows_per_microbatch or -(-total // place.rows.count)
    positions = share_of_rows(total, place.rows, rows_per_microbatch=rows)
    taken = _take_rows(batch, positions.reshape(-1), multiple_of=2 * place.ring.count)
    parts = split_batch(taken, positions.shape[1])
    return [shard_sequence(part, ring=place.ring, ulysses=place.ulysses) for part in parts]


_BLANK = dict.fromkeys(BATCH_TENSORS, -1) | {"input_ids": 0, "labels": IGNORED_LABEL}


def _take_rows(batch: Batch, places: np.ndarray[Any, Any], *, multiple_of: int) -> Batch:
    """Return some rows of a batch; -1 stands for a blank one."""
    rows, length = batch.input_ids.shape
    ends = np.cumsum(batch.spans.lengths)
    cuts = np.append(0, np.searchsorted(ends, np.arange(1, rows + 1) * length) + 1)
    blank_row = blank_batch(1, length, multiple_of=multiple_of).spans.lengths
    spans = [
        batch.spans.lengths[cuts[place] : cuts[place + 1]] if place >= 0 else blank_row
        for place in places
    ]
    blank = torch.from_numpy(places < 0)
    index = torch.from_numpy(places).clamp(min=0)
    taken = {name: batch[name][index] for name in (*BATCH_TENSORS, *batch.extra)}
    for name, values in taken.items():
        values[blank] = _BLANK.get(name, 0)
    taken["position_ids"][blank] = torch.arange(length)
    return Batch(
        **{name: taken[name] for name in BATCH_TENSORS},
        spans=spans_of_lengths(np.concatenate(spans)),
        extra={name: taken[name] for name in batch.extra},
    )
