"""Data: from packed corpora, or a stream, to the microbatches of a step on one rank."""

from __future__ import annotations

from trainkit.data.cache import cached_bins
from trainkit.data.dispatch import dispatch, stop_together
from trainkit.data.packed import Packed, join_packed, pack_apart, packed_facts
from trainkit.data.prefetch import prefetch
from trainkit.data.steps import deal_rows, eval_batches, step_batch, with_noise_keys
from trainkit.data.stream import (
    StreamStep,
    batch_maker,
    documents_from,
    stream_counts,
    stream_steps,
)

__all__ = [
    "Packed",
    "StreamStep",
    "batch_maker",
    "cached_bins",
    "deal_rows",
    "dispatch",
    "documents_from",
    "eval_batches",
    "join_packed",
    "pack_apart",
    "packed_facts",
    "prefetch",
    "step_batch",
    "stop_together",
    "stream_counts",
    "stream_steps",
    "with_noise_keys",
]
