"""`python -m trainkit control RUN REQUEST [NUMBER]`: ask a run that trains to do something, now.

  python -m trainkit control runs/mine save        save after the next step
  python -m trainkit control runs/mine stop        save and stop; the same command resumes it
  python -m trainkit control runs/mine abort       stop without a save
  python -m trainkit control runs/mine evaluate    evaluate after the next step
  python -m trainkit control runs/mine sample      write a sample, as recipes do when they evaluate
  python -m trainkit control runs/mine log-every 1 read the metrics of every step from now on
  python -m trainkit control runs/mine profile 3   profile three steps

It works from any host that sees the directory, for any user who may write there. All ranks do it
after the same step; the command waits until it is done and prints it, and an event "control" in
events.jsonl has who requested it. A request that no rank has taken within a minute is taken back.

Exit codes: 0 done, 64 refused (by the run too) or no run trains there, 68 no rank carried it out,
74 the disk, 76 interrupted: the request is taken back if the run has not taken it yet.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from trainkit.run.control import REQUESTS, control_run

HELP = "save, stop, evaluate and more, in a run that trains"


def add(control: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    control.add_argument("run", type=Path, help="the run directory")
    control.add_argument("request", help=", ".join(REQUESTS))
    control.add_argument(
        "number", type=_read_number, nargs="?", help="steps, for profile and log-every"
    )
    control.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def _read_number(text: str) -> int | str:
    """Return a number, or what is none as it is, which `check_request` refuses in its own words."""
    try:
        return int(text)
    except ValueError:
        return text


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what was done, in words on a terminal, and the exit code 0."""
    request, answer = control_run(options.run, options.request, options.number)
    seconds = max(0.0, answer.done - request.time)
    if options.json or not sys.stdout.isatty():
        report = {
            "request": request.name,
            "argument": request.argument,
            "by": request.by,
            "step": answer.step,
            "seconds": seconds,
            "text": answer.text,
        }
        return report, 0
    return f"{request.name} after step {answer.step}, {seconds:.1f} s later: {answer.text}", 0
