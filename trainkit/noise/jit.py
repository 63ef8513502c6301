"""Loops compiled by numba, kept on disk for the next process where that is possible."""

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
    """Compile a function at its first call; it runs without the interpreter's lock.

    Args:
        function: A function of numbers and numpy arrays.
        inline: Put its code where another compiled function calls it.
        divides: A division by 0 gives what the processor gives, and no error: a loop that looks
            for one does four elements' work for each.
        uses: What it calls from other files, which numba does not look at when it asks whether what
            it kept still holds. Kept is what is of this package, under a digest of those files.

    Examples:
        >>> double = jit(lambda x: 2 * x)
        >>> double(4)
        8
    """
    options: dict[str, Any] = {"nogil": True, "inline": "always" if inline else "never"}
    options |= {"error_model": "numpy"} if divides else {}
    package = __name__.partition(".")[0]
    if any(used.__module__.partition(".")[0] != package for used in uses):
        return njit(**options)(function)
    if files := {sys.modules[used.__module__].__file__ or "" for used in uses}:
        told = b"".join(Path(file).read_bytes() for file in sorted(files))
        function.__qualname__ += f"-{hashlib.blake2b(told, digest_size=8).hexdigest()}"
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError:  # no directory that numba could write its cache to
        return njit(**options)(function)
    if hasattr(made, "_cache"):  # NUMBA_DISABLE_JIT gives the function back
        made._cache._cache_file.__class__ = Kept  # noqa: SLF001 (no public way)
    return made


class Kept(IndexDataCacheFile):
    """Where the compiled forms of a function are, one for each kind of arguments and closure.

    Numba 0.68 numbers their files, so that of two processes which compile a function for the first
    time one may find the other's form under its own number: other numbers, or a crash. Here a
    file's name follows from what it is of. Two that write the index at once may lose an entry, and
    then somebody compiles again.
    """

    def save(self, key: Any, data: Any) -> None:
        """Keep a form, where there is room for it."""
        told = repr((self._source_stamp, key)).encode()
        name = self._data_name(int.from_bytes(hashlib.blake2b(told, digest_size=8).digest()))
        with contextlib.suppress(OSError):
            self._save_data(name, data)
            self._save_index(self._load_index() | {key: name})
