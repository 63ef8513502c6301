"""What happened in a run: events in words, samples, packings, versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from trainkit.tools.report.axes import Axes, limit_text, locate, to_number
from trainkit.tools.report.read import Line

_MOST_EVENTS = 1500
_MOST_SAMPLES = 60
_KINDS = {"rolled back": "rollback", "apply": "spike"}
_FREQUENT = {"save", "evaluation", "sample", "straggler", "rollout", "packing", "warning"}
_NO_FACTS = {"time", "event", "step", "software", "operations"}  # they have places of their own
_FIRST_MOMENT = 1e9  # Unix seconds of 2001
_NO_VERSIONS = {"ranks", "device_indices"}  # of a host
_LEADING = ("path", "request", "argument", "reason", "why", "what", "prompt", "text")
_PACKING = ("rows", "tokens", "documents", "efficiency")


def describe_events(events: Sequence[Line], axes: Axes, notes: list[str]) -> list[dict[str, Any]]:
    """Return events in order: Unix time `t`, place `x`, `kind` and `text`.

    Kinds that repeat, such as saves, are thinned if there are too many, others never.

    Args:
        events: The lines of events.jsonl.
        axes: From `make_axes`.
        notes: What is left out is appended.

    Examples:
        >>> from pathlib import Path
        >>> from trainkit.tools.report.axes import make_axes
        >>> from trainkit.tools.report.read import RunFiles
        >>> axes = make_axes(RunFiles(Path("runs/mine")))
        >>> starts = [
        ...     {"time": t, "event": "start", "step": 0, "ranks": n} for t, n in [(1, 8), (2, 6)]
        ... ]
        >>> [(event["kind"], event["text"]) for event in describe_events(starts, axes, [])]
        [('start', 'on 8 ranks'), ('ranks', '8 ranks, then 6')]
    """
    found: list[dict[str, Any]] = []
    ranks = None
    start: float | None = None
    for event in events:
        kind, text = _name_event(event, ranks)
        step = event.get("step")
        if event["event"] == "start":
            ranks = event.get("ranks")
            start = step
        # What is measured before the first step belongs to the start.
        if event["event"] in ("startup", "host"):
            step = start
        found.append(
            {
                "t": event["time"],
                "x": locate(axes, step, event["time"]),
                "kind": limit_text(kind),
                "text": limit_text(text),
            }
        )
    retained = _thin_events(found)
    if dropped := len(found) - len(retained):
        notes.append(f"events: {dropped:,} of {len(found):,} left out, of kinds that repeat")
    return retained


def _thin_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most 1,500 events, evenly spread, without leaving out one that is rare."""
    often = [i for i, event in enumerate(events) if event["kind"] in _FREQUENT]
    excess = len(events) - _MOST_EVENTS
    if excess <= 0 or not often:
        return events
    # Where rare events alone are too many, a few of the others are still worth their place.
    number = min(len(often), max(len(often) - excess, 200))
    shown = np.linspace(0, len(often) - 1, number).astype(int)
    dropped = set(often) - {often[i] for i in shown}
    return [event for i, event in enumerate(events) if i not in dropped]


def _name_event(event: Line, ranks: Any) -> tuple[str, str]:
    """Return the kind and the text of an event; `ranks` are those of the start before it."""
    name = event["event"]
    if name == "start":
        count = event.get("ranks")
        kind = "start" if ranks is None else "restart"
        text = f"on {count} rank{'s' * (count != 1)}"
        if type(count) is int and type(ranks) is int and count != ranks:
            kind = "ranks"
            text = f"{ranks} ranks, then {count}"
        if repeated := event.get("repeated"):
            text += f"; {repeated} steps are repeated"
        return kind, text
    if name == "end":
        failure = event.get("failure")
        return ("failure", str(failure)) if failure else ("end", "")
    if name == "memory" and isinstance(event.get("memory_peak"), list):
        peaks = list(map(to_number, event["memory_peak"]))
        peak = max(peaks, default=0.0)
        return name, f"at most {peak / 2**30:.2f} GiB, on rank {peaks.index(peak)}" if peaks else ""
    if name == "save" and event.get("error"):
        return "save failed", str(event["error"])
    if name == "straggler":
        busy, others = to_number(event.get("busy")), to_number(event.get("others"))
        return name, (
            f"rank {event.get('rank')} works {busy:.0%} of the time, the others {others:.0%}, and "
            "wait for it"
        )
    return _KINDS.get(name, name), _describe_facts(event)


def _describe_facts(event: Line) -> str:
    """Return the facts of an event as text: its reason or message first."""
    facts: Line = {}
    for name, value in event.items():
        # An empty value, such as the error of a save that went well, says nothing, and a second
        # moment in Unix seconds is for programs: the event has its time already.
        is_moment = isinstance(value, float) and value > _FIRST_MOMENT
        if name not in _NO_FACTS and value not in (None, "", [], {}) and not is_moment:
            facts[name] = value
    if isinstance(facts.get("hosts"), list):  # what they are stands in the table of software
        hosts = [str(host.get("host")) for host in facts["hosts"] if isinstance(host, dict)]
        facts["hosts"] = ", ".join(dict.fromkeys(hosts))
    if isinstance(facts.get("path"), str):
        facts["path"] = facts["path"].rpartition("/")[2]
    parts = [str(facts.pop(name)) for name in _LEADING if name in facts]
    parts += [_format_fact(name, value) for name, value in facts.items()]
    return " · ".join(parts)


def _format_fact(name: str, value: Any) -> str:
    name = name.removeprefix("eval/").replace("_", " ")
    if isinstance(value, dict):
        inner = ", ".join(
            f"{key} {x:.3g}" if isinstance(x, float) else f"{key} {format_value(x)}"
            for key, x in value.items()
        )
        return f"{name}: {inner}"
    text = f"{value:,}" if type(value) is int else format_value(value)
    return f"{name} {text}"


def format_value(value: Any) -> str:
    """Return a value of a configuration or an event as text, six digits of a float.

    Examples:
        >>> format_value("adamw"), format_value(0.123456789), format_value([1, True])
        ('adamw', '0.123457', '[1,true]')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError:  # TOML holds integers beyond 64 bits
        return str(value)


def list_samples(events: Sequence[Line], notes: list[str]) -> list[dict[str, Any]]:
    """Return the last samples: `step`, `prompt`, `text`."""
    samples = [event for event in events if event["event"] == "sample"]
    if len(samples) > _MOST_SAMPLES:
        notes.append(f"samples: the last {_MOST_SAMPLES} of {len(samples)}")
    return [
        {
            "step": event.get("step"),
            "prompt": limit_text(str(event.get("prompt") or "")),
            "text": limit_text(str(event.get("text") or "")),
        }
        for event in samples[-_MOST_SAMPLES:]
    ]


def list_packings(events: Iterable[Line]) -> list[dict[str, Any]]:
    """Return what the last start has packed, by corpus."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "packing":
            corpus = limit_text(str(event.get("corpus", "")))
            row: dict[str, Any] = {"corpus": corpus}
            for name in _PACKING:
                if name in event:
                    row[name] = to_number(event[name])
            found[corpus] = row  # of a corpus that was packed again, as after a restart, the last
    return list(found.values())


def list_profiles(events: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the last profile of a run: its steps, the idle share, and the dearest operations.

    Examples:
        >>> operations = [{"name": "aten::mm", "calls": 2, "seconds": 0.5}]
        >>> event = {"event": "profile", "step": 3, "first": 2, "seconds": 1.0, "idle": 0.25}
        >>> list_profiles([event | {"operations": operations}])[0]["operations"]
        [{'name': 'aten::mm', 'calls': 2, 'seconds': 0.5}]
    """
    found: list[dict[str, Any]] = []
    for event in events:
        operations = event.get("operations")
        if event["event"] != "profile" or not isinstance(operations, list):
            continue
        profile: dict[str, Any] = {}
        for name in ("step", "first", "seconds", "idle"):
            profile[name] = to_number(event.get(name))
        profile["operations"] = [
            {
                "name": limit_text(str(one.get("name"))),
                "calls": to_number(one.get("calls")),
                "seconds": to_number(one.get("seconds")),
            }
            for one in operations
            if isinstance(one, dict)
        ]
        found = [profile]
    return found


def list_software(events: Iterable[Line]) -> list[list[str]]:
    """Return versions and hashes of the code of the last start, and what hosts have in common."""
    found: dict[str, str] = {}
    for event in events:
        if isinstance(event.get("software"), dict):
            for name, value in event["software"].items():
                found[name] = format_value(value)
        values: dict[str, dict[str, None]] = {}  # a dict as a set that keeps its order
        for host in list_hosts([event]):
            for name, value in host.items():
                if name not in _NO_VERSIONS:
                    in_bytes = name.endswith("memory") and math.isfinite(to_number(value))
                    text = f"{value / 2**30:.0f} GiB" if in_bytes else format_value(value)
                    values.setdefault(name, {})[text] = None
        found |= {name: ", ".join(texts) for name, texts in values.items()}
    return [[limit_text(name), limit_text(x)] for name, x in found.items()]


def list_hosts(events: Sequence[Line]) -> list[Mapping[str, Any]]:
    """Return the machines of the last event "host"."""
    for event in reversed(events):
        if event["event"] == "host" and isinstance(event.get("hosts"), list):
            return [host for host in event["hosts"] if isinstance(host, dict)]
    return []
