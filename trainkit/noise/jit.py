"""Loops compiled by numba and cached on disk for the next process where possible."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import IndexDataCacheFile

F = TypeVar("F", bound=Callable[..., Any])


def jit(
    function: F,
    *,
    inline: bool = False,
    divides: bool = False,
    uses: Sequence[Callable[..., Any]] = (),
) -> F:
    """Compile a function at its first call; it runs without the global interpreter lock.

    Args:
        function: A function of numbers and numpy arrays.
        inline: Inline the code into the compiled functions that call it.
        divides: A division by 0 gives inf or NaN and raises no error; a loop that checks for it is
            four times as slow.
        uses: Functions of other files that it calls. Numba does not check these files for changes
            when it reads its cache, so a digest of them becomes part of the name. Functions that
            use another package are not cached.

    Examples:
        >>> double = jit(lambda x: 2 * x)
        >>> double(4)
        8
    """
    options: dict[str, Any] = {
        "nogil": True,
        "inline": "always" if inline else "never",
        "error_model": "numpy" if divides else "python",
    }
    package = __name__.partition(".")[0]
    if any(used.__module__.partition(".")[0] != package for used in uses):
        return njit(**options)(function)
    if files := {sys.modules[used.__module__].__file__ or "" for used in uses}:
        source = b"".join(Path(file).read_bytes() for file in sorted(files))
        function.__qualname__ += f"-{hashlib.blake2b(source, digest_size=8).hexdigest()}"
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no directory that it can write its cache to
        return njit(**options)(function)
    if hasattr(compiled, "_cache"):  # NUMBA_DISABLE_JIT returns the function itself
        compiled._cache._cache_file.__class__ = Kept  # noqa: SLF001 (no public way)
    return compiled


class Kept(IndexDataCacheFile):
    """Numba's cache of a function's compiled overloads, with file names that follow from the key.

    Numba 0.68 numbers the files. Of two processes that compile a function for the first time, one
    may load the overload of the other under its own number: wrong results, or a crash. Two
    processes that write the index at once may still lose an entry; then it is compiled again.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write a compiled overload; on a full or read-only disk it is not cached."""
        text = repr((self._source_stamp, key)).encode()
        name = self._data_name(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()))
        with contextlib.suppress(OSError):
            self._save_data(name, data)
            self._save_index(self._load_index() | {key: name})
