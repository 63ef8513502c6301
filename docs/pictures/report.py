"""Draw report.png and report-dark.png: the page of a run that goes on, in light and in dark.

PYTHONPATH=tests python docs/pictures/report.py        # of a run that is made up
PYTHONPATH=tests python docs/pictures/report.py RUN    # run.png and run-dark.png, of a real one

It needs Playwright and Chromium, as .ci/browser does. The lines of the first are written by
tests/report_runs.py, and nothing was trained; the other is that of terminal.py.
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import report_runs
from playwright.sync_api import sync_playwright

from trainkit.tools.report import write_report

SIZE = {"width": 1400, "height": 1300}


def main() -> None:
    """Draw the pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        given = [Path(name) for name in sys.argv[1:]]
        run = given or [report_runs.healthy(Path(folder) / "llama-8b-web", until=16_240)]
        page = Path(folder) / "report.html"
        write_report(run, page)
        chromium = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        name = "run" if given else "report"
        for scheme, ending in (("light", ".png"), ("dark", "-dark.png")):
            tab = chromium.new_page(viewport=SIZE, color_scheme=scheme)
            tab.goto(f"file://{page}")
            tab.wait_for_selector("html[data-ready]")
            tab.wait_for_timeout(500)
            card = tab.locator("[data-card='phases-0']").bounding_box()
            height = round(card["y"] + card["height"]) + 11  # no card is cut
            tab.screenshot(
                path=Path(__file__).with_name(name + ending),
                clip={"x": 0, "y": 0, "width": SIZE["width"], "height": height},
            )
        chromium.close()


if __name__ == "__main__":
    main()
