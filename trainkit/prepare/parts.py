"""Part files of a corpus that is being prepared: one for each chunk of its source.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import orjson

from trainkit.corpora.documents import checked_document
from trainkit.corpora.tokens import SUFFIX, open_tokens, write_corpus
from trainkit.files import disk_errors, replacing
from trainkit.prepare.chunks import Chunk, document_name, read_chunk
from trainkit.tokenizers.bytes import encode_documents, text_of, tokenizer_hash
from trainkit.types import DataError, Sample, Tokenizer

if TYPE_CHECKING:
    from trainkit.types import IntArray

FORMAT = 2
_RECORDS = 64  # documents that are encoded at a time
_SIGN = 0.5  # seconds between two signs of life

Encode = Callable[[Mapping[str, Any]], Any]
"""From a record to ids or a `Sample`.

An attribute `counts`, if it has one, is a `Counter` to which it adds what happened to records. What
is `dropped` there gives no tokens, but is no empty document.
"""


@attrs.frozen
class Job:
    """How chunks become parts; travels to other processes.

    Attributes:
        folder: Where the parts lie.
        tokenizer: What encodes.
        make_encode: `make_encode(tokenizer) -> encode`, called in each process; None encodes the
            text of `field`.
        field: The field of a record that holds its text.
    """

    folder: Path
    tokenizer: Tokenizer
    make_encode: Callable[[Tokenizer], Encode] | None
    field: str

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's, where it has one."""
        return getattr(self.tokenizer, "vocab_size", None)


EncodeAll = Callable[[Sequence[Mapping[str, Any]]], list[Any]]


@attrs.frozen(eq=False)
class Work:
    """A job, and what one process makes of it once.

    Attributes:
        job: The job.
        encode: From records to documents.
        settings: What parts are made from.
        counts: Where the encoder adds up what happened, if it does.
    """

    job: Job
    encode: EncodeAll
    settings: Mapping[str, Any]
    counts: Mapping[str, int]


@attrs.frozen
class Tally:
    """What came out of some documents: how many, their tokens, how many had no text.

    `counts` is what the encoder says happened to them.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    counts: Mapping[str, int] = attrs.field(factory=dict)


def summed(tallies: Iterable[Tally]) -> Tally:
    """Add up tallies.

    Examples:
        >>> summed([Tally(1, 5, 0, {"dropped": 1}), Tally(2, 6, 1)])
        Tally(documents=3, tokens=11, empty_documents=1, counts={'dropped': 1})
    """
    documents = tokens = empty = 0
    counts: Counter[str] = Counter()
    for tally in tallies:
        documents += tally.documents
        tokens += tally.tokens
        empty += tally.empty_documents
        counts.update(tally.counts)
    return Tally(documents, tokens, empty, dict(counts))


Report = Callable[[Tally], None]


def settings_of(job: Job) -> dict[str, Any]:
    """Return what the content of all parts follows from, but for the source.

    Raises:
        ValueError: The tokenizer or the encoder cannot be told from another.
    """
    return {
        "format": FORMAT,
        "trainkit": _code(),
        "tokenizer": tokenizer_hash(job.tokenizer),
        "vocab_size": job.vocab_size,
        "encode": f"field {job.field}" if job.make_encode is None else identity(job.make_encode),
    }


def _code() -> str:
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
        value: A function at the top of a module, a `functools.partial` of one, or a plain value.

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
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    raise ValueError(
        f"prepare: make_encode must be a function at the top of a module, or a functools.partial "
        f"of one with plain values, so that other processes can import it; got {value!r}"
    )


# ------------------------------------------------------------------------------------------- write


def ready(job: Job) -> Work:
    """Make the encoder in this process.

    Raises:
        ValueError: The tokenizer or the encoder cannot be told from another.
    """
    if job.make_encode is None:
        return Work(job, partial(_encode_texts, job.tokenizer, job.field), settings_of(job), {})
    one = job.make_encode(job.tokenizer)
    encode = partial(_encode_each, one, job.vocab_size or 1 << 32)
    return Work(job, encode, settings_of(job), getattr(one, "counts", {}))


def write_part(work: Work, number: int, chunk: Chunk, report: Report) -> Tally:
    """Encode a chunk and write its part.

    Args:
        work: How, as `ready` returned it.
        number: Which part this is.
        chunk: What to read.
        report: Called every half second with what there is so far.

    Raises:
        DataError: A document cannot be read or encoded. The message names its file and line.
        DiskError: The part cannot be written.

    Effects:
        Writes the part's two files.
    """
    job, tally = work.job, Tally()
    plain = job.make_encode is None
    no_text = len(encode_documents(job.tokenizer, [""])[0]) if plain else 0
    last = time.monotonic()

    def documents() -> Iterator[IntArray | Sample]:
        nonlocal tally, last
        records = read_chunk(chunk, columns=[job.field] if plain else None)
        for batch in _batched(records, _RECORDS):
            before = dict(work.counts)
            found = _encoded(work.encode, batch, chunk, tally.documents)
            counts = {name: n - before.get(name, 0) for name, n in work.counts.items()}
            sizes = [_size(document) for document in found]
            empty = sum(size <= no_text for size in sizes) - counts.get("dropped", 0)
            tally = summed([tally, Tally(len(found), sum(sizes), empty, counts)])
            yield from found
            if time.monotonic() - last > _SIGN:
                last = time.monotonic()
                report(tally)

    rest = documents()
    first = list(itertools.islice(rest, 1))
    digest = None
    if first:
        path = _path(job.folder, number)
        whole = itertools.chain(first, rest)
        digest = write_corpus(path, whole, vocab_size=job.vocab_size).digest
    key = key_of_part(work.settings, chunk)
    text = orjson.dumps({"key": key, "digest": digest, **attrs.asdict(tally)})
    path = _path(job.folder, number).with_suffix(".json")
    with replacing(path, by="prepare") as file, disk_errors(path, by="prepare", needed=len(text)):
        file.write(text)
    return tally


def _encode_texts(
    tokenizer: Tokenizer, field: str, records: Sequence[Mapping[str, Any]]
) -> list[IntArray]:
    return encode_documents(tokenizer, [text_of(record, field) for record in records])


def _encode_each(encode: Encode, limit: int, records: Sequence[Mapping[str, Any]]) -> list[Any]:
    documents = [encode(record) for record in records]
    for document in documents:
        checked_document(document, limit, "what `encode` returned")
    return documents


def _encoded(
    encode: EncodeAll,
    records: Sequence[Mapping[str, Any]],
    chunk: Chunk,
    before: int,
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


def _size(document: Any) -> int:
    return np.size(document.tokens if isinstance(document, Sample) else document)


def _batched(records: Iterable[dict[str, Any]], count: int) -> Iterator[list[dict[str, Any]]]:
    records = iter(records)
    while batch := list(itertools.islice(records, count)):
        yield batch


def _path(folder: Path, number: int) -> Path:
    return folder / f"part_{number:08d}{SUFFIX}"


# -------------------------------------------------------------------------------------------- read


def finished_part(folder: Path, number: int, key: Mapping[str, Any]) -> tuple[Tally | None, str]:
    """Return what a part holds, or None and why it is of no use ("" where there is none)."""
    path = _path(folder, number)
    try:
        facts = orjson.loads(path.with_suffix(".json").read_bytes())
        found, digest = facts.pop("key"), facts.pop("digest")
        tally = Tally(**facts)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return None, f"{path.with_suffix('.json').name} is damaged ({error})"
    for name, want in orjson.loads(orjson.dumps(key)).items():
        if found.get(name) != want:
            return None, _changed(name, found.get(name), want)
    if digest is not None:
        try:
            got = open_tokens(path, check="full").digest
        except DataError as error:
            return None, str(error)
        if got != digest:
            return None, f"{path.name} is not the file that was written"
    return tally, ""


def documents_of_parts(folder: Path, count: int) -> Iterator[np.ndarray[Any, Any] | Sample]:
    """Yield the documents of all parts, in order."""
    for number in range(count):
        path = _path(folder, number)
        if not path.exists():  # a chunk without documents
            continue
        corpus = open_tokens(path, check="none")
        for begin, end in itertools.pairwise(corpus.offsets.tolist()):
            tokens = corpus.tokens[begin:end]
            if corpus.trained is None:
                yield tokens
            else:
                yield Sample(tokens, corpus.trained[begin:end].view(np.bool_))


def _changed(name: str, got: Any, want: Any) -> str:
    if name != "files" or not got or not want:
        return f"{name} changed from {got!r} to {want!r}"
    before, now = ({file[0]: file[1:] for file in files} for files in (got, want))
    for file in [*before, *now]:
        if before.get(file) != now.get(file):
            return f"{file} changed" if file in before and file in now else f"{file} came or went"
    return "the files have another order"
