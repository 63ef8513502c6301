"""Draw what a run shows on a terminal of 80 columns: python docs/pictures/terminal.py (needs pyte).

It runs the first recipe in a pseudo-terminal, and draws the screen after a given step as
terminal.svg.
"""
# ruff: noqa: INP001, S603 -- a script

import argparse
import html
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pyte

HERE = Path(__file__).parent
COLUMNS, LINES = 80, 24
WIDTH, HEIGHT = 8.4, 19.0  # of a character, in pixels
COLORS = {"default": "#d4d8de", "magenta": "#c792ea", "red": "#f28779", "cyan": "#5ccfe6"}
COLORS |= {"green": "#87d96c", "brown": "#ffcc66", "yellow": "#ffcc66", "blue": "#73b8ff"}


def watch(command: list[str], *, until: str) -> pyte.Screen:
    """Run a command on a pseudo-terminal; return the screen when it first shows a text."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    running = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, **size})
    os.close(theirs)
    try:
        while select.select([ours], [], [], 120.0)[0]:
            try:
                stream.feed(os.read(ours, 2**16).replace(b"\n", b"\r\n"))
            except OSError:  # the command has ended
                break
            if any(re.search(until, line) for line in screen.display):
                break
    finally:
        running.kill()
        running.wait()
    return screen


def draw(screen: pyte.Screen, command: str) -> str:
    """Return the screen as an SVG, below the command that was typed."""
    rows = [f'<tspan fill="#87d96c">$</tspan> {html.escape(command)}']
    for y in range(LINES):
        spans = []
        for x in range(COLUMNS):
            cell = screen.buffer[y][x]
            color = cell.fg if cell.fg.startswith("#") else COLORS.get(cell.fg)
            color = color or (f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else "#d4d8de")
            weight = ' font-weight="bold"' if cell.bold else ""
            spans.append((f'fill="{color}"{weight}', cell.data))
        merged = list[list[str]]()
        for style, text in spans:
            if merged and merged[-1][0] == style:
                merged[-1][1] += text
            else:
                merged.append([style, text])
        rows.append("".join(f"<tspan {s}>{html.escape(t)}</tspan>" for s, t in merged).rstrip())
    while re.sub("<[^>]*>", "", rows[-1]).strip() == "":
        rows.pop()
    width, height = COLUMNS * WIDTH + 40, len(rows) * HEIGHT + 62
    texts = "\n".join(
        f'<text x="20" y="{58 + i * HEIGHT:.0f}" xml:space="preserve">{row}</text>'
        for i, row in enumerate(rows)
    )
    dots = "".join(
        f'<circle cx="{22 + 18 * i}" cy="18" r="5.5" fill="{color}"/>'
        for i, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="A run on a terminal">\n'
        f'<rect width="100%" height="100%" rx="10" fill="#1f2430"/>{dots}\n'
        "<g font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', "
        'monospace" font-size="14" fill="#d4d8de">\n'
        f"{texts}\n</g>\n</svg>\n"
    )


def main() -> None:
    """Run the recipe, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=int, default=60, help="the step to draw (default: 60)")
    options = parser.parse_args()
    command = "python recipes/pretrain.py --steps 100 --eval-every 40 --sample 60"
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, *command.split()[1:], "--out", f"{out}/run"]
        screen = watch(words, until=rf"step {options.step}/")
    (HERE / "terminal.svg").write_text(draw(screen, command))


if __name__ == "__main__":
    main()
