"""Reduce long series to what a page can draw, so that no spike is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

Values = np.ndarray[tuple[int], np.dtype[np.float64]]


@attrs.frozen(eq=False)
class Buckets:
    """Which lines share a point of a curve: `edges` `[B+1]`, int64 indices of lines.

    Without `edges` every line has a point of its own.
    """

    count: int
    edges: np.ndarray[tuple[int], np.dtype[np.int64]] | None


def make_buckets(count: int, *, limit: int) -> Buckets:
    """Return buckets for so many lines: none if there are at most `2 * limit`.

    Args:
        count: The number of lines.
        limit: The largest number of buckets, each of which has two points.

    Examples:
        >>> make_buckets(5, limit=4).edges is None, make_buckets(12, limit=3).edges.tolist()
        (True, [0, 4, 8, 12])
    """
    if count <= 2 * limit:
        return Buckets(count, None)
    return Buckets(count, np.linspace(0, count, limit + 1).round().astype(np.int64))


def thin_axis(x: Sequence[float] | Values, buckets: Buckets) -> Values:
    """Return the positions of the points: two for each bucket, its first line and its middle.

    The last point stands at the last line.

    Examples:
        >>> thin_axis(range(12), make_buckets(12, limit=3)).tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0, 11.0]
    """
    x = np.asarray(x, dtype=np.float64)
    if buckets.edges is None:
        return x
    first, following = buckets.edges[:-1], buckets.edges[1:]
    rows = np.stack([first, (first + following) // 2], axis=1).ravel()
    rows[-1] = len(x) - 1  # an axis reaches to the last line
    return x[rows]


def thin_values(values: Sequence[Any] | Values, buckets: Buckets) -> tuple[Values, Values | None]:
    """Return the smallest and the largest value of each bucket, as they came, and its mean.

    So a spike of one step in 100,000 is drawn at its full height, where a sample of the steps would
    miss it and a mean would flatten it.

    Args:
        values: A number for each line; NaN where there is none.
        buckets: Of as many lines.

    Returns:
        `[2 * B]` with two values for each bucket, the earlier one first, and the means `[B]`; NaN
        where a bucket has no finite value. Without buckets the values as they are, and None.

    Examples:
        >>> values, means = thin_values([1, 9, 2, 0, 5, 5], Buckets(6, np.array([0, 3, 6])))
        >>> values.tolist(), means.tolist()
        ([1.0, 9.0, 0.0, 5.0], [4.0, 3.33...])
    """
    values = np.asarray(values, dtype=np.float64)
    if buckets.edges is None:
        return values, None
    starts = buckets.edges[:-1]
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    low = np.where(finite, values, np.inf)
    high = np.where(finite, values, -np.inf)
    lowest = np.minimum.reduceat(low, starts)
    highest = np.maximum.reduceat(high, starts)
    sizes = np.diff(buckets.edges)
    # The first line of each bucket at which its extreme stands.
    rows = np.arange(len(values))
    at_low = np.minimum.reduceat(
        np.where(low == np.repeat(lowest, sizes), rows, len(values)), starts
    )
    at_high = np.minimum.reduceat(
        np.where(high == np.repeat(highest, sizes), rows, len(values)), starts
    )
    pairs = np.stack([lowest, highest], axis=1)
    falls = at_high < at_low
    pairs[falls] = pairs[falls, ::-1]
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    empty = counts == 0
    pairs[empty] = np.nan
    means = np.where(empty, np.nan, sums / np.maximum(counts, 1))
    return pairs.ravel(), means


def round_values(values: Values, *, digits: int = 6) -> list[float | None]:
    """Return the values with so many significant digits, None where one is not finite.

    Examples:
        >>> round_values(np.array([1.23456789, np.nan, 0.0]), digits=3)
        [1.23, None, 0.0]
    """
    # A number as text and back: half of the bytes of a double, and no pixel shows the rest.
    return [
        float(f"{value:.{digits}g}") if finite else None
        for value, finite in zip(values.tolist(), np.isfinite(values).tolist(), strict=True)
    ]
