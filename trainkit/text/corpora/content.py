"""Write the content of a token file in one pass over the documents, hashed in chunks."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainkit.data.documents import check_document
from trainkit.files import convert_disk_errors
from trainkit.text.corpora.token_file import (
    BLOCK,
    CHUNK,
    Header,
    encode_header,
    get_header_fields,
    round_up,
)
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import ArrayLike

    from trainkit.types import Column, Sample


class _ChunkWriter:
    """Writes bytes into a file in chunks, and hashes each chunk into `table`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.table = bytearray()
        self._file = file
        self._path = path
        self._pending = bytearray()

    def write(self, data: bytes) -> None:
        self._pending.extend(data)
        # The last chunk may be shorter, and is written by `finish`.
        while len(self._pending) >= CHUNK:
            self._write_chunk()

    def finish(self) -> None:
        while self._pending:
            self._write_chunk()

    def _write_chunk(self) -> None:
        # One write for each chunk, whatever the documents' sizes.
        chunk = bytes(self._pending[:CHUNK])
        del self._pending[:CHUNK]
        self.table.extend(hashlib.sha256(chunk).digest())
        _write(self._file, chunk, self._path)


def write_content(
    file: BinaryIO,
    path: Path,
    documents: Iterable[ArrayLike | Sample],
    *,
    dtype: np.dtype[Any],
    vocab_size: int | None,
    tokenizer_hash: str | None,
    columns: Mapping[str, Column],
    template_hash: str | None,
    made_with: Mapping[str, str],
) -> None:
    """Write a complete token file in one pass over the documents.

    Args:
        file: An empty file.
        path: Its final path, for messages.
        documents: Sequences of token ids, or `Sample`s.
        dtype: The dtype of the tokens.
        vocab_size: Exclusive upper bound of the ids.
        tokenizer_hash: Hash of the tokenizer that made the tokens.
        columns: The further columns of a token.
        template_hash: Hash of the chat template of the conversations.
        made_with: The names of the tokenizer and of the template.

    Raises:
        DataError: A document is invalid, or there is none.
        DiskError: The file cannot be written.

    Effects:
        Writes `file`, and nameless temporary files in its directory: the loss mask and the columns
        come after all tokens.
    """
    _write(file, bytes(BLOCK), path)  # replaced by the header, which needs all hashes
    content = _ChunkWriter(file, path)
    # A document is checked against the dtype too: a larger id would wrap around silently.
    limit = min(vocab_size or 1 << 32, 1 << 8 * dtype.itemsize)
    offsets, has_mask = _write_documents(
        content, path, documents, dtype=dtype, limit=limit, columns=columns
    )
    # The offsets come last: their number is unknown until the last document.
    encoded_offsets = np.frombuffer(offsets, np.int64).astype("<i8").tobytes()
    content.write(encoded_offsets)
    content.finish()
    _write(file, bytes(content.table), path)
    header = Header(
        dtype=dtype.name,
        documents=len(offsets) - 1,
        tokens=offsets[-1],
        vocab_size=vocab_size,
        loss_mask=has_mask,
        chunk_bytes=CHUNK,
        offsets_sha256=hashlib.sha256(encoded_offsets).hexdigest(),
        table_sha256=hashlib.sha256(content.table).hexdigest(),
        tokenizer=tokenizer_hash,
        columns=columns,
        template=template_hash,
        made_with=made_with,
    )
    # A file without this last write has no magic, so nothing takes it for a token file.
    file.seek(0)
    _write(file, encode_header(get_header_fields(header)), path)


def _write_documents(
    content: _ChunkWriter,
    path: Path,
    documents: Iterable[ArrayLike | Sample],
    *,
    dtype: np.dtype[Any],
    limit: int,
    columns: Mapping[str, Column],
) -> tuple[array[int], bool]:
    """Write tokens, loss mask and columns; return the offsets, and whether there is a mask."""
    # Of all that is written, only this stays in memory: 8 bytes a document.
    offsets = array("q", [0])
    has_mask: bool | None = None
    with ExitStack() as stack:
        # The mask and the columns follow all tokens, so until then they go into files of their own,
        # on the same disk. These have no name: they vanish with the process, however that ends.
        with convert_disk_errors(path, by="write_corpus"):
            mask_file, *column_files = [
                stack.enter_context(
                    tempfile.TemporaryFile(dir=path.parent, prefix=f".{path.name}.")
                )
                for _ in range(1 + len(columns))
            ]
        for index, given in enumerate(documents):
            document = check_document(
                given,
                limit,
                f"write_corpus: {path}: document {index}",
                columns=columns,
                has_mask=has_mask,
            )
            has_mask = document.loss_mask is not None
            offsets.append(offsets[-1] + len(document))
            content.write(document.ids.astype(dtype.newbyteorder("<")).tobytes())
            if document.loss_mask is not None:
                _write(mask_file, document.loss_mask.tobytes(), path)
            for values, column_file in zip(document.values.values(), column_files, strict=True):
                little_endian = values.astype(values.dtype.newbyteorder("<"))
                _write(column_file, little_endian.tobytes(), path)
        if has_mask is None:
            raise DataError(f"{path}: there are no documents to write", where=path)
        # Aligned, so that the sections after the tokens can be viewed in their own dtype.
        content.write(bytes(-offsets[-1] * dtype.itemsize % 8))
        # In the order of `Header`: loss mask, columns by name.
        for section in [mask_file, *column_files] if has_mask else []:
            _copy_section(section, content, path)
    return offsets, has_mask


def _copy_section(section: BinaryIO, content: _ChunkWriter, path: Path) -> None:
    """Append a temporary file to the content, padded with zeros to a multiple of 8 bytes."""
    with convert_disk_errors(path, by="write_corpus"):
        size = section.tell()
        section.seek(0)
        while block := section.read(1 << 20):
            content.write(block)
    content.write(bytes(round_up(size) - size))


def _write(file: BinaryIO, data: bytes, path: Path) -> None:
    with convert_disk_errors(path, by="write_corpus", needed=len(data)):
        file.write(data)
