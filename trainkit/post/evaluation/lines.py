"""Results as lines of JSON, one for each item: a killed run goes on after the last whole line."""

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

Lines = Sequence[Mapping[str, Any]]
_FORM = {"form": "trainkit results 2"}
_HASH = b',"hash":"'


def score_in_groups(
    score: Scorer,
    items: Sequence[EvalItem],
    line: Callable[[EvalItem, Sequence[ExampleScores]], Mapping[str, Any]],
    *,
    group: int = 256,
    start: int = 0,
) -> Iterator[Lines]:
    """Yield the lines of items, a group of them at a time, in their order.

    Groups are the same whatever `start` is, so that a run that goes on gives the same bits.

    Args:
        score: What scores examples, from `make_scorer`; on all ranks.
        items: What is asked, from `read_texts` or `read_choices`.
        line: Makes a line of an item and what its examples score: `make_text_record` or
            `make_choice_record`.
        group: How many items are scored together.
        start: How many items have a line already.

    Examples:
        >>> from trainkit.post.evaluation.examples import make_example
        >>> items = [EvalItem([make_example([1], [i], context=8)]) for i in range(3)]
        >>> half = lambda examples: [ExampleScores(np.array([-0.5]), True) for _ in examples]
        >>> import numpy as np
        >>> line = lambda item, scored: {"logprob": scored[0].logprob}
        >>> list(score_in_groups(half, items, line, group=2, start=1))
        [[{'index': 1, 'logprob': -0.5}], [{'index': 2, 'logprob': -0.5}]]
    """
    check_range("score_in_groups", at_least=1, group=group)
    done = start - start % group if start < len(items) else start
    for first in range(done, len(items), group):
        chosen = items[first : first + group]
        found = iter(score([example for item in chosen for example in item.examples]))
        lines = [
            {"index": number, **line(item, [next(found) for _ in item.examples])}
            for number, item in enumerate(chosen, start=first)
        ]
        yield lines[max(0, start - first) :]


def write_results(
    path: Path | str,
    lines_from: Callable[[int], Iterable[Lines]],
    *,
    facts: Mapping[str, Any],
    axis: Axis = SOLO,
) -> int:
    """Write lines to a file, a group at a time, after those that it has; return how many it had.

    The first line holds `facts`, what the results are of: a hash of the model, of the data. A file
    with others is refused. Every line ends with a hash of itself, and one that was changed is
    refused too. Half a line at the end, of a run that was killed, is cut off.

    Args:
        path: The file, made if need be; the first rank of `axis` writes it.
        lines_from: Yields the lines from a number on, in groups, `{"index": number, ...}`; called
            on every rank, as it may communicate.
        facts: What JSON holds; equal on all ranks.
        axis: The ranks that call this together, `ps.world`.

    Raises:
        DataError: The file is of other facts, is no such file, or is being written.
        DiskError: It cannot be written.

    Effects:
        Writes the file, which has reached the disk after each group; communicates on `axis`.

    Examples:
        >>> import tempfile
        >>> lines_from = lambda start: [[{"index": i, "logprob": -i}] for i in range(start, 3)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "scores.jsonl"
        ...     first = write_results(path, lines_from, facts={"model": "a"})
        ...     text = path.read_text()
        ...     _ = path.write_text(text[:-5])
        ...     (
        ...         first,
        ...         write_results(path, lines_from, facts={"model": "a"}),
        ...         path.read_text() == text,
        ...     )
        (0, 2, True)
    """
    path = Path(path)
    handles, writes = list[BinaryIO](), axis.index == 0

    def begin() -> int:
        handles.append(_open(path))
        return _go_on(handles[0], path, facts)

    def append(lines: Lines) -> None:
        with convert_disk_errors(path, by="write_lines"):
            handles[0].write(b"".join(map(_line, lines)))
            handles[0].flush()
            os.fsync(handles[0].fileno())

    try:
        start = run_on_all_ranks(lambda: begin() if writes else None, axis)[0]
        for lines in lines_from(start):
            run_on_all_ranks(lambda lines=lines: append(lines) if writes else None, axis)
    finally:
        for file in handles:
            file.close()
    return start


def read_results(path: Path | str) -> list[dict[str, Any]]:
    """Return the lines of a file of results, without its first, which says what they are of.

    Raises:
        DataError: It is no such file, or a line of it is damaged; half a line at its end is left
            out.

    Examples:
        >>> read_results("/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: /does/not/exist cannot be read: No such file or directory
    """
    try:
        with Path(path).open("rb") as file:
            _head(file, Path(path))
            return [line for line, _ in _whole_lines(file, Path(path))]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", where=path) from error


def _open(path: Path) -> BinaryIO:
    with convert_disk_errors(path, by="write_lines"):
        is_new = not path.exists()
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        if is_new:
            fsync_folder(path.parent)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DataError(f"{path} is being written by another process", where=path) from None
    return file


def _go_on(file: BinaryIO, path: Path, facts: Mapping[str, Any]) -> int:
    """Put the file's end behind its last whole line; return how many it has after the first."""
    head, found = _line({**_FORM, **facts}), file.readline()
    if not found.endswith(b"\n"):
        if not head.startswith(found):
            raise _foreign(path)
        count, end = 0, 0
    else:
        file.seek(0)
        _check_facts(path, _head(file, path), _without_hash(orjson.loads(head)))
        count, end = 0, file.tell()
        for count, (_, end) in enumerate(_whole_lines(file, path), start=1):  # noqa: B007
            pass
    with convert_disk_errors(path, by="write_lines"):
        file.truncate(end)
        file.seek(end)
        if not end:
            file.write(head)
            file.flush()
    return count


def _head(file: BinaryIO, path: Path) -> dict[str, Any]:
    try:
        facts = orjson.loads(file.readline())
    except orjson.JSONDecodeError:
        facts = None
    if not isinstance(facts, dict) or facts.get("form") != _FORM["form"]:
        raise _foreign(path)
    return _without_hash(facts)


def _without_hash(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "hash"}


def _foreign(path: Path) -> DataError:
    what = f"{path} is no file of results: its first line does not say what they are of"
    return DataError(what, where=path, hint="name another file")


def _check_facts(path: Path, found: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    names = [name for name in {**found, **want} if found.get(name) != want.get(name)]
    if names:
        name = names[0]
        raise DataError(
            f"{path} holds results of another {' and another '.join(names)}: {name} is "
            f"{found.get(name)} there, and {want.get(name)} here",
            where=path,
            got=found.get(name),
            want=want.get(name),
            hint="name another file, or remove this one",
        )


def _whole_lines(file: BinaryIO, path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the lines that are whole, with the place of their end; refuse what is no such line."""
    for number, line in enumerate(file):
        if not line.endswith(b"\n"):
            return
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            value = None
        is_right = _with_hash(line.rpartition(_HASH)[0]) == line
        if not is_right or not isinstance(value, dict) or value.get("index") != number:
            what = f"{path}: line {number + 2} is damaged: it is not the result of item {number}"
            raise DataError(what, where=path, hint="remove it and all lines after it")
        yield _without_hash(value), file.tell()


def _line(values: Mapping[str, Any]) -> bytes:
    """Return a line of JSON; its last entry is a hash of the others, as they stand there."""
    return _with_hash(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[:-1])


def _with_hash(begin: bytes) -> bytes:
    return begin + _HASH + hashlib.sha256(begin).hexdigest()[:16].encode() + b'"}\n'
