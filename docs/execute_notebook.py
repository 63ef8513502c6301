"""Execute docs/first_run.ipynb on a CPU; an error in a cell is an error here.

python docs/execute_notebook.py              # as .ci/run does: nothing is written
python docs/execute_notebook.py --write      # and writes what the cells have printed and drawn
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def main() -> int:
    """Execute the notebook in an empty folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", nargs="?", default=Path(__file__).with_name("first_run.ipynb"))
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    options = parser.parse_args()
    notebook = nbformat.read(options.notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}})
        try:
            client.execute()
        except CellExecutionError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    if options.write:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # when it ran
        nbformat.write(notebook, options.notebook)
    return 0


if __name__ == "__main__":
    sys.exit(main())
