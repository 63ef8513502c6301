"""`python -m trainkit recipe NAME`: copy a recipe, to run it or to change it.

To a file of your own, or under its own name into a folder:

  python -m trainkit recipe pretrain > train.py
  python -m trainkit recipe pretrain --to .

The first line of the copy names the version that it came from. `python -m trainkit recipes` lists
the names. A file that exists is not overwritten by --to.

Exit codes: 0 success, 64 an unknown name, or a file that exists, 74 it cannot be written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainkit.files import atomic_write, convert_disk_errors, find_recipes, read_version
from trainkit.types import ConfigError

HELP = "copy a recipe, to run it or to change it"


def add(recipe: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    recipe.add_argument("name", metavar="NAME", help="python -m trainkit recipes lists them")
    recipe.add_argument(
        "--to", type=Path, metavar="FOLDER", help="copy it there (default: print it)"
    )


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return the recipe's text, or where it was copied to, and the exit code 0.

    Effects:
        Writes a file, with --to.
    """
    recipes = {path.stem: path for path in find_recipes().glob("*.py")}
    path = recipes.get(options.name.removesuffix(".py"))
    if path is None:
        raise ConfigError(
            f"recipe: there is no recipe {options.name}; there are {', '.join(sorted(recipes))}",
            where="name",
            got=options.name,
            want=sorted(recipes),
        )
    # Lines of its docstring name it as it was called in trainkit, whatever the copy is called.
    text = f"# The recipe {path.stem} of trainkit-lm {read_version()}\n{path.read_text('utf-8')}"
    if options.to is None:
        return text.removesuffix("\n"), 0
    copy = options.to / path.name
    if copy.exists():
        raise ConfigError(
            f"recipe: {copy} exists, and is not overwritten",
            where="to",
            hint=f"choose another folder, or a name: python -m trainkit recipe {path.stem} > FILE",
        )
    with convert_disk_errors(options.to, by="recipe"):
        options.to.mkdir(parents=True, exist_ok=True)
    with atomic_write(copy, by="recipe") as file:
        file.write(text.encode())
    return {"recipe": path.stem, "copied_to": str(copy)}, 0
