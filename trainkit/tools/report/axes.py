"""Where the lines and events of a run stand on the three axes of a chart: step, tokens, time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trainkit.tools.report.read import Line, RunFiles

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Position = tuple[float, float | None, float | None]
"""A place on the axes: step, tokens, seconds since the start; None on an axis that a run lacks."""

_LARGEST_NUMBER = 1e100  # sums of larger ones overflow, and no metric means them
_MOST_TEXT = 4000  # characters of one sample or one message


@attrs.frozen(eq=False)
class Axes:
    """The lines of steps `[N]`, and their positions: `steps`, `tokens`, `seconds` since `start`.

    `start` is in Unix seconds. An axis without any value is None.
    """

    lines: list[Line]
    steps: Floats
    tokens: Floats | None
    seconds: Floats | None
    start: float | None


def make_axes(run: RunFiles) -> Axes:
    """Return the axes of a run.

    In a file without times, as older versions wrote it, seconds are the sum of those of the steps.

    Examples:
        >>> from pathlib import Path
        >>> lines = [{"step": 5, "seconds": 2.0}, {"step": 6, "seconds": 3.0}]
        >>> make_axes(RunFiles(Path("runs/mine"), lines)).seconds.tolist()
        [2.0, 5.0]
    """
    # An evaluation of a step without a line, such as step 0, is no point of the curves.
    lines = [
        line
        for line in run.metrics
        if any(name != "step" and not name.startswith("eval/") for name in line)
    ]
    tokens = get_numbers(lines, "tokens_total")
    times = get_numbers(lines, "time")
    known = times[np.isfinite(times)]
    start = min(
        [event["time"] for event in run.events[:1]] + known[:1].tolist(),
        default=None,
    )
    seconds = None
    # Wall time includes what stood between the steps: saves, evaluations, hours in a queue.
    if known.size and start is not None:
        seconds = _fill_gaps(times - start)
    elif (worked := np.nan_to_num(get_numbers(lines, "seconds"))).any():
        seconds = np.cumsum(worked)
    return Axes(
        lines=lines,
        steps=get_numbers(lines, "step"),
        tokens=_fill_gaps(tokens) if np.isfinite(tokens).any() else None,
        seconds=seconds,
        start=start,
    )


def locate(axes: Axes, step: float | None, time: float | None = None) -> Position:
    """Return the place of something that happened at a step, at a Unix time, or both.

    Examples:
        >>> from pathlib import Path
        >>> lines = [{"step": 1, "tokens_total": 8}, {"step": 3, "tokens_total": 24}]
        >>> locate(make_axes(RunFiles(Path("runs/mine"), lines)), 2)
        (2, 16.0, None)
    """
    after = None if time is None or axes.start is None else time - axes.start
    if step is None:
        step = 0.0
        if after is not None and axes.seconds is not None:
            step = float(np.interp([after], axes.seconds, axes.steps)[0])
    if not axes.lines:
        return step, None, after
    # Curves without times are drawn over the seconds of their steps, and so are their events.
    has_times = math.isfinite(to_number(axes.lines[-1].get("time")))
    if after is None or not has_times:
        after = _interpolate(step, axes.steps, axes.seconds)
    return step, _interpolate(step, axes.steps, axes.tokens), after


def _interpolate(step: float, steps: Floats, values: Floats | None) -> float | None:
    return None if values is None else round(float(np.interp([step], steps, values)[0]), 2)


def _fill_gaps(x: Floats) -> Floats:
    """Return values that never fall, with gaps filled, as an axis needs them."""
    known = np.isfinite(x)
    # A clock that is set back would fold the curve over itself.
    filled = np.interp(np.arange(len(x)), np.flatnonzero(known), x[known])
    return np.maximum.accumulate(filled)


def get_numbers(lines: Sequence[Mapping[str, Any]], name: str) -> Floats:
    """Return a value of each line as fp64, NaN where it is missing or no number."""
    values = [line.get(name) for line in lines]
    # numpy takes None for NaN, but text and bools for numbers; it is slow to look at each value.
    if not {*map(type, values)} <= {int, float, type(None)}:
        values = [to_number(x) for x in values]
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.abs(numbers) <= _LARGEST_NUMBER, numbers, np.nan)


def to_number(value: Any) -> float:
    """Return a number as it is, and NaN for anything else: bools, text, numbers beyond 1e100.

    Examples:
        >>> to_number(3), to_number("3"), to_number(True)
        (3, nan, nan)
    """
    is_number = type(value) in (int, float) and abs(value) <= _LARGEST_NUMBER
    return value if is_number else math.nan


def limit_text(text: str) -> str:
    r"""Return text that JSON can hold: no halves of surrogate pairs, and not endless.

    Examples:
        >>> limit_text("a\udc80"), len(limit_text("a" * 5000))
        ('a?', 4021)
    """
    # A path may hold bytes that are no UTF-8, which Python stores as such halves.
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]} … ({len(text):,} characters)"
