"""Results as a JSON lines file, one record per item, that an interrupted run can resume."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from trainkit.collectives import run_on_all_ranks
from trainkit.files import convert_disk_errors, fsync_folder
from trainkit.post.evaluation.examples import EvalItem
from trainkit.post.evaluation.score import ExampleScores, Scorer
from trainkit.types import SOLO, Axis, DataError, check_range

Records = Sequence[Mapping[str, Any]]
_FORM = {"form": "trainkit results 2"}
_HASH = b',"hash":"'  # after the last value of a line


def score_in_groups(
    score: Scorer,
    items: Sequence[EvalItem],
    make_record: Callable[[EvalItem, Sequence[ExampleScores]], Mapping[str, Any]],
    *,
    group: int = 256,
    start: int = 0,
) -> Iterator[Records]:
    """Score items in groups and yield the records of each group.

    Groups do not depend on `start`, so that a resumed run computes the same bits.

    Args:
        score: From `make_scorer`; on all ranks.
        items: From `read_texts` or `read_choices`.
        make_record: `make_text_record` or `make_choice_record`.
        group: Number of items that are scored together.
        start: Number of items that have a record already.

    Examples:
        >>> from trainkit.post.evaluation.examples import make_example
        >>> items = [EvalItem([make_example([1], [i], context=8)]) for i in range(3)]
        >>> half = lambda examples: [ExampleScores(np.array([-0.5]), True) for _ in examples]
        >>> import numpy as np
        >>> make_record = lambda item, scored: {"logprob": scored[0].logprob}
        >>> list(score_in_groups(half, items, make_record, group=2, start=1))
        [[{'index': 1, 'logprob': -0.5}], [{'index': 2, 'logprob': -0.5}]]
    """
    check_range("score_in_groups", at_least=1, group=group)
    # From the start of a group, since rounding depends on the examples that share a row.
    group_start = start - start % group if start < len(items) else start
    for first in range(group_start, len(items), group):
        selected = items[first : first + group]
        scores = iter(score([example for item in selected for example in item.examples]))
        records = [
            {"index": index, **make_record(item, [next(scores) for _ in item.examples])}
            for index, item in enumerate(selected, start=first)
        ]
        yield records[max(0, start - first) :]


def write_results(
    path: Path | str,
    records_from: Callable[[int], Iterable[Records]],
    *,
    facts: Mapping[str, Any],
    axis: Axis = SOLO,
) -> int:
    """Append records to a file, a group at a time; return the number of records it had.

    The first line holds `facts`, such as hashes of the model and the data, and a file with other
    facts is rejected. Every line ends with a hash of itself, and a changed line is rejected, too.
    An incomplete line at the end, left by an interrupted run, is removed.

    Args:
        path: The file, created if necessary; the first rank of `axis` writes it.
        records_from: `records_from(start)` yields groups of records from `start` on, each
            `{"index": ..., ...}`; called on every rank, as it may communicate.
        facts: JSON values, equal on all ranks.
        axis: The ranks that call this together, `ps.world`.

    Raises:
        DataError: The file has other facts, is not a file of results, or is being written.
        DiskError: It cannot be written.

    Effects:
        Writes the file and syncs it to disk after each group; communicates on `axis`.

    Examples:
        >>> import tempfile
        >>> records_from = lambda start: [[{"index": i, "logprob": -i}] for i in range(start, 3)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "scores.jsonl"
        ...     first = write_results(path, records_from, facts={"model": "a"})
        ...     text = path.read_text()
        ...     _ = path.write_text(text[:-5])
        ...     second = write_results(path, records_from, facts={"model": "a"})
        ...     first, second, path.read_text() == text
        (0, 2, True)
    """
    path = Path(path)
    files: list[BinaryIO] = []  # the file on the first rank, none on others

    def open_file() -> int:
        with convert_disk_errors(path, by="write_results"):
            is_new = not path.exists()
            # open() would fail without a file in mode r+b, and truncate an old one in w+b.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = os.fdopen(os.open(path, flags, 0o666), "r+b")
            files.append(file)
            if is_new:
                fsync_folder(path.parent)  # a power loss keeps a file's bytes, and loses its name
        try:
            # The lock goes with the file descriptor, however the process ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{path} is being written by another process", where=path) from None
        return _seek_end(file, path, facts)

    def append(records: Records) -> None:
        with convert_disk_errors(path, by="write_results"):
            files[0].write(b"".join(map(_format_record, records)))
            files[0].flush()
            os.fsync(files[0].fileno())  # a crash loses no group that was written

    try:
        start = run_on_all_ranks(lambda: None if axis.index else open_file(), axis)[0]
        for records in records_from(start):
            run_on_all_ranks(lambda group=records: None if axis.index else append(group), axis)
    finally:
        for file in files:
            file.close()
    return start


def read_results(path: Path | str) -> list[dict[str, Any]]:
    """Read the records of a file of results, without the first line, its facts.

    Raises:
        DataError: It is not such a file, or a line is damaged; an incomplete line at the end is
            skipped.

    Examples:
        >>> read_results("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: /does/not/exist cannot be read: No such file or directory
    """
    try:
        with Path(path).open("rb") as file:
            _read_facts(file, Path(path))
            return [record for record, _ in _read_records(file, Path(path))]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", where=path) from error


def _seek_end(file: BinaryIO, path: Path, facts: Mapping[str, Any]) -> int:
    """Truncate the file after its last complete line; return its number of records."""
    header = _format_record({**_FORM, **facts})
    first_line = file.readline()  # incomplete if the first write was interrupted
    count = end = 0
    if first_line.endswith(b"\n"):
        file.seek(0)
        actual = _read_facts(file, path)
        expected = _drop_hash(orjson.loads(header))  # as JSON has them: a tuple is a list there
        all_names = {**actual, **expected}
        names = [name for name in all_names if actual.get(name) != expected.get(name)]
        if names:
            name = names[0]
            raise DataError(
                f"{path} holds results of another {' and another '.join(names)}: {name} is "
                f"{actual.get(name)} there, and {expected.get(name)} here",
                where=path,
                got=actual.get(name),
                want=expected.get(name),
                hint="name another file, or remove this one",
            )
        end = file.tell()
        for count, (_, end) in enumerate(_read_records(file, path), start=1):  # noqa: B007
            pass
    elif not header.startswith(first_line):  # also if it is empty, as a new file is
        raise _foreign_file(path)
    with convert_disk_errors(path, by="write_results"):
        file.truncate(end)
        file.seek(end)
        if not end:
            file.write(header)
            file.flush()
    return count


def _read_facts(file: BinaryIO, path: Path) -> dict[str, Any]:
    try:
        facts = orjson.loads(file.readline())
    except orjson.JSONDecodeError:
        facts = None
    if not isinstance(facts, dict) or facts.get("form") != _FORM["form"]:
        raise _foreign_file(path)
    return _drop_hash(facts)


def _drop_hash(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "hash"}


def _foreign_file(path: Path) -> DataError:
    return DataError(
        f"{path} is no file of results: its first line does not hold their facts",
        where=path,
        hint="name another file",
    )


def _read_records(file: BinaryIO, path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield complete records, each with the offset of its end."""
    for index, line in enumerate(file):
        if not line.endswith(b"\n"):
            return
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        # The hash is the last entry, so the bytes before it are those that were hashed.
        is_intact = _append_hash(line.rpartition(_HASH)[0]) == line
        if not is_intact or not isinstance(record, dict) or record.get("index") != index:
            raise DataError(
                f"{path}: line {index + 2} is damaged: it is not the result of item {index}",
                where=path,
                hint="remove it and all lines after it",
            )
        yield _drop_hash(record), file.tell()


def _format_record(values: Mapping[str, Any]) -> bytes:
    """Format a record as a line of JSON whose last entry is a hash of the bytes before it."""
    return _append_hash(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[:-1])


def _append_hash(prefix: bytes) -> bytes:
    digest = hashlib.sha256(prefix).hexdigest()[:16]
    return prefix + _HASH + digest.encode() + b'"}\n'
