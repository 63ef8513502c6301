"""Metrics and events as lines of strict JSON, one object each, that survive being killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from trainkit.types import Sink


@contextlib.contextmanager
def jsonl(path: str | Path, *, step: int = 0) -> Iterator[Sink]:
    """Yield a sink that appends one line per step, `{"step": 1, ...}`, and flushes it.

    NaN and infinities, which JSON lacks, become null; the `_hex` twins of `metrics.step_record`
    tell which.

    Args:
        path: The file, made if need be.
        step: The step that the run goes on from: lines beyond it, and a torn last line, are
            dropped (see `repair_jsonl`), so that after any restart each step has exactly one line.

    Raises:
        ValueError: A value is not a plain number, string, bool, None, or list or dict of these.

    Effects:
        Repairs the file through a new one and a rename; then only appends to it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for begin in (0, 1):  # the second run goes on from step 1
        ...         with jsonl(f"{folder}/metrics.jsonl", step=begin) as sink:
        ...             for step in range(begin, begin + 2):
        ...                 sink(step + 1, {"loss": 1.5})
        ...     print(Path(f"{folder}/metrics.jsonl").read_text(), end="")
        {"step":1,"loss":1.5}
        {"step":2,"loss":1.5}
        {"step":3,"loss":1.5}
    """
    with _repaired(Path(path), lambda text: repair_jsonl(text, step)) as append:

        def write(step: int, values: Mapping[str, Any]) -> None:
            append({"step": step, **values})

        yield write


@contextlib.contextmanager
def events(path: str | Path) -> Iterator[Callable[..., None]]:
    """Yield `event(name, **facts)`, which appends `{"time": ..., "event": name, ...}` and flushes.

    For what is no step: evaluations, saves, restarts. `time` is in seconds since 1970. Nothing is
    ever removed but a torn last line: steps that a restart repeats are told twice.

    Effects:
        Appends to the file, which it makes if need be.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with events(f"{folder}/events.jsonl") as event:
        ...         event("evaluation", step=100, loss=1.5)
        ...     print(Path(f"{folder}/events.jsonl").read_text(), end="")
        {"time":...,"event":"evaluation","step":100,"loss":1.5}
    """
    with _repaired(Path(path), _whole_lines) as append:

        def event(name: str, **facts: Any) -> None:
            append({"time": time.time(), "event": name, **facts})

        yield event


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
        number = _parsed(line).get("step")
        if type(number) is int and last < number <= step:
            kept.append(line + b"\n")
            last = number
    return b"".join(kept)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON objects; a missing file has none.

    Examples:
        >>> read_jsonl("no/such/file.jsonl")
        []
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [value for line in lines if (value := _parsed(line))]


@contextlib.contextmanager
def _repaired(
    path: Path, repair: Callable[[bytes], bytes]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Repair a file of lines and yield a function that appends one."""
    old = path.read_bytes() if path.exists() else b""
    if (new := repair(old)) != old:
        _replace(path, new)
    with path.open("ab") as file:

        def append(line: Mapping[str, Any]) -> None:
            try:
                data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
            except TypeError as error:
                kinds = {name: type(value).__name__ for name, value in line.items()}
                raise ValueError(
                    f"{path.name}: a line takes plain numbers and strings (see trainkit.to_host),"
                    f" got {kinds}: {error}"
                ) from error
            file.write(data)
            file.flush()

        yield append


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _whole_lines(text: bytes) -> bytes:
    return text[: text.rfind(b"\n") + 1]


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the object of a line, empty if it is none."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
