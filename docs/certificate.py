"""Write the certificate's table into README.md; it takes four minutes on two cores.

python docs/certificate.py          # trains in every layout
python docs/certificate.py PAGE     # takes what `python -m trainkit certify --markdown` printed

The tests make rows of the table anew (`pytest --all`: every row): a layout that is missing in
README.md is an error there.
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"
COMMAND = [sys.executable, "-m", "trainkit", "certify", "--markdown"]


def table_of(page: str) -> list[str]:
    """Return the lines of the decoder's table in fp64, without its last column."""
    section = page.partition("## decoder, fp64\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.rsplit("|", 2)[0] + "|" for line in lines]


def main() -> None:
    """Put the table between its marks."""
    given = sys.argv[1:]
    page = (
        Path(given[0]).read_text("utf-8")
        if given
        else subprocess.run(COMMAND, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 -- our own
    )
    table = table_of(page)
    count = f"{len(table) - 2} of {len(table) - 2} layouts give the numbers of one process"
    version = ".".join(torch.__version__.split(".")[:2])
    block = [
        "<!-- certificate -->",
        "<details>",
        f"<summary>{count}, to 1e-12, after 3 steps (torch {version}, two cores)</summary>",
        "",
        *table,
        "",
        "</details>",
        "<!-- /certificate -->",
    ]
    marked = re.compile(r"<!-- certificate -->.*<!-- /certificate -->", re.DOTALL)
    README.write_text(marked.sub("\n".join(block), README.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
