"""Check integer arguments: numpy would truncate fractions and wrap large numbers around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def integers(where: str, name: str, values: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Convert an argument to int64; raise ValueError if that is not exact.

    Args:
        where: The function, for the message.
        name: The name of the argument.
        values: Its value.

    Raises:
        ValueError: The values are ragged, are not integers (a bool is not), or exceed int64.

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
    # An empty list is float64 to numpy, and no error.
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{where}: {name} must be integers, got {array.dtype} {array.shape}")
    if array.size and array.dtype == np.uint64 and array.max() >> 63:
        raise ValueError(f"{where}: {name} must be below 2^63, got {array.max()}")
    return array.astype(np.int64, copy=False)


def indices_below(count: int, where: str, index: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Convert the argument `index` of a function to int64 `[N]`; check that it is in [0, count).

    Raises:
        ValueError: As `integers`; or an index lies outside.

    Examples:
        >>> indices_below(3, "permute", 2)
        array([2])
    """
    array = np.atleast_1d(integers(where, "index", index))
    if array.size and not 0 <= array.min() <= array.max() < count:
        raise ValueError(
            f"{where}: indices must lie in [0, {count}), got {array.min()} to {array.max()}"
        )
    return array
