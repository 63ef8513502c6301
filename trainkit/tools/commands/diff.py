"""`python -m trainkit diff A B`: what differs between two runs, and from which step on.

  python -m trainkit diff runs/one runs/two

The first line is the verdict, such as "equal until step 412; then the batch differs". Below it
stand the values of that step, the largest relative differences |a - b| / |b| of loss and gradient
norm over all steps, the first parameter that differs in checkpoints of the same step and the one
that differs most, and what differs in the configuration, the data and the code. Only parameters are
compared with torch, and only where the hashes of two checkpoints differ.

A layout sums in an order of its own. In the first steps that is a difference of about 1e-7 in fp32
and 1e-15 in fp64, which grows from step to step; 1e-3 is another computation.

Exit codes: 0 all that both have computed is equal, 1 something differs or nothing can be compared,
64 wrong use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.run.compare_runs import CAUSES, compare_runs

HELP = "compare two runs: configuration, data, code, and the first step that differs"

_MAX_ROWS = 30  # of one table that is printed; the JSON has all
_MAX_TEXT = 60  # characters of a value


def add(diff: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    diff.add_argument("a", type=Path, help="a run directory")
    diff.add_argument("b", type=Path, help="another one")
    diff.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return the text or the report, and the exit code: 1 if the runs differ."""
    report = compare_runs(options.a, options.b)
    code = 0 if report["equal"] else 1
    if options.json or not sys.stdout.isatty():
        return {"verdict": format_verdict(report), **report}, code
    return format_comparison(report), code


def format_verdict(report: Mapping[str, Any]) -> str:
    """Return in one sentence from which step on two runs differ.

    Args:
        report: As `compare_runs` returns it.

    Examples:
        >>> steps = {
        ...     "common": 9,
        ...     "equal_until": 4,
        ...     "differs": {"step": 5, "fields": {"loss_hex": 0}, "relative": {"loss_hex": 2e-7}},
        ... }
        >>> format_verdict({"steps": steps})
        'equal until step 4; then the loss differs, by 2.0e-07 of its value'
    """
    steps = report["steps"]
    if not steps["common"]:
        return f"no step to compare: {_describe_steps(report)}"
    differs = steps["differs"]
    if differs is None:
        saved = report["checkpoints"]["differs"]
        if saved is not None:
            what = saved["first"] or f"the counter {next(iter(saved['counters']), '')}"
            return (
                f"equal losses in all {steps['common']} steps that both have, but in the "
                f"checkpoint of step {saved['step']} {what} differs"
            )
        is_whole = steps["a"] == steps["b"]
        more = "" if is_whole else f" that both have: {_describe_steps(report)}"
        return f"equal in all {steps['common']} steps{more}"
    name = next(iter(differs["fields"]))
    relative = differs["relative"].get(name)  # a batch has no size
    size = "" if relative is None else f", by {relative:.1e} of its value"
    if steps["equal_until"] is None:
        return f"{CAUSES[name]} differs from the first step on, step {differs['step']}{size}"
    return f"equal until step {steps['equal_until']}; then {CAUSES[name]} differs{size}"


def _describe_steps(report: Mapping[str, Any]) -> str:
    texts = []
    for name in "ab":
        steps = report["steps"][name]
        range_ = "no steps" if steps is None else "steps {} to {}".format(*steps)
        texts.append(f"{report[name]} has {range_}")
    return ", ".join(texts)


def format_comparison(report: Mapping[str, Any]) -> str:
    """Return a report of `compare_runs` as text: the verdict, and a table for each of the others.

    Args:
        report: As `compare_runs` returns it.
    """
    from trainkit.run.sinks.console import escape_control_characters  # noqa: PLC0415 -- slow

    lines = [format_verdict(report)]
    steps, saved = report["steps"], report["checkpoints"]
    if steps["differs"] is not None:
        step = steps["differs"]["step"]
        lines += _format_table(f"step {step}", steps["differs"]["fields"])
        lines.append(f"{steps['unequal']} of the {steps['common']} steps that both have differ")
        lines += [
            f"{CAUSES[name]} differs most in step {step}, by {size:.1e} of its value"
            for name, (step, size) in steps["largest"].items()
        ]
    if saved["equal_until"] is not None:
        lines.append(f"the checkpoints of step {saved['equal_until']} are equal")
    if saved["differs"] is not None:
        lines += _format_saved(saved["differs"])
    lines += [f"a checkpoint is left out: {problem}" for problem in saved["problems"]]
    for name in ("config", "data", "code"):
        lines += _format_table(name, report[name])
    return escape_control_characters("\n".join(lines))


def _format_saved(differs: Mapping[str, Any]) -> Iterator[str]:
    if differs["first"] is not None:
        relative = differs["relative"]
        size = "" if relative is None else f", max|a - b| / max|b| {relative:.1e}"
        yield (
            f"the checkpoints of step {differs['step']} differ in {differs['tensors']} tensors, "
            f"first in {differs['first']}{size}"
        )
    if differs["largest"] is not None:
        name, relative = differs["largest"]
        yield f"of the parameters {name} differs most, max|a - b| / max|b| {relative:.1e}"
    yield from _format_table(f"counters of step {differs['step']}", differs["counters"])


def _format_table(title: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of names and the two values of each; none for an empty table."""
    if not table:
        return
    rows = []
    for name, pair in [*table.items()][:_MAX_ROWS]:
        texts = ["-" if value is None else str(value) for value in pair]
        short = [x if len(x) <= _MAX_TEXT else f"{x[: _MAX_TEXT - 1]}\u2026" for x in texts]
        rows.append((name, *short))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    yield f"{title}:"
    for name, a, b in rows:
        yield f"  {name:{widths[0]}}  {a:{widths[1]}}  {b}"
    if len(table) > _MAX_ROWS:
        yield f"  and {len(table) - _MAX_ROWS} more, which --json lists"
