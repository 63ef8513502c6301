"""Documents from a source of unknown length, packed as they are read, with an exact cursor."""

from trainkit.text.streams.stream import (
    StreamStep,
    count_stream,
    make_document_opener,
    make_stream_reader,
    pack_stream,
)

__all__ = [
    "StreamStep",
    "count_stream",
    "make_document_opener",
    "make_stream_reader",
    "pack_stream",
]
