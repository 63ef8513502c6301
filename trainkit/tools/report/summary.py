"""The top of the page: the figures of a run, and what ran where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import attrs
import numpy as np

from trainkit.files import flatten_table
from trainkit.run.sinks.timing import measure_goodput
from trainkit.tools.pictures.mesh import mesh_places
from trainkit.tools.report.axes import get_numbers, limit_text, to_number
from trainkit.tools.report.happenings import format_value, list_hosts, list_software
from trainkit.tools.report.read import Line, RunFiles
from trainkit.types import Layout

Cell = tuple[str, int, int]
"""A cell of a layout: its text, how many ranks it spans, its shade."""

_RECENT = 100  # lines whose median is shown
_LARGEST_WORLD = 1 << 31  # of ranks that a file may claim
_MOST_RANKS = 64  # of a layout that is drawn rank by rank


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
    }
    for name in ("tokens_per_second", "mfu", "hfu", "seconds"):
        numbers[name] = get_recent(lines, name)
    peaks = get_numbers(lines, "memory_peak")
    highest = int(np.nanargmax(peaks)) if np.isfinite(peaks).any() else None
    numbers["memory"] = None if highest is None else float(peaks[highest])
    numbers["memory_rank"] = None if highest is None else find_last([lines[highest]], "memory_rank")
    # Goodput counts from the starts; a file of another program has none.
    if starts and all("step" in event for event in starts):
        time = measure_goodput(_list_seconds(lines), [_keep_sane(event) for event in run.events])
        for name in ("share", "wall", "starts", "repeated", "saves"):
            numbers[name] = getattr(time, name)
    return numbers


def _list_seconds(lines: Sequence[Line]) -> list[Line]:
    found: list[Line] = []
    for line in lines:
        seconds = to_number(line.get("seconds"))
        if math.isfinite(seconds):
            found.append({"step": line["step"], "seconds": seconds})
    return found


def _keep_sane(event: Line) -> Line:
    """Return an event without values that `measure_goodput` could not add."""
    sane = dict(event)
    for name in ("repeated", "blocked"):
        if not math.isfinite(to_number(event.get(name))):
            sane.pop(name, None)
    return sane


def _find_integer(events: Sequence[Line], name: str) -> int | None:
    for event in reversed(events):
        value = event.get(name)
        if type(value) is int:
            return value
    return None


def find_last(lines: Sequence[Line], name: str) -> float | None:
    """Return the last value of a name, None if it is missing or no finite number."""
    for line in reversed(lines):
        if name in line:
            value = to_number(line[name])
            return value if math.isfinite(value) else None
    return None


def get_recent(lines: Sequence[Line], name: str) -> float | None:
    """Return the median of a name in the last lines, None if no line has it."""
    values = get_numbers(lines[-_RECENT:], name)
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else None


def list_facts(run: RunFiles) -> list[list[str]]:
    """Return what the header says of a run, as pairs: model, optimizer, device, versions."""
    facts: dict[str, str] = {}
    for label, name in (("model", "init"), ("model", "size"), ("optimizer", "optimizer")):
        value = run.config.get(name)
        if isinstance(value, str) and value != "None":  # how config.toml writes None
            facts.setdefault(label, limit_text(value))
    # A run on several kinds of devices names each once.
    hosts = list_hosts(run.events)
    devices = Counter(str(host["device"]) for host in hosts if host.get("device"))
    if devices:
        facts["device"] = limit_text(", ".join(devices))
        # Ranks of one host that differ, as in their device, are several entries.
        facts["hosts"] = str(len({format_value(host.get("host")) for host in hosts}))
    software = dict(list_software(run.events))
    facts |= {name: software[name] for name in ("torch", "trainkit") if name in software}
    return [[label, value] for label, value in facts.items()]


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
    # What the run has measured is newer than what its flags wanted.
    given = {name.rpartition(".")[2]: value for name, value in flatten_table(run.config)}
    for event in run.events:
        if event["event"] == "host" and isinstance(event.get("layout"), dict):
            given |= event["layout"]
    layout = Layout()
    # Other fields, such as the schedule, do not move ranks. A value of another type is ignored.
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
        cells: list[Cell] = []
        # Neighbors with the same indices on this axis and on those above share a cell.
        indices = [tuple(place.index[axis] for axis in degrees[:depth]) for place in places]
        for index, group in groupby(indices):
            cells.append((str(index[-1]), len(list(group)), index[-1] % 2))
        rows.append({"name": name, "cells": cells})
    leaves = {
        "rank": [place.rank for place in places],
        "tokens": [place.tokens for place in places],
        "parameters": [place.parameters for place in places],
    }
    if layout.ep > 1:
        leaves["experts"] = [place.index["ep"] for place in places]
    for name, numbers in leaves.items():
        rows.append({"name": name, "cells": [(str(n), 1, n) for n in numbers]})
    return rows
