"""Build the page: one HTML file with its data, its script and the library that draws."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from trainkit.files import atomic_write
from trainkit.run.status import OVER
from trainkit.tools.report.describe import describe_run
from trainkit.tools.report.read import read_run

_SCRIPTS = (
    "base",
    "numbers",
    "choices",
    "curves",
    "pointer",
    "events",
    "heatmaps",
    "frame",
    "panels",
    "start",
)


def write_report(
    run_dirs: Sequence[str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    refresh: float | None = None,
) -> list[dict[str, str]]:
    """Write a page about runs, and return the state of each.

    Args:
        run_dirs: Run directories; several are drawn over each other.
        out: The HTML file to write, whole or not at all.
        title: The heading; by default the names of the runs, or their number.
        refresh: Seconds after which the open page loads itself again, as long as a run goes on.

    Returns:
        Of each run its `name`, its `state` (`run.status.State`), and as `text` why it has it.

    Raises:
        DataError: A directory is no run.
        DiskError: A file cannot be read or written.

    Effects:
        Writes `out`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "metrics.jsonl").write_text('{"step":1,"loss":5.5}')
        ...     states = write_report([folder], f"{folder}/report.html")
        >>> states[0]["state"]
        'unknown'
    """
    runs = [describe_run(read_run(run_dir)) for run_dir in run_dirs]
    names = name_apart([Path(run_dir).resolve() for run_dir in run_dirs])
    for run, name in zip(runs, names, strict=True):
        run["name"] = name
    goes_on = any(run["state"]["kind"] not in OVER for run in runs)
    text = build_page(
        runs,
        title=title or (", ".join(names) if len(names) < 4 else f"{len(names)} runs"),
        refresh=refresh if goes_on else None,
        written=time.time(),
    )
    # Whole or not at all: the open page may load itself again at any moment.
    with atomic_write(Path(out), by="write_report") as file:
        file.write(text.encode())
    return [
        {"name": run["name"], "state": run["state"]["kind"], "text": run["state"]["text"]}
        for run in runs
    ]


def build_page(
    runs: Sequence[dict[str, Any]],
    *,
    title: str,
    written: float,
    refresh: float | None = None,
) -> str:
    """Return the page as HTML.

    Nothing of a run becomes markup: its values are JSON without the characters that could end a
    script, and the page shows them as text. A policy in the page lets only its own script run, by
    hash, and no address be loaded.

    Args:
        runs: From `describe_run`.
        title: The heading.
        written: Unix seconds.
        refresh: As in `write_report`.

    Examples:
        >>> page = build_page([], title="</title><script>alert(1)</script>", written=0.0)
        >>> "<script>alert" in page, "<title>&lt;/title&gt;" in page
        (False, True)
    """
    data = {
        "title": title.encode("utf-8", "replace").decode(),
        "written": written,
        "refresh": refresh,
        "runs": list(runs),
    }
    # One function around all files, so that their names are no fields of the window.
    parts = "\n".join(_read_asset(f"{name}.js") for name in _SCRIPTS)
    library = _read_asset("uPlot.iife.min.js")
    script = f'{library}\n(() => {{\n"use strict";\n{parts}}})();\n'
    style = f"{_read_asset('uPlot.min.css')}\n{_read_asset('style.css')}"
    values = {
        "title": html.escape(data["title"]),
        "licence": _read_asset("uPlot.LICENSE"),
        "policy": (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "data": escape_json(data),
        "script": script,
    }
    # In one pass: what a value contains is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], _read_asset("template.html"))


def escape_json(value: Any) -> str:
    r"""Return JSON that can stand inside `<script>` of an HTML page, whatever its strings hold.

    Examples:
        >>> escape_json({"name": "</script>&"})
        '{"name":"\\u003c/script\\u003e\\u0026"}'
    """
    text = orjson.dumps(value).decode()
    # These stand inside strings alone, where JSON reads the escape as the character.
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def name_apart(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that differ.

    Examples:
        >>> name_apart([Path("/runs/a/first"), Path("/runs/b/first"), Path("/runs/c")])
        ['a/first', 'b/first', 'c']
    """
    names: list[str] = []
    for index, path in enumerate(paths):
        others = [other.parts for i, other in enumerate(paths) if i != index]
        depth = 1  # parts of the path
        while depth < len(path.parts) and any(o[-depth:] == path.parts[-depth:] for o in others):
            depth += 1
        names.append("/".join(path.parts[-depth:]).encode("utf-8", "replace").decode())
    return names


def _read_asset(name: str) -> str:
    return (
        importlib.resources.files("trainkit.tools.report")
        .joinpath("assets", name)
        .read_text(encoding="utf-8")
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
