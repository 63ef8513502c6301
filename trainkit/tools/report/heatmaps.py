"""The heat maps of a page: statistics by layer, and the load of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainkit.run.plots.load import load_over_steps
from trainkit.tools.report.axes import Axes, limit_text, locate, to_number
from trainkit.tools.report.read import Line, format_count
from trainkit.tools.report.thin import round_values

_MOST_COLUMNS = 240
_MOST_NAMES = 400  # rows
_STATISTICS = ("rms", "largest", "zeros", "nonfinite")


def describe_layers(lines: Sequence[Line], axes: Axes, notes: list[str]) -> list[dict[str, Any]]:
    """Return statistics by layer, for each kind: `names`, positions `x`, `stats` by statistic.

    A statistic is a list of columns, each with a value for each name. A column holds the largest
    value of the lines that share it, so that no bad step is lost; it stands at the last of them.

    Args:
        lines: The lines of layers.jsonl.
        axes: From `make_axes`.
        notes: What is left out is appended.
    """
    whole = [line for line in lines if _is_whole(line)]
    if dropped := len(lines) - len(whole):
        notes.append(
            f"layers.jsonl: {format_count(dropped, 'line')} left out (no step, kind or names, or "
            "not a value for each name)"
        )
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys(line["kind"] for line in whole):
        of_kind = [line for line in whole if line["kind"] == kind]
        names = of_kind[-1]["names"]
        # Matrices of other names, as of another model in the same folder, do not fit together.
        # Of a step that stands there twice, as after a restart, the last line counts.
        by_step = {line["step"]: line for line in of_kind if line["names"] == names}
        if any(line["names"] != names for line in of_kind):
            notes.append(f"layers.jsonl: lines of {limit_text(kind)} with other names left out")
        if len(names) > _MOST_NAMES:
            notes.append(f"layers.jsonl: the first {_MOST_NAMES} of {len(names)} names")
        rows = [by_step[step] for step in sorted(by_step)]
        edges = np.linspace(0, len(rows), min(len(rows), _MOST_COLUMNS) + 1).round().astype(int)
        stats: dict[str, Any] = {}
        for name in _STATISTICS:
            if all(name in row for row in rows):
                columns = [row[name] for row in rows]
                stats[name] = _thin_columns(columns, edges)
        found.append(
            {
                "kind": limit_text(kind),
                "names": [limit_text(str(name)) for name in names[:_MOST_NAMES]],
                "x": [locate(axes, rows[i - 1]["step"]) for i in edges[1:]],
                "stats": stats,
            }
        )
    return found


def _is_whole(line: Line) -> bool:
    names = line.get("names")
    if not isinstance(names, list) or not names:
        return False
    if not isinstance(line.get("kind"), str) or type(line.get("step")) is not int:
        return False
    columns = [line[name] for name in _STATISTICS if name in line]
    return all(isinstance(x, list) and len(x) == len(names) for x in columns)


def _thin_columns(
    columns: Sequence[Sequence[Any]], edges: np.ndarray[Any, np.dtype[np.int64]]
) -> list[list[float | None]]:
    numbers = [list(map(to_number, column[:_MOST_NAMES])) for column in columns]
    matrix = np.array(numbers, dtype=np.float64)
    # Not the mean: one bad step among many is what a reader looks for. fmax passes over NaN.
    matrix = np.fmax.reduceat(matrix, edges[:-1], axis=0)
    return [round_values(column, digits=4) for column in matrix]


def describe_experts(lines: Sequence[Line], notes: list[str]) -> dict[str, Any] | None:
    """Return the load of each expert over the mean of its layer; None if no line has a load.

    Args:
        lines: Lines of steps, some with `load` `[L, E]`.
        notes: What is left out is appended.

    Returns:
        `first` and `last` step, and `load` `[columns, L, E]`, None where no line falls.

    Examples:
        >>> describe_experts(
        ...     [{"step": 1, "load": [[3, 1]]}, {"step": 2, "load": "odd"}], notes := []
        ... )
        {'first': 1, 'last': 1, 'load': [[[1.5, 0.5]]]}
        >>> notes
        ['load: 1 line of another shape left out']
    """
    loads = [line for line in lines if line.get("load")]
    shapes = [_get_shape(line["load"]) for line in loads]
    # A run whose model has changed its experts shows those that it had for longest.
    common = Counter(shape for shape in shapes if shape is not None).most_common(1)
    if not common:
        return None
    same = [line for line, shape in zip(loads, shapes, strict=True) if shape == common[0][0]]
    if len(same) < len(loads):
        notes.append(
            f"load: {format_count(len(loads) - len(same), 'line')} of another shape left out"
        )
    columns = load_over_steps(same, columns=_MOST_COLUMNS)
    return {
        "first": same[0]["step"],
        "last": same[-1]["step"],
        "load": [[round_values(row, digits=3) for row in column] for column in columns],
    }


def _get_shape(load: Any) -> tuple[int, ...] | None:
    """Return the numbers of layers and experts of a load, None if it is no matrix of numbers."""
    try:
        matrix = np.array(load, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return matrix.shape if matrix.ndim == 2 and matrix.size else None
