"""The top of the page: the state of a run, its figures, and what ran where."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs

from trainkit.run.sinks.timing import measure_goodput
from trainkit.tools.pictures.mesh import mesh_places
from trainkit.tools.report.axes import limit_text, to_number
from trainkit.tools.report.happenings import list_hosts, list_software
from trainkit.tools.report.read import Line, RunFiles
from trainkit.types import Layout

_SILENT_AFTER = 120.0  # seconds without a line, as long as a step is short
_RECENT = 100  # lines whose median is shown
_LARGEST_WORLD = 1 << 31  # of ranks that a file may claim
_MOST_RANKS = 64  # of a layout that is drawn rank by rank


def describe_state(run: RunFiles, *, now: float) -> dict[str, str]:
    """Return whether a run is running, finished, stopped, failed or silent, with a sentence.

    Silent is a run that has written no end, and nothing for two minutes or twenty steps.

    Args:
        run: From `read_run`.
        now: Unix seconds.

    Examples:
        >>> end = [{"time": 1.0, "event": "end", "failure": "DataError"}]
        >>> describe_state(RunFiles("runs/mine", [], end, [], {}, None, 0.0, []), now=9.0)
        {'kind': 'failed', 'text': 'failed: DataError'}
    """
    if run.final is not None:
        return {"kind": "finished", "text": "finished"}
    since_start: list[Line] = []
    for event in run.events:
        since_start = [] if event["event"] == "start" else [*since_start[-9:], event]
    last = {event["event"]: event for event in since_start}
    if failure := last.get("end", {}).get("failure"):
        return {"kind": "failed", "text": limit_text(f"failed: {failure}")}
    if "stop" in last:
        why = last["stop"].get("why") or last["stop"].get("reason")
        return {"kind": "stopped", "text": limit_text(f"stopped: {why}")}
    if "end" in last:
        return {"kind": "stopped", "text": "ended before its last step"}
    silence = now - run.touched
    if silence > max(_SILENT_AFTER, 20 * (get_recent(run.metrics, "seconds") or 0.0)):
        return {"kind": "silent", "text": f"no sign of life for {_format_duration(silence)}"}
    return {"kind": "running", "text": "running" if run.metrics else "starting"}


def summarize(run: RunFiles) -> dict[str, Any]:
    """Return the figures at the top of the page; None where a run has none.

    Throughput, utilization and step time are medians of the last 100 lines; `share` is the goodput
    (`sinks.measure_goodput`), whose other fields have their names.
    """
    lines = run.metrics
    starts = [event for event in run.events if event["event"] == "start"]
    numbers: dict[str, Any] = {
        "step": lines[-1]["step"] if lines else 0,
        "last": _find_integer(starts, "last"),
        "ranks": _find_integer(starts, "ranks"),
        "loss": find_last(lines, "loss"),
        "evaluation": find_last(lines, "eval/loss"),
        "tokens": find_last(lines, "tokens_total"),
        "memory_rank": find_last(lines, "memory_rank"),
    }
    for name in ("tokens_per_second", "mfu", "hfu", "seconds"):
        numbers[name] = get_recent(lines, name)
    peaks = [x for line in lines if math.isfinite(x := to_number(line.get("memory_peak")))]
    numbers["memory"] = max(peaks, default=None)
    if starts and all("step" in event for event in starts):
        time = measure_goodput(_list_seconds(lines), [_keep_sane(event) for event in run.events])
        for name in ("share", "wall", "starts", "repeated", "saves"):
            numbers[name] = getattr(time, name)
    return numbers


def _list_seconds(lines: Sequence[Line]) -> list[Line]:
    seconds = [(line["step"], to_number(line.get("seconds"))) for line in lines]
    return [{"step": step, "seconds": x} for step, x in seconds if math.isfinite(x)]


def _keep_sane(event: Line) -> Line:
    """Return an event without values that `measure_goodput` could not add."""
    counted = ("repeated", "blocked")
    return {
        name: x for name, x in event.items() if name not in counted or math.isfinite(to_number(x))
    }


def _find_integer(events: Sequence[Line], name: str) -> int | None:
    return next((x for event in reversed(events) if type(x := event.get(name)) is int), None)


def find_last(lines: Sequence[Line], name: str) -> float | None:
    """Return the last value of a name, None if it is missing or no finite number."""
    for line in reversed(lines):
        if name in line:
            value = to_number(line[name])
            return value if math.isfinite(value) else None
    return None


def get_recent(lines: Sequence[Line], name: str) -> float | None:
    """Return the median of a name in the last lines, None if no line has it."""
    recent = [x for line in lines[-_RECENT:] if math.isfinite(x := to_number(line.get(name)))]
    return statistics.median(recent) if recent else None


def list_facts(run: RunFiles) -> list[list[str]]:
    """Return what the header says of a run, as pairs: model, optimizer, device, versions."""
    facts: dict[str, str] = {}
    for label, name in (("model", "init"), ("model", "size"), ("optimizer", "optimizer")):
        value = run.config.get(name)
        if isinstance(value, str) and value != "None":  # how config.toml writes None
            facts.setdefault(label, limit_text(value))
    hosts = list_hosts(run.events)
    devices = Counter(str(host["device"]) for host in hosts if host.get("device"))
    if devices:
        facts["device"] = limit_text(", ".join(devices))
        facts["hosts"] = str(len(hosts))
    software = dict(list_software(run.events))
    facts |= {name: software[name] for name in ("torch", "trainkit") if name in software}
    return [[label, value] for label, value in facts.items()]


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested configuration with names that are joined by dots.

    Examples:
        >>> list(flatten_config({"lr": 0.1, "logging": {"sinks": []}}))
        [('lr', 0.1), ('logging.sinks', [])]
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_layout(run: RunFiles, notes: list[str]) -> dict[str, Any] | None:
    """Return the ranks of a run as rows of cells `[text, width, shade]`; None for one rank.

    Each axis is a row, which divides the row above it. Below the ranks, `tokens` and `parameters`
    say which of them hold the same (`pictures.mesh_places`). Many ranks have no rows.

    Args:
        run: The degrees are those of its last event "host", or of its configuration.
        notes: A layout that is refused is appended.
    """
    starts = [event for event in run.events if event["event"] == "start"]
    try:
        layout = _make_layout(run, _find_integer(starts, "ranks") or 1)
    except ValueError as error:
        notes.append(f"layout: not drawn ({error})")
        return None
    if not 1 < layout.world < _LARGEST_WORLD:
        return None
    rows = _draw_layout(layout) if layout.world <= _MOST_RANKS else []
    return {"title": str(layout), "ranks": layout.world, "rows": rows}


def _make_layout(run: RunFiles, ranks: int) -> Layout:
    given = {name.rpartition(".")[2]: value for name, value in flatten_config(run.config)}
    for event in run.events:
        if event["event"] == "host" and isinstance(event.get("layout"), dict):
            given |= event["layout"]
    layout = Layout()
    for name in ("fold_sp", "ep_adjacent", *layout.degrees):
        if type(given.get(name)) is type(getattr(layout, name)):
            layout = attrs.evolve(layout, **{name: given[name]})
    if layout.dp_shard == -1:  # the rest of the ranks
        layout = attrs.evolve(layout, dp_shard=max(1, ranks // layout.world))
    return layout


def _draw_layout(layout: Layout) -> list[dict[str, Any]]:
    places = mesh_places(layout)
    degrees = [name for name in layout.axes["world"] if layout.count(name) > 1]
    rows: list[dict[str, Any]] = []
    for depth, name in enumerate(degrees, 1):
        indices = [tuple(place.index[axis] for axis in degrees[:depth]) for place in places]
        groups = [(index[-1], len(list(group))) for index, group in groupby(indices)]
        rows.append({"name": name, "cells": [[str(i), width, i % 2] for i, width in groups]})
    for name in ("rank", "tokens", "parameters"):
        cells = [[str(getattr(place, name)), 1, getattr(place, name)] for place in places]
        rows.append({"name": name, "cells": cells})
    if layout.ep > 1:
        cells = [[str(place.index["ep"]), 1, place.index["ep"]] for place in places]
        rows.append({"name": "experts", "cells": cells})
    return rows


def _format_duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
