"""`python -m trainkit report RUN...`: write a page about runs: one HTML file, for any browser.

The file holds all that it shows, and loads nothing from a network: it can be mailed, or stored
with the run. Several runs are drawn over each other, with what differs between them. Panels of what
a run did not measure are left out.

Examples:
  python -m trainkit report runs/mine                 # writes runs/mine/report.html

  # while it goes on: the file is written anew every few seconds, and the open page follows
  python -m trainkit report runs/mine --follow

  # compare
  python -m trainkit report runs/a runs/b --out compare.html --title "Muon or AdamW"

What is whole is shown; of lines that are cut, mixed with other text, or written by another program,
the page says how many it left out. --follow ends when the runs have, or with Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.types import ConfigError

if TYPE_CHECKING:
    import argparse

HELP = "write a page about runs, for a browser"
_INTERVAL = 5.0  # seconds between two pages of --follow


def add(report: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    report.add_argument("run", nargs="+", type=Path, help="run directories")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (report.html in the first run)"
    )
    report.add_argument("--title", help="the heading (the names of the runs)")
    report.add_argument(
        "--follow", action="store_true", help="write it anew until the runs have ended"
    )
    report.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Write the page and return where it is and the state of each run, and the exit code."""
    # Imported here: they load numba.
    from trainkit.run.sinks.console import escape_control_characters  # noqa: PLC0415 -- slow
    from trainkit.run.status import OVER  # noqa: PLC0415
    from trainkit.tools.report.page import write_report  # noqa: PLC0415

    if len({path.resolve() for path in options.run}) < len(options.run):
        raise ConfigError("report: a run is named twice; name each once", where="run")
    out = options.out or options.run[0] / "report.html"
    if out.is_dir():
        raise ConfigError(f"report: {out} is a folder; name a file", where="out")
    pause = _INTERVAL  # of the first page, before it is known how long one takes
    while True:
        begin = time.monotonic()
        refresh = pause if options.follow else None
        states = write_report(options.run, out, title=options.title, refresh=refresh)
        # A page of long runs takes seconds: most of the time is left to the training.
        pause = max(_INTERVAL, 10 * (time.monotonic() - begin))
        is_over = all(state["state"] in OVER for state in states)
        if not options.follow or is_over:
            break
        time.sleep(pause)
    if options.json or not sys.stdout.isatty():
        return {"page": str(out), "bytes": out.stat().st_size, "runs": states}, 0
    # A name or a reason comes from a file of the run, and may hold control sequences.
    lines = [f"{state['name']}: {state['text']}" for state in states]
    return escape_control_characters("\n".join([*lines, f"the page is in {out}"])), 0
