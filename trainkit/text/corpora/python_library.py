"""Text on every machine with Python: the standard library, as source and as conversations."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.text.corpora.records import read_records
from trainkit.text.corpora.text_files import read_text
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_LIBRARY = frozenset({"dist-packages", "idle_test", "site-packages", "test", "tests"})


def standard_library() -> Path:
    """Return the directory of Python's standard library, in a virtual environment as well.

    Examples:
        >>> (standard_library() / "json" / "decoder.py").exists()
        True
    """
    return Path(sysconfig.get_path("stdlib"))


def is_library_source(name: str) -> bool:
    """Return whether a path below `standard_library()` is a source file of the library.

    Installed packages and tests, which are in the same directory, are not, nor is a binary file.

    Args:
        name: A path relative to `standard_library()`, with slashes. For `open_corpus(...,
            keep=is_library_source)`.

    Examples:
        >>> [is_library_source(name) for name in ("json/decoder.py", "unittest/test/a.py")]
        [True, False]
    """
    # The name first: only files with a suitable one are read.
    if not name.endswith(".py") or not NOT_LIBRARY.isdisjoint(name.split("/")):
        return False
    try:
        read_text(standard_library() / name)
    except DataError:
        return False
    return True


def docstring_conversations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield conversations from the standard library: a function's signature, and its purpose.

    The user gives the signature of a function, the assistant answers with the first paragraph of
    its docstring. Files are sorted by path; those that this Python cannot parse are skipped.

    Returns:
        An iterator of (path:line, {"messages": [...]}), the form of `read_records`.

    Examples:
        >>> name, record = next(docstring_conversations())
        >>> [message["role"] for message in record["messages"]]
        ['user', 'assistant']
    """
    files = read_records(standard_library(), suffixes=(".py",), keep=is_library_source)
    for path, record in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in third-party sources
                tree = ast.parse(record["text"])
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first_paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
            purpose = " ".join(first_paragraph.split())
            if not purpose:
                continue
            signature = f"def {node.name}({ast.unparse(node.args)})"
            messages = [
                {"role": "user", "content": signature},
                {"role": "assistant", "content": purpose},
            ]
            yield f"{path}:{node.lineno}", {"messages": messages}
