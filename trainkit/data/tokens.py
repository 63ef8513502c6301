"""trainkit's token file: documents of tokens in one file that is mapped into memory.

Layout, all little-endian. A block of 4096 bytes: 8 bytes magic, the header's length (uint64), the
SHA-256 of the header (32 bytes), the header in JSON (version, dtype, documents, tokens, vocab_size,
and the SHA-256 of all that follows the block), zeros. Then the tokens, zeros up to a multiple of 8
bytes, and the offsets: documents + 1 int64, from 0 to the number of tokens. Tokens come first so
that a stream of documents is written in one pass.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import numpy as np
import orjson

from trainkit.data.text import check_readable
from trainkit.types import DataError, DiskError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, DTypeLike

    from trainkit.types import IntArray

SUFFIX = ".tokens"
MAGIC = b"\x89TKTOK\r\n"
VERSION = 1
BLOCK = 4096
_DTYPES = ("uint8", "uint16", "uint32")


@attrs.frozen(eq=False)
class TokenCorpus:
    """Documents of tokens, one after the other: a `Corpus`.

    Attributes:
        tokens: Unsigned integers `[T]`, in memory or mapped from a file, read-only.
        offsets: int64 `[N+1]`; document i is `tokens[offsets[i]:offsets[i + 1]]`.
        vocab_size: No token is this large or larger; None where nobody said so.
        names: What each document is called, where documents have names.
        digest: A hash of the content, where one was written down with it.
        trained: 0 for tokens that no label shall ask for, `[T]`; None where all are trained on.
        sources: A hash of the content of each file that the corpus was read from, by its name.
    """

    tokens: np.ndarray[Any, Any]
    offsets: IntArray
    vocab_size: int | None = None
    names: Sequence[str] | None = None
    digest: str | None = None
    trained: np.ndarray[Any, Any] | None = None
    sources: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, int64 `[N]`, computed anew at each call."""
        return np.diff(self.offsets)

    def read(self, document: int, start: int, length: int) -> np.ndarray[Any, Any]:
        """Return `length` tokens of a document from token `start` on, as a view."""
        if not 0 <= document < len(self.offsets) - 1:
            raise ValueError(f"read: there is no document {document} of {len(self.offsets) - 1}")
        begin, end = int(self.offsets[document]), int(self.offsets[document + 1])
        if start < 0 or length < 0 or begin + start + length > end:
            raise ValueError(
                f"read: document {document} has {end - begin} tokens; "
                f"asked for {length} from {start} on"
            )
        return self.tokens[begin + start : begin + start + length]


def write_corpus(
    path: str | os.PathLike[str],
    documents: Iterable[ArrayLike],
    *,
    dtype: DTypeLike | None = None,
    vocab_size: int | None = None,
) -> TokenCorpus:
    """Write documents of tokens into a token file, whole or not at all, and open it.

    Args:
        path: The file to make, which ends in `.tokens`; a file that is there is replaced at the
            end, in one step.
        documents: Sequences of token ids, read once, one at a time; only offsets stay in memory.
        dtype: uint8, uint16 or uint32; by default the smallest that holds `vocab_size`, or uint32.
        vocab_size: No token may be this large or larger; written down, and checked when the file is
            opened with a tokenizer.

    Returns:
        The corpus, mapped from the file.

    Raises:
        ValueError: The suffix or the dtype is not one of the above.
        DataError: A document is not a sequence of ids that fit, or there is no document. The
            message names it.
        DiskError: The file cannot be written, or the disk is full.

    Effects:
        Writes `path`, through a temporary file beside it that is removed on failure; both reach the
        disk before this returns.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     corpus = write_corpus(Path(folder) / "two.tokens", [[1, 2, 3], [4]], vocab_size=10)
        ...     corpus.lengths, corpus.read(0, 1, 2), corpus.tokens.dtype
        (array([3, 1]), array([2, 3], dtype=uint8), dtype('uint8'))
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"write_corpus: the file must end in {SUFFIX}, got {path}")
    kind = np.dtype(dtype) if dtype is not None else smallest_dtype(vocab_size)
    if kind.name not in _DTYPES:
        raise ValueError(f"write_corpus: dtype must be one of {', '.join(_DTYPES)}, got {kind}")
    limit = min(vocab_size or 1 << 32, 1 << 8 * kind.itemsize)
    with _replacing(path) as file:
        _write(file, path, bytes(BLOCK))
        digest, offsets = hashlib.sha256(), [0]
        for number, document in enumerate(documents):
            data = _checked_tokens(document, limit, f"{path}: document {number}")
            offsets.append(offsets[-1] + data.size)
            _write(file, path, data.astype(kind.newbyteorder("<")).tobytes(), digest)
        if len(offsets) == 1:
            raise DataError(f"write_corpus: {path}: there are no documents to write", where=path)
        _write(file, path, bytes(-offsets[-1] * kind.itemsize % 8), digest)
        ends = np.array(offsets, "<i8").tobytes()
        _write(file, path, ends, digest)
        header = {
            "version": VERSION,
            "dtype": kind.name,
            "documents": len(offsets) - 1,
            "tokens": offsets[-1],
            "vocab_size": vocab_size,
            "offsets_sha256": hashlib.sha256(ends).hexdigest(),
            "sha256": digest.hexdigest(),
        }
        file.seek(0)
        _write(file, path, _encode_header(header))
    return open_tokens(path)


def open_tokens(path: str | os.PathLike[str]) -> TokenCorpus:
    """Open a token file: check its header, its size and its offsets, and map its tokens.

    The tokens themselves are not read: `verify_tokens` does that.

    Raises:
        DataError: The file is missing, truncated, damaged, or no token file of this version.
    """
    path = Path(path)
    check_readable(path)
    try:
        header, size = _read_header(path), path.stat().st_size
        want = _offsets_begin(header) + 8 * (header["documents"] + 1)
        if size != want:
            raise _broken(
                path, f"{size} bytes instead of {want}", got=size, want=want, hint="write it again"
            )
        kind = np.dtype(header["dtype"]).newbyteorder("<")
        # A slice of np.memmap takes 1.1 us, of a plain array 0.1; collation makes one per piece.
        data = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", where=path) from error
    tokens = data[BLOCK : BLOCK + header["tokens"] * kind.itemsize].view(kind)
    offsets = data[_offsets_begin(header) :].view("<i8")
    if offsets[0] != 0 or offsets[-1] != header["tokens"] or (np.diff(offsets) < 0).any():
        raise _broken(path, f"offsets that do not rise from 0 to {header['tokens']}")
    if hashlib.sha256(offsets.tobytes()).hexdigest() != header.get("offsets_sha256"):
        raise _broken(path, "offsets that were changed after they were written")
    return TokenCorpus(tokens, offsets, header["vocab_size"], digest=header["sha256"])


def verify_tokens(path: str | os.PathLike[str]) -> None:
    """Read a whole token file: compare its hash with the header's, its tokens with the vocabulary.

    Raises:
        DataError: The file cannot be opened, or its content is not what was written.
    """
    corpus, digest = open_tokens(path), hashlib.sha256()
    with Path(path).open("rb") as file:
        file.seek(BLOCK)
        while data := file.read(1 << 20):
            digest.update(data)
    got, want = digest.hexdigest(), _read_header(Path(path))["sha256"]
    if got != want:
        raise _broken(path, "content that was changed after it was written", got=got, want=want)
    largest = int(corpus.tokens.max(initial=0))
    if corpus.vocab_size is not None and largest >= corpus.vocab_size:
        raise _broken(path, f"token {largest} outside its vocabulary of {corpus.vocab_size}")


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the smallest dtype that holds a vocabulary's tokens; uint32 if it is unknown."""
    return np.dtype("uint32" if vocab_size is None else np.min_scalar_type(max(vocab_size - 1, 0)))


def _checked_tokens(document: ArrayLike, limit: int, name: str) -> np.ndarray[Any, Any]:
    data = np.asarray(document)
    if data.ndim != 1 or (data.size and data.dtype.kind not in "iu"):
        raise DataError(
            f"write_corpus: {name} must be integers in one dimension, "
            f"got {data.dtype} {data.shape}",
            where=name,
        )
    if data.size and (data.min() < 0 or data.max() >= limit):
        worst = int(((data < 0) | (data >= limit)).argmax())
        raise DataError(
            f"write_corpus: {name} has token {data[worst]} at {worst}, outside [0, {limit})",
            where=name,
            got=int(data[worst]),
        )
    return data


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` at the end, and goes on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with _disk_errors(path):
        file = temporary.open("xb")
    try:
        yield file
        with _disk_errors(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            temporary.replace(path)
            _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # closing writes what is left, and fails again where writing failed
            file.close()
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(file: BinaryIO, path: Path, data: bytes, digest: Any = None) -> None:
    with _disk_errors(path, needed=len(data)):
        file.write(data)
    if digest is not None:
        digest.update(data)


@contextmanager
def _disk_errors(path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Turn an `OSError` of the block into a `DiskError` that names the file and what is free."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else None
        room = f"; the next part needs {needed} bytes" if needed else ""
        room += "" if free is None else f"; {free} bytes are free"
        raise DiskError(
            f"write_corpus: cannot write {path}: {error.strerror}{room}",
            where=path,
            got=free,
            want=needed,
        ) from error


def _encode_header(header: dict[str, Any]) -> bytes:
    text = orjson.dumps(header)
    block = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    return block.ljust(BLOCK, b"\0")


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        block = file.read(BLOCK)
    if block[:8] != MAGIC:
        raise _broken(path, "no token file's beginning", got=block[:8], want=MAGIC)
    text = block[48 : 48 + int.from_bytes(block[8:16], "little")]
    if len(block) < BLOCK or hashlib.sha256(text).digest() != block[16:48]:
        raise _broken(path, "a header that is truncated or damaged", got=len(block), want=BLOCK)
    header = orjson.loads(text)
    if header["version"] != VERSION:
        raise _broken(
            path,
            f"version {header['version']}; this trainkit reads {VERSION}",
            got=header["version"],
            want=VERSION,
        )
    if header["dtype"] not in _DTYPES:
        raise _broken(path, f"unknown dtype {header['dtype']}", got=header["dtype"], want=_DTYPES)
    return header


def _offsets_begin(header: dict[str, Any]) -> int:
    return BLOCK + -(-header["tokens"] * np.dtype(header["dtype"]).itemsize // 8) * 8


def _broken(path: str | os.PathLike[str], what: str, **facts: Any) -> DataError:
    return DataError(f"{os.fspath(path)}: this token file has {what}", where=path, **facts)
