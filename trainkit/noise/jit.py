"""Loops compiled by numba, kept on disk for the next process where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F, *, inline: bool = False, divides: bool = False) -> F:
    """Compile a function at its first call; it runs without the interpreter's lock.

    Args:
        function: A function of numbers and numpy arrays.
        inline: Put its code where another compiled function calls it.
        divides: A division by 0 gives what the processor gives, and no error: a loop that looks
            for one does four elements' work for each.

    Examples:
        >>> double = jit(lambda x: 2 * x)
        >>> double(4)
        8
    """
    options: dict[str, Any] = {"nogil": True, "inline": "always" if inline else "never"}
    options |= {"error_model": "numpy"} if divides else {}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no directory that numba could write its cache to
        return njit(**options)(function)
