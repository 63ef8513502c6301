"""`prepare_corpus`: tokenize text into a token file, in parallel, and resume if interrupted."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trainkit.buckets.files import mount_files
from trainkit.data.corpus import iterate_documents
from trainkit.files import convert_disk_errors, fsync_folder
from trainkit.text.chat.encode import format_answers_warning
from trainkit.text.corpora.formats import RECORD_FORMATS
from trainkit.text.corpora.shards import describe_unread_files
from trainkit.text.corpora.text_files import TEXT_SUFFIXES, check_name
from trainkit.text.corpora.tokens import SUFFIX, write_corpus
from trainkit.text.prepare.chunks import Chunk, split_source
from trainkit.text.prepare.parts import (
    MakeEncode,
    Tally,
    Work,
    add_tallies,
    make_part_key,
    make_part_writer,
    make_work,
    open_finished_parts,
    read_finished_part,
)
from trainkit.text.prepare.workers import process_pool, write_parts
from trainkit.types import ConfigError, DataError, DiskError, Log, check_range, log_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from trainkit.data.corpus import TokenCorpus
    from trainkit.types import Tokenizer

    Source = str | Path

_MIN_CHUNK_BYTES = 4 << 20  # a second of BPE on one core
_MAX_CHUNKS = 4096
_SMALL = 32 << 20  # bytes: tokenizing less takes less time than starting processes


@attrs.frozen
class PrepareProgress:
    """Progress of `prepare_corpus`.

    Attributes:
        documents: Finished documents, those of an earlier run included.
        tokens: Their tokens.
        bytes: Finished bytes of the source, those of an earlier run included.
        total_bytes: Bytes of the whole source.
        reused_bytes: Bytes that an earlier run had finished.
        seconds: Duration of this run so far.
    """

    documents: int
    tokens: int
    bytes: int
    total_bytes: int
    reused_bytes: int
    seconds: float


@attrs.frozen
class PrepareResult:
    """Result of `prepare_corpus`.

    Attributes:
        path: The token file.
        documents: The number of its documents.
        tokens: The number of its tokens.
        bytes: The source's bytes; of parquet and arrow files, uncompressed.
        empty_documents: Documents without text; they are in the file.
        counts: The encoder's counter, if it has one: with `make_chat_encoder` the `conversations`,
            and how many were `truncated` or `dropped`. The dropped ones are documents without
            tokens.
        vocab_size: The tokenizer's vocabulary.
        digest: The token file's hash.
        parts_reused: Parts that an earlier run had finished.
        workers: The number of processes; None with an `executor`.
        seconds: Duration of the run.
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
    parts_reused: int
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
    log: Log = log_info,
    progress: Callable[[PrepareProgress], object] | None = None,
) -> PrepareResult:
    """Tokenize text into a token file, in several processes or by an `Executor`.

    The source is split into chunks, and each becomes a part file in the folder `OUT.parts`; at the
    end the parts are concatenated, in the order of the source. After an interruption of any kind
    the same call resumes with the parts that are finished. A part whose file, tokenizer or settings
    have changed is made again. The token file is the same byte for byte for any executor, any
    number of processes and any interruptions.

    Args:
        source: A directory of text files; a `.jsonl`, `.parquet` or `.arrow` file, or a directory
            of such; or several of these, one after the other. Or their URLs in a bucket.
        out: The file to make, which ends in `.tokens`. An existing one is replaced at the end, in
            one step.
        tokenizer: Encodes a text; `bos_id` and `eos_id` are added around each document.
        make_encode: For records that are not plain text: `make_encode(tokenizer)` returns a
            function from a record to ids or a `Sample`. It is called in each process, so it must be
            a function at the top of a module, or a `functools.partial` of one. Its result may have
            an attribute `counts`, a `Counter` of what happened, and `columns`, the `Column`s of its
            samples by name. `tokenizers.make_sample_encoder` is one for records of ids.
        template_hash: Hash of the chat template of `make_encode`, from the function of that name;
            the token file stores it.
        made_with: The names of the "tokenizer" and the "template", as a command line has them; the
            token file stores them too.
        field: The field of a record that holds its text.
        suffixes: The suffixes of text files.
        keep: Whether to take a file of a directory, by its relative path.
        workers: The number of processes; by default one for each core, and only this one for less
            than 32 MiB.
        executor: Makes the parts instead of a process pool: any executor of `concurrent.futures`,
            or Dask's `client.get_executor()` for the cores of several machines, which must all see
            the source and the folder of `out`, and have the same trainkit. It is not shut down.
        chunk_bytes: The minimum size of a chunk; by default 4 MiB, or a 4096th of the source.
        timeout: Seconds without a heartbeat after which processes are taken to hang. The processes
            of a pool have at least 60 seconds to start; those of an `executor` may wait for any
            time, as in the queue of a cluster.
        log: Called with messages, for example about parts that are reused.
        progress: Called whenever a part is finished.

    Raises:
        DataError: The source is missing, empty or damaged, a document cannot be encoded, a process
            died, or the template hides too many answers (`chat.format_answers_warning`). The
            message names the file and the line, or the process and the chunk.
        DiskError: A file cannot be written, or the disk is full.
        ConfigError: Another process prepares the same file, or a library is missing.
        ValueError: An argument is out of range.

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
    start_time = time.monotonic()
    out = Path(out)
    check_output(out)
    check_range("prepare", at_least=1, workers=workers)
    folder = out.with_name(f"{out.name}.parts")
    work = make_work(folder, tokenizer, make_encode, field, template_hash=template_hash)
    sources = [mount_files(x) for x in ([source] if isinstance(source, str | Path) else source)]
    # A function of the files alone: the next run finds the same parts.
    chunks = split_sources(sources, suffixes=suffixes, keep=keep, chunk_bytes=chunk_bytes)
    for path in sources:
        if message := describe_unread_files(path, (*suffixes, *RECORD_FORMATS)):
            log(message)
    with lock_output(out), _make_parts_folder(work.folder):
        reused = _find_finished_parts(work, chunks, log)
        report = _ProgressReport(chunks, reused, progress, start_time)
        used_workers = _write_parts(work, chunks, report, executor, workers, timeout=timeout)
        parts = [report.parts[index] for index in range(len(chunks))]
        total = add_tallies(parts)
        _check_content(total, sources, log)
        corpus = _concat_parts(out, work, parts, made_with, log)
    seconds = time.monotonic() - start_time
    return PrepareResult(
        path=out,
        documents=total.documents,
        tokens=total.tokens,
        bytes=report.total_bytes,
        empty_documents=total.empty_documents,
        counts=total.counts,
        vocab_size=work.settings["vocab_size"],
        digest=corpus.digest,
        parts_reused=len(reused),
        workers=used_workers,
        seconds=seconds,
        # Reused parts took no time in this run.
        tokens_per_second=(total.tokens - add_tallies(reused.values()).tokens) / seconds,
    )


class _ProgressReport:
    """Collects the finished parts in `parts`, and reports the progress."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        reused: Mapping[int, Tally],
        progress: Callable[[PrepareProgress], object] | None,
        start_time: float,
    ) -> None:
        self.total_bytes = sum(chunk.bytes for chunk in chunks)
        self._chunks = chunks
        self.parts = dict(reused)
        self._progress = progress
        self._start_time = start_time
        self._reused_bytes = sum(chunks[index].bytes for index in reused)

    def add(self, index: int, part: Tally) -> None:
        self.parts[index] = part
        if self._progress is None:
            return
        # Only a few thousand parts, so they can be added each time.
        finished = add_tallies(self.parts.values())
        self._progress(
            PrepareProgress(
                documents=finished.documents,
                tokens=finished.tokens,
                bytes=sum(self._chunks[i].bytes for i in self.parts),
                total_bytes=self.total_bytes,
                reused_bytes=self._reused_bytes,
                seconds=time.monotonic() - self._start_time,
            )
        )


def check_output(out: Path) -> None:
    """Raise an error if a token file could not be written at the end.

    Raises:
        ValueError: Its name does not end in `.tokens`.
        DataError: Its name is not UTF-8.
        DiskError: Its folder is missing or not writable, or a folder has its name.
    """
    check_name(out)
    if out.suffix != SUFFIX:
        raise ValueError(f"prepare: the file must end in {SUFFIX}, got {out}")
    if out.is_dir():
        raise DiskError(f"prepare: cannot write {out}: it is a folder", where=out)
    # Now, not after hours of work.
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise DiskError(
            f"prepare: cannot write {out}: {out.parent} is no folder that can be written to",
            where=out,
        )


def split_sources(
    sources: Sequence[Source],
    *,
    suffixes: Sequence[str],
    keep: Callable[[str], bool] | None = None,
    chunk_bytes: int | None = None,
) -> list[Chunk]:
    """Split all sources of a corpus, in order; the arguments are those of `prepare_corpus`.

    Raises:
        DataError: A source is missing, damaged or without documents. The message names it.
    """
    check_range("prepare", at_least=1, chunk_bytes=chunk_bytes)
    chunks: list[Chunk] = []
    for path in map(mount_files, sources):
        part = split_source(
            path,
            suffixes=suffixes,
            chunk_bytes=chunk_bytes or _MIN_CHUNK_BYTES,
            keep=keep,
        )
        # Each source must have some: an empty one is a wrong path.
        if not part:
            reason = ": all files are left out by name" if path.is_dir() else ""
            raise DataError(f"prepare: {path}: there are no documents{reason}", where=path)
        chunks += part
    if chunk_bytes is None and len(chunks) > _MAX_CHUNKS:
        # Fewer, larger chunks: each is two files and a task.
        larger = sum(chunk.bytes for chunk in chunks) // _MAX_CHUNKS
        if larger > _MIN_CHUNK_BYTES:
            return split_sources(sources, suffixes=suffixes, keep=keep, chunk_bytes=larger)
    return chunks


def _find_finished_parts(work: Work, chunks: Sequence[Chunk], log: Log) -> dict[int, Tally]:
    """Find the parts that an earlier run has finished; delete those that cannot be reused."""
    parts: dict[int, Tally] = {}
    reasons: list[str] = []
    for index, chunk in enumerate(chunks):
        part, reason = read_finished_part(work.folder, index, make_part_key(work.settings, chunk))
        if part is not None:
            parts[index] = part
        elif reason:
            reasons.append(reason)
    reusable = {f"part_{index:08d}" for index in parts}
    # The two files of a part differ only in their suffix.
    for file in work.folder.iterdir():
        if file.stem not in reusable:
            file.unlink(missing_ok=True)  # a worker that is exiting may delete its own first
    if parts or reasons:
        log(f"{work.folder}: resuming with {len(parts)} of {len(chunks)} parts")
    # One reason stands for all: mostly the same setting has changed.
    if reasons:
        log(f"{work.folder}: {len(reasons)} finished parts are made again: {reasons[0]}")
    return parts


def _write_parts(
    work: Work,
    chunks: Sequence[Chunk],
    report: _ProgressReport,
    executor: Executor | None,
    workers: int | None,
    *,
    timeout: float,
) -> int | None:
    """Write the missing parts; return the number of processes, None with an executor."""
    missing = {index: chunk for index, chunk in enumerate(chunks) if index not in report.parts}
    if executor is not None:
        write_parts(
            work, missing, executor, starts_at_once=False, timeout=timeout, on_part=report.add
        )
        return None
    if workers is None:
        # Starting processes takes seconds: each imports trainkit, numba and the caller's script.
        is_small = sum(chunk.bytes for chunk in missing.values()) < _SMALL
        # The cores that this process may use, which a container or a batch system may limit.
        workers = 1 if is_small else len(os.sched_getaffinity(0))
    # No process without a chunk.
    workers = max(1, min(workers, len(missing)))
    # Here, as a process would only add its start.
    if workers == 1:
        write = make_part_writer(work)
        for index, chunk in missing.items():
            # Nobody waits for a heartbeat here, and `bool()` does nothing.
            report.add(index, write(index, chunk, bool))
    else:
        with process_pool(workers) as pool:
            write_parts(
                work, missing, pool, starts_at_once=True, timeout=timeout, on_part=report.add
            )
    return workers


def _check_content(total: Tally, sources: Sequence[Path], log: Log) -> None:
    """Raise DataError if all documents are empty; log a warning if answers are hidden."""
    # Dropped conversations have no tokens, and are not among the empty documents.
    dropped = total.counts.get("dropped", 0)
    if total.empty_documents + dropped >= total.documents:
        names = ", ".join(map(str, sources))
        if not total.documents:
            raise DataError(f"prepare: {names}: no documents: there is none", where=names)
        raise DataError(
            f"prepare: {names}: no documents: they are all empty"
            f"{f', or dropped ({dropped})' if dropped else ''}",
            where=names,
        )
    if warning := format_answers_warning(total.counts):
        log(warning)


def _concat_parts(
    out: Path,
    work: Work,
    parts: Sequence[Tally],
    made_with: Mapping[str, str] | None,
    log: Log,
) -> TokenCorpus:
    """Write the token file from the parts, and delete them."""
    total = add_tallies(parts)
    log(f"concatenating {len(parts)} parts: {total.documents} documents, {total.tokens} tokens")
    # Checked before the copy, which may take long.
    needed = sum(file.stat().st_size for file in work.folder.glob(f"*{SUFFIX}"))
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise DiskError(
            f"prepare: cannot write {out}: the parts become a new file, which needs {needed} "
            f"bytes; {free} bytes are free",
            where=out,
            got=free,
            want=needed,
            hint="make room and run the same again: the parts are finished",
        )
    # In the folder of the parts, which is on the same disk: the rename is atomic.
    temporary = work.folder / f"concatenated{SUFFIX}"
    corpus = open_finished_parts(work.folder, parts)
    written = write_corpus(
        temporary,
        iterate_documents(corpus),
        vocab_size=work.settings["vocab_size"],
        tokenizer_hash=work.settings["tokenizer"],
        columns=corpus.columns,
        template_hash=work.settings["template"],
        made_with=made_with,
    )
    with convert_disk_errors(out, by="prepare"):
        temporary.replace(out)
        fsync_folder(out.parent)
    # Last: until the file has reached the disk, a run that is killed resumes from the parts.
    shutil.rmtree(work.folder)
    return written


@contextmanager
def _make_parts_folder(folder: Path) -> Iterator[None]:
    """Make the folder of parts; at the end of the block, delete everything but finished parts."""
    with convert_disk_errors(folder, by="prepare"):
        folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if folder.is_dir():
            # Heartbeat files of killed processes, and temporary files of their parts.
            for file in folder.glob(".*"):
                file.unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def lock_output(out: Path, *, function: str = "prepare") -> Iterator[None]:
    """Lock an output file while the block runs, by a lock file in the same directory.

    Raises:
        ConfigError: Another process has the lock; the message begins with `function`.
        DiskError: The lock file cannot be written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, lock_output(Path(folder) / "a.tokens"):
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['.a.tokens.lock']
    """
    path = out.with_name(f".{out.name}.lock")
    while True:
        with convert_disk_errors(path, by=function):
            # Not "w", which would erase the process id of the one that holds the lock.
            file = path.open("a+")
        try:
            # A lock of the kernel, not a file that exists: it ends with a killed process.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            other = file.read() or "unknown"
            file.close()
            raise ConfigError(
                f"{function}: {out}: another process (process {other}) makes it",
                where=path,
                hint="wait for it, or write to another file",
            ) from error
        # The lock counts only if the path is still this file, which others will open too.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break
        file.close()  # the process that had the lock has deleted the file: lock a new one
    # For the message of a process that comes meanwhile.
    try:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
    finally:
        # While it is locked: later it might be the lock file of the next process.
        path.unlink(missing_ok=True)
        file.close()
