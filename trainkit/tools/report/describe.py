"""What the page draws of one run, as plain values."""

from __future__ import annotations

import math
from typing import Any

from trainkit.files import flatten_table
from trainkit.run.status import describe_status
from trainkit.tools.report.axes import limit_text, make_axes
from trainkit.tools.report.curves import list_evaluations, list_series, mark_bad_steps
from trainkit.tools.report.happenings import (
    describe_events,
    format_value,
    list_packings,
    list_profiles,
    list_samples,
    list_software,
)
from trainkit.tools.report.heatmaps import describe_experts, describe_layers
from trainkit.tools.report.read import RunFiles
from trainkit.tools.report.summary import (
    describe_layout,
    list_facts,
    summarize,
)
from trainkit.tools.report.thin import make_buckets, thin_axis

_MOST_BUCKETS = 2000  # of a curve, each with two points: more than a screen has pixels


def describe_run(run: RunFiles) -> dict[str, Any]:
    """Return what the page shows of a run, as plain values.

    Args:
        run: From `read_run`.

    Returns:
        JSON values: `name`, `path`, `state`, `numbers`, `facts`, `start`, `every` (lines that share
        a point), `x` (positions of the points on the three axes), `series`, `evaluations`, `marks`,
        `events`, `layers`, `experts`, `layout`, `samples`, `profiles`, `packing`, `config`,
        `software`, `notes`. A part that a run lacks is empty or None.

    Examples:
        >>> from pathlib import Path
        >>> lines = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.25}]
        >>> run = RunFiles(Path("runs/mine"), lines)
        >>> page = describe_run(run)
        >>> page["series"]["loss"], page["numbers"]["step"], page["state"]["kind"]
        ({'v': [5.5, 5.25]}, 2, 'unknown')
    """
    notes = list(run.notes)
    axes = make_axes(run)
    if axes.lines and axes.seconds is None:
        notes.append("metrics.jsonl: no line has a time or seconds; there is no axis of time")
    buckets = make_buckets(len(axes.lines), limit=_MOST_BUCKETS)
    positions = {"step": axes.steps, "tokens": axes.tokens, "time": axes.seconds}
    config = flatten_table(run.config)
    described: dict[str, Any] = {
        "name": limit_text(run.path.name),
        "path": limit_text(str(run.path)),
        "state": {"kind": run.status.state, "text": limit_text(describe_status(run.status))},
        "numbers": summarize(run),
        "facts": list_facts(run),
        "start": axes.start,
        "every": 1 if buckets.edges is None else math.ceil(buckets.count / _MOST_BUCKETS),
        "x": {
            name: None if x is None else thin_axis(x, buckets).round(3).tolist()
            for name, x in positions.items()
        },
        "series": list_series(axes, buckets, notes),
        "evaluations": list_evaluations(run.metrics, axes),
        "marks": mark_bad_steps(axes),
        "events": describe_events(run.events, axes, notes),
        "layers": describe_layers(run.layers, axes, notes),
        "experts": describe_experts(axes.lines, notes),
        "layout": describe_layout(run, notes),
        "samples": list_samples(run.events, notes),
        "profiles": list_profiles(run.events),
        "packing": list_packings(run.events),
        "config": [[limit_text(name), limit_text(format_value(x))] for name, x in config],
        "software": list_software(run.events),
    }
    return described | {"notes": [limit_text(note) for note in notes]}
