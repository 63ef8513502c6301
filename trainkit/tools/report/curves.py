"""The curves of a page: metrics by name, results of evaluations, and steps that went wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainkit.tools.report.axes import Axes, get_numbers, limit_text, locate, to_number
from trainkit.tools.report.read import Line
from trainkit.tools.report.thin import Buckets, round_values, thin_values

_MOST_SERIES = 300
_MOST_EVALUATIONS = 4000
_MOST_MARKS = 1500
_NO_CURVES = {"step", "time", "tokens_total", "skipped"}
_COUNTS = ("eval/tokens", "eval/pairs", "eval/answers")  # how much was evaluated is no result


def list_series(axes: Axes, buckets: Buckets, notes: list[str]) -> dict[str, dict[str, Any]]:
    """Return each metric of the lines: `v` the points, and `m` the means of buckets if thinned.

    Values that are no numbers are gaps. A phase of a step (`seconds/NAME`) that a line lacks took
    no time.

    Args:
        axes: From `make_axes`.
        buckets: Of as many lines.
        notes: What is left out is appended.
    """
    # One pass over all lines: which names are curves, and which only sometimes a number. Most lines
    # are alike, so that those with the same names and types are looked at once.
    alike = Counter((tuple(line), tuple(map(type, line.values()))) for line in axes.lines)
    numeric = Counter[str]()
    odd = Counter[str]()
    for (names, types), count in alike.items():
        for name, type_ in zip(names, types, strict=True):
            if type_ in (int, float):
                numeric[name] += count
            elif type_ is not type(None):
                odd[name] += count
    if mixed := sorted(numeric.keys() & odd.keys()):
        notes.append(
            f"metrics.jsonl: values that are no numbers are gaps, in {', '.join(mixed[:8])}"
        )
    names = [name for name in numeric if name not in _NO_CURVES and not name.startswith("eval/")]
    if len(names) > _MOST_SERIES:
        notes.append(f"curves: the {_MOST_SERIES} of {len(names)} metrics with the most values")
        names = sorted(names, key=lambda name: -numeric[name])[:_MOST_SERIES]
    series: dict[str, dict[str, Any]] = {}
    for name in names:
        values = get_numbers(axes.lines, name)
        if name.startswith("seconds/"):
            values = np.nan_to_num(values)
        points, means = thin_values(values, buckets)
        series[limit_text(name)] = {"v": round_values(points)}
        if means is not None:
            series[limit_text(name)]["m"] = round_values(means)
    return series


def list_evaluations(metrics: Sequence[Line], axes: Axes) -> dict[str, dict[str, Any]]:
    """Return the results of evaluations: for each name the positions `x` and the values `v`.

    Examples:
        >>> from pathlib import Path
        >>> from trainkit.tools.report.axes import make_axes
        >>> from trainkit.tools.report.read import RunFiles
        >>> lines = [{"step": 1, "loss": 5.5, "eval/loss": 5.75}]
        >>> axes = make_axes(RunFiles(Path("runs/mine"), lines))
        >>> list_evaluations(lines, axes)
        {'eval/loss': {'x': [(1, None, None)], 'v': [5.75]}}
    """
    results = {name for name in set[str]().union(*metrics) if name.startswith("eval/")}
    lines = [line for line in metrics if not results.isdisjoint(line)]
    if len(lines) > _MOST_EVALUATIONS:  # evenly, as evaluations have no spikes to lose
        shown = np.linspace(0, len(lines) - 1, _MOST_EVALUATIONS).astype(int)
        lines = [lines[i] for i in shown]
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("eval/"))
    return {
        limit_text(name): {
            "x": [locate(axes, line["step"]) for line in lines],
            "v": round_values(get_numbers(lines, name)),
        }
        for name in names
        if name not in _COUNTS
    }


def mark_bad_steps(axes: Axes) -> list[dict[str, Any]]:
    """Return the steps that were skipped, and those whose loss or norm is no finite number.

    A mark has a place `x` and a Unix time `t`, a `kind` ("skipped", or "nonfinite" if the loss is),
    and the `values` that are not finite, from the `_hex` fields, which know NaN from infinities.
    """
    marks: list[dict[str, Any]] = []
    skipped_before = 0.0  # the metric counts the skipped steps so far
    for line in axes.lines:
        skipped = to_number(line.get("skipped"))
        bad = [
            name
            for name in ("loss", "grad_norm")
            if name in line and not math.isfinite(to_number(line[name]))
        ]
        if bad or skipped > skipped_before:
            time = to_number(line.get("time"))
            marks.append(
                {
                    "x": locate(axes, line["step"]),
                    "t": time if math.isfinite(time) else None,
                    "kind": "nonfinite" if "loss" in bad else "skipped",
                    "values": {
                        name: limit_text(str(line.get(f"{name}_hex", "no number"))) for name in bad
                    },
                }
            )
        skipped_before = skipped if math.isfinite(skipped) else skipped_before
    # A run that only makes NaNs has a mark at every step; the newest say it as well.
    return marks[-_MOST_MARKS:]
