"""The state of runs, read from their directories alone, not from their processes.

A run that is under way holds `lock` and writes a beat for each rank about once a second; one that
has ended has left an event "end". What is neither was killed. Without torch, and from the ends of
files: a folder of 200 runs takes half a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import orjson

from trainkit.files import open_regular
from trainkit.run.clocks import START
from trainkit.run.peers import SILENT_AFAR, Member, is_gone
from trainkit.types import ConfigError, Layout

State = Literal["running", "ended", "stopped", "died", "refused", "stale", "unknown"]
"""running: it shows signs of life; ended: it took its last step; stopped: it can be resumed; died:
it failed or was killed; refused: it has never started; stale: it neither ended nor shows a sign of
life; unknown: its files cannot be read."""

OVER: frozenset[State] = frozenset({"ended", "stopped", "died", "refused"})
"""The states of a run in which no process trains any more."""

_SIGNS = ("lock", "metrics.jsonl", "events.jsonl", "run.json", "config.toml", "final.json", "ranks")
_KILLED = 'it was killed: it has left no event "end"'
_DEPTH = 3  # folders below the one that is listed
_TAIL = 1 << 16  # bytes from the end of a file that are read first
_MAX_CONFIG = 1 << 16  # bytes


@attrs.frozen(kw_only=True)
class RunStatus:
    """What a run directory says about its run; None where it says nothing.

    `step` of `last` steps are done, with this `loss` of the last one; `age` is the seconds since
    the run last wrote a line, and `why` how it ended, or what cannot be read.
    """

    path: Path
    state: State
    step: int | None = None
    last: int | None = None
    loss: float | None = None
    age: float | None = None
    ranks: int | None = None
    layout: str | None = None
    why: str | None = None


def find_runs(folder: str | Path) -> list[Path]:
    """Return the run directories in a folder and at most two folders below; or the folder itself.

    Args:
        folder: A folder of runs, or a run directory.

    Raises:
        ConfigError: It is not a directory, or cannot be read.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("sweep/a", "b", "cache"):
        ...         Path(folder, name).mkdir(parents=True)
        ...     for name in ("sweep/a", "b"):
        ...         _ = Path(folder, name, "config.toml").write_text("seed = 1")
        ...     [str(path.relative_to(folder)) for path in find_runs(folder)]
        ['b', 'sweep/a']
    """
    folder = Path(folder)
    try:
        inside = list(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"runs: {folder} cannot be listed: {error.strerror}",
            where=str(folder),
            hint="name a folder of runs, or a run directory",
        ) from error
    return [folder] if _is_run(inside) else sorted(_walk(inside, _DEPTH - 1))


def _is_run(inside: Iterable[Path]) -> bool:
    return any(path.name in _SIGNS for path in inside)


def _walk(paths: Iterable[Path], depth: int) -> Iterator[Path]:
    for path in paths:
        try:
            inside = list(path.iterdir())
        except PermissionError:  # another user's, perhaps a run: it is listed as unknown
            yield path
        except OSError:  # no directory
            continue
        else:
            if _is_run(inside):
                yield path
            elif depth:
                yield from _walk(inside, depth - 1)


def read_run_status(run_dir: str | Path) -> RunStatus:
    r"""Return the state of a run from the files of its directory.

    A run on this host whose process is gone has died. Of a process on another host nothing is
    known: its run is "stale" when no rank has written a beat for 65 seconds, which a shared disk
    may take to show it.

    Args:
        run_dir: The run directory.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:
        ...     _ = Path(run, "metrics.jsonl").write_text('{"step":7,"loss":2.5}\n')
        ...     _ = Path(run, "events.jsonl").write_text(
        ...         '{"event":"start","step":0,"ranks":2,"last":9}\n'
        ...         '{"event":"stop","step":7,"why":"SIGTERM on rank 0"}\n'
        ...         '{"event":"end","step":7,"failure":null}\n'
        ...     )
        ...     status = read_run_status(run)
        >>> status.state, status.step, status.last, status.loss, status.why
        ('stopped', 7, 9, 2.5, 'SIGTERM on rank 0')
    """
    run_dir = Path(run_dir)
    try:
        events = _read_last_start(run_dir / "events.jsonl")
        lines = _parse_lines(_read_tail(run_dir / "metrics.jsonl", _TAIL))
        is_locked = (run_dir / "lock").exists()
        state, why = _judge_lock(run_dir, events) if is_locked else _judge_end(run_dir, events)
    except OSError as error:
        why = f"{error.filename or run_dir} cannot be read: {error.strerror}"
        return RunStatus(path=run_dir, state="unknown", why=why.removeprefix(f"{run_dir}/"))
    start: dict[str, Any] = events[0] if events else {}
    line = lines[-1] if lines else start
    ranks = _get_count(start, "ranks")
    layout, problem = _read_layout(run_dir, ranks)
    return RunStatus(
        path=run_dir,
        state=state,
        step=_get_count(line, "step"),
        last=_get_count(start, "last"),
        loss=_read_loss(line),
        age=_measure_silence(run_dir / "metrics.jsonl", run_dir / "events.jsonl"),
        ranks=ranks,
        layout=layout,
        why="; ".join(text for text in (why, problem) if text) or None,
    )


def describe_status(status: RunStatus) -> str:
    """Return the state of a run, and why it has it.

    Examples:
        >>> describe_status(RunStatus(path=Path("runs/a"), state="died", why="DataError"))
        'died: DataError'
    """
    return status.state if status.why is None else f"{status.state}: {status.why}"


def _judge_end(run_dir: Path, events: list[dict[str, Any]]) -> tuple[State, str | None]:
    """Return how a run without a lock has ended, and why, from its beats and its last events."""
    failure = _read_json(run_dir / "ranks" / "failure.json")  # of the last process, never older
    beat = _read_json(run_dir / "ranks" / "rank_00000.json")
    state, why = _judge_events(events)
    # Had that start taken a step, the failure would be in its events too.
    if failure.get("refused") and state != "died":
        refusal = str(failure.get("what")).removeprefix("failed: ")
        refusal = refusal.removesuffix(f" (in phase {START!r})")
        if not events:
            return "refused", refusal
        return state, f"{why + '; ' if why else ''}the last start was refused: {refusal}"
    if state == "ended" and beat.get("phase") == START:
        return "ended", None  # the failure is of a later start, which took no step
    if failure:
        return "died", _describe_failure(failure)
    if beat.get("state") == "failed":
        return "died", f"failed in phase {beat.get('phase')!r}"
    return ("died", _KILLED) if beat and not events else (state, why)


def _judge_events(events: list[dict[str, Any]]) -> tuple[State, str | None]:
    """Return how the last start that took steps has ended, and why."""
    ends = {str(event.get("event")): event for event in events}
    if not events:
        return "unknown", "it has no events"
    if "end" not in ends:
        return "died", _KILLED
    if failure := ends["end"].get("failure"):
        return "died", str(failure)
    return ("stopped", str(ends["stop"].get("why"))) if "stop" in ends else ("ended", None)


def _describe_failure(failure: Mapping[str, Any]) -> str:
    return f"rank {failure.get('rank')} {failure.get('what')}"


def _judge_lock(run_dir: Path, events: list[dict[str, Any]]) -> tuple[State, str | None]:
    """Return whether the owner of a lock is alive, as far as that can be known from here."""
    holder = _read_json(run_dir / "lock")
    host, pid = str(holder.get("host")), holder.get("pid")
    member = Member(0, host, host, pid if isinstance(pid, int) else 0, started="")
    if holder and is_gone(member, here=socket.gethostname()):
        # A launcher kills the other ranks when one has ended: the cause is what that one wrote.
        if _read_json(run_dir / "ranks" / "failure.json"):
            return _judge_end(run_dir, events)
        return "died", f"it was killed: process {pid} on {host} is gone"
    silence = _measure_silence(run_dir / "lock", *(run_dir / "ranks").glob("rank_*.json"))
    if silence is not None and silence > SILENT_AFAR:
        return "stale", f"no sign of life of process {pid} on {host} for {format_age(silence)}"
    return "running", None


# ------------------------------------------------------------------------------------ files


def _read_tail(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of a file from the start of a line; nothing without a file."""
    if not path.exists():
        return b""
    with open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        file.seek(max(0, length - size))
        data = file.read(size)
    return data if size >= length else data.partition(b"\n")[2]


def _read_last_start(path: Path) -> list[dict[str, Any]]:
    """Return the events of the last process of a run, from its "start" on."""
    size = _TAIL
    while True:
        data = _read_tail(path, size)
        start = data.rfind(b'"event":"start"')
        if start >= 0:
            return _parse_lines(data[data.rfind(b"\n", 0, start) + 1 :])
        if not path.exists() or size >= path.stat().st_size:
            return []
        size *= 16


def _parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the complete JSON objects among some lines."""
    found = []
    for line in data.split(b"\n"):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Return a small file's object, empty if it is missing or no object."""
    with contextlib.suppress(OSError):
        return next(iter(_parse_lines(_read_tail(path, _TAIL))), {})
    return {}


def _get_count(record: Mapping[str, Any], name: str) -> int | None:
    value = record.get(name)
    return value if type(value) is int else None


def _read_loss(line: Mapping[str, Any]) -> float | None:
    """Return the loss of a line; JSON has no NaN, which only `loss_hex` shows."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return float.fromhex(line["loss_hex"]) if line["loss"] is None else float(line["loss"])
    return None


def _read_layout(run_dir: Path, ranks: int | None) -> tuple[str | None, str | None]:
    """Return the layout of config.toml in words, and what is wrong with that file."""
    path = run_dir / "config.toml"
    if not path.exists():
        return (None if ranks is None else f"{ranks} rank{'s' * (ranks != 1)}"), None
    names = attrs.fields_dict(Layout)
    try:
        table = tomllib.loads(_read_tail(path, _MAX_CONFIG).decode())
        layout = Layout(**{name: x for name, x in table.items() if name in names})
        return str(layout.over(ranks or layout.world)), None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return None, f"config.toml cannot be read: {str(error).splitlines()[0]}"


def _measure_silence(*paths: Path) -> float | None:
    """Return the seconds since one of some files was written, None if there is none."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None


def format_age(seconds: float | None) -> str:
    """Return some seconds in the largest unit of which there are two, in at most four characters.

    Examples:
        >>> [format_age(x) for x in (8.2, 119, 130, 7300, 200_000, None)]
        ['8s', '119s', '2m', '2h', '2d', '-']
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"
