"""Draw what the first run shows on a terminal of 80 columns: python docs/pictures/terminal.py RUN.

It runs the first recipe in a pseudo-terminal, with RUN as its directory, to the end. terminal.svg
is what stood there after a given step, as rich exports it; report.py draws the page of RUN.
"""
# ruff: noqa: INP001, S603 -- a script

import argparse
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 80
COMMAND = "python recipes/pretrain.py --steps 100 --eval-every 40 --sample 60"
# What rich writes before it draws its lines anew: erase this line, and the one above, so many times
ERASE = re.compile(r"(\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*)")
COLORS = [(31, 36, 48), (242, 135, 121), (135, 217, 108), (255, 204, 102)]
COLORS += [(115, 184, 255), (199, 146, 234), (92, 207, 230), (212, 216, 222)]
THEME = TerminalTheme((31, 36, 48), (212, 216, 222), COLORS)
# rich's own template loads a font from the network, which a picture in a page may not do.
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-label="The first run on a terminal">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, SFMono-Regular, Menlo, \
Consolas, "DejaVu Sans Mono", monospace; font-variant-east-asian: full-width }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def watch(command: list[str]) -> str:
    """Run a command on a pseudo-terminal; return what it wrote there."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "24", "TERM": "xterm-256color"}
    running = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, **size})
    os.close(theirs)
    parts = []
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                parts.append(terminal.read(2**16))
            except OSError:  # the command has ended
                break
    if running.wait():
        raise SystemExit(f"the run failed:\n{b''.join(parts).decode()}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def read_screen(written: str, until: str) -> str:
    """Return the lines that stand on a terminal when a text is first on it."""
    lines = [""]
    for part in ERASE.split(written):
        if part.startswith("\r\x1b[2K"):
            if re.search(until, "\n".join(lines)):
                break
            del lines[-1 - part.count("\x1b[1A") :]
            lines.append("")
        else:
            first, *rest = part.split("\n")
            lines[-1] += first
            lines += rest
    return "\n".join(lines)


def main() -> None:
    """Run the recipe, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of the run, a new one")
    parser.add_argument("--step", type=int, default=60, help="the step to draw (default: 60)")
    options = parser.parse_args()
    written = watch([sys.executable, *COMMAND.split()[1:], "--out", str(options.run)])
    screen = Text.from_ansi(read_screen(written, rf"step {options.step}/"))
    console = Console(record=True, width=COLUMNS + 2, file=io.StringIO(), force_terminal=True)
    console.print(Padding(Text.assemble(("$ ", "green"), COMMAND, "\n", screen), 1))
    picture = console.export_svg(title="", theme=THEME, code_format=SVG, unique_id="run")
    (HERE / "terminal.svg").write_text(picture)


if __name__ == "__main__":
    main()
