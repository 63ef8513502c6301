"""Read what a run has written, whole or not: what cannot be read is counted and named."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from trainkit.files import convert_disk_errors
from trainkit.run.sinks.jsonl import join_evaluations
from trainkit.run.status import RunStatus, read_run_status
from trainkit.types import DataError

_FILES = ("metrics.jsonl", "events.jsonl", "layers.jsonl", "config.toml", "run.json", "final.json")
_LARGEST_FILE = 4 << 30  # bytes; no metrics file is larger, and a page of it would not open

# No run is longer; products of steps with numbers of columns stay far below 2^63.
_LARGEST_STEP = 1 << 40

Line = dict[str, Any]


@attrs.frozen(eq=False)
class RunFiles:
    """The files of a run directory, parsed.

    `metrics` has a line for each step, in rising order, with the evaluations as `eval/NAME`;
    `events` and `layers` are in the order of the files. `status` is from `read_run_status`.
    `notes` says what was left out, and why.
    """

    path: Path
    metrics: list[Line] = attrs.field(factory=list)
    events: list[Line] = attrs.field(factory=list)
    layers: list[Line] = attrs.field(factory=list)
    config: Mapping[str, Any] = attrs.field(factory=dict)
    status: RunStatus = attrs.Factory(
        lambda run: RunStatus(path=run.path, state="unknown"), takes_self=True
    )
    notes: list[str] = attrs.field(factory=list)


def read_run(run_dir: str | Path) -> RunFiles:
    r"""Read a run directory.

    Files that are missing, cut, mixed with other text or written by another program are no error:
    lines that are whole are used, and the others counted in `notes`. A step that stands in the file
    several times counts once, with its last line, as after a restart.

    Args:
        run_dir: A run directory.

    Raises:
        DataError: The directory does not exist, or holds no file of a run.
        DiskError: A file cannot be read.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "metrics.jsonl").write_text('{"step":1,"loss":5.5}\n{"step":2,"lo')
        ...     run = read_run(folder)
        >>> run.metrics, run.notes
        ([{'step': 1, 'loss': 5.5}], ['metrics.jsonl: the last line is cut (13 bytes)'])
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise DataError(
            f"read_run: {path} is no run directory; pass the folder that a recipe got as --out",
            where=str(path),
        )
    # A wrong folder would give an empty page, which is no answer to a typing mistake.
    if not any((path / name).is_file() for name in _FILES):
        raise DataError(
            f"read_run: {path} holds none of {', '.join(_FILES)}; pass the run directory itself",
            where=str(path),
        )
    notes: list[str] = []
    lines = _keep_steps(_read_lines(path / "metrics.jsonl", notes), notes)
    events = _keep_events(_read_lines(path / "events.jsonl", notes), notes)
    return RunFiles(
        path=path,
        metrics=join_evaluations(lines, events),
        events=events,
        layers=_read_lines(path / "layers.jsonl", notes),
        config=_read_config(path / "config.toml", notes),
        status=read_run_status(path),
        notes=notes,
    )


def _read_lines(path: Path, notes: list[str]) -> list[Line]:
    """Return the objects of a file of lines, and note what else it holds."""
    if not path.is_file():
        return []
    with convert_disk_errors(path, by="read_run"):
        if path.stat().st_size > _LARGEST_FILE:
            notes.append(f"{path.name}: left out, as it is larger than {_LARGEST_FILE >> 30} GiB")
            return []
        *whole, rest = path.read_bytes().split(b"\n")
    odd = Counter[str]()
    records: list[Line] = []
    for line in [*whole, rest]:
        record = _parse_line(line)
        if isinstance(record, dict):
            records.append(record)
        elif line is not rest and line.strip():
            odd[record] += 1
    notes += [f"{path.name}: {format_count(n, 'line')} left out ({x})" for x, n in odd.items()]
    # The last line may be under way.
    if rest and not isinstance(_parse_line(rest), dict):
        notes.append(f"{path.name}: the last line is cut ({len(rest)} bytes)")
    return records


def _parse_line(line: bytes) -> Line | str:
    """Return the object of a line, or what stands there instead."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "no JSON" if line.strip(b"\0") else "zero bytes"
    return record if isinstance(record, dict) else "JSON, but no object"


def _keep_steps(lines: list[Line], notes: list[str]) -> list[Line]:
    """Return the lines that have a step, with 3.0 and "3" read as 3, and note the others."""
    whole: list[Line] = []
    for line in lines:
        step = _to_integer(line.get("step"))
        if step is not None:
            whole.append(line if step is line["step"] else {**line, "step": step})
    if dropped := len(lines) - len(whole):
        notes.append(
            f"metrics.jsonl: {format_count(dropped, 'line')} left out (no step; from "
            "another program or version)"
        )
    again = len(whole) - len({line["step"] for line in whole})
    if again:
        notes.append(
            f"metrics.jsonl: {format_count(again, 'line')} replaced by later ones of their step"
        )
    return whole


def _keep_events(lines: list[Line], notes: list[str]) -> list[Line]:
    """Return the lines that have a name and a time; a step that is no integer is removed."""
    whole: list[Line] = []
    # What reads events below, here and in sinks, may rely on these three.
    for line in lines:
        time = line.get("time")
        if not isinstance(line.get("event"), str) or type(time) not in (int, float):
            continue
        step = _to_integer(line.get("step"))
        whole.append({key: x for key, x in line.items() if key != "step"})
        if step is not None:
            whole[-1]["step"] = step
    if dropped := len(lines) - len(whole):
        notes.append(f"events.jsonl: {format_count(dropped, 'line')} left out (no name or no time)")
    return whole


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        with convert_disk_errors(path, by="read_run"):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # DiskError, bad UTF-8 or bad TOML: a page without it is worth more
        notes.append(f"config.toml: left out ({error})")
        return {}


def _to_integer(value: Any) -> int | None:
    """Return a step as it is, or from a float or digits; None if it is none of these."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        value = int(value)
    if type(value) not in (int, float) or not abs(value) < _LARGEST_STEP:
        return None
    return int(value) if value == int(value) else None


def format_count(number: int, noun: str) -> str:
    """Return a number of things in words.

    Examples:
        >>> format_count(1, "line"), format_count(2000, "line")
        ('1 line', '2,000 lines')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
