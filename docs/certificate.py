"""Write docs/certificate.md; it takes four minutes on two cores.

python docs/certificate.py          # trains in every layout
python docs/certificate.py PAGE     # takes what `python -m trainkit certify --markdown` printed

The tests make rows of the decoder's table anew (`pytest --all`: every row): a layout that is
missing on the page is an error there. pictures/certificate.py draws it, and is to be run after it.
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from pathlib import Path

import torch

PAGE = Path(__file__).with_suffix(".md")
COMMAND = [sys.executable, "-m", "trainkit", "certify", "--markdown"]
HEAD = """\
![Every layout, mistakes, and reported losses](pictures/certificate-reported.png#gh-light-mode-only)
![The same, dark](pictures/certificate-reported-dark.png#gh-dark-mode-only)

[How to read a certificate](howto/coming-from-another-trainer.md#how-to-read-a-certificate) has the
names of the rows, [my loss differs from one rank](howto/my-loss-differs.md) makes one of your own
model, and [below](#the-picture) is what the picture shows. The tables are of torch {torch} on two
cores of a CPU, {date}.
"""
FOOT = """\
## The picture

**On the left** each layout of the first table is a column: its loss, gradient norm and parameters.
An exact 0 is drawn at the bottom. The line at 1e-12 is the bound of the tests.

**In the middle** are the mistakes in [what causes look
like](howto/my-loss-differs.md#what-causes-look-like), planted one at a time into a small decoder on
two ranks: the largest of its three differences after one step in fp64.

**On the right** is what such a comparison looks like without the same initial values. A [comment of
2026-08-04 in torchtitan #3029](https://github.com/pytorch/torchtitan/issues/3029) has the losses of
a debug model on one GPU and in 17 layouts of up to 8 GPUs, from one seed: after 10 steps between
9.73 and 9.97. The points are these losses' relative differences from that of one GPU. They measure
something else than the certificate: it is another model, in development then, with experts, and
each layout drew initial values of its own, as the losses of the first step, before any update, show
(12.03 to 12.08). So they say nothing against these layouts. They cannot say much for them either:
seven of the twelve mistakes in the middle leave the first loss as it is. Later rows of the thread
begin from one checkpoint: [others work on this in
public](comparison.md#what-others-are-still-working-on). Here the initial value of an element is a
function of the seed, its parameter's name and its index.
"""


def drop_last_column(line: str) -> str:
    """Return a table's line without the worst tensor, which is wider than a page."""
    return line.rsplit("|", 2)[0] + "|" if line.startswith("|") else line


def main() -> None:
    """Write the page."""
    given = sys.argv[1:]
    printed = (
        Path(given[0]).read_text("utf-8")
        if given
        else subprocess.run(COMMAND, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 -- our own
    )
    introduction, mark, tables = printed.partition("## decoder, fp64\n")
    lines = [drop_last_column(line) for line in tables.rstrip().splitlines()]
    head = HEAD.format(
        torch=torch.__version__.partition("+")[0], date=dt.datetime.now(dt.UTC).date()
    )
    joined = "\n".join(lines)
    PAGE.write_text(f"{introduction}{head}\n{mark}{joined}\n\n{FOOT}", "utf-8")


if __name__ == "__main__":
    main()
