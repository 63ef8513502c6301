"""Streams: pack documents of unknown number, with a cursor that restores the position exactly."""

from trainkit.text.streams.stream import (
    make_document_opener,
    make_stream_reader,
    pack_stream,
)

__all__ = [
    "make_document_opener",
    "make_stream_reader",
    "pack_stream",
]
