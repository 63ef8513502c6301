"""`python -m trainkit runs [FOLDER]`: the runs in a folder, the newest first.

  python -m trainkit runs
  python -m trainkit runs sweeps/lr --json

A run is running, ended (it took its last step), stopped (the same command resumes it), died (it
failed or was killed), refused (it has never started: WHY has the reason), or stale: it has not
ended, but no rank has shown a sign of life for more than a minute. AGE is the time since it last
wrote a line. The last column has what is wrong with a directory. Neither torch nor a process of the
runs is needed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trainkit.run.status import RunStatus, find_runs, format_age, read_run_status

HELP = "list runs with their state, step, loss, age and layout"

_WIDTH = 80  # columns, where the terminal does not say
_SHRINK = {"WHY": 12, "RUN": 16, "LAYOUT": 8}  # to at least so much, in this order


def add(runs: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    runs.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("runs"),
        help="a folder of runs, or one run (default runs)",
    )
    runs.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return a table on a terminal, records elsewhere, and the exit code 0."""
    found = [read_run_status(path) for path in find_runs(options.folder)]
    found.sort(key=lambda x: float("inf") if x.age is None else x.age)
    if options.json or not sys.stdout.isatty():
        return [attrs.asdict(x) | {"path": str(x.path)} for x in found], 0
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    return format_runs(found, options.folder, width=max(width, _WIDTH)), 0


def format_runs(runs: Sequence[RunStatus], folder: Path, *, width: int) -> str:
    """Return a table of runs, at most `width` characters wide.

    Args:
        runs: The runs, in the order of the table.
        folder: Their names are relative to it.
        width: Characters in a line; long names and reasons are cut to it.

    Examples:
        >>> one = RunStatus(path=Path("runs/a"), state="ended", step=9, last=9, loss=2.5, age=130)
        >>> print(format_runs([one], Path("runs"), width=80))
        RUN  STATE  STEP  LOSS    AGE  LAYOUT  WHY
        a    ended  9/9   2.5000  2m   -       -
    """
    from trainkit.run.sinks.console import escape_control_characters  # noqa: PLC0415 -- slow

    rows = [_format_row(x, folder) for x in runs]
    if not rows:
        return f"no run in {folder}"
    rows.insert(0, {name: name for name in rows[0]})
    rows = [{name: escape_control_characters(x[name]) for name in x} for x in rows]
    widths = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    for name, least in _SHRINK.items():
        excess = sum(widths.values()) + 2 * (len(widths) - 1) - width
        widths[name] = min(widths[name], max(least, widths[name] - max(0, excess)))
    lines = []
    for row in rows:
        cells = [
            row[name].ljust(size) if len(row[name]) <= size else f"{row[name][: size - 1]}\u2026"
            for name, size in widths.items()
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _format_row(status: RunStatus, folder: Path) -> Mapping[str, str]:
    name = status.path if status.path == folder else status.path.relative_to(folder)
    step = "-" if status.step is None else str(status.step)
    return {
        "RUN": str(name),
        "STATE": status.state,
        "STEP": step if status.last is None else f"{step}/{status.last}",
        "LOSS": "-" if status.loss is None else f"{status.loss:.4f}",
        "AGE": format_age(status.age),
        "LAYOUT": status.layout or "-",
        "WHY": " ".join((status.why or "-").split()),
    }
