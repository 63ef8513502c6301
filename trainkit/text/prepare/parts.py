"""Tally files of a corpus that is being prepared: one for each chunk of its source.

`part_00000012.tokens` holds the documents of chunk 12, and `part_00000012.json`, written after it,
says from what they were made: a part counts only while all of that is as it was, and the tokens
have the hash that was written down. A chunk without documents has a `.json` alone.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import orjson

from trainkit.data.corpus import TokenCorpus
from trainkit.data.documents import checked_columns, checked_document
from trainkit.data.joined import ConcatCorpus, concat_corpora
from trainkit.files import atomic_write, convert_disk_errors
from trainkit.text.corpora.tokens import SUFFIX, Check, open_tokens, write_corpus
from trainkit.text.prepare.chunks import Chunk, document_name, read_chunk
from trainkit.text.tokenizers.documents import encode_documents, get_text
from trainkit.text.tokenizers.open import tokenizer_hash
from trainkit.types import Column, DataError, Tokenizer

FORMAT = 2
_RECORDS = 64  # documents that are encoded at a time
_SIGN = 0.5  # seconds between two signs of life

Encode = Callable[[Mapping[str, Any]], Any]
"""From a record to ids or a `Sample`.

An attribute `counts`, if it has one, is a `Counter` to which it adds what happened to records. What
is `dropped` there gives no tokens, but is no empty document. An attribute `columns` says by name
what `Column`s its samples have.
"""

EncodeAll = Callable[[Sequence[Mapping[str, Any]]], list[Any]]
WritePart = Callable[[int, Chunk, Callable[[], object]], "Tally"]

MakeEncode = Callable[[Tokenizer], Encode]
"""From a tokenizer to an `Encode`; other processes import it by its name."""


@attrs.frozen
class Work:
    """How chunks become parts; travels to other processes.

    Attributes:
        folder: Where the parts lie, absolute.
        tokenizer: What encodes.
        make_encode: `make_encode(tokenizer) -> encode`, called in each process; None encodes the
            text of `field`.
        field: The field of a record that holds its text.
        settings: What the content of all parts follows from, but for the source.
    """

    folder: Path
    tokenizer: Tokenizer
    make_encode: MakeEncode | None
    field: str
    settings: Mapping[str, Any]


def make_work(
    folder: Path, tokenizer: Tokenizer, make_encode: MakeEncode | None, field: str
) -> Work:
    """Return how chunks become parts, and what their content follows from.

    Raises:
        ValueError: The tokenizer or the encoder cannot be told from another.
    """
    settings = {
        "format": FORMAT,
        "trainkit": code_version(),
        "tokenizer": tokenizer_hash(tokenizer),
        "vocab_size": getattr(tokenizer, "vocab_size", None),
        "encode": f"field {field}" if make_encode is None else identity(make_encode),
    }
    return Work(folder.absolute(), tokenizer, make_encode, field, settings)


@attrs.frozen
class Tally:
    """What some documents have become: how many they are, their tokens, how many had no text.

    `counts` is what the encoder says happened to them; `digest` the hash of the token file, None
    where there is none.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    counts: Mapping[str, int] = attrs.field(factory=dict)
    digest: str | None = None


def summed(parts: Collection[Tally]) -> Tally:
    """Add up parts.

    Examples:
        >>> summed([Tally(1, 5, 0, {"dropped": 1}), Tally(2, 6, 1)])
        Tally(documents=3, tokens=11, empty_documents=1, counts={'dropped': 1}, digest=None)
    """
    counts = Counter[str]()
    for part in parts:
        counts.update(part.counts)
    return Tally(
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        empty_documents=sum(part.empty_documents for part in parts),
        counts=dict(counts),
    )


def code_version() -> str:
    """Return trainkit's version, and a hash of its code that turns text and messages into ids."""
    try:
        version = metadata.version("trainkit-lm")
    except metadata.PackageNotFoundError:
        version = "not installed"
    rooms = (Path(__file__).parents[1] / room for room in ("chat", "tokenizers"))
    digest = hashlib.sha256()
    for file in sorted(itertools.chain(*(room.rglob("*.py") for room in rooms))):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{version} {digest.hexdigest()[:16]}"


def key_of_part(settings: Mapping[str, Any], chunk: Chunk) -> dict[str, Any]:
    """Return all that a part's content follows from, as its `.json` shows it."""
    files = [list(stats) for stats in chunk.files]
    place = {"source": str(chunk.path.absolute()), "begin": chunk.begin, "end": chunk.end}
    return {**settings, **place, "files": files}


def identity(value: Any) -> str:
    """Return a text that tells a function, with all that is bound to it, from another.

    Args:
        value: A function at the top of a module, a `functools.partial` of one, or a plain value:
            text, a number, a `Column`, or a list or dict of such.

    Raises:
        ValueError: It is something else, or a function that another process cannot import.

    Examples:
        >>> identity(3), identity(("a", None))
        ('3', "('a', None)")
    """
    if isinstance(value, partial):
        bound = [value.func, *value.args, *itertools.chain(*sorted(value.keywords.items()))]
        return f"partial({', '.join(map(identity, bound))})"
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        try:
            source = inspect.getsource(value)
        except OSError:
            source = ""
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        return f"{value.__module__}.{value.__qualname__} {digest}"
    if isinstance(value, Sequence) and not isinstance(value, str) and all(map(identity, value)):
        return repr(value)
    if isinstance(value, Mapping) and all(map(identity, [*value, *value.values()])):
        return repr(dict(value))
    if value is None or isinstance(value, str | int | float | Column):
        return repr(value)
    raise ValueError(
        f"prepare: make_encode must be a function at the top of a module, or a functools.partial "
        f"of one with plain values, so that other processes can import it; got {value!r}"
    )


# ------------------------------------------------------------------------------------------- write


def part_writer(work: Work) -> WritePart:
    """Return the function that writes parts, with the encoder that it uses.

    `write(number, chunk, alive)` encodes a chunk, writes the two files of its part and returns it;
    it calls `alive()` every half second.

    Raises:
        DataError: A document cannot be read or encoded. The message names its file and line.
        DiskError: A part cannot be written.
    """
    one = None if work.make_encode is None else work.make_encode(work.tokenizer)
    counts = getattr(one, "counts", {})
    vocab_size, fields = work.settings["vocab_size"], [work.field] if one is None else None
    columns = checked_columns("prepare", getattr(one, "columns", None))
    no_text = 0 if one else len(encode_documents(work.tokenizer, [""])[0])

    def encode(records: Sequence[Mapping[str, Any]]) -> list[Any]:
        documents = (
            [one(record) for record in records]
            if one
            else encode_documents(
                work.tokenizer, [get_text(record, work.field) for record in records]
            )
        )
        for document in documents:
            limit, where = vocab_size or 1 << 32, "what `encode` returned"
            checked_document(document, limit, where, columns=columns)
        return documents

    def write(number: int, chunk: Chunk, alive: Callable[[], object]) -> Tally:
        path, before = _path(work.folder, number), Counter(counts)
        documents = _documents(encode, chunk, fields, alive)
        first, tally = list(itertools.islice(documents, 1)), Tally()
        if first:
            whole = itertools.chain(first, documents)
            corpus = write_corpus(path, whole, vocab_size=vocab_size, columns=columns)
            lengths, counted = corpus.lengths, {n: c - before[n] for n, c in counts.items()}
            empty = int((lengths <= no_text).sum()) - counted.get("dropped", 0)
            tally = Tally(len(lengths), int(lengths.sum()), empty, counted, corpus.digest)
        text = orjson.dumps({"key": key_of_part(work.settings, chunk), **attrs.asdict(tally)})
        path = path.with_suffix(".json")
        with atomic_write(path, by="prepare") as file, convert_disk_errors(path, by="prepare"):
            file.write(text)
        return tally

    return write


def _documents(
    encode: EncodeAll, chunk: Chunk, fields: Sequence[str] | None, alive: Callable[[], object]
) -> Iterator[Any]:
    records, last = read_chunk(chunk, columns=fields), time.monotonic()
    before = 0
    while batch := list(itertools.islice(records, _RECORDS)):
        yield from _encoded(encode, batch, chunk, before)
        before += len(batch)
        if time.monotonic() - last > _SIGN:
            last = time.monotonic()
            alive()


def _encoded(
    encode: EncodeAll, records: Sequence[Mapping[str, Any]], chunk: Chunk, before: int
) -> list[Any]:
    """Encode some records; where that fails, find out which of them it was."""
    try:
        return encode(records)
    except Exception:
        for index, record in enumerate(records, start=before):
            try:
                encode([record])
            except Exception as error:
                where = document_name(chunk, index)
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                raise DataError(f"{where}: {kind}{error}", where=where) from error
        raise


def _path(folder: Path, number: int) -> Path:
    return folder / f"part_{number:08d}{SUFFIX}"


# -------------------------------------------------------------------------------------------- read


def finished_part(folder: Path, number: int, key: Mapping[str, Any]) -> tuple[Tally | None, str]:
    """Return what a part holds, or None and why it is of no use ("" where there is none)."""
    path = _path(folder, number)
    try:
        facts = orjson.loads(path.with_suffix(".json").read_bytes())
        found = dict(facts.pop("key"))
        part = Tally(digest=facts.pop("digest"), **facts)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return None, f"{path.with_suffix('.json').name} is damaged ({error})"
    for name, want in orjson.loads(orjson.dumps(key)).items():
        if found.get(name) != want:
            return None, _changed(name, found.get(name), want)
    try:
        if part.digest is not None:
            _opened(path, part, check="full")
    except DataError as error:
        return None, str(error)
    return part, ""


def open_finished(folder: Path, parts: Sequence[Tally]) -> ConcatCorpus:
    """Return the documents of all parts, in order; the parts stay mapped.

    Raises:
        DataError: A part is not the one that was written.
    """
    return concat_corpora(
        _opened(_path(folder, number), part, check="none")
        for number, part in enumerate(parts)
        if part.digest is not None  # else a chunk without documents
    )


def _opened(path: Path, part: Tally, *, check: Check) -> TokenCorpus:
    corpus = open_tokens(path, check=check)
    if corpus.digest != part.digest:
        raise DataError(f"{path.name} is not the file that was written", where=path)
    return corpus


def _changed(name: str, got: Any, want: Any) -> str:
    if name != "files" or not got or not want:
        return f"{name} changed from {got!r} to {want!r}"
    before, now = ({file[0]: file[1:] for file in files} for files in (got, want))
    for file in [*before, *now]:
        if before.get(file) != now.get(file):
            return f"{file} changed" if file in before and file in now else f"{file} came or went"
    return "the files have another order"
