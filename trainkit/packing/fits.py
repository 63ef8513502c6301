"""Fits: bin-packing algorithms. Any function with the same signature is a `Fit` too.

A fit gets the lengths of one group, each between 1 and the capacity, and numbers the bins from 0
without gaps. The fits here have a `version` for the cache of packings, which changes with their
results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs
import numpy as np

from trainkit.noise.jit import jit
from trainkit.sampling.integers import integers

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.types import Fit, IntArray

INT32 = 1 << 31
"""The first integer beyond int32."""
MAX_TOKENS = INT32 - 1
"""The longest row: `cu_seqlens` is int32."""


class VersionedFit(Protocol):
    """A `Fit` with a name and a version, which identify it in a cache of packings."""

    __name__: str
    version: int

    def __call__(
        self, lengths: IntArray, capacity: int, *, max_documents: int | None
    ) -> IntArray: ...


def with_version(version: int) -> Callable[[Fit], VersionedFit]:
    """Return a decorator that sets the version of a `Fit`.

    Args:
        version: Change it whenever the results of the fit change: cached packings of another
            version are not used.

    Examples:
        >>> @with_version(1)
        ... def one_each(lengths, capacity, *, max_documents):
        ...     return np.arange(len(lengths))
        >>> one_each.__name__, one_each.version
        ('one_each', 1)
    """

    def decorate(function: Fit) -> VersionedFit:
        fit = cast("VersionedFit", function)
        fit.version = version
        return fit

    return decorate


@with_version(1)
def next_fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
    """Fill one bin after the other; a piece that does not fit opens the next (next fit).

    Args:
        lengths: int64 `[N]`, each between 1 and `capacity`.
        capacity: Tokens per bin.
        max_documents: The maximum number of pieces in a bin; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`.

    Raises:
        ValueError: A length is not between 1 and `capacity`.

    Examples:
        >>> next_fit(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([0, 0, 1, 1])
    """
    lengths, limit = _check_arguments("next_fit", lengths, capacity, max_documents)
    bin_of = np.empty(lengths.size, np.int64)
    shortest, longest = _next_fit(lengths, int(capacity), limit, bin_of)
    _check_lengths("next_fit", shortest, longest, capacity)
    return bin_of


@with_version(1)
def best_fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
    """Put each piece, the longest first, into the fullest bin that has room (best fit decreasing).

    Time is linear in pieces plus the longest length (for few long pieces, the time of sorting
    them), and memory is linear in pieces. There is no search for the fullest bin. Lengths only
    decrease, so the bins with room for the current length form a stack with the fullest on top. The
    top bin takes pieces of this length as long as they fit. Then its space is below the length, and
    it waits in a list of bins with that space until the length has decreased to it. At that time it
    is fuller than all bins on the stack, and goes on top.

    Ties: pieces of one length go in arrival order, and of equally full bins the one that waited
    first goes first.

    Args:
        lengths: int64 `[N]`, each between 1 and `capacity`.
        capacity: Tokens per bin.
        max_documents: The maximum number of pieces in a bin; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`. See D. S. Johnson, "Near-optimal bin packing algorithms"
        (1973).

    Raises:
        ValueError: A length is not between 1 and `capacity`.

    Examples:
        >>> best_fit(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([1, 1, 0, 0])
    """
    task = make_task("best_fit", lengths, capacity, max_documents)
    size = task.keys.size
    # There are at most three runs per length, and far fewer segments than pieces; memory that is
    # never touched is never allocated.
    max_runs = min(bound_num_bins(task), 3 * task.sizes.size)
    runs = np.empty((max_runs, 5), np.int64)
    segments = np.empty((size, 4), np.int32 if size < INT32 else np.int64)
    firsts = np.zeros(task.sizes.size, np.int64)
    _best_fit(task.keys, task.sizes, task.capacity, task.limit, runs, segments, firsts)
    bin_of = np.empty(size, np.int64)
    _assign_bins(task.keys, segments, firsts, bin_of)
    return bin_of


@with_version(1)
def first_fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
    """Put each piece, the longest first, into the first bin that has room (first fit decreasing).

    As in the textbook, ties go in arrival order, the first bin is the one with the lowest number,
    and a new bin opens when none has room. A tree of the largest spaces finds it in log(bins) time,
    and pieces of equal length that fit together are placed together.

    Args:
        lengths: int64 `[N]`, each between 1 and `capacity`.
        capacity: Tokens per bin.
        max_documents: The maximum number of pieces in a bin; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`. See D. S. Johnson, "Near-optimal bin packing algorithms"
        (1973).

    Raises:
        ValueError: A length is not between 1 and `capacity`.

    Examples:
        >>> first_fit(np.array([5, 2, 6, 3, 1]), 8, max_documents=None)
        array([1, 0, 0, 1, 2])
    """
    task = make_task("first_fit", lengths, capacity, max_documents)
    ends, bins = count_by_length(task)
    # A complete binary tree with a leaf for each bin that may be opened; a closed or unopened bin
    # has space 0.
    leaves = 1 << (bound_num_bins(task) - 1).bit_length()
    tree = np.zeros(2 * leaves, np.int32)
    room = np.empty(leaves, bins.dtype)
    _first_fit(ends, task.sizes, task.capacity, task.limit, tree, room, bins)
    return restore_arrival_order(task, ends, bins)


# --------------------------------------------------------------------------------------- arguments


@attrs.frozen(eq=False)
class Task:
    """The checked arguments of a fit, in the form of the compiled loops.

    `limit` is `max_documents`, by default the number of pieces. The length of a piece is
    `sizes[key]`; sizes increase from 0. They are all lengths up to the longest, so that a key is a
    length. Where that table would be much longer than the pieces, they are the lengths that occur.
    """

    keys: IntArray
    sizes: IntArray
    capacity: int
    limit: int
    total: int


def make_task(name: str, lengths: Any, capacity: int, max_documents: int | None) -> Task:
    """Check the arguments of the fit `name`, and return them as a `Task`."""
    lengths, limit = _check_arguments(name, lengths, capacity, max_documents)
    # One pass; numpy's min, max and sum would take three.
    shortest, longest, total = compute_extent(lengths)
    _check_lengths(name, shortest, longest, capacity)
    if has_table(longest, lengths.size):
        return Task(lengths, np.arange(longest + 1), int(capacity), limit, total)
    # With 0 in front, as in the table of all lengths: key 0 is a length that no piece has.
    sizes, keys = np.unique(np.append(0, lengths), return_inverse=True)
    return Task(read_only(keys[1:]), sizes, int(capacity), limit, total)


def has_table(longest: int, num_pieces: int) -> bool:
    """Return whether a table of all lengths is small, or not much larger than the pieces."""
    return longest <= (1 << 16) + 16 * num_pieces


def _check_arguments(
    name: str, lengths: Any, capacity: int, max_documents: int | None
) -> tuple[IntArray, int]:
    """Return the lengths in the form of the compiled loops, and the limit of pieces."""
    check_integer(name, "capacity", capacity, min_value=1, max_value=MAX_TOKENS)
    lengths = integers(name, "lengths", lengths)
    if lengths.ndim != 1:
        raise ValueError(f"{name}: lengths must have one dimension, got shape {lengths.shape}")
    if max_documents is not None:
        check_integer(name, "max_documents", max_documents, min_value=1)
    limit = lengths.size if max_documents is None else min(int(max_documents), lengths.size)
    return read_only(np.ascontiguousarray(lengths)), max(1, limit)


def _check_lengths(name: str, shortest: int, longest: int, capacity: int) -> None:
    """Raise ValueError if a length is out of range; without lengths the extremes are (1, 0)."""
    if shortest < 1 or longest > capacity:
        raise ValueError(
            f"{name}: lengths must lie between 1 and the capacity, {capacity}, got {shortest} to "
            f"{longest}; pack_bins splits and drops documents first"
        )


def check_integer(
    function: str,
    name: str,
    value: int,
    *,
    min_value: int | None = None,
    max_value: int | None = None,
) -> None:
    """Raise ValueError if an argument of `function` is not an integer, or out of range."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    is_above = is_integer and max_value is not None and value > max_value
    if not is_integer or is_above or (min_value is not None and value < min_value):
        bound = "" if min_value is None else f" of at least {min_value}"
        bound = f" of at most {max_value}" if is_above else bound
        raise ValueError(f"{function}: {name} must be an integer{bound}, got {value!r}")


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View an array as read-only: numba compiles a loop separately for writeable arrays."""
    view = array.view()
    view.flags.writeable = False
    return view


def bound_num_bins(task: Task) -> int:
    """Return an upper bound of the bins of a fit that opens one only when no other has room.

    All bins but one, and but those closed by `limit`, are more than half full: of two that are not,
    the first would have had room for the pieces of the second.
    """
    bound = 2 * task.total // task.capacity + 1 + task.keys.size // task.limit
    return max(1, min(task.keys.size, bound))


def count_by_length(task: Task) -> tuple[IntArray, np.ndarray[Any, Any]]:
    """Return the ends of the pieces of each key in sorted order, and memory for their bins.

    Bins are written for pieces sorted by length and, within a length, by arrival.
    """
    ends = np.cumsum(np.bincount(task.keys, minlength=task.sizes.size))
    size = task.keys.size
    return ends, np.empty(size, np.int32 if size < INT32 else np.int64)


def restore_arrival_order(task: Task, ends: IntArray, bins: np.ndarray[Any, Any]) -> IntArray:
    """Return the bin of each piece from the bins of sorted pieces; overwrites `ends`."""
    bin_of = np.empty(task.keys.size, np.int64)
    # The end of a key is the start of the next; ends[0] stays, as no piece has key 0.
    ends[1:] = ends[:-1]
    _scatter_bins(task.keys, ends, bins, bin_of)
    return bin_of


def argsort_keys(keys: IntArray, count: int) -> tuple[np.ndarray[Any, Any], IntArray]:
    """Sort the indices of keys in [0, count), stably; those of key k end at `ends[k]`."""
    order = np.empty(keys.size, np.int32 if keys.size < INT32 else np.int64)
    ends = np.zeros(count, np.int64)
    _counting_sort(keys, order, ends)
    return order, ends


@jit
def compute_extent(values: Any) -> Any:
    """Return the smallest value, the largest value and the sum; (1, 0, 0) for no values."""
    if values.size == 0:
        return 1, 0, 0
    smallest = values[0]
    largest = values[0]
    total = 0
    for index in range(values.size):
        value = values[index]
        smallest = min(smallest, value)
        largest = max(largest, value)
        total += value
    return smallest, largest, total


@jit
def _counting_sort(keys: Any, order: Any, ends: Any) -> None:
    for key in keys:
        ends[key] += 1
    place = 0
    for key in range(ends.size):  # ends are starts until the next loop
        ends[key], place = place, place + ends[key]
    for index in range(keys.size):
        order[ends[keys[index]]] = index
        ends[keys[index]] += 1


# --------------------------------------------------------------------------------- compiled loops


@jit
def _next_fit(lengths: Any, capacity: int, limit: int, bin_of: Any) -> Any:
    """Write the bins; return the shortest and the longest length, which cost no time here."""
    # No branches: a bin ends at every third or fourth piece, which cannot be predicted (a million
    # pieces in 1.5 ms instead of 2.6). `opens` is -1, all bits set, or 0.
    current = -1
    space = 0
    room = limit
    shortest, longest = 1, 0
    for piece in range(lengths.size):
        length = lengths[piece]
        shortest = min(shortest, length)
        longest = max(longest, length)
        space -= length
        room -= 1
        opens = (space | room) >> 63
        space += opens & (capacity - length - space)
        room += opens & (limit - 1 - room)
        current -= opens
        bin_of[piece] = current
    return shortest, longest


@jit
def _scatter_bins(keys: Any, places: Any, bins: Any, bin_of: Any) -> None:
    for piece in range(keys.size):
        place = places[keys[piece]]
        places[keys[piece]] = place + 1
        bin_of[piece] = bins[place]


@jit
def _best_fit(  # noqa: PLR0917 (an array is a parameter)
    keys: Any, sizes: Any, capacity: int, limit: int, runs: Any, segments: Any, firsts: Any
) -> None:
    """Write the segments of each length, in order of arrival, from `firsts` on.

    A segment is pieces of one length in consecutive bins: the first bin, the end, the pieces in
    each bin, and this number again for `_assign_bins` to count down.

    A run is consecutive bins with equal contents. It takes all pieces of a length at once, so that
    the time depends on the number of lengths, and hardly on the number of pieces.
    """
    first_bin, count, space = runs[:, 0], runs[:, 1], runs[:, 2]
    room, earlier = runs[:, 3], runs[:, 4]
    ready = np.empty(len(runs), np.int64)  # the stack
    waiting = np.full(sizes.size, -1)  # for each key, the last run with space for it
    # Whether sizes are all lengths up to the longest, so that a space is its own key.
    every = sizes[-1] == sizes.size - 1
    for key in keys:
        firsts[key] += 1
    num_bins = num_runs = num_segments = 0
    num_ready = np.int64(0)  # as a literal 0 numba would compile `_push_runs` a second time
    for key in range(sizes.size - 1, 0, -1):
        length = sizes[key]
        num_ready = _push_runs(ready, num_ready, waiting[key], earlier, space, every)
        # Until here `firsts` counts the pieces of each length, and from here on finds its segments.
        left, firsts[key] = firsts[key], num_segments
        while left > 0:
            if num_ready == 0:
                # All new bins that the remaining pieces need are one run.
                per_bin = min(capacity // length, limit)
                first_bin[num_runs] = num_bins
                count[num_runs] = (left + per_bin - 1) // per_bin
                space[num_runs], room[num_runs] = capacity, limit
                num_bins += count[num_runs]
                ready[num_ready] = num_runs
                num_ready, num_runs = 1, num_runs + 1
            run = ready[num_ready - 1]
            per_bin = _count_fitting(length, space[run], room[run], left)
            # Bins that take `per_bin` pieces each; a last bin that takes fewer has its own round.
            bins = min(count[run], left // per_bin)
            if bins < count[run]:  # the others stay on the stack
                part = num_runs
                num_runs += 1
                first_bin[part], count[part] = first_bin[run], bins
                space[part], room[part] = space[run], room[run]
                first_bin[run] += bins
                count[run] -= bins
                run = part
            else:
                num_ready -= 1
            segments[num_segments, 0] = first_bin[run]
            segments[num_segments, 1] = first_bin[run] + bins
            segments[num_segments, 2] = segments[num_segments, 3] = per_bin
            num_segments += 1
            left -= bins * per_bin
            space[run] -= per_bin * length
            room[run] -= per_bin
            if room[run] == 0:
                continue
            if space[run] >= length:
                ready[num_ready] = run
                num_ready += 1
            else:
                # Waits for the longest length that fits its space.
                file = space[run] if every else np.searchsorted(sizes, space[run], "right") - 1
                earlier[run] = waiting[file]
                waiting[file] = run


@jit
def _push_runs(  # noqa: PLR0917 (an array is a parameter)
    ready: Any, num_ready: Any, run: int, earlier: Any, space: Any, every: bool
) -> int:
    """Put the waiting runs of one key on the stack, the fullest on top; return its height."""
    height = num_ready
    while run >= 0:
        ready[num_ready] = run
        num_ready += 1
        run = earlier[run]
    if not every and num_ready - height > 1:  # otherwise their spaces are equal
        # Loops, because numba takes five seconds to compile the same as array expressions.
        top = ready[height:num_ready].copy()
        fullness = np.empty(top.size, np.int64)
        for place in range(top.size):
            fullness[place] = -space[top[place]]
        order = np.argsort(fullness, kind="mergesort")
        for place in range(top.size):
            ready[height + place] = top[order[place]]
    return num_ready


@jit
def _assign_bins(keys: Any, segments: Any, firsts: Any, bin_of: Any) -> None:
    """Assign the pieces to the segments of their lengths; overwrites both."""
    for piece in range(keys.size):
        at = firsts[keys[piece]]
        bin_of[piece] = segments[at, 0]
        segments[at, 3] -= 1
        if segments[at, 3] == 0:
            segments[at, 0] += 1
            segments[at, 3] = segments[at, 2]
            if segments[at, 0] == segments[at, 1]:
                firsts[keys[piece]] = at + 1


@jit
def _first_fit(  # noqa: PLR0917 (an array is a parameter)
    ends: Any, sizes: Any, capacity: int, limit: int, tree: Any, room: Any, bins: Any
) -> None:
    """Write the bins of the pieces by length.

    Node n of `tree` has the largest space below it; its children are 2n and 2n + 1.
    """
    leaves = tree.size // 2
    num_bins = 0
    for key in range(ends.size - 1, 0, -1):
        # The pieces of this length are [place, end) in sorted order.
        length = sizes[key]
        place = ends[key - 1]
        end = ends[key]
        while place < end:
            # The root has the largest space of all bins: a bin that is open has room.
            if tree[1] >= length:
                node = 1
                while node < leaves:
                    node *= 2
                    # The left child goes first, since its bins have lower numbers.
                    if tree[node] < length:
                        node += 1
            else:
                # Opens a bin; its space then goes up the tree like that of any other.
                node = leaves + num_bins
                tree[node] = capacity
                room[num_bins] = limit
                num_bins += 1
            bin_ = node - leaves
            taken = _count_fitting(length, tree[node], room[bin_], end - place)
            bins[place : place + taken] = bin_
            place += taken
            room[bin_] -= taken
            tree[node] = tree[node] - taken * length if room[bin_] > 0 else 0
            while node > 1:
                node //= 2
                # Where a node's largest space stays, that of the nodes above it does too.
                largest = max(tree[2 * node], tree[2 * node + 1])
                if tree[node] == largest:
                    break
                tree[node] = largest


@jit
def _count_fitting(length: int, space: int, room: int, left: int) -> int:
    """Return the number of `left` pieces of one length that fit into a bin with room for one."""
    if left == 1 or room == 1 or space - length < length:  # the usual case, without a slow division
        return 1
    return min(space // length, room, left)
