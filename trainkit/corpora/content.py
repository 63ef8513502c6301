"""The content of a token file on its way to the disk, hashed in chunks."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import numpy as np

from trainkit.corpora.documents import checked_document
from trainkit.corpora.text import bad_file
from trainkit.corpora.token_file import BLOCK, CHUNK, Header, encode_header
from trainkit.files import disk_errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import ArrayLike

    from trainkit.types import Sample


@attrs.define
class _Content:
    """What has been written of a file, and what waits for its chunk to be full."""

    file: BinaryIO
    path: Path
    chunk_bytes: int
    waiting: bytearray = attrs.field(factory=bytearray)
    table: bytearray = attrs.field(factory=bytearray)


def write_content(
    file: BinaryIO,
    path: Path,
    documents: Iterable[ArrayLike | Sample],
    *,
    kind: np.dtype[Any],
    vocab_size: int | None,
    tokenizer_hash: str | None = None,
) -> None:
    """Write a whole token file in one pass over the documents.

    Args:
        file: An empty file.
        path: What it will be called.
        documents: Sequences of token ids, or `Sample`s.
        kind: The tokens' dtype.
        vocab_size: No token may be this large or larger.
        tokenizer_hash: Of the tokenizer that made the tokens.

    Raises:
        DataError: A document is not what it must be, or there is none.
        DiskError: The file cannot be written.

    Effects:
        Writes `file`; and for `Sample`s a file without a name beside it, as which tokens are
        trained on comes after all tokens.
    """
    out = _Content(file, path, CHUNK)
    _write(out, bytes(BLOCK))
    with ExitStack() as stack:
        offsets, choices = _put_documents(out, stack, documents, kind, vocab_size)
        _put(out, bytes(-offsets[-1] * kind.itemsize % 8))
        if choices is not None:
            _put_copy(out, choices)
            _put(out, bytes(-offsets[-1] % 8))
    ends = np.frombuffer(offsets, np.int64).astype("<i8").tobytes()
    _put(out, ends)
    _flush(out, last=True)
    _write(out, bytes(out.table))
    header = Header(
        kind.name,
        len(offsets) - 1,
        offsets[-1],
        vocab_size,
        choices is not None,
        out.chunk_bytes,
        hashlib.sha256(ends).hexdigest(),
        hashlib.sha256(out.table).hexdigest(),
        tokenizer_hash,
    )
    file.seek(0)
    _write(out, encode_header(attrs.asdict(header)))


def _put_documents(
    out: _Content,
    stack: ExitStack,
    documents: Iterable[ArrayLike | Sample],
    kind: np.dtype[Any],
    vocab_size: int | None,
) -> tuple[array[int], BinaryIO | None]:
    """Write the tokens; return the offsets, and for `Sample`s a file of which are trained on."""
    limit = min(vocab_size or 1 << 32, 1 << 8 * kind.itemsize)
    offsets, choices = array("q", [0]), None
    for number, document in enumerate(documents):
        ids, chosen = checked_document(
            document,
            limit,
            f"write_corpus: {out.path}: document {number}",
            with_choice=None if number == 0 else choices is not None,
        )
        offsets.append(offsets[-1] + ids.size)
        _put(out, ids.astype(kind.newbyteorder("<")).tobytes())
        if chosen is not None:
            with disk_errors(out.path, by="write_corpus", needed=chosen.size):
                choices = choices or stack.enter_context(_nameless(out.path))
                choices.write(chosen.tobytes())
    if len(offsets) == 1:
        raise bad_file(out.path, "there are no documents to write")
    return offsets, choices


def _nameless(path: Path) -> Any:
    """Open a file on the same disk that goes with the process, however that ends."""
    return tempfile.TemporaryFile(dir=path.parent, prefix=f".{path.name}.")


def _put(out: _Content, data: bytes) -> None:
    out.waiting += data
    if len(out.waiting) >= out.chunk_bytes:
        _flush(out)


def _put_copy(out: _Content, source: BinaryIO) -> None:
    with disk_errors(out.path, by="write_corpus"):
        source.seek(0)
        for data in iter(lambda: source.read(1 << 20), b""):
            _put(out, data)


def _flush(out: _Content, *, last: bool = False) -> None:
    """Write the chunks that are full; the last may be short."""
    while len(out.waiting) >= out.chunk_bytes or (last and out.waiting):
        chunk = bytes(out.waiting[: out.chunk_bytes])
        del out.waiting[: out.chunk_bytes]
        out.table += hashlib.sha256(chunk).digest()
        _write(out, chunk)


def _write(out: _Content, data: bytes) -> None:
    with disk_errors(out.path, by="write_corpus", needed=len(data)):
        out.file.write(data)
