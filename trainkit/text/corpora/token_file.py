"""The format of trainkit's token file: its header, its sections, the hashes of its chunks.

Everything is little-endian. First a block of 4096 bytes: 8 bytes of magic, the length of the header
(uint64), the SHA-256 of the header (32 bytes), the header in JSON, zeros. Then the content, each
section padded with zeros to a multiple of 8 bytes: the tokens; the loss mask if there is one, a
byte for each token; the values of each column; the offsets, documents + 1 int64, from 0 to the
number of tokens. Then a table: the SHA-256 of each chunk of the content.

The header holds the SHA-256 of the table, so it covers every byte, and any chunk can be checked
without reading the others. A file with columns has version 3, one without has version 2.
"""

from __future__ import annotations

import hashlib
import random
from itertools import accumulate
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import numpy as np
import orjson

from trainkit.data.documents import check_columns
from trainkit.text.corpora.text_files import measure_file, read_at
from trainkit.types import Column, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

MAGIC = b"\x89TKTOK\r\n"
VERSIONS = (2, 3)  # without columns, with columns
BLOCK = 4096
CHUNK = 1 << 22
HASH = 32
DTYPES = ("uint8", "uint16", "uint32")
SAMPLED = 32
"""Chunks that opening a file checks: all of a file of up to 128 MiB, in 0.13 s on one core."""


@attrs.frozen
class Header:
    """The header of a token file; positions are bytes from the beginning of the file.

    `tokenizer` is the `tokenizer_hash` of the tokenizer that made the tokens, and `template` the
    `template_hash` of the chat template, if the writer gave them. `made_with` has the names of
    both, "tokenizer" and "template", as the user gave them; they appear in error messages.
    """

    dtype: str
    documents: int
    tokens: int
    vocab_size: int | None
    loss_mask: bool
    chunk_bytes: int
    offsets_sha256: str
    table_sha256: str
    tokenizer: str | None = None
    columns: Mapping[str, Column] = attrs.field(factory=dict)
    template: str | None = None
    made_with: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens in the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def loss_mask_at(self) -> int:
        """Where the loss mask begins; the section is empty if `loss_mask` is false."""
        return BLOCK + round_up(self.tokens * self.token_dtype.itemsize)

    @property
    def values_at(self) -> list[int]:
        """Where the values of each column begin, and last where the offsets begin."""
        start = self.loss_mask_at + (round_up(self.tokens) if self.loss_mask else 0)
        sizes = (
            round_up(self.tokens * column.width * np.dtype(column.dtype).itemsize)
            for column in self.columns.values()
        )
        return [*accumulate(sizes, initial=start)]

    @property
    def offsets_at(self) -> int:
        """Where the offsets begin."""
        return self.values_at[-1]

    @property
    def table_at(self) -> int:
        """Where the content ends and the table begins."""
        return self.offsets_at + 8 * (self.documents + 1)

    @property
    def chunks(self) -> int:
        """The number of chunks; the last may be shorter."""
        return -(-(self.table_at - BLOCK) // self.chunk_bytes)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.table_at + HASH * self.chunks

    @property
    def digest(self) -> str:
        """A hash of the corpus; the same bytes under another dtype are another corpus."""
        text = f"{self.dtype} {self.loss_mask} {self.chunk_bytes} {self.table_sha256}"
        # The names and types of columns are in the header, which the chunks do not cover.
        text += f" {list_columns(self.columns)}" if self.columns else ""
        return hashlib.sha256(text.encode()).hexdigest()


def round_up(size: int) -> int:
    """Round a size up to a multiple of 8."""
    return -(-size // 8) * 8


def list_columns(columns: Mapping[str, Column]) -> list[list[Any]]:
    """Return columns as plain lists, (name, dtype, inner, of) of each, for JSON and for hashes.

    Examples:
        >>> from trainkit.types import Column
        >>> list_columns({"advantages": Column()})
        [['advantages', 'float32', [], 'label']]
    """
    return [[name, x.dtype, list(x.inner), x.of] for name, x in columns.items()]


def get_header_fields(header: Header) -> dict[str, Any]:
    """Return the fields of a header as JSON values; empty ones of later versions are omitted."""
    fields = attrs.asdict(header, recurse=False)
    fields["columns"] = list_columns(header.columns)
    fields["made_with"] = dict(header.made_with)
    # A file without these fields is byte for byte as older versions wrote it.
    later = ("columns", "template", "made_with")
    return {name: value for name, value in fields.items() if value or name not in later}


def encode_header(fields: Mapping[str, Any]) -> bytes:
    """Return the first block of a token file.

    Raises:
        ValueError: The columns do not fit into the block.
    """
    text = orjson.dumps({"version": VERSIONS["columns" in fields], **fields})
    if len(text) > BLOCK - 48:
        raise ValueError(f"a header of {len(text)} bytes is too long: give columns shorter names")
    # The hash of the header is outside the JSON that it covers.
    block = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    return block.ljust(BLOCK, b"\0")


def read_token_header(file: BinaryIO, path: Path) -> Header:
    """Read the header of an open token file, and check it against the size of the file.

    Raises:
        DataError: The block is truncated, damaged, of another version, or has invalid fields.
    """
    block = read_at(file, path, 0, BLOCK)
    if block[:8] != MAGIC:
        raise DataError(
            f"{path}: this token file has no token file's beginning",
            where=path,
            got=block[:8],
            want=MAGIC,
        )
    # After 8 bytes of magic, 8 of the length and 32 of the hash.
    end = 48 + int.from_bytes(block[8:16], "little")
    text = block[48:end]
    is_intact = hashlib.sha256(text).digest() == block[16:48]
    has_zeros = not block[end:].strip(b"\0")
    if len(block) < BLOCK or not (is_intact and has_zeros):
        raise DataError(
            f"{path}: this token file has a header that is truncated or damaged",
            where=path,
            got=len(block),
            want=BLOCK,
        )
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{path}: this token file has a header that is no JSON: {error}", where=path
        ) from error
    # Before the other fields, as those of another version may mean something else.
    version = fields.get("version") if isinstance(fields, dict) else None
    if version not in VERSIONS:
        raise DataError(
            f"{path}: this token file has version {version}; this trainkit reads "
            f"{' and '.join(map(str, VERSIONS))}",
            where=path,
            got=version,
            want=VERSIONS,
        )
    # From here on a field is what the writer wrote; a bug or a forger may have written anything.
    header = _parse_header(fields, path)
    size = measure_file(file)
    # From here on sections can be sliced without checks: the file holds all of them.
    if size != header.size:
        raise DataError(
            f"{path}: this token file has {size} bytes instead of {header.size}",
            where=path,
            got=size,
            want=header.size,
            hint="write it again",
        )
    return header


def _parse_header(fields: dict[str, Any], path: Path) -> Header:
    """Make a `Header` of checked fields; unknown ones, of later versions, are ignored."""
    dtype = fields.get("dtype")
    if dtype not in DTYPES:
        raise DataError(
            f"{path}: this token file has unknown dtype {dtype}",
            where=path,
            got=dtype,
            want=DTYPES,
        )
    # `type(x) is int`, as JSON's `true` is an int for `isinstance`.
    rules: dict[str, Callable[[Any], bool]] = {
        "documents": lambda x: type(x) is int and x >= 1,
        "tokens": lambda x: type(x) is int and x >= 0,
        "vocab_size": lambda x: x is None or (type(x) is int and x >= 1),
        "loss_mask": lambda x: type(x) is bool,
        # A multiple of 8, so that no chunk begins inside a number.
        "chunk_bytes": lambda x: type(x) is int and x >= 8 and x % 8 == 0,
        "offsets_sha256": lambda x: type(x) is str,
        "table_sha256": lambda x: type(x) is str,
        "tokenizer": lambda x: x is None or type(x) is str,
        "template": lambda x: x is None or type(x) is str,
        "made_with": lambda x: type(x) is dict and all(type(each) is str for each in x.values()),
    }
    # Files that were written before these fields existed.
    fields = {"tokenizer": None, "template": None, "made_with": {}, **fields}
    for name, rule in rules.items():
        if name not in fields or not rule(fields[name]):
            raise DataError(
                f"{path}: this token file has a header with {name} {fields.get(name)!r}",
                where=path,
                got=fields.get(name),
            )
    header = Header(dtype, **{name: fields[name] for name in rules})
    # Version 2 has no columns.
    if fields["version"] == VERSIONS[0]:
        return header
    try:
        columns = {
            name: Column(column_dtype, inner, of)
            for name, column_dtype, inner, of in fields["columns"]
        }
        return attrs.evolve(header, columns=check_columns("open_tokens", columns))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: this token file has a header with columns that cannot be: {error}",
            where=path,
        ) from error


# ------------------------------------------------------------------------------------------ chunks


def sample_chunks(count: int, max_chunks: int | None) -> list[int]:
    """Return the indices, in order, of up to `max_chunks` of `count` chunks, spread over the file.

    The first and the last are included; the others are drawn again on each call, so that many
    starts of a run check the whole file.
    """
    if max_chunks is None or count <= max_chunks:
        return list(range(count))
    # Not the global generator: a run seeds it, and each start would check the same chunks.
    draw = random.SystemRandom().randrange
    # The first, the last and one in between would be three.
    if max_chunks < 3:
        return sorted({draw(count) for _ in range(max_chunks)})
    bounds = [1 + part * (count - 2) // (max_chunks - 2) for part in range(max_chunks - 1)]
    # One chunk from each of equal ranges, so that no part of the file is left out for long.
    middle = (draw(bounds[i], bounds[i + 1]) for i in range(max_chunks - 2))
    return [0, *middle, count - 1]


def check_chunks(
    file: BinaryIO, header: Header, indices: Iterable[int], path: Path
) -> Iterator[tuple[int, int]]:
    """Compare chunks with the table; yield (first byte, end) of each.

    The file is read, not mapped: a read error raises, while one in mapped memory kills the process.

    Raises:
        DataError: The table or a chunk has changed. The message names the byte.
    """
    # The hash in the header makes the table trustworthy, and the table each chunk.
    table = read_at(file, path, header.table_at, HASH * header.chunks)
    if hashlib.sha256(table).hexdigest() != header.table_sha256:
        raise DataError(
            f"{path}: this token file has a table of fingerprints, from byte {header.table_at} "
            "on, that changed",
            where=path,
        )
    for index in indices:
        start = BLOCK + index * header.chunk_bytes
        end = min(start + header.chunk_bytes, header.table_at)
        digest = hashlib.sha256(read_at(file, path, start, end - start)).digest()
        if digest != table[index * HASH : (index + 1) * HASH]:
            raise DataError(
                f"{path}: this token file has content between bytes {start} and {end} that was "
                "changed after it was written: its fingerprint differs from the stored one",
                where=path,
                got=digest.hex()[:16],
                hint="write it again, or copy it again from where it came from",
            )
        yield start, end


def check_ids(
    tokens: np.ndarray[Any, Any],
    start: int,
    *,
    vocab_size: int | None,
    offsets: np.ndarray[Any, Any],
    first_byte: int,
    path: Path,
) -> None:
    """Raise DataError if tokens are negative or outside the vocabulary.

    Args:
        tokens: Some of a file's tokens, in the dtype of the file.
        start: The index of the first of them in the file.
        vocab_size: Exclusive upper bound of the ids.
        offsets: The document offsets, in tokens.
        first_byte: The position of the file's first token.
        path: The file.

    Raises:
        DataError: A token is out of range. The message names it, its document and its position.
    """
    # Without a vocabulary only the sign of an id can be wrong.
    limit = vocab_size if vocab_size is not None else 1 << 8 * tokens.itemsize
    low = 0 if tokens.dtype.kind == "u" else int(tokens.min(initial=0))
    # A pass over the tokens is skipped where their dtype rules out ids above the limit.
    can_exceed = tokens.dtype.kind == "i" or limit < 1 << 8 * tokens.itemsize
    if low >= 0 and (not can_exceed or int(tokens.max(initial=0)) < limit):
        return
    # Only now, as it takes memory for every token: the position of the first.
    worst = int(((tokens < 0) | (tokens >= limit)).argmax())
    index = start + worst
    document = int(np.searchsorted(offsets, index, side="right")) - 1
    allowed = (
        "the valid ids, from 0 on" if vocab_size is None else f"its vocabulary of {vocab_size}"
    )
    raise DataError(
        f"{path}: this file has, in document {document} at offset "
        f"{index - int(offsets[document])} (byte {first_byte + index * tokens.itemsize} of the "
        f"file), token {tokens[worst]} outside {allowed}",
        where=path,
        got=int(tokens[worst]),
        want=vocab_size,
    )
