"""Documents from a source of unknown length, packed as they are read, with an exact cursor."""

from trainkit.text.streams.stream import (
    StreamStep,
    batch_maker,
    documents_from,
    stream_counts,
    stream_steps,
)

__all__ = [
    "StreamStep",
    "batch_maker",
    "documents_from",
    "stream_counts",
    "stream_steps",
]
