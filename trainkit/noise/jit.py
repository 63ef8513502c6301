"""Loops compiled by numba, cached on disk for the next process where that is possible."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

F = TypeVar("F", bound=Callable[..., Any])


def jit(
    function: F,
    *,
    inline: bool = False,
    divides: bool = False,
    uses: Sequence[Callable[..., Any]] = (),
) -> F:
    """Compile a function at its first call; it runs without the interpreter's lock.

    Args:
        function: A function of numbers and numpy arrays.
        inline: Inline its code into other compiled functions that call it.
        divides: A division by 0 gives inf or nan as the processor does, and no error. A loop that
            checks for zeros takes four times as long.
        uses: The compiled functions that it calls from other files. Numba looks at this file alone
            to see whether its cache is out of date, so a digest of those files becomes a part of
            the cache's name. Only loops of this package are cached.

    Examples:
        >>> double = jit(lambda x: 2 * x)
        >>> double(4)
        8
    """
    decorate: Any = njit(
        nogil=True,
        inline="always" if inline else "never",
        error_model="numpy" if divides else "python",
    )
    package = __name__.partition(".")[0]
    # A later version of another package would not make the cache out of date.
    if any(used.__module__.partition(".")[0] != package for used in uses):
        return decorate(function)
    if files := {sys.modules[used.__module__].__file__ or "" for used in uses}:
        sources = b"".join(Path(file).read_bytes() for file in sorted(files))
        function.__qualname__ += f"-{hashlib.blake2b(sources, digest_size=8).hexdigest()}"
    compiled = decorate(function)
    with contextlib.suppress(RuntimeError):  # there is no directory that numba could write to
        if hasattr(compiled, "_cache"):  # NUMBA_DISABLE_JIT gives the function back
            compiled._cache = LoopCache(function)  # noqa: SLF001 (as `cache=True` does)
    return compiled


class LoopCache(FunctionCache):
    """Numba's cache of a function, with the file names of `LoopFiles`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = LoopFiles(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )


class LoopFiles(IndexDataCacheFile):
    """The compiled forms of a function on disk, one for each kind of arguments and closure.

    Numba 0.68 numbers their files, so that of two processes which compile a function for the first
    time one may find the other's form under its own number: wrong results, or a crash. Here a hash
    of what was compiled names the file. Two processes that write the index at once may lose an
    entry, which is then compiled again.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write a form to disk if there is room for it."""
        stamp = repr((self._source_stamp, key)).encode()
        digest = hashlib.blake2b(stamp, digest_size=8).digest()
        name = self._data_name(int.from_bytes(digest))
        with contextlib.suppress(OSError):
            self._save_data(name, data)
            self._save_index(self._load_index() | {key: name})
