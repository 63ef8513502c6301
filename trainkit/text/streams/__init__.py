"""Streams: pack documents of unknown number, with a cursor that restores the position exactly."""

from trainkit.text.streams.stream import (
    count_stream,
    make_document_opener,
    make_stream_reader,
    pack_stream,
)

__all__ = [
    "count_stream",
    "make_document_opener",
    "make_stream_reader",
    "pack_stream",
]
