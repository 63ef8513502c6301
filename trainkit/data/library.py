"""Text that is on every machine with a Python: the source of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path, PurePosixPath

from trainkit.data.text import read_text
from trainkit.types import DataError

NOT_LIBRARY = frozenset({"dist-packages", "idle_test", "site-packages", "test", "tests"})


def standard_library() -> Path:
    """Return the directory of Python's standard library, also inside a virtual environment.

    Examples:
        >>> (standard_library() / "json" / "decoder.py").exists()
        True
    """
    return Path(sysconfig.get_path("stdlib"))


def is_library_source(name: str) -> bool:
    """Say whether a path below `standard_library()` is a source file of it.

    Installed packages and tests, which lie under the same directory, are not, nor is a file that is
    no text.

    Args:
        name: A path relative to `standard_library()`, with slashes; for `open_corpus(...,
            keep=is_library_source)`.

    Examples:
        >>> [is_library_source(name) for name in ("json/decoder.py", "unittest/test/a.py")]
        [True, False]
    """
    path = PurePosixPath(name)
    if path.suffix != ".py" or not NOT_LIBRARY.isdisjoint(path.parts):
        return False
    try:
        read_text(standard_library() / path)
    except DataError:
        return False
    return True
