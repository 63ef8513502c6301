"""Streams: pack documents of unknown number, with a cursor that restores the position exactly."""

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
