"""`prepare_corpus`: text into a token file, in parallel, and again from where it was stopped."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trainkit.data.corpus import iterate_documents
from trainkit.files import convert_disk_errors, fsync_folder
from trainkit.text.chat.encode import format_answers_warning
from trainkit.text.corpora.records import RECORD_SUFFIXES
from trainkit.text.corpora.shards import describe_unread_files
from trainkit.text.corpora.text import TEXT_SUFFIXES, check_name
from trainkit.text.corpora.tokens import SUFFIX, write_corpus
from trainkit.text.prepare.chunks import Chunk, cut_source
from trainkit.text.prepare.parts import (
    MakeEncode,
    Tally,
    Work,
    finished_part,
    key_of_part,
    make_work,
    open_finished,
    part_writer,
    summed,
)
from trainkit.text.prepare.workers import process_pool, write_parts
from trainkit.types import ConfigError, DataError, DiskError, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from trainkit.data.corpus import TokenCorpus
    from trainkit.types import Tokenizer

    Source = str | Path

_LEAST_CHUNK = 4 << 20  # bytes: a second of BPE on one core
_MOST_CHUNKS = 4096
_SMALL = 32 << 20  # bytes: less is done sooner than processes have started


@attrs.frozen
class PrepareProgress:
    """How far `prepare_corpus` is.

    Attributes:
        documents: Documents so far, those of an earlier run included.
        tokens: Their tokens.
        bytes: Bytes of the source that are finished, those of an earlier run included.
        total_bytes: Bytes of the whole source.
        kept_bytes: Those of them that an earlier run had finished.
        seconds: How long this run takes so far.
    """

    documents: int
    tokens: int
    bytes: int
    total_bytes: int
    kept_bytes: int
    seconds: float


@attrs.frozen
class PrepareResult:
    """What `prepare_corpus` has done.

    Attributes:
        path: The token file.
        documents: Its documents.
        tokens: Its tokens.
        bytes: The source's bytes; of parquet and arrow files, uncompressed.
        empty_documents: Documents without text; they are in the file.
        counts: What the encoder counted, if it did: of `make_chat_encoder` the `conversations`, and how
            many were `truncated` or `dropped`. Those dropped are documents without tokens.
        vocab_size: The tokenizer's vocabulary.
        digest: The token file's hash.
        parts_kept: Parts that an earlier run had finished.
        workers: Processes that worked; None where an executor of yours did.
        seconds: How long it took.
        tokens_per_second: Tokens of this run over its seconds.
    """

    path: Path
    documents: int
    tokens: int
    bytes: int
    empty_documents: int
    counts: Mapping[str, int]
    vocab_size: int | None
    digest: str | None
    parts_kept: int
    workers: int | None
    seconds: float
    tokens_per_second: float


def prepare_corpus(
    source: Source | Sequence[Source],
    out: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    make_encode: MakeEncode | None = None,
    template_hash: str | None = None,
    made_with: Mapping[str, str] | None = None,
    field: str = "text",
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    keep: Callable[[str], bool] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    chunk_bytes: int | None = None,
    timeout: float = 300.0,
    tell: Callable[[str], object] | None = None,
    progress: Callable[[PrepareProgress], object] | None = None,
) -> PrepareResult:
    """Turn text into a token file, in several processes, or by anybody's `Executor`.

    The source is cut into chunks, and each becomes a part file in the folder `OUT.parts`; at the
    end they are joined, in the order of the source. A run that was stopped, however hard, is
    started again with the same call and goes on with the parts that are finished. A part whose
    file, tokenizer or settings have changed meanwhile is made anew. The token file is the same byte
    for byte for any executor, any number of processes and any interruptions.

    Args:
        source: A directory of text files; a `.jsonl`, `.parquet` or `.arrow` file, or a directory
            of such; or several of these, one after the other.
        out: The file to make, which ends in `.tokens`; one that is there is replaced at the end, in
            one step.
        tokenizer: What encodes a text; `bos_id` and `eos_id` go around each document.
        make_encode: For records that are not plain text: `make_encode(tokenizer)` returns the
            function from a record to ids or a `Sample`. It is called in each process, so it must be
            a function at the top of a module, or a `functools.partial` of one. What it returns may
            have an attribute `counts`, a `Counter` of what happened, and `columns`, the `Column`s
            of its samples by name. `tokenizers.make_sample_encoder` is one for records of ids.
        template_hash: Of the template with which `make_encode` writes conversations, as the
            function of that name gives it; the token file says it.
        made_with: The names of the "tokenizer" and the "template", as a command line has them; the
            token file says them too.
        field: The field of a record that holds its text.
        suffixes: How the names of a directory's text files end.
        keep: Says by its relative path whether a file of a directory is wanted.
        workers: How many processes; by default one for each core, and this one alone for less than
            32 MiB.
        executor: What makes the parts instead of a pool of our own: any of `concurrent.futures`, or
            Dask's `client.get_executor()` for the cores of several machines, which all see the
            source and the folder of `out`, and have this trainkit. It is not shut down.
        chunk_bytes: The least size of a chunk; by default 4 MiB, or a 4096th of the source.
        timeout: Seconds without a sign of life after which processes are taken to hang.
        tell: Called with a sentence about each thing worth knowing, such as parts that are reused.
        progress: Called whenever a part is finished.

    Raises:
        DataError: The source is missing, empty or damaged, a document cannot be encoded, a process
            died, or the template hides too many answers (`chat.format_answers_warning`). The message names
            the file and the line, or the process and the chunk.
        DiskError: A file cannot be written, or the disk is full.
        ConfigError: Another process prepares the same file, or a library is missing.
        ValueError: An argument is out of its range.

    Effects:
        Writes `out`, and `OUT.parts` while it works; starts processes and ends them. On failure the
        finished parts stay, for the next run.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.tokenizers.bytes import make_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     done = prepare_corpus(folder, f"{folder}/a.tokens", tokenizer=make_byte_tokenizer())
        >>> done.documents, done.tokens
        (1, 4)
    """
    begun, out, say = time.monotonic(), Path(out), tell or (lambda _: None)
    check_out(out)
    check_range("prepare", at_least=1, workers=workers)
    work = make_work(out.with_name(f"{out.name}.parts"), tokenizer, make_encode, field)
    work = attrs.evolve(work, settings={**work.settings, "template": template_hash})
    chunks = cut_sources(source, suffixes=suffixes, keep=keep, chunk_bytes=chunk_bytes)
    kinds = (*suffixes, *RECORD_SUFFIXES)
    for told in filter(None, (describe_unread_files(path, kinds) for path in _paths_of(source))):
        say(told)
    total = sum(chunk.bytes for chunk in chunks)
    with alone(out), _parts_folder(work.folder):
        parts = _finished(work, chunks, say)
        kept = dict(parts)
        todo = {i: chunk for i, chunk in enumerate(chunks) if i not in kept}
        kept_bytes = sum(chunks[i].bytes for i in kept)

        def done(number: int, part: Tally) -> None:
            parts[number] = part
            if progress is not None:
                sums, size = summed(parts.values()), sum(chunks[i].bytes for i in parts)
                seconds = time.monotonic() - begun
                progress(
                    PrepareProgress(sums.documents, sums.tokens, size, total, kept_bytes, seconds)
                )

        crew = _crew(workers, todo, total - kept_bytes)
        _write_parts(work, todo, executor, crew, timeout=timeout, done=done)
        sums = summed(parts.values())
        _check_content(sums, _paths_of(source))
        if warning := format_answers_warning(sums.counts):
            say(warning)
        say(f"joining {len(chunks)} parts: {sums.documents} documents, {sums.tokens} tokens")
        corpus = _join(out, work, [parts[i] for i in range(len(chunks))], made_with)
    seconds = time.monotonic() - begun
    return PrepareResult(
        path=out,
        documents=sums.documents,
        tokens=sums.tokens,
        bytes=total,
        empty_documents=sums.empty_documents,
        counts=sums.counts,
        vocab_size=work.settings["vocab_size"],
        digest=corpus.digest,
        parts_kept=len(kept),
        workers=crew if executor is None else None,
        seconds=seconds,
        tokens_per_second=(sums.tokens - summed(kept.values()).tokens) / seconds,
    )


def check_out(out: Path) -> None:
    """Refuse a file that could not be written in the end.

    Raises:
        ValueError: Its name does not end in `.tokens`.
        DataError: Its name is no UTF-8.
        DiskError: Its folder is missing or must not be written to, or a folder has its name.
    """
    check_name(out)
    if out.suffix != SUFFIX:
        raise ValueError(f"prepare: the file must end in {SUFFIX}, got {out}")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK) or out.is_dir():
        folder = f"{out.parent} is no folder that can be written to"
        what = "it is a folder" if out.is_dir() else folder
        raise DiskError(f"prepare: cannot write {out}: {what}", where=out)


def cut_sources(
    source: Source | Sequence[Source],
    *,
    suffixes: Sequence[str],
    keep: Callable[[str], bool] | None = None,
    chunk_bytes: int | None = None,
) -> list[Chunk]:
    """Cut all sources of a corpus, in order; the arguments are those of `prepare_corpus`.

    Raises:
        DataError: A source is missing, damaged or without documents. The message names it.
    """
    check_range("prepare", at_least=1, chunk_bytes=chunk_bytes)
    chunks: list[Chunk] = []
    for path in _paths_of(source):
        least = chunk_bytes or _LEAST_CHUNK
        found = cut_source(path, suffixes=suffixes, chunk_bytes=least, keep=keep)
        if not found:
            what = ": all files are left out by name" if path.is_dir() else ""
            raise DataError(f"prepare: {path}: there are no documents{what}", where=path)
        chunks += found
    if chunk_bytes is None and len(chunks) > _MOST_CHUNKS:
        larger = sum(chunk.bytes for chunk in chunks) // _MOST_CHUNKS
        if larger > _LEAST_CHUNK:
            return cut_sources(source, suffixes=suffixes, keep=keep, chunk_bytes=larger)
    return chunks


def _finished(
    work: Work, chunks: Sequence[Chunk], say: Callable[[str], object]
) -> dict[int, Tally]:
    """Return the parts that an earlier run has finished; delete those that are of no use."""
    parts: dict[int, Tally] = {}
    reasons: list[str] = []
    for number, chunk in enumerate(chunks):
        part, reason = finished_part(work.folder, number, key_of_part(work.settings, chunk))
        if part is not None:
            parts[number] = part
        elif reason:
            reasons.append(reason)
    useful = {f"part_{number:08d}" for number in parts}
    for file in work.folder.iterdir():
        if file.stem not in useful:
            file.unlink(missing_ok=True)  # of a worker that is ending
    if parts or reasons:
        say(f"{work.folder}: going on with {len(parts)} of {len(chunks)} parts")
    if reasons:
        say(f"{work.folder}: {len(reasons)} finished parts are made anew: {reasons[0]}")
    return parts


def _write_parts(
    work: Work,
    todo: Mapping[int, Chunk],
    executor: Executor | None,
    crew: int,
    *,
    timeout: float,
    done: Callable[[int, Tally], None],
) -> None:
    """Write parts by an executor, in processes of our own, or in this one."""
    if executor is None and crew == 1:
        write = part_writer(work)
        for number, chunk in todo.items():
            done(number, write(number, chunk, bool))
        return
    with process_pool(crew) if executor is None else nullcontext(executor) as pool:
        write_parts(work, todo, pool, timeout=timeout, done=done)


def _crew(workers: int | None, todo: Mapping[int, Chunk], size: int) -> int:
    if workers is None:
        workers = 1 if size < _SMALL else len(os.sched_getaffinity(0))
    return max(1, min(workers, len(todo)))


def _paths_of(source: Source | Sequence[Source]) -> list[Path]:
    return [Path(path) for path in ([source] if isinstance(source, str | Path) else source)]


def _check_content(sums: Tally, sources: Sequence[Path]) -> None:
    """Refuse documents that are all without text: marks of their begin and end are no text."""
    dropped = sums.counts.get("dropped", 0)
    if sums.empty_documents + dropped >= sums.documents:
        empty = f"they are all empty, or dropped ({dropped})" if dropped else "they are all empty"
        found = empty if sums.documents else "there is none"
        place = ", ".join(map(str, sources))
        raise DataError(f"prepare: {place}: no documents: {found}", where=place)


def _join(
    out: Path, work: Work, parts: Sequence[Tally], made_with: Mapping[str, str] | None
) -> TokenCorpus:
    """Write the token file from the parts, and delete them."""
    needed = sum(file.stat().st_size for file in work.folder.glob(f"*{SUFFIX}"))
    if (free := shutil.disk_usage(out.parent).free) < needed:
        what = f"the parts become a new file, which needs {needed} bytes; {free} bytes are free"
        hint = "make room and run the same again: the parts are finished"
        facts = {"where": out, "got": free, "want": needed, "hint": hint}
        raise DiskError(f"prepare: cannot write {out}: {what}", **facts)
    joined, whole = work.folder / f"joined{SUFFIX}", open_finished(work.folder, parts)
    corpus = write_corpus(
        joined,
        iterate_documents(whole),
        vocab_size=work.settings["vocab_size"],
        tokenizer_hash=work.settings["tokenizer"],
        columns=whole.columns,
        template_hash=work.settings["template"],
        made_with=made_with,
    )
    with convert_disk_errors(out, by="prepare"):
        joined.replace(out)
        fsync_folder(out.parent)
    shutil.rmtree(work.folder)
    return corpus


@contextmanager
def _parts_folder(folder: Path) -> Iterator[None]:
    """Make the folder of parts; when the block ends, leave nothing but finished parts."""
    with convert_disk_errors(folder, by="prepare"):
        folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if folder.is_dir():
            for file in folder.glob(".*"):
                file.unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def alone(out: Path, *, by: str = "prepare") -> Iterator[None]:
    """Hold a lock on what is made from `out`'s name, beside it, while the block runs.

    Raises:
        ConfigError: Another process holds it; `by` is which function says so.
        DiskError: It cannot be written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder) / "a.tokens"):
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['.a.tokens.lock']
    """
    path = out.with_name(f".{out.name}.lock")
    while True:
        with convert_disk_errors(path, by=by):
            file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            other = file.read() or "unknown"
            file.close()
            raise ConfigError(
                f"{by}: {out}: another process (process {other}) makes it",
                where=path,
                hint="wait for it, or write to another file",
            ) from error
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            break
        file.close()  # its holder deleted it in between
    try:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()
