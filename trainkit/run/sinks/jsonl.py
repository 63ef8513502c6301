"""Metrics and events as lines of strict JSON, one object each, that survive kills and full disks.

What strict JSON lacks is written so that every reader takes it and nothing is lost: NaN and
infinities are null (the `_hex` twins of `metrics.make_step_record` tell which), whole numbers
beyond 64 bits are strings of hexadecimal digits, and half a surrogate pair is a question mark.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import orjson

from trainkit.files import atomic_write, convert_disk_errors, fsync_folder
from trainkit.types import DiskError, Log, Sink

_ROOM = 64 << 20  # bytes of lines that wait in memory for a disk that takes them

Problem = Callable[[str, Exception], None]


@attrs.frozen
class Rewound:
    """What `rewind_jsonl` found: lines kept, steps whose lines went, steps that have no line."""

    kept: int = 0
    dropped: int = 0
    missing: int = 0


@contextlib.contextmanager
def open_jsonl(path: str | Path, *, step: int = 0, log: Log | None = None) -> Iterator[Sink]:
    """Yield a sink that appends one line per step, `{"step": 1, ...}`, and hands it to the system.

    A line that the system has is safe from a kill; `fsync_jsonl` makes it safe from a power cut. A
    disk that is full may take part of a line: the rest, and the lines that follow, wait in memory
    (64 MiB of them) and are written first as soon as there is room, so that no line is torn inside
    the file or lost. A file that is removed meanwhile begins anew, and that is told. A step that is
    not beyond the last one, as after a roll-back, takes the place of all lines from it on; but what
    is told of the last step under other names, as by an evaluation, joins its line.

    Args:
        path: The file, made if need be.
        step: The step that the run goes on from: lines beyond it, and a torn last line, are
            dropped (see `rewind_jsonl`), so that after any restart each step has exactly one line.
        log: Gets the first problem in words, and lets the run go on: a full disk, a value that is
            not plain (its type's name stands for it). None raises.

    Raises:
        ValueError: A value is not a plain number, string, bool, None, or list or dict of these.
        DiskError: The file cannot be opened; without `log`, it cannot be written.

    Effects:
        Repairs the file; then only appends to it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for begin in (0, 1):  # the second run goes on from step 1
        ...         with open_jsonl(f"{folder}/metrics.jsonl", step=begin) as sink:
        ...             for step in range(begin, begin + 2):
        ...                 sink(step + 1, {"loss": 1.5})
        ...     print(Path(f"{folder}/metrics.jsonl").read_text(), end="")
        {"step":1,"loss":1.5}
        {"step":2,"loss":1.5}
        {"step":3,"loss":1.5}
    """
    path, last, told = Path(path), step, dict[str, Any]()
    rewind_jsonl(path, step)
    with contextlib.ExitStack() as stack:
        append = stack.enter_context(_appending(path, log))

        def go_back(step: int) -> None:
            nonlocal append
            stack.close()
            try:
                rewind_jsonl(path, step)
                append = stack.enter_context(_appending(path, log))
            except DiskError as error:
                _reporting(log)("rewind", error)

        def write(step: int, values: Mapping[str, Any]) -> None:
            nonlocal last, told
            told = {**told, **values} if step == last and is_more(told, values) else dict(values)
            if step <= last:
                go_back(step - 1)
            append({"step": step, **told})
            last = step

        yield write


@contextlib.contextmanager
def open_events(path: str | Path, *, log: Log | None = None) -> Iterator[Callable[..., None]]:
    """Yield `event(name, **facts)`, which appends `{"time": ..., "event": name, ...}`.

    For what is no step: evaluations, saves, restarts. `time` is in seconds since 1970. Nothing is
    ever removed but a torn last line: steps that a restart repeats are told twice.

    Args:
        path: The file, made if need be.
        log: What to do with problems, as in `open_jsonl`.

    Effects:
        Appends to the file.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open_events(f"{folder}/events.jsonl") as event:
        ...         event("stop", step=100, why="SIGTERM")
        ...     print(Path(f"{folder}/events.jsonl").read_text(), end="")
        {"time":...,"event":"stop","step":100,"why":"SIGTERM"}
    """
    path = Path(path)
    with convert_disk_errors(path, by="events"):
        _drop_torn_line(path)
    with _appending(path, log) as append:

        def event(name: str, **facts: Any) -> None:
            append({"time": time.time(), "event": name, **facts})

        yield event


def is_more(told: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Say whether values are more of a step that was told, as an evaluation's are.

    A name that comes twice is a step that is done again.

    Examples:
        >>> is_more({"loss": 2.0}, {"eval/loss": 2.5}), is_more({"loss": 2.0}, {"loss": 2.0})
        (True, False)
    """
    return bool(told) and told.keys().isdisjoint(values)


def repair_jsonl(text: bytes, step: int) -> bytes:
    r"""Return the lines of a metrics file up to `step`, each step once, in rising order.

    Whatever is no whole JSON object with a whole number `step` is dropped: a torn last line, or
    the zeros that a lost disk cache leaves.

    Examples:
        >>> repair_jsonl(b'{"step":1}\n{"step":2}\n{"step":3}\n{"ste', step=2)
        b'{"step":1}\n{"step":2}\n'
    """
    kept: list[bytes] = []
    last = -1
    for line in text.split(b"\n"):
        number = _step_of(line)
        if number is not None and last < number <= step:
            kept.append(line + b"\n")
            last = number
    return b"".join(kept)


def rewind_jsonl(path: str | Path, step: int) -> Rewound:
    """Make a metrics file end with `step`, as `repair_jsonl` does.

    A file that is whole up to there is cut, any other replaced.

    Args:
        path: The file; a missing one is left missing.
        step: The last step that may have a line.

    Returns:
        How many lines are left, how many steps beyond `step` had one, and how many steps between
        the first line and `step` have none.

    Raises:
        DiskError: The file cannot be read, cut or replaced.

    Effects:
        Cuts the file, or replaces it by a rename.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "metrics.jsonl"
        ...     with open_jsonl(path) as sink:
        ...         for step in range(1, 6):
        ...             sink(step, {})
        ...     rewind_jsonl(path, 3)
        Rewound(kept=3, dropped=2, missing=0)
    """
    path = Path(path)
    if not path.is_file():  # a device has no end
        return Rewound()
    with convert_disk_errors(path, by="rewind_jsonl"):
        text = path.read_bytes()
        repaired = repair_jsonl(text, step)
        if text.startswith(repaired):
            _cut(path, len(repaired))
        else:
            with atomic_write(path, by="rewind_jsonl") as file:
                file.write(repaired)
    kept = repaired.count(b"\n")
    first = _step_of(repaired.partition(b"\n")[0]) or 0
    newest = max((_step_of(line) or 0 for line in text.split(b"\n")), default=0)
    missing = step - first + 1 - kept if kept else 0
    return Rewound(kept=kept, dropped=max(0, newest - step), missing=missing)


def fsync_jsonl(run_dir: str | Path) -> None:
    """Return once the lines of a run that the system has are on the disk; never raises.

    For the moment before a checkpoint is committed: no power cut then loses lines of steps that no
    restart will repeat. Any thread may call it.

    Effects:
        Waits for the disk.

    Examples:
        >>> fsync_jsonl("no/such/run")
    """
    for name in ("metrics.jsonl", "events.jsonl"):
        with contextlib.suppress(OSError):
            file = os.open(Path(run_dir) / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    r"""Return the steps of a run in their order, with what evaluations found after each of them.

    The lines of metrics.jsonl, joined by the evaluations of events.jsonl as `eval/NAME`. What a
    restart or a roll-back has given up is left out, of both, and so is a torn last line. An
    evaluation of a step without a line, such as step 0, has a line of its own.

    Args:
        run_dir: A run directory; a missing one has no steps.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:
        ...     _ = Path(run, "metrics.jsonl").write_text('{"step":1,"loss":5.5}\n{"step":2,"lo')
        ...     line = '{"event":"evaluation","step":1,"eval/loss":5.25}\n'
        ...     _ = Path(run, "events.jsonl").write_text(line)
        ...     read_metrics(run)
        [{'step': 1, 'loss': 5.5, 'eval/loss': 5.25}]
    """
    lines, told = (read_jsonl(Path(run_dir) / f"{name}.jsonl") for name in ("metrics", "events"))
    return joined(lines, told)


def compare_evaluations(run_dir: str | Path, metric: str) -> dict[str, Any]:
    """Return what a run has learned, for an event "result": its first and its last evaluation.

    Args:
        run_dir: A run directory.
        metric: The name in `read_metrics`, "eval/loss".

    Returns:
        {"metric": ..., "before": ..., "after": ...}; None where nothing was evaluated.

    Examples:
        >>> compare_evaluations("no/such/run", "eval/loss")
        {'metric': 'eval/loss', 'before': None, 'after': None}
    """
    found = [line[metric] for line in read_metrics(run_dir) if metric in line] or [None]
    return {"metric": metric, "before": found[0], "after": found[-1]}


def joined(
    metrics: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl with the evaluations of events.jsonl: see `read_metrics`.

    Examples:
        >>> events = [
        ...     {"event": "evaluation", "step": 2, "eval/loss": 9.0},
        ...     {"event": "rewind", "step": 1},
        ... ]
        >>> joined([{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}], events)
        [{'step': 1, 'loss': 2.5}, {'step': 2, 'loss': 2.25}]
    """
    steps = {step: line for line in metrics if (step := _whole(line.get("step"))) is not None}
    for step, found in _evaluations(events).items():
        steps[step] = steps.get(step, {"step": step}) | found
    return [steps[step] for step in sorted(steps)]


def _evaluations(events: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what evaluations found by their steps, but of steps that were done again since."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if (step := _whole(event.get("step"))) is None:
            continue
        if event.get("event") in ("start", "rewind"):  # it went on from here
            found = {done: values for done, values in found.items() if done <= step}
        elif event.get("event") == "evaluation":
            found[step] = {name: x for name, x in event.items() if name.startswith("eval/")}
    return found


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON objects; a missing file has none.

    Examples:
        >>> read_jsonl("no/such/file.jsonl")
        []
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [value for line in lines if (value := _parsed(line))]


# ------------------------------------------------------------------------------------ writing


@contextlib.contextmanager
def _appending(path: Path, log: Log | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that appends a line, or keeps it until the disk has room."""
    problem = _reporting(log)
    with convert_disk_errors(path, by="sinks"):
        is_new = not path.exists()
        file = _open(path)
        if is_new:
            fsync_folder(path.parent)
    put, finish = _writer(file, path, problem)
    try:
        yield lambda line: put(_json_line(line, path.name, problem))
    except BaseException:
        with contextlib.suppress(DiskError):  # what is on its way says more
            finish()
        raise
    finish()


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _reporting(log: Log | None) -> Problem:
    """Return a function that raises an error, or tells it if it is the first of its kind."""
    told: set[str] = set()

    def problem(kind: str, error: Exception) -> None:
        if log is None:
            raise error
        if kind not in told:
            told.add(kind)
            log(str(error))

    return problem


def _writer(
    file: int, path: Path, problem: Problem
) -> tuple[Callable[[bytes], None], Callable[[], None]]:
    """Return `put(line)` and `finish()`: lines go out in order and whole, now or when they can."""
    waiting = bytearray()
    lost = 0
    is_open = True  # afterwards another file may have this one's number
    one_at_a_time = threading.Lock()  # events may come from threads

    def drain() -> None:
        try:
            with convert_disk_errors(path, by="sinks", needed=len(waiting)):
                _begin_anew_if_removed(file, path, problem)
                while waiting:  # a disk that fills up takes part of what it is given
                    del waiting[: os.write(file, waiting)]
        except DiskError as error:
            what = f"{error}; lines wait in memory until there is room"
            problem("disk", DiskError(what, where=path, got=error.got, want=error.want))

    def put(line: bytes) -> None:
        nonlocal lost
        with one_at_a_time:
            if is_open and len(waiting) + len(line) <= _ROOM:
                waiting.extend(line)
            else:
                lost += 1
            if is_open:
                drain()

    def finish() -> None:
        nonlocal is_open
        with one_at_a_time, contextlib.suppress(OSError, DiskError):  # it is told what is lost
            try:
                drain()
            finally:
                is_open = False
                os.close(file)
        if missing := waiting.count(b"\n") + lost:
            problem("lost", DiskError(f"sinks: {path} lacks its last {missing} lines", where=path))

    return put, finish


def _begin_anew_if_removed(file: int, path: Path, problem: Problem) -> None:
    """Let an open file that somebody has removed, or the directory around it, be a new one."""
    if os.fstat(file).st_nlink:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    again = _open(path)
    os.dup2(again, file, inheritable=False)
    os.close(again)
    what = f"sinks: {path} was removed while the run goes on: its lines up to now are lost"
    problem("removed", DiskError(what, where=path))


def _json_line(line: Mapping[str, Any], name: str, problem: Problem) -> bytes:
    """Return a line of strict JSON; what is not plain becomes the name of its type, and is told."""
    with contextlib.suppress(TypeError):
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    odd: dict[str, str] = {}
    plain = {_text(key): _plain(value, key, odd) for key, value in line.items()}
    if odd:
        problem(
            "value",
            ValueError(
                f"{name}: a line takes plain numbers and strings (see trainkit.to_host), got {odd}"
            ),
        )
    return orjson.dumps(plain, option=orjson.OPT_APPEND_NEWLINE)


def _plain(value: Any, name: str, odd: dict[str, str]) -> Any:
    """Return a value as orjson takes it, and note in `odd` where there was none."""
    plain: Any
    match value.item() if isinstance(value, np.generic) else value:
        case None | bool() as plain:
            pass
        case str() as text:
            plain = _text(text)
        case int() as number if not -(1 << 63) <= number < 1 << 64:
            plain = hex(number)
        case int() | float() as number:
            plain = number + 0  # where it was of a class of its own
        case list() | tuple() as parts:
            plain = [_plain(part, name, odd) for part in parts]
        case Mapping() as parts:
            plain = {_text(key): _plain(part, name, odd) for key, part in parts.items()}
        case other:
            plain = odd[name] = f"<{type(other).__name__}>"
    return plain


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------ repairing


def _cut(path: Path, size: int) -> None:
    if path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())


def _drop_torn_line(path: Path) -> None:
    """Cut a file after its last line that is whole."""
    if path.is_file():
        lines = path.read_bytes().splitlines(keepends=True)
        while lines and not (lines[-1].endswith(b"\n") and _parsed(lines[-1])):
            lines.pop()
        _cut(path, sum(map(len, lines)))


def _step_of(line: bytes) -> int | None:
    return _whole(_parsed(line).get("step"))


def _whole(number: Any) -> int | None:
    return number if type(number) is int else None


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the object of a line, empty if it is none."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
