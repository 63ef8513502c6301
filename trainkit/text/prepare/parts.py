"""The parts of a corpus in preparation, one for each chunk of its source.

`part_00000012.tokens` holds the documents of chunk 12. `part_00000012.json`, written after it,
holds everything that its content depends on: a part is reused only if all of that is unchanged and
the tokens have the stored hash. A chunk without documents has only a `.json`.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import orjson

from trainkit.data.concat import ConcatCorpus, concat_corpora
from trainkit.data.corpus import TokenCorpus
from trainkit.data.documents import check_columns, check_document
from trainkit.files import atomic_write, convert_disk_errors, read_version
from trainkit.text.corpora.tokens import SUFFIX, Check, open_tokens, write_corpus
from trainkit.text.prepare.chunks import Chunk, describe_document, read_chunk
from trainkit.text.tokenizers.documents import encode_documents, get_text
from trainkit.text.tokenizers.open import tokenizer_hash
from trainkit.types import Column, DataError, Tokenizer

# Increased when the same source gives other parts: older ones are then made again.
FORMAT = 2
_BATCH = 64  # documents that are encoded at a time
_HEARTBEAT = 0.5  # seconds between two heartbeats

Encode = Callable[[Mapping[str, Any]], Any]
"""Converts a record to ids or a `Sample`.

Its attribute `counts`, if it has one, is a `Counter` of what happened to records. A record that is
`dropped` there has no tokens, but is not counted as an empty document. Its attribute `columns`
declares the `Column`s of its samples by name.
"""

EncodeBatch = Callable[[Sequence[Mapping[str, Any]]], list[Any]]
WritePart = Callable[[int, Chunk, Callable[[], object]], "Tally"]

MakeEncode = Callable[[Tokenizer], Encode]
"""Makes an `Encode` from a tokenizer; other processes import it by its name."""


@attrs.frozen
class Work:
    """The settings by which chunks become parts, the same in all processes.

    Attributes:
        folder: The folder of the parts, absolute.
        tokenizer: The tokenizer.
        make_encode: `make_encode(tokenizer) -> encode`, called in each process; None encodes the
            text of `field`.
        field: The field of a record that holds its text.
        settings: Everything that the content of all parts depends on, except for the source.
    """

    folder: Path
    tokenizer: Tokenizer
    make_encode: MakeEncode | None
    field: str
    settings: Mapping[str, Any]


def make_work(
    folder: Path,
    tokenizer: Tokenizer,
    make_encode: MakeEncode | None,
    field: str,
    *,
    template_hash: str | None = None,
) -> Work:
    """Make the `Work` of a run.

    Raises:
        ValueError: The tokenizer or the encoder has nothing that identifies it.
    """
    settings = {
        "format": FORMAT,
        "trainkit": code_version(),
        "tokenizer": tokenizer_hash(tokenizer),
        "vocab_size": getattr(tokenizer, "vocab_size", None),
        "encode": f"field {field}" if make_encode is None else identify(make_encode),
        "template": template_hash,
    }
    return Work(folder.absolute(), tokenizer, make_encode, field, settings)


@attrs.frozen
class Tally:
    """Counts of encoded documents, of their tokens, and of those without text.

    `counts` is the encoder's own counter; `digest` the hash of the token file, None if there is
    none.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    counts: Mapping[str, int] = attrs.field(factory=dict)
    digest: str | None = None


def add_tallies(parts: Collection[Tally]) -> Tally:
    """Add the counts of parts.

    Examples:
        >>> add_tallies([Tally(1, 5, 0, {"dropped": 1}), Tally(2, 6, 1)])
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
    """Return trainkit's version, and a hash of its code that converts text and messages to ids."""
    # Ids depend on this code, so a part of other code is made again.
    text = Path(__file__).parents[1]
    files = [*(text / "chat").rglob("*.py"), *(text / "tokenizers").rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{read_version()} {digest.hexdigest()[:16]}"


def make_part_key(settings: Mapping[str, Any], chunk: Chunk) -> dict[str, Any]:
    """Return everything that the content of a part depends on, as its `.json` has it."""
    return {
        **settings,
        "source": str(chunk.path.absolute()),
        "begin": chunk.start,
        "end": chunk.end,
        "files": [list(stats) for stats in chunk.files],
    }


def identify(value: Any) -> str:
    """Return a text that identifies a function, its code, and the arguments bound to it.

    Args:
        value: A function at the top of a module, a `functools.partial` of one, or a plain value:
            text, a number, a `Column`, or a list or dict of such.

    Raises:
        ValueError: It is something else, or a function that another process cannot import.

    Examples:
        >>> identify(3), identify(("a", None))
        ('3', "('a', None)")
    """
    if isinstance(value, partial):
        # Sorted, as the order of keywords does not matter.
        keywords = itertools.chain(*sorted(value.keywords.items()))
        bound = [value.func, *value.args, *keywords]
        return f"partial({', '.join(map(identify, bound))})"
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        try:
            # A function under the same name may have changed.
            source = inspect.getsource(value)
        except OSError:
            source = ""
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        return f"{value.__module__}.{value.__qualname__} {digest}"
    # `identify` of each raises for what has no stable text, such as an object.
    if isinstance(value, Sequence) and not isinstance(value, str) and all(map(identify, value)):
        return repr(value)
    if isinstance(value, Mapping) and all(map(identify, [*value, *value.values()])):
        return repr(dict(value))
    if value is None or isinstance(value, str | int | float | Column):
        return repr(value)
    raise ValueError(
        f"prepare: make_encode must be a function at the top of a module, or a functools.partial "
        f"of one with plain values, so that other processes can import it; got {value!r}"
    )


# ------------------------------------------------------------------------------------------- write


def make_part_writer(work: Work) -> WritePart:
    """Return a function that writes parts, with an encoder of its own.

    `write(index, chunk, heartbeat)` encodes a chunk, writes the two files of its part and returns
    its counts; it calls `heartbeat()` every half second.

    Raises:
        DataError: A document cannot be read or encoded. The message names its file and line.
        DiskError: A part cannot be written.
    """
    encode_record = None if work.make_encode is None else work.make_encode(work.tokenizer)
    # The encoder's counter runs on; a part has the difference.
    counter = getattr(encode_record, "counts", {})
    columns = check_columns("prepare", getattr(encode_record, "columns", None))
    vocab_size = work.settings["vocab_size"]
    # BOS and EOS alone are no text.
    empty_length = 0 if encode_record else len(encode_documents(work.tokenizer, [""])[0])

    def encode_batch(records: Sequence[Mapping[str, Any]]) -> list[Any]:
        if encode_record is not None:
            documents = [encode_record(record) for record in records]
        else:
            texts = [get_text(record, work.field) for record in records]
            documents = encode_documents(work.tokenizer, texts)
        for document in documents:
            check_document(
                document, vocab_size or 1 << 32, "what `encode` returned", columns=columns
            )
        return documents

    def write(index: int, chunk: Chunk, heartbeat: Callable[[], object]) -> Tally:
        path = _part_path(work.folder, index)
        before = Counter(counter)
        fields = [work.field] if encode_record is None else None
        documents = _encode_chunk(encode_batch, chunk, fields, heartbeat)
        tally = Tally()
        # The first one apart: a token file cannot be empty, and a chunk can.
        first = list(itertools.islice(documents, 1))
        if first:
            corpus = write_corpus(
                path,
                itertools.chain(first, documents),
                vocab_size=vocab_size,
                columns=columns,
            )
            lengths = corpus.lengths
            counts = {name: count - before[name] for name, count in counter.items()}
            tally = Tally(
                documents=len(lengths),
                tokens=int(lengths.sum()),
                # Dropped records have no tokens either, and are counted by the encoder.
                empty_documents=int((lengths <= empty_length).sum()) - counts.get("dropped", 0),
                counts=counts,
                digest=corpus.digest,
            )
        text = orjson.dumps({"key": make_part_key(work.settings, chunk), **attrs.asdict(tally)})
        # Written last: without it a part does not count.
        path = path.with_suffix(".json")
        with atomic_write(path, by="prepare") as file, convert_disk_errors(path, by="prepare"):
            file.write(text)
        return tally

    return write


def _encode_chunk(
    encode_batch: EncodeBatch,
    chunk: Chunk,
    fields: Sequence[str] | None,
    heartbeat: Callable[[], object],
) -> Iterator[Any]:
    records = read_chunk(chunk, columns=fields)
    last_heartbeat = time.monotonic()
    count = 0
    while batch := list(itertools.islice(records, _BATCH)):
        try:
            documents = encode_batch(batch)
        except Exception:
            # Again one by one: the first record that fails alone is named, with its file and line.
            for index, record in enumerate(batch, start=count):
                try:
                    encode_batch([record])
                except Exception as error:
                    origin = describe_document(chunk, index)
                    # A ValueError or DataError explains itself; of other errors the class is half
                    # the message.
                    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                    raise DataError(f"{origin}: {kind}{error}", where=origin) from error
            raise
        yield from documents
        count += len(batch)
        if time.monotonic() - last_heartbeat > _HEARTBEAT:
            last_heartbeat = time.monotonic()
            heartbeat()


def _part_path(folder: Path, index: int) -> Path:
    return folder / f"part_{index:08d}{SUFFIX}"


# -------------------------------------------------------------------------------------------- read


def read_finished_part(
    folder: Path, index: int, key: Mapping[str, Any]
) -> tuple[Tally | None, str]:
    """Return the counts of a finished part; or None and the reason, "" if there is none."""
    path = _part_path(folder, index)
    try:
        stored = orjson.loads(path.with_suffix(".json").read_bytes())
        stored_key = dict(stored.pop("key"))
        part = Tally(digest=stored.pop("digest"), **stored)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return None, f"{path.with_suffix('.json').name} is damaged ({error})"
    # Through JSON, in which tuples become lists, as the stored key went.
    for name, expected in orjson.loads(orjson.dumps(key)).items():
        if stored_key.get(name) != expected:
            return None, _describe_change(name, stored_key.get(name), expected)
    try:
        # All of it, since the disk may have lost what a killed machine had written.
        if part.digest is not None:
            _open_part(path, part, check="full")
    except DataError as error:
        return None, str(error)
    return part, ""


def open_finished_parts(folder: Path, parts: Sequence[Tally]) -> ConcatCorpus:
    """Open the documents of all parts as one corpus, in order; the parts stay mapped.

    Raises:
        DataError: A part is not the one that was written.
    """
    return concat_corpora(
        _open_part(_part_path(folder, index), part, check="none")
        for index, part in enumerate(parts)
        if part.digest is not None  # else a chunk without documents
    )


def _open_part(path: Path, part: Tally, *, check: Check) -> TokenCorpus:
    # A part may be a whole token file, and still not the one that its `.json` describes.
    corpus = open_tokens(path, check=check)
    if corpus.digest != part.digest:
        raise DataError(f"{path.name} is not the file that was written", where=path)
    return corpus


def _describe_change(name: str, old: Any, new: Any) -> str:
    if name != "files" or not old or not new:
        return f"{name} changed from {old!r} to {new!r}"
    # Files that were changed, added or removed, by name; else only their order differs.
    old_files = {file[0]: file[1:] for file in old}
    new_files = {file[0]: file[1:] for file in new}
    for file in [*old_files, *new_files]:
        if old_files.get(file) != new_files.get(file):
            both = file in old_files and file in new_files
            return f"{file} changed" if both else f"{file} was added or removed"
    return "the files have another order"
