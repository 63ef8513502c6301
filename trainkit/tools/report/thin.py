"""Reduce long series to what a page can draw, so that no spike is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
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
    if count <= 2 * limit:  # a bucket of two lines would draw both anyway
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
    pairs = np.full((len(buckets.edges) - 1, 2), np.nan)
    means = np.full(len(pairs), np.nan)
    for bucket, (first, following) in enumerate(pairwise(buckets.edges)):
        inside = values[first:following]
        inside = inside[np.isfinite(inside)]
        if not inside.size:
            continue
        low = inside.argmin()
        high = inside.argmax()
        # In the order of the steps, or a curve would run backwards inside a bucket.
        pairs[bucket] = inside[min(low, high)], inside[max(low, high)]
        means[bucket] = inside.mean()
    return pairs.ravel(), means


def round_values(values: Values, *, digits: int = 6) -> list[float | None]:
    """Return the values with so many significant digits, None where one is not finite.

    Examples:
        >>> round_values(np.array([1.23456789, np.nan, 0.0]), digits=3)
        [1.23, None, 0.0]
    """

    def shorten(value: float) -> float | None:
        # As text and back: half of the bytes of a double, and no pixel shows the rest.
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None

    return list(map(shorten, values.tolist()))
