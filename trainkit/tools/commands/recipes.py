"""`python -m trainkit recipes`: list the recipes, with a sentence each.

python -m trainkit recipes
python -m trainkit recipes --json
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from trainkit.files import find_recipes

HELP = "list the recipes with a sentence each"

_MAX_WIDTH = 80  # columns


def add(recipes: argparse.ArgumentParser) -> None:
    """Add the command's flag to its parser."""
    recipes.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return the list as text for a terminal, as records elsewhere, and the exit code 0."""
    found = [
        {"recipe": path.stem, "does": read_summary(path)}
        for path in sorted(find_recipes().glob("*.py"))
    ]
    if options.json or not sys.stdout.isatty():
        return found, 0
    width = min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 24)).columns)
    margin = max(len(recipe["recipe"]) for recipe in found) + 2
    lines = [
        textwrap.fill(
            recipe["does"],
            max(width, 2 * margin),
            initial_indent=recipe["recipe"].ljust(margin),
            subsequent_indent=" " * margin,
        )
        for recipe in found
    ]
    return "\n".join([*lines, "", "python -m trainkit recipe NAME > train.py copies one."]), 0


def read_summary(path: Path) -> str:
    """Return the first sentence of a file's docstring.

    Args:
        path: A Python file, which is parsed and not run.

    Examples:
        >>> read_summary(find_recipes() / "pretrain.py").startswith("Train a decoder from scratch")
        True
    """
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())
