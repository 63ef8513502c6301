"""Integers from outside: numpy would cut off a fraction, and let what is too large wrap around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def integers(where: str, name: str, values: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the argument `name` of `where` as int64, or refuse what int64 does not hold exactly.

    Raises:
        ValueError: The values are ragged, no integers (a bool is none), or beyond int64.

    Examples:
        >>> integers("permute", "index", [3, 4])
        array([3, 4])
        >>> integers("permute", "index", [0.5])
        Traceback (most recent call last):
        ...
        ValueError: permute: index must be integers, got float64 (1,)
    """
    try:
        array = np.asarray(values)
    except ValueError:
        must = f"{name} must be one list of integers, not a ragged one"
        raise ValueError(f"{where}: {must}") from None
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{where}: {name} must be integers, got {array.dtype} {array.shape}")
    if array.size and array.dtype == np.uint64 and array.max() >> 63:
        raise ValueError(f"{where}: {name} must be below 2^63, got {array.max()}")
    return array.astype(np.int64, copy=False)


def indices_below(count: int, where: str, index: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the argument `index` of `where`, int64 `[N]`, or refuse what is not in [0, count).

    Raises:
        ValueError: As `integers`; or one lies outside.

    Examples:
        >>> indices_below(3, "permute", 2)
        array([2])
    """
    array = np.atleast_1d(integers(where, "index", index))
    if array.size and not 0 <= array.min() <= array.max() < count:
        what = f"indices must lie in [0, {count}), got {array.min()} to {array.max()}"
        raise ValueError(f"{where}: {what}")
    return array
