"""Every public function has an example, and every example of the library runs."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trainkit"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SKIPPED = {"trainkit.testing.preload"}  # importing it loads what only a forkserver wants

WITHOUT = {}


def functions_without_example(module, text):
    """Return the public functions of a module's text whose docstring has no example."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {
        f"{module}.{node.name}"
        for node in found
        if node.name[0] != "_" and "\nExamples:\n" not in (ast.get_docstring(node) or "")
    }


@pytest.mark.parametrize("module", [name for name in FILES if name not in SKIPPED])
def test_examples_run(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=OPTIONS)
    assert result.failed == 0


def test_every_public_function_has_an_example():
    found = set()
    for module, path in FILES.items():
        found |= functions_without_example(module, path.read_text())
    assert sorted(found) == sorted(WITHOUT)
