"""Metrics and events as lines of strict JSON, one object each, that survive kills and full disks.

Values that strict JSON lacks are converted so that every reader accepts them and nothing is lost:
NaN and infinities are null (the `_hex` fields of `metrics.make_step_record` distinguish them),
integers beyond 64 bits are strings of hexadecimal digits, and a lone surrogate is a question mark.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import orjson

from trainkit.files import atomic_write, convert_disk_errors, fsync_folder
from trainkit.types import DiskError, Log, Sink

_MAX_WAITING = 64 << 20  # bytes of lines that wait in memory for room on the disk

Report = Callable[[str, Exception], None]
"""`Report(kind, error)`: raises an error, or logs it if it is the first of its kind."""


@attrs.frozen
class Rewound:
    """How many lines `rewind_jsonl` retained, how many steps it dropped, how many have no line."""

    retained: int = 0
    dropped: int = 0
    missing: int = 0


@contextlib.contextmanager
def open_jsonl(path: str | Path, *, step: int = 0, log: Log | None = None) -> Iterator[Sink]:
    """Yield a sink that appends one line per step, `{"step": 1, ...}`, to a file.

    Each line goes to the operating system at once, which makes it safe from a kill; `fsync_jsonl`
    makes it safe from a power cut. A full disk may take part of a line: the rest, and the lines
    that follow, wait in memory (up to 64 MiB) and are written first when there is room, so that no
    line inside the file is torn or lost. A file that is removed meanwhile is created again, with a
    message. A step that is not beyond the last one, as after a roll-back, replaces all lines from
    it on; but further values of the last step under other names, as of an evaluation, join its
    line.

    Args:
        path: The file, created if it does not exist.
        step: The step that the run resumes from: lines beyond it, and a torn last line, are
            dropped (see `rewind_jsonl`), so that after any restart each step has exactly one line.
        log: Called with the first problem of each kind, and the run goes on: a full disk, a value
            that is not plain (its type's name replaces it). None raises.

    Raises:
        ValueError: A value is not a plain number, string, bool, None, or list or dict of these.
        DiskError: The file cannot be opened; without `log`, it cannot be written.

    Effects:
        Repairs the file; then only appends to it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for start in (0, 1):  # the second run resumes from step 1
        ...         with open_jsonl(f"{folder}/metrics.jsonl", step=start) as sink:
        ...             for step in range(start, start + 2):
        ...                 sink(step + 1, {"loss": 1.5})
        ...     print(Path(f"{folder}/metrics.jsonl").read_text(), end="")
        {"step":1,"loss":1.5}
        {"step":2,"loss":1.5}
        {"step":3,"loss":1.5}
    """
    path = Path(path)
    last_step = step
    last_values: dict[str, Any] = {}
    rewind_jsonl(path, step)
    with contextlib.ExitStack() as stack:
        append = stack.enter_context(_open_appender(path, log))

        def go_back(step: int) -> None:
            nonlocal append
            stack.close()  # the file may be replaced by another
            try:
                rewind_jsonl(path, step)
                append = stack.enter_context(_open_appender(path, log))
            except DiskError as error:
                if log is None:
                    raise
                log(str(error))

        def write(step: int, values: Mapping[str, Any]) -> None:
            nonlocal last_step, last_values
            # A step that comes again replaces its line and all later ones, after a roll-back; one
            # that only has new names, such as an evaluation's, is joined with its line.
            if step == last_step and is_more(last_values, values):
                last_values = {**last_values, **values}
            else:
                last_values = dict(values)
            if step <= last_step:
                go_back(step - 1)
            append({"step": step, **last_values})
            last_step = step

        yield write


class WriteEvent(Protocol):
    """Add a line with a name, the time and these facts to events.jsonl."""

    def __call__(self, name: str, **facts: Any) -> None: ...


@contextlib.contextmanager
def open_events(path: str | Path, *, log: Log | None = None) -> Iterator[WriteEvent]:
    """Yield `event(name, **facts)`, which appends `{"time": ..., "event": name, ...}`.

    For everything that is not a step: evaluations, saves, restarts. `time` is in seconds since
    1970. Nothing is ever removed except a torn last line: events of steps that a restart repeats
    appear twice.

    Args:
        path: The file, created if it does not exist.
        log: For problems, as in `open_jsonl`.

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
        # A kill may have torn the last line; a disk that lost its cache may have zeroed several.
        if path.is_file():
            lines = path.read_bytes().splitlines(keepends=True)
            while lines and not (lines[-1].endswith(b"\n") and _parse_line(lines[-1])):
                lines.pop()
            _truncate(path, sum(map(len, lines)))
    with _open_appender(path, log) as append:

        def event(name: str, **facts: Any) -> None:
            append({"time": time.time(), "event": name, **facts})

        yield event


def is_more(written: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether values add to those written for the same step, as an evaluation's do.

    If a name appears in both, the step was repeated.

    Examples:
        >>> is_more({"loss": 2.0}, {"eval/loss": 2.5}), is_more({"loss": 2.0}, {"loss": 2.0})
        (True, False)
    """
    return bool(written) and written.keys().isdisjoint(values)


def repair_jsonl(text: bytes, step: int) -> bytes:
    r"""Return the lines of a metrics file up to `step`, each step once, in rising order.

    Lines that are not complete JSON objects with an integer `step` are dropped: a torn last line,
    or the zeros that a lost disk cache leaves.

    Examples:
        >>> repair_jsonl(b'{"step":1}\n{"step":2}\n{"step":3}\n{"ste', step=2)
        b'{"step":1}\n{"step":2}\n'
    """
    lines: list[bytes] = []
    last = -1
    for line in text.split(b"\n"):
        number = _read_step(line)
        if number is not None and last < number <= step:
            lines.append(line + b"\n")
            last = number
    return b"".join(lines)


def rewind_jsonl(path: str | Path, step: int) -> Rewound:
    """Make a metrics file end with `step`, as `repair_jsonl` does.

    A file that is intact up to there is truncated, any other replaced.

    Args:
        path: The file; if it does not exist, nothing happens.
        step: The last step that may have a line.

    Returns:
        How many lines are left, how many steps beyond `step` had one, and how many steps between
        the first line and `step` have none.

    Raises:
        DiskError: The file cannot be read, truncated or replaced.

    Effects:
        Truncates the file, or replaces it by a rename.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "metrics.jsonl"
        ...     with open_jsonl(path) as sink:
        ...         for step in range(1, 6):
        ...             sink(step, {})
        ...     rewind_jsonl(path, 3)
        Rewound(retained=3, dropped=2, missing=0)
    """
    path = Path(path)
    if not path.is_file():  # reading a device such as /dev/stdout would never end
        return Rewound()
    with convert_disk_errors(path, by="rewind_jsonl"):
        text = path.read_bytes()
        repaired = repair_jsonl(text, step)
        # Truncating needs no room, which a full disk does not have.
        if text.startswith(repaired):
            _truncate(path, len(repaired))
        else:
            with atomic_write(path, by="rewind_jsonl") as file:
                file.write(repaired)
    retained = repaired.count(b"\n")
    first = _read_step(repaired.partition(b"\n")[0]) or 0
    newest = max((_read_step(line) or 0 for line in text.split(b"\n")), default=0)
    missing = step - first + 1 - retained if retained else 0
    return Rewound(retained=retained, dropped=max(0, newest - step), missing=missing)


def fsync_jsonl(run_dir: str | Path) -> None:
    """Wait until the lines of a run are on the disk; never raises.

    Called before a checkpoint is committed: a power cut then loses no lines of steps that no
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
    r"""Return the steps of a run in order, each with the evaluation that followed it.

    These are the lines of metrics.jsonl, joined with the evaluations of events.jsonl as
    `eval/NAME`. Lines and evaluations that a restart or a roll-back has discarded are left out, and
    so is a torn last line. An evaluation of a step without a line, such as step 0, has a line of
    its own.

    Args:
        run_dir: A run directory; one that does not exist has no steps.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:
        ...     _ = Path(run, "metrics.jsonl").write_text('{"step":1,"loss":5.5}\n{"step":2,"lo')
        ...     line = '{"event":"evaluation","step":1,"eval/loss":5.25}\n'
        ...     _ = Path(run, "events.jsonl").write_text(line)
        ...     read_metrics(run)
        [{'step': 1, 'loss': 5.5, 'eval/loss': 5.25}]
    """
    run_dir = Path(run_dir)
    return join_evaluations(
        read_jsonl(run_dir / "metrics.jsonl"), read_jsonl(run_dir / "events.jsonl")
    )


def compare_evaluations(run_dir: str | Path, metric: str) -> dict[str, Any]:
    """Return the first and the last evaluation of a run, as the fields of an event "result".

    Args:
        run_dir: A run directory.
        metric: The name in `read_metrics`, such as "eval/loss".

    Returns:
        {"metric": ..., "before": ..., "after": ...}; None where nothing was evaluated.

    Examples:
        >>> compare_evaluations("no/such/run", "eval/loss")
        {'metric': 'eval/loss', 'before': None, 'after': None}
    """
    values = [line[metric] for line in read_metrics(run_dir) if metric in line] or [None]
    return {"metric": metric, "before": values[0], "after": values[-1]}


def join_evaluations(
    metrics: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl with the evaluations of events.jsonl: see `read_metrics`.

    Examples:
        >>> events = [
        ...     {"event": "evaluation", "step": 2, "eval/loss": 9.0},
        ...     {"event": "rewind", "step": 1},
        ... ]
        >>> join_evaluations([{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}], events)
        [{'step': 1, 'loss': 2.5}, {'step': 2, 'loss': 2.25}]
    """
    evaluations: dict[int, dict[str, Any]] = {}
    for event in events:
        if (step := _get_step(event)) is None:
            continue
        if event.get("event") in ("start", "rewind"):  # later steps were repeated from here
            evaluations = {done: values for done, values in evaluations.items() if done <= step}
        elif event.get("event") == "evaluation":
            evaluations[step] = {name: x for name, x in event.items() if name.startswith("eval/")}
    lines = {step: line for line in metrics if (step := _get_step(line)) is not None}
    for step, values in evaluations.items():
        lines[step] = lines.get(step, {"step": step}) | values
    return [lines[step] for step in sorted(lines)]


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON objects; a file that does not exist has none.

    Examples:
        >>> read_jsonl("no/such/file.jsonl")
        []
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [value for line in lines if (value := _parse_line(line))]


# ------------------------------------------------------------------------------------ writing


@contextlib.contextmanager
def _open_appender(path: Path, log: Log | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that appends a line, or stores it until the disk has room.

    With `log` the first problem of each kind is logged; without it problems are raised.
    """
    reported: set[str] = set()

    def report(kind: str, error: Exception) -> None:
        if log is None:
            raise error
        if kind not in reported:
            reported.add(kind)
            log(str(error))

    with convert_disk_errors(path, by="sinks"):
        is_new = not path.exists()
        file = _open(path)
        # Without it a power cut may lose the name of a file whose lines are on the disk.
        if is_new:
            fsync_folder(path.parent)
    put, finish = _make_writer(file, path, report)
    try:
        yield lambda line: put(_format_line(line, path.name, report))
    except BaseException:
        with contextlib.suppress(DiskError):  # the error that is under way matters more
            finish()
        raise
    finish()


def _open(path: Path) -> int:
    # With O_APPEND lines follow the end of a file that somebody has truncated meanwhile.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _make_writer(
    file: int, path: Path, report: Report
) -> tuple[Callable[[bytes], None], Callable[[], None]]:
    """Return `put(line)` and `finish()`: lines are written complete and in order, now or later."""
    waiting = bytearray()
    num_lost = 0
    is_open = True  # once closed, another file may have this one's number
    lock = threading.Lock()  # events may come from threads

    def drain() -> None:
        try:
            with convert_disk_errors(path, by="sinks", needed=len(waiting)):
                _recreate_if_removed(file, path, report)
                while waiting:  # a disk that fills up accepts part of a write
                    del waiting[: os.write(file, waiting)]
        except DiskError as error:
            report(
                "disk",
                DiskError(
                    f"{error.what}; lines wait in memory until there is room",
                    where=path,
                    got=error.got,
                    want=error.want,
                ),
            )

    def put(line: bytes) -> None:
        nonlocal num_lost
        with lock:
            if is_open and len(waiting) + len(line) <= _MAX_WAITING:
                waiting.extend(line)
            else:
                num_lost += 1
            if is_open:
                drain()

    def finish() -> None:
        nonlocal is_open
        with lock, contextlib.suppress(OSError, DiskError):  # reported below, as lost lines
            try:
                drain()
            finally:
                is_open = False
                os.close(file)
        if missing := waiting.count(b"\n") + num_lost:
            report("lost", DiskError(f"sinks: {path} lacks its last {missing} lines", where=path))

    return put, finish


def _recreate_if_removed(file: int, path: Path, report: Report) -> None:
    """Let the descriptor of a file that was removed, or whose folder was, refer to a new file."""
    # A file that is open has no name left once it is removed.
    if os.fstat(file).st_nlink:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _open(path)
    # The number stays, so that the writer goes on unchanged.
    os.dup2(new, file, inheritable=False)
    os.close(new)
    report(
        "removed",
        DiskError(
            f"sinks: {path} was removed while the run goes on: its lines up to now are lost",
            where=path,
        ),
    )


def _format_line(line: Mapping[str, Any], name: str, report: Report) -> bytes:
    """Return a line of strict JSON; a value that is not plain becomes its type's name."""
    # Nearly all lines are plain, so the slow conversion below runs only after a failure.
    with contextlib.suppress(TypeError):
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    odd: dict[str, str] = {}
    plain = {_to_text(key): _to_plain(value, key, odd) for key, value in line.items()}
    if odd:
        report(
            "value",
            ValueError(
                f"{name}: a line takes plain numbers and strings (see trainkit.to_host), got {odd}"
            ),
        )
    return orjson.dumps(plain, option=orjson.OPT_APPEND_NEWLINE)


def _to_plain(value: Any, name: str, odd: dict[str, str]) -> Any:
    """Return a value that orjson takes, and add its name to `odd` if there is none."""
    plain: Any
    match value.item() if isinstance(value, np.generic) else value:
        case None | bool() as plain:
            pass
        case str() as text:
            plain = _to_text(text)
        # orjson takes int64 and uint64.
        case int() as number if not -(1 << 63) <= number < 1 << 64:
            plain = hex(number)
        case int() | float() as number:
            plain = number + 0  # turns a subclass into a plain int or float
        case list() | tuple() as parts:
            plain = [_to_plain(part, name, odd) for part in parts]
        case Mapping() as parts:
            plain = {_to_text(key): _to_plain(part, name, odd) for key, part in parts.items()}
        case other:
            plain = odd[name] = f"<{type(other).__name__}>"
    return plain


def _to_text(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------ repairing


def _truncate(path: Path, size: int) -> None:
    if path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())


def _read_step(line: bytes) -> int | None:
    return _get_step(_parse_line(line))


def _get_step(record: Mapping[str, Any]) -> int | None:
    step = record.get("step")
    return step if type(step) is int else None  # a bool is no step


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the object of a line, empty if it is not an object."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
