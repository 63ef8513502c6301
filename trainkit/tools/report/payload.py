"""What the page draws, as plain values: curves, events, facts and pictures of one run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
import numpy as np
import orjson

from trainkit.run.plots.load import load_over_steps
from trainkit.run.sinks.timing import measure_goodput
from trainkit.tools.pictures.mesh import mesh_places
from trainkit.tools.report.read import Line, RunFiles
from trainkit.tools.report.thin import Buckets, make_buckets, round_values, thin_axis, thin_values
from trainkit.types import Layout

_MOST_BUCKETS = 2000  # of a curve, each with two points: more than a screen has pixels
_MOST_EVENTS = 1500
_MOST_COLUMNS = 240  # of a heat map
_MOST_NAMES = 400  # rows of a heat map
_MOST_SERIES = 300
_MOST_SAMPLES = 60
_MOST_TEXT = 4000  # characters of one sample or one message
_MOST_RANKS = 64  # of a layout, drawn one by one
_SILENT_AFTER = 120.0  # seconds without a line, as long as a step is short
_NO_CURVES = {"step", "time", "tokens_total", "skipped"}
_FREQUENT = ("save", "evaluation", "sample", "straggler", "rollout", "memory", "packing", "warning")

Position = tuple[float, float | None, float | None]
"""Where an event stands on the three axes: step, tokens, seconds since the start."""


def describe_run(run: RunFiles, *, now: float) -> dict[str, Any]:
    """Return what the page shows of a run, as plain values.

    Args:
        run: From `read_run`.
        now: Unix seconds: a run that has not ended counts as running if it was written lately.

    Returns:
        JSON values: `name`, `state`, `numbers`, `facts`, `x` (positions of the points on the three
        axes), `series`, `evaluations`, `marks`, `events`, `layers`, `experts`, `layout`, `samples`,
        `packing`, `config`, `software`, `notes`. A part that a run lacks is empty.

    Examples:
        >>> lines = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.25}]
        >>> run = RunFiles("runs/mine", lines, [], [], {}, None, 0.0, [])
        >>> page = describe_run(run, now=60.0)
        >>> page["series"]["loss"], page["numbers"]["step"], page["state"]["kind"]
        ({'v': [5.5, 5.25]}, 2, 'running')
    """
    notes = list(run.notes)
    axes = _Axes.of(run)
    if run.metrics and axes.seconds is None:
        notes.append("metrics.jsonl: no line has a time or seconds; there is no axis of wall time")
    buckets = make_buckets(len(axes.steps), limit=_MOST_BUCKETS)
    events = describe_events(run.events, axes, notes)
    return {
        "name": _clean(getattr(run.path, "name", str(run.path)) or str(run.path)),
        "path": _clean(str(run.path)),
        "state": describe_state(run, now=now),
        "numbers": _summarize(run),
        "facts": _list_facts(run),
        "start": axes.start,
        "every": 1 if buckets.edges is None else math.ceil(len(axes.steps) / _MOST_BUCKETS),
        "x": {
            name: None if x is None else thin_axis(x, buckets).round(3).tolist()
            for name, x in (("step", axes.steps), ("tokens", axes.tokens), ("time", axes.seconds))
        },
        "series": _thin_series(axes.lines, buckets, notes),
        "evaluations": _list_evaluations(run.metrics, axes),
        "marks": _mark_bad_steps(axes),
        "events": events,
        "layers": describe_layers(run.layers, axes, notes),
        "experts": _describe_experts(axes.lines, notes),
        "layout": describe_layout(run, notes),
        "samples": _list_samples(run.events, notes),
        "packing": [_describe_packing(event) for event in run.events if _is(event, "packing")],
        "config": [[key, _to_text(value)] for key, value in _flatten(run.config)],
        "software": _list_software(run.events),
        "notes": notes,
    }


# ------------------------------------------------------------------------------------ the axes


@attrs.frozen(eq=False)
class _Axes:
    """The lines of steps, and where each stands: `steps`, `tokens` and `seconds` since `start`."""

    lines: list[Line]
    steps: np.ndarray[Any, np.dtype[np.float64]]
    tokens: np.ndarray[Any, np.dtype[np.float64]] | None
    seconds: np.ndarray[Any, np.dtype[np.float64]] | None
    start: float | None

    @classmethod
    def of(cls, run: RunFiles) -> _Axes:
        # An evaluation of a step without a line, such as step 0, is no point of the curves.
        lines = [
            line
            for line in run.metrics
            if any(not key.startswith("eval/") for key in line if key != "step")
        ]
        steps = np.array([line["step"] for line in lines], dtype=np.float64)
        tokens = _get_numbers(lines, "tokens_total")
        times = _get_numbers(lines, "time")
        start = min(
            [event["time"] for event in run.events[:1]] + times[np.isfinite(times)][:1].tolist(),
            default=None,
        )
        if np.isfinite(times).any() and start is not None:
            seconds = _fill(times - start)
        else:  # a file of before lines had a time: the time that steps took
            worked = np.nan_to_num(_get_numbers(lines, "seconds"))
            seconds = np.cumsum(worked) if worked.any() else None
        return cls(
            lines, steps, _fill(tokens) if np.isfinite(tokens).any() else None, seconds, start
        )

    def locate(self, step: float | None, time: float | None) -> Position:
        """Return where something stands that happened at a step, or at a Unix time."""
        has_times = self.start is not None and self.lines and "time" in self.lines[-1]
        after = None if time is None or self.start is None else time - self.start
        if step is None:
            known = after is not None and self.seconds is not None and len(self.steps)
            step = float(np.interp(after, self.seconds, self.steps)) if known else 0.0
        if not len(self.steps):
            return step, None, after
        tokens = None if self.tokens is None else float(np.interp(step, self.steps, self.tokens))
        if not has_times or after is None:
            after = (
                None if self.seconds is None else float(np.interp(step, self.steps, self.seconds))
            )
        return step, tokens, None if after is None else round(after, 2)


def _get_numbers(
    lines: Sequence[Mapping[str, Any]], name: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a value of each line as fp64, NaN where it is missing or no number."""
    return np.array([_to_number(line.get(name)) for line in lines], dtype=np.float64)


def _to_number(value: Any) -> float:
    return value if type(value) in (int, float) else math.nan


def _fill(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return values that never fall, with gaps filled, as an axis needs them."""
    known = np.isfinite(x)
    filled = np.interp(np.arange(len(x)), np.flatnonzero(known), x[known])
    return np.maximum.accumulate(filled)


# ------------------------------------------------------------------------------------ curves


def _thin_series(lines: Sequence[Line], buckets: Buckets, notes: list[str]) -> dict[str, Any]:
    counts = Counter(key for line in lines for key, x in line.items() if type(x) in (int, float))
    names = [name for name in counts if name not in _NO_CURVES and not name.startswith("eval/")]
    if len(names) > _MOST_SERIES:
        notes.append(f"curves: {_MOST_SERIES} of {len(names)} are drawn, those with most values")
        names = sorted(names, key=lambda name: -counts[name])[:_MOST_SERIES]
    odd = {
        key
        for line in lines[:: max(1, len(lines) // 1000)]
        for key, x in line.items()
        if key in counts and type(x) not in (int, float, type(None))
    }
    if odd:
        notes.append(
            f"metrics.jsonl: values that are no numbers are gaps: {', '.join(sorted(odd)[:8])}"
        )
    series: dict[str, Any] = {}
    for name in names:
        values = _get_numbers(lines, name)
        if name.startswith("seconds/"):  # a phase that did not happen took no time
            values = np.nan_to_num(values)
        points, means = thin_values(values, buckets)
        series[_clean(name)] = {"v": round_values(points)}
        if means is not None:
            series[_clean(name)]["m"] = round_values(means)
    return series


def _list_evaluations(metrics: Iterable[Line], axes: _Axes) -> dict[str, Any]:
    """Return the results of evaluations by name: positions on the axes, and values."""
    lines = [line for line in metrics if any(key.startswith("eval/") for key in line)]
    names = sorted({key for line in lines for key in line if key.startswith("eval/")})
    if len(lines) > 2 * _MOST_BUCKETS:
        lines = [lines[i] for i in np.linspace(0, len(lines) - 1, 2 * _MOST_BUCKETS).astype(int)]
    return {
        _clean(name): {
            "x": [axes.locate(line["step"], None) for line in lines],
            "v": round_values(_get_numbers(lines, name)),
        }
        for name in names
        if name not in ("eval/tokens", "eval/pairs", "eval/answers")
    }


def _mark_bad_steps(axes: _Axes) -> list[dict[str, Any]]:
    """Return the steps that were skipped, and those whose loss or norm is no finite number."""
    marks: list[dict[str, Any]] = []
    before = 0.0
    for line in axes.lines:
        skipped = _to_number(line.get("skipped"))
        bad = [
            name
            for name in ("loss", "grad_norm")
            if name in line and not math.isfinite(_to_number(line[name]))
        ]
        if bad or skipped > before:
            kind = "nonfinite" if "loss" in bad else "skipped"
            values = {name: line.get(f"{name}_hex") or "no number" for name in bad}
            marks.append(
                {
                    "x": axes.locate(line["step"], None),
                    "t": x if math.isfinite(x := _to_number(line.get("time"))) else None,
                    "kind": kind,
                    "values": values,
                }
            )
        before = skipped if math.isfinite(skipped) else before
    return marks[-_MOST_EVENTS:]


# ------------------------------------------------------------------------------------ events


def describe_events(events: Sequence[Line], axes: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Return what happened, in order: the time, the place on the axes, a kind and a text.

    Kinds that happen often are thinned if there are too many, others never.
    """
    found: list[dict[str, Any]] = []
    ranks = None
    for event in events:
        name = event["event"]
        kind = _KINDS.get(name, name)
        if name == "start":
            count = event.get("ranks")
            kind = "start" if ranks is None else "restart" if count == ranks else "ranks"
            text = f"{ranks} ranks, then {count}" if kind == "ranks" else f"on {count} ranks"
            ranks = count
            if repeated := event.get("repeated"):
                text += f"; {repeated} steps are repeated"
        elif name == "end":
            kind, text = ("failure", str(event["failure"])) if event.get("failure") else ("end", "")
        elif name == "save" and event.get("error"):
            kind, text = "save failed", str(event["error"])
        else:
            text = _describe_facts(event)
        position = axes.locate(event.get("step"), event["time"])
        found.append(
            {"t": event["time"], "x": position, "kind": _clean(kind), "text": _clean(text)}
        )
    excess = len(found) - _MOST_EVENTS
    often = [i for i, event in enumerate(found) if event["kind"] in _FREQUENT]
    if excess > 0 and often:
        retained = max(len(often) - excess, 200)
        shown = set(np.linspace(0, len(often) - 1, min(retained, len(often))).astype(int).tolist())
        dropped = {i for n, i in enumerate(often) if n not in shown}
        found = [event for i, event in enumerate(found) if i not in dropped]
        notes.append(f"events: {len(dropped):,} of {len(events):,} left out, of those that repeat")
    return found


_KINDS = {"rolled back": "rollback", "apply": "spike"}
_NO_FACTS = ("time", "event", "step", "software")  # columns of the table, or another table
_LEADING = ("path", "reason", "why", "what", "prompt", "text")


def _describe_facts(event: Line) -> str:
    """Return the facts of an event as text: its reason or message first."""
    facts = {
        key: x
        for key, x in event.items()
        if key not in _NO_FACTS and x is not None and x not in ("", [], {})
    }
    if isinstance(facts.get("hosts"), list):  # what they are stands in the table of software
        facts["hosts"] = ", ".join(
            str(x.get("host")) for x in facts["hosts"] if isinstance(x, dict)
        )
    if isinstance(facts.get("path"), str):
        facts["path"] = facts["path"].rpartition("/")[2]
    leading = [str(facts.pop(key)) for key in _LEADING if key in facts]
    return " · ".join([*leading, *(_format_fact(key, x) for key, x in facts.items())])


def _format_fact(name: str, value: Any) -> str:
    """Return a name and a value; the values of a dict are its facts in turn."""
    name = name.removeprefix("eval/").replace("_", " ")
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {_to_text(x)}" for key, x in value.items())
        return f"{name}: {inner}"
    if type(value) is int:
        return f"{name} {value:,}"
    return f"{name} {_to_text(value)}"


def _list_samples(events: Iterable[Line], notes: list[str]) -> list[dict[str, Any]]:
    samples = [event for event in events if _is(event, "sample")]
    if len(samples) > _MOST_SAMPLES:
        notes.append(f"samples: the last {_MOST_SAMPLES} of {len(samples)}")
    return [
        {
            "step": event.get("step"),
            "prompt": _clean(str(event.get("prompt") or "")),
            "text": _clean(str(event.get("text") or "")),
        }
        for event in samples[-_MOST_SAMPLES:]
    ]


def _describe_packing(event: Line) -> dict[str, Any]:
    names = (
        "corpus",
        "rows",
        "tokens",
        "documents",
        "efficiency",
        "row_padding",
        "split_documents",
    )
    return {
        name: _clean(x) if isinstance(x := event[name], str) else _to_number(x)
        for name in names
        if name in event
    }


def _list_software(events: Iterable[Line]) -> list[list[str]]:
    """Return versions and hashes of the code, of the last start, and what hosts say of themselves."""
    found: dict[str, str] = {}
    for event in events:
        software = event.get("software")
        if isinstance(software, dict):
            found |= {str(key): _to_text(x) for key, x in software.items()}
        if _is(event, "host") and isinstance(event.get("hosts"), list):
            hosts = [host for host in event["hosts"] if isinstance(host, dict)]
            for key in sorted({key for host in hosts for key in host} - {"ranks"}):
                values = dict.fromkeys(_to_text(host[key]) for host in hosts if key in host)
                found[str(key)] = ", ".join(values)
    return [[_clean(key), _clean(x)] for key, x in found.items()]


# ------------------------------------------------------------------------------------ facts


def describe_state(run: RunFiles, *, now: float) -> dict[str, str]:
    """Return whether a run is running, finished, stopped, failed or silent, with a sentence."""
    silence = now - run.touched
    last = next(
        (e for e in reversed(run.events) if e["event"] in ("start", "stop", "end", "stopped")), {}
    )
    stop = next((e for e in reversed(run.events) if e["event"] in ("start", "stop")), {})
    if run.final is not None:
        return {"kind": "finished", "text": "finished"}
    if last.get("failure"):
        return {"kind": "failed", "text": f"failed: {_clean(str(last['failure']))}"}
    if stop.get("event") == "stop":
        return {"kind": "stopped", "text": f"stopped: {_clean(str(stop.get('why')))}"}
    if last.get("event") == "end":
        return {"kind": "stopped", "text": "ended before its last step"}
    recent = [
        x for line in run.metrics[-50:] if math.isfinite(x := _to_number(line.get("seconds")))
    ]
    if silence > max(_SILENT_AFTER, 20 * statistics.median(recent or [0.0])):
        return {"kind": "silent", "text": f"no sign of life for {_format_duration(silence)}"}
    return {"kind": "running", "text": "running" if run.metrics else "starting"}


def _summarize(run: RunFiles) -> dict[str, Any]:
    """Return the figures at the top of the page; None where a run has none."""
    lines = run.metrics
    starts = [event for event in run.events if _is(event, "start")]
    numbers: dict[str, Any] = {
        "step": lines[-1]["step"] if lines else 0,
        "last": next((x for e in reversed(starts) if type(x := e.get("last")) is int), None),
        "ranks": next((x for e in reversed(starts) if type(x := e.get("ranks")) is int), None),
        "loss": _find_last(lines, "loss"),
        "evaluation": _find_last(lines, "eval/loss"),
        "tokens": _find_last(lines, "tokens_total"),
    }
    for name in ("tokens_per_second", "mfu", "hfu", "seconds", "padding"):
        recent = [x for line in lines[-100:] if math.isfinite(x := _to_number(line.get(name)))]
        numbers[name] = statistics.median(recent) if recent else None
    peaks = [x for line in lines if math.isfinite(x := _to_number(line.get("memory_peak")))]
    numbers["memory"] = max(peaks, default=None)
    numbers["memory_rank"] = _find_last(lines, "memory_rank")
    if starts and all("step" in event for event in starts):
        sane = [
            {
                key: x
                for key, x in e.items()
                if key not in ("repeated", "blocked") or type(x) in (int, float)
            }
            for e in run.events
        ]
        usable = [
            {"step": e["step"], "seconds": x}
            for e in lines
            if math.isfinite(x := _to_number(e.get("seconds")))
        ]
        time = measure_goodput(usable, sane)
        for name in ("share", "wall", "down", "starts", "repeated", "saves", "blocked"):
            numbers[name] = getattr(time, name)
    return numbers


def _find_last(lines: Sequence[Line], name: str) -> float | None:
    """Return the last value of a name, None if it is missing or no finite number."""
    line = next((line for line in reversed(lines) if name in line), {})
    value = _to_number(line.get(name))
    return value if math.isfinite(value) else None


def _list_facts(run: RunFiles) -> list[list[str]]:
    """Return what the header says of a run: model, layout, device, torch."""
    facts: list[list[str]] = []
    for label, key in (("model", "init"), ("model", "size"), ("optimizer", "optimizer")):
        value = run.config.get(key)
        if isinstance(value, str) and value != "None" and label not in dict(facts):
            facts.append([label, _clean(value)])
    hosts = next(
        (
            e["hosts"]
            for e in reversed(run.events)
            if _is(e, "host") and isinstance(e.get("hosts"), list)
        ),
        [],
    )
    devices = Counter(
        str(host["device"]) for host in hosts if isinstance(host, dict) and host.get("device")
    )
    if devices:
        facts.append(["device", _clean(", ".join(devices))])
        facts.append(["hosts", str(len(hosts))])
    software = dict(_list_software(run.events))
    facts += [[name, software[name]] for name in ("torch", "trainkit") if name in software]
    return facts


def describe_layout(run: RunFiles, notes: list[str]) -> dict[str, Any] | None:
    """Return the ranks of a run as rows of cells, `[text, width, shade]`; None for one rank.

    Each axis is a row, which divides the row above it. Below the ranks, `tokens` and `parameters`
    say which of them hold the same.
    """
    starts = [
        event for event in run.events if _is(event, "start") and type(event.get("ranks")) is int
    ]
    ranks = starts[-1]["ranks"] if starts else 1
    host: Any = next((e.get("layout") for e in reversed(run.events) if _is(e, "host")), None)
    given = dict(_flatten(run.config)) | (host if isinstance(host, dict) else {})
    fields = {field.name: type(field.default) for field in attrs.fields(Layout)}
    options = {
        name: given[name]
        for name in ("fold_sp", "ep_adjacent", *Layout().degrees)
        if isinstance(given.get(name), fields[name])
    }
    try:
        layout = attrs.evolve(Layout(), **options)
        rest = layout.world if layout.dp_shard == -1 else 1
        layout = (
            attrs.evolve(layout, dp_shard=max(1, ranks // rest))
            if rest and layout.dp_shard == -1
            else layout
        )
        if layout.world == 1:
            return None
        places = mesh_places(layout) if layout.world <= _MOST_RANKS else []
    except ValueError as error:
        notes.append(f"layout: not drawn ({error})")
        return None
    degrees = [name for name in layout.axes["world"] if layout.count(name) > 1]
    rows: list[dict[str, Any]] = []
    for depth, name in enumerate(degrees, 1):
        keys = [tuple(place.index[axis] for axis in degrees[:depth]) for place in places]
        runs = [(key, len(list(group))) for key, group in groupby(keys)]
        rows.append(
            {"name": name, "cells": [[str(key[-1]), width, key[-1] % 2] for key, width in runs]}
        )
    for name in ("rank", "tokens", "parameters"):
        cells = [[str(getattr(place, name)), 1, getattr(place, name)] for place in places]
        rows.append({"name": name, "cells": cells})
    if layout.ep > 1:
        rows.append(
            {"name": "experts", "cells": [[str(p.index["ep"]), 1, p.index["ep"]] for p in places]}
        )
    return {"title": str(layout), "ranks": layout.world, "rows": rows if places else []}


# ------------------------------------------------------------------------------------ heat maps


def describe_layers(lines: Sequence[Line], axes: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Return statistics by layer: for each kind, names, positions, and a matrix by statistic.

    A column holds the largest value of the lines that share it, so that no bad step is lost.
    """
    found: list[dict[str, Any]] = []
    whole = [
        line
        for line in lines
        if isinstance(line.get("names"), list)
        and isinstance(line.get("kind"), str)
        and type(line.get("step")) is int
    ]
    if len(whole) < len(lines):
        notes.append(
            f"layers.jsonl: {len(lines) - len(whole)} lines left out (no step, kind or names)"
        )
    for kind in dict.fromkeys(line["kind"] for line in whole):
        rows = [line for line in whole if line["kind"] == kind]
        names = rows[-1]["names"]
        by_step = {line["step"]: line for line in rows if line["names"] == names}
        if len(by_step) < len({line["step"] for line in rows}):
            notes.append(
                f"layers.jsonl: lines of {kind} with other names than the last are left out"
            )
        if len(names) > _MOST_NAMES:
            notes.append(f"layers.jsonl: the first {_MOST_NAMES} of {len(names)} names of {kind}")
        rows = [by_step[step] for step in sorted(by_step)]
        edges = np.linspace(0, len(rows), min(len(rows), _MOST_COLUMNS) + 1).round().astype(int)
        stats: dict[str, Any] = {}
        for stat in ("rms", "largest", "zeros", "nonfinite"):
            columns = [
                row[stat]
                for row in rows
                if isinstance(row.get(stat), list) and len(row[stat]) == len(names)
            ]
            if len(columns) == len(rows):
                matrix = np.array(
                    [[_to_number(x) for x in column[:_MOST_NAMES]] for column in columns],
                    dtype=np.float64,
                )
                matrix = np.fmax.reduceat(matrix, edges[:-1], axis=0)
                stats[stat] = [round_values(column, digits=4) for column in matrix]
        found.append(
            {
                "kind": _clean(kind),
                "names": [_clean(str(name)) for name in names[:_MOST_NAMES]],
                "x": [axes.locate(rows[i]["step"], None) for i in edges[:-1]],
                "stats": stats,
            }
        )
    return found


def _describe_experts(lines: Sequence[Line], notes: list[str]) -> dict[str, Any] | None:
    """Return the load of each expert over the mean of its layer, in columns of steps."""
    loads = [line for line in lines if line.get("load")]
    shapes = Counter(_get_shape(line["load"]) for line in loads)
    shapes.pop(None, None)
    if not shapes:
        return None
    shape = shapes.most_common(1)[0][0]
    same = [line for line in loads if _get_shape(line["load"]) == shape]
    if len(same) < len(loads):
        notes.append(f"load: {len(loads) - len(same)} lines of another number of experts left out")
    columns = load_over_steps(same, columns=_MOST_COLUMNS)
    return {
        "first": same[0]["step"],
        "last": same[-1]["step"],
        "load": [[round_values(row, digits=3) for row in column] for column in columns],
    }


def _get_shape(load: Any) -> tuple[int, ...] | None:
    """Return the layers and experts of a load, None if it is no matrix of numbers."""
    try:
        matrix = np.array(load, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return matrix.shape if matrix.ndim == 2 and matrix.size else None


# ------------------------------------------------------------------------------------ text


def _is(event: Line, name: str) -> bool:
    return event.get("event") == name


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return orjson.dumps(value, default=str).decode()


def _clean(text: str) -> str:
    """Return text that JSON can hold: no halves of surrogates, and not endless."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} … ({len(text):,} characters)"


def _format_duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
