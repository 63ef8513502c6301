"""The content of a token file on its way to the disk, hashed in chunks."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainkit.data.documents import checked_document
from trainkit.files import bad_file, convert_disk_errors
from trainkit.text.corpora.token_file import BLOCK, CHUNK, Header, aligned, encode_header, facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import ArrayLike

    from trainkit.types import Column, Sample


def write_content(
    file: BinaryIO,
    path: Path,
    documents: Iterable[ArrayLike | Sample],
    *,
    kind: np.dtype[Any],
    vocab_size: int | None,
    tokenizer_hash: str | None,
    columns: Mapping[str, Column],
    template_hash: str | None,
    made_with: Mapping[str, str],
) -> None:
    """Write a whole token file in one pass over the documents.

    Args:
        file: An empty file.
        path: What it will be called.
        documents: Sequences of token ids, or `Sample`s.
        kind: The tokens' dtype.
        vocab_size: No token may be this large or larger.
        tokenizer_hash: Of the tokenizer that made the tokens.
        columns: What there is of each token besides.
        template_hash: Of the template that conversations were written with.
        made_with: The names of the tokenizer and of the template.

    Raises:
        DataError: A document is not what it must be, or there is none.
        DiskError: The file cannot be written.

    Effects:
        Writes `file`; and files without a name beside it, as which tokens are trained on, and the
        columns, come after all tokens.
    """
    offsets, table = array("q", [0]), bytearray()
    trained: bool | None = None

    def write(data: bytes, to: BinaryIO = file) -> None:
        with convert_disk_errors(path, by="write_corpus", needed=len(data)):
            to.write(data)

    put = _in_chunks(write, table)
    write(bytes(BLOCK))
    limit = min(vocab_size or 1 << 32, 1 << 8 * kind.itemsize)
    with ExitStack() as stack:
        choices, *others = [stack.enter_context(_nameless(path)) for _ in range(1 + len(columns))]
        for number, given in enumerate(documents):
            where = f"write_corpus: {path}: document {number}"
            document = checked_document(given, limit, where, columns=columns, with_choice=trained)
            trained = document.trained is not None
            offsets.append(offsets[-1] + len(document))
            put(document.ids.astype(kind.newbyteorder("<")).tobytes())
            if document.trained is not None:
                write(document.trained.tobytes(), choices)
            for values, other in zip(document.values.values(), others, strict=True):
                write(values.astype(values.dtype.newbyteorder("<")).tobytes(), other)
        if trained is None:
            raise bad_file(path, "there are no documents to write")
        put(bytes(-offsets[-1] * kind.itemsize % 8))
        for section in [choices, *others] if trained else []:
            for data in _whole(section, path):
                put(data)
    ends = np.frombuffer(offsets, np.int64).astype("<i8").tobytes()
    put(ends, last=True)
    write(bytes(table))
    header = Header(
        kind.name,
        len(offsets) - 1,
        offsets[-1],
        vocab_size,
        trained,
        CHUNK,
        hashlib.sha256(ends).hexdigest(),
        hashlib.sha256(table).hexdigest(),
        tokenizer_hash,
        columns,
        template_hash,
        made_with,
    )
    file.seek(0)
    write(encode_header(facts_of(header)))


def _whole(section: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield what was written into a file, filled up with zeros to a multiple of 8 bytes."""
    with convert_disk_errors(path, by="write_corpus"):
        size = section.tell()
        section.seek(0)
        yield from iter(lambda: section.read(1 << 20), b"")
    yield bytes(aligned(size) - size)


def _in_chunks(write: Callable[[bytes], None], table: bytearray) -> Callable[..., None]:
    """Return put(data, last=False), which writes the chunks that are full, and hashes them."""
    waiting = bytearray()

    def put(data: bytes, *, last: bool = False) -> None:
        waiting.extend(data)
        while len(waiting) >= CHUNK or (last and waiting):
            chunk = bytes(waiting[:CHUNK])
            del waiting[:CHUNK]
            table.extend(hashlib.sha256(chunk).digest())
            write(chunk)

    return put


def _nameless(path: Path) -> Any:
    """Open a file on the same disk that goes with the process, however that ends."""
    with convert_disk_errors(path, by="write_corpus"):
        return tempfile.TemporaryFile(dir=path.parent, prefix=f".{path.name}.")
