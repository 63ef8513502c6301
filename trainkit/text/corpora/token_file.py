"""The layout of trainkit's token file: its header, its sections, the hashes of its chunks.

All little-endian. A block of 4096 bytes: 8 bytes magic, the header's length (uint64), the SHA-256
of the header (32 bytes), the header in JSON, zeros. Then the content, each section filled up with
zeros to a multiple of 8 bytes: the tokens; where the header says so, one byte for each token, 1 if
it is trained on; the values of each column that it names; the offsets: documents + 1 int64, from 0
to the number of tokens. Then a table: the SHA-256 of each chunk of the content. The header holds
the table's SHA-256, so it vouches for every byte, and a few chunks can be checked without reading
the others. A file with columns is of version 3, one without of version 2, as it was before them.
"""

from __future__ import annotations

import hashlib
import os
import random
from itertools import accumulate
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import numpy as np
import orjson

from trainkit.data.documents import checked_columns
from trainkit.files import bad_file
from trainkit.text.corpora.text import read_at
from trainkit.types import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from trainkit.types import DataError

MAGIC = b"\x89TKTOK\r\n"
VERSIONS = (2, 3)  # without columns, and with some
BLOCK = 4096
CHUNK = 1 << 22
HASH = 32
DTYPES = ("uint8", "uint16", "uint32")
SAMPLED = 32
"""Chunks that opening a file checks: all of a file of up to 128 MiB, 0.13 s on one core."""


@attrs.frozen
class Header:
    """What a token file says of itself; positions are bytes from its beginning.

    `tokenizer` is the `tokenizer_hash` of what made the tokens, and `template` the `template_hash`
    of how conversations were written, where somebody said so; `made_with` has the names of both,
    "tokenizer" and "template", as they were on a command line, for messages.
    """

    dtype: str
    documents: int
    tokens: int
    vocab_size: int | None
    trained: bool
    chunk_bytes: int
    offsets_sha256: str
    table_sha256: str
    tokenizer: str | None = None
    columns: Mapping[str, Column] = attrs.field(factory=dict)
    template: str | None = None
    made_with: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def kind(self) -> np.dtype[Any]:
        """The tokens' dtype."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def trained_at(self) -> int:
        """Where the section `trained` begins, which may be empty."""
        return BLOCK + aligned(self.tokens * self.kind.itemsize)

    @property
    def values_at(self) -> list[int]:
        """Where the values of each column begin, and the offsets after them."""
        begin = self.trained_at + (aligned(self.tokens) if self.trained else 0)
        each = (x.width * np.dtype(x.dtype).itemsize for x in self.columns.values())
        return [*accumulate((aligned(self.tokens * size) for size in each), initial=begin)]

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
        """The size of the whole file."""
        return self.table_at + HASH * self.chunks

    @property
    def digest(self) -> str:
        """A hash of the corpus: the same bytes as another dtype are another corpus."""
        text = f"{self.dtype} {self.trained} {self.chunk_bytes} {self.table_sha256}"
        text += f" {described(self.columns)}" if self.columns else ""
        return hashlib.sha256(text.encode()).hexdigest()


def aligned(size: int) -> int:
    """Return the next multiple of 8."""
    return -(-size // 8) * 8


def described(columns: Mapping[str, Column]) -> list[list[Any]]:
    """Return columns as a header and a hash have them: (name, dtype, inner, of) of each.

    Examples:
        >>> from trainkit.types import Column
        >>> described({"advantages": Column()})
        [['advantages', 'float32', [], 'label']]
    """
    return [[name, x.dtype, list(x.inner), x.of] for name, x in columns.items()]


def facts_of(header: Header) -> dict[str, Any]:
    """Return what a header says, as JSON has it."""
    others = ("columns", "template", "made_with")
    facts = attrs.asdict(header, filter=lambda field, _: field.name not in others)
    facts |= {"columns": described(header.columns)} if header.columns else {}
    facts |= {} if header.template is None else {"template": header.template}
    return facts | ({"made_with": dict(header.made_with)} if header.made_with else {})


def encode_header(facts: Mapping[str, Any]) -> bytes:
    """Return the first block of a token file.

    Raises:
        ValueError: There is no room for so many columns.
    """
    text = orjson.dumps({"version": VERSIONS["columns" in facts], **facts})
    if len(text) > BLOCK - 48:
        raise ValueError(f"a header of {len(text)} bytes is too long: give columns shorter names")
    block = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    return block.ljust(BLOCK, b"\0")


def read_header(file: BinaryIO, path: Path) -> Header:
    """Read the header of an open token file, and refuse what no file of this size can hold.

    Raises:
        DataError: The block is truncated, damaged, of another version, or says what cannot be.
    """
    block = read_at(file, path, 0, BLOCK)
    if block[:8] != MAGIC:
        raise broken(path, "no token file's beginning", got=block[:8], want=MAGIC)
    end = 48 + int.from_bytes(block[8:16], "little")
    text = block[48:end]
    intact = hashlib.sha256(text).digest() == block[16:48] and not block[end:].strip(b"\0")
    if len(block) < BLOCK or not intact:
        raise broken(path, "a header that is truncated or damaged", got=len(block), want=BLOCK)
    try:
        facts = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise broken(path, f"a header that is no JSON: {error}") from error
    version = facts.get("version") if isinstance(facts, dict) else None
    if version not in VERSIONS:
        what = f"version {version}; this trainkit reads {' and '.join(map(str, VERSIONS))}"
        raise broken(path, what, got=version, want=VERSIONS)
    header = _checked(facts, path)
    size = os.fstat(file.fileno()).st_size
    if size != header.size:
        what = f"{size} bytes instead of {header.size}"
        raise broken(path, what, got=size, want=header.size, hint="write it again")
    return header


def _checked(facts: dict[str, Any], path: Path) -> Header:
    """Make the header's record; unknown keys are for later versions."""
    dtype = facts.get("dtype")
    if dtype not in DTYPES:
        raise broken(path, f"unknown dtype {dtype}", got=dtype, want=DTYPES)
    rules: dict[str, Callable[[Any], bool]] = {
        "documents": lambda x: type(x) is int and x >= 1,
        "tokens": lambda x: type(x) is int and x >= 0,
        "vocab_size": lambda x: x is None or (type(x) is int and x >= 1),
        "trained": lambda x: type(x) is bool,
        "chunk_bytes": lambda x: type(x) is int and x >= 8 and x % 8 == 0,
        "offsets_sha256": lambda x: type(x) is str,
        "table_sha256": lambda x: type(x) is str,
        "tokenizer": lambda x: x is None or type(x) is str,
        "template": lambda x: x is None or type(x) is str,
        "made_with": lambda x: type(x) is dict and all(type(each) is str for each in x.values()),
    }
    # Files that are older do not say these.
    facts = {"tokenizer": None, "template": None, "made_with": {}, **facts}
    for name, rule in rules.items():
        if name not in facts or not rule(facts[name]):
            raise broken(path, f"a header with {name} {facts.get(name)!r}", got=facts.get(name))
    own = {name: facts[name] for name in rules}
    if facts["version"] == VERSIONS[0]:
        return Header(dtype, **own)
    try:
        columns = {name: Column(kind, inner, of) for name, kind, inner, of in facts["columns"]}
        return Header(dtype, **own, columns=checked_columns("open_tokens", columns))
    except (KeyError, TypeError, ValueError) as error:
        raise broken(path, f"a header with columns that cannot be: {error}") from error


# ------------------------------------------------------------------------------------------ chunks


def sampled(count: int, most: int | None) -> list[int]:
    """Return which of `count` chunks to check, in order: the first, the last, others spread.

    They are drawn anew at each call, so that many starts see the whole file.
    """
    if most is None or count <= most:
        return list(range(count))
    draw = random.SystemRandom().randrange
    if most < 3:
        return sorted({draw(count) for _ in range(most)})
    bounds = [1 + part * (count - 2) // (most - 2) for part in range(most - 1)]
    middle = (draw(bounds[i], bounds[i + 1]) for i in range(most - 2))
    return [0, *middle, count - 1]


def check_chunks(
    file: BinaryIO, header: Header, which: Iterable[int], path: Path
) -> Iterator[tuple[int, int]]:
    """Compare chunks with the table; yield the part of the file, (begin, end), of each.

    The file is read, not its map: an error of the disk is then an error, not the process' end.

    Raises:
        DataError: The table or a chunk is not what was written. The message names the byte.
    """
    table = read_at(file, path, header.table_at, HASH * header.chunks)
    if hashlib.sha256(table).hexdigest() != header.table_sha256:
        raise broken(path, f"a table of fingerprints, from byte {header.table_at} on, that changed")
    for number in which:
        begin = BLOCK + number * header.chunk_bytes
        end = min(begin + header.chunk_bytes, header.table_at)
        got = hashlib.sha256(read_at(file, path, begin, end - begin)).digest()
        if got != table[number * HASH : (number + 1) * HASH]:
            what = f"content between bytes {begin} and {end} that was changed after it was written"
            why = "it does not have the fingerprint that was written down"
            hint = "write it again, or copy it again from where it came from"
            raise broken(path, f"{what}: {why}", got=got.hex()[:16], hint=hint)
        yield begin, end


def check_ids(
    tokens: np.ndarray[Any, Any],
    begin: int,
    *,
    vocab_size: int | None,
    offsets: np.ndarray[Any, Any],
    first_byte: int,
    path: Path,
) -> None:
    """Refuse tokens below 0 or outside the vocabulary.

    Args:
        tokens: Some of a file's tokens, as the file has them.
        begin: Which of the file's tokens is the first of them.
        vocab_size: No token may be this large or larger.
        offsets: Where documents begin, in tokens.
        first_byte: Where the file's first token lies.
        path: The file.

    Raises:
        DataError: A token is not a token. The message names it, its document and its place.
    """
    limit = vocab_size if vocab_size is not None else 1 << 8 * tokens.itemsize
    low = 0 if tokens.dtype.kind == "u" else int(tokens.min(initial=0))
    possible = tokens.dtype.kind == "i" or limit < 1 << 8 * tokens.itemsize
    if low >= 0 and (not possible or int(tokens.max(initial=0)) < limit):
        return
    worst = int(((tokens < 0) | (tokens >= limit)).argmax())
    place = begin + worst
    document = int(np.searchsorted(offsets, place, side="right")) - 1
    token = int(tokens[worst])
    rule = "what is a token, from 0 on" if vocab_size is None else f"its vocabulary of {vocab_size}"
    byte, offset = first_byte + place * tokens.itemsize, place - int(offsets[document])
    what = f"this file has, in document {document} at offset {offset} (byte {byte} of the file)"
    raise bad_file(path, f"{what}, token {token} outside {rule}", got=token, want=vocab_size)


def broken(path: Path, what: str, **facts: Any) -> DataError:
    """Return the error that says what is wrong with a token file."""
    return bad_file(path, f"this token file has {what}", **facts)
