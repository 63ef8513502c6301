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
        raise ValueError(
            f"{where}: {name} must be one list of integers, not a ragged one"
        ) from None
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{where}: {name} must be integers, got {array.dtype} {array.shape}")
    if array.size and array.dtype == np.uint64 and array.max() >> 63:
        raise ValueError(f"{where}: {name} must be below 2^63, got {array.max()}")
    return array.astype(np.int64, copy=False)
