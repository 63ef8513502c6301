"""Fits: which bin each piece goes to. Any function of the same signature is a `Fit` too.

A fit sees the lengths of one group, each between 1 and the capacity, and numbers the bins from 0
without gaps. Those here have a `version`, which a cache of plans keeps: it changes with what they
do.
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
"""The first number that int32 does not hold."""
MOST_TOKENS = INT32 - 1
"""The longest row: a batch says in int32 where its documents begin."""


class VersionedFit(Protocol):
    """A `Fit` with a name and a version, by which a cache tells its plans from others."""

    __name__: str
    version: int

    def __call__(
        self, lengths: IntArray, capacity: int, *, max_documents: int | None
    ) -> IntArray: ...


def with_version(version: int) -> Callable[[Fit], VersionedFit]:
    """Return a decorator that writes down the version of a `Fit`.

    Args:
        version: Change it whenever the fit's answers change: plans kept under another version are
            not taken.

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
        max_documents: The most pieces a bin may hold; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`.

    Raises:
        ValueError: A length is not between 1 and `capacity`.

    Examples:
        >>> next_fit(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([0, 0, 1, 1])
    """
    lengths, limit = _asked("sequential", lengths, capacity, max_documents)
    bin_of = np.empty(lengths.size, np.int64)
    _check_range("sequential", _sequential(lengths, int(capacity), limit, bin_of), capacity)
    return bin_of


@with_version(1)
def best_fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
    """Put each piece, the longest first, into the fullest bin that has room (best fit decreasing).

    Time is linear in pieces plus the longest length, or for few and long pieces that of sorting
    them, and memory is linear in pieces, without a search for the fullest bin: lengths only fall,
    so the bins with room for the present length form a stack with the fullest on top. A bin that is
    taken from the top is filled with pieces of this length as long as they fit; then its space is
    below the length, and it waits, filed under that space, until the length has fallen to it. Then
    it is fuller than all bins on the stack, and joins on top.

    Ties: pieces of one length go in arrival order, and of bins that are equally full the one filed
    first goes first.

    Args:
        lengths: int64 `[N]`, each between 1 and `capacity`.
        capacity: Tokens per bin.
        max_documents: The most pieces a bin may hold; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`. See D. S. Johnson, "Near-optimal bin packing algorithms"
        (1973).

    Raises:
        ValueError: A length is not between 1 and `capacity`.

    Examples:
        >>> best_fit(np.array([5, 3, 2, 6]), 8, max_documents=None)
        array([1, 1, 0, 0])
    """
    task = task_of("best_fit", lengths, capacity, max_documents)
    size = task.keys.size
    # Runs come to at most three a length; segments to far fewer than pieces: memory that is never
    # touched is never there.
    runs = np.empty((min(most_bins(task), 3 * task.sizes.size), 5), np.int64)
    segments = np.empty((size, 4), np.int32 if size < INT32 else np.int64)
    firsts = np.zeros(task.sizes.size, np.int64)
    _best_fit(task.keys, task.sizes, task.capacity, task.limit, runs, segments, firsts)
    bin_of = np.empty(size, np.int64)
    _assign(task.keys, segments, firsts, bin_of)
    return bin_of


@with_version(1)
def first_fit(lengths: IntArray, capacity: int, *, max_documents: int | None) -> IntArray:
    """Put each piece, the longest first, into the first bin that has room (first fit decreasing).

    The bins of the textbook: ties go in arrival order, the first bin is the one with the lowest
    number, and a new bin opens when none has room. A tree of the largest spaces finds it in
    log(bins) time, and pieces of equal length that fit together are placed together.

    Args:
        lengths: int64 `[N]`, each between 1 and `capacity`.
        capacity: Tokens per bin.
        max_documents: The most pieces a bin may hold; None sets no limit.

    Returns:
        The bin of each piece, int64 `[N]`. See D. S. Johnson, "Near-optimal bin packing algorithms"
        (1973).

    Raises:
        ValueError: A length is not between 1 and `capacity`.

    Examples:
        >>> first_fit(np.array([5, 2, 6, 3, 1]), 8, max_documents=None)
        array([1, 0, 0, 1, 2])
    """
    task = task_of("first_fit", lengths, capacity, max_documents)
    ends, bins = by_length(task)
    leaves = 1 << (most_bins(task) - 1).bit_length()
    tree = np.zeros(2 * leaves, np.int32)
    room = np.empty(leaves, bins.dtype)
    _first_fit(ends, task.sizes, task.capacity, task.limit, tree, room, bins)
    return in_arrival_order(task, ends, bins)


# ----------------------------------------------------------------------------------- what is asked


@attrs.frozen(eq=False)
class Task:
    """What a fit is asked, checked and in the one form that the compiled loops take.

    `limit` is `max_documents`, or the number of pieces where there is none. `keys` say which of
    `sizes`, that rise from 0, each piece is as long as. A table may have a place for each of them:
    they are all lengths up to the longest, so that a key is a length, or, where these would be far
    more than there are pieces, those that occur.
    """

    keys: IntArray
    sizes: IntArray
    capacity: int
    limit: int
    total: int


def task_of(name: str, lengths: Any, capacity: int, max_documents: int | None) -> Task:
    """Check the arguments of the fit `name`."""
    lengths, limit = _asked(name, lengths, capacity, max_documents)
    shortest, longest, total = extent(lengths)
    _check_range(name, (shortest, longest), capacity)
    if has_table(longest, lengths.size):
        return Task(lengths, np.arange(longest + 1), int(capacity), limit, total)
    sizes, keys = np.unique(np.append(0, lengths), return_inverse=True)
    return Task(read_only(keys[1:]), sizes, int(capacity), limit, total)


def has_table(longest: int, num_pieces: int) -> bool:
    """Tell whether a table with a place for each length is small beside the pieces, or at all."""
    return longest <= (1 << 16) + 16 * num_pieces


def _asked(
    name: str, lengths: Any, capacity: int, max_documents: int | None
) -> tuple[IntArray, int]:
    """Return the lengths in the form that the compiled loops take, and the limit of pieces."""
    check_whole(name, "capacity", capacity, least=1, most=MOST_TOKENS)
    lengths = integers(name, "lengths", lengths)
    if lengths.ndim != 1:
        raise ValueError(f"{name}: lengths must have one dimension, got shape {lengths.shape}")
    if max_documents is not None:
        check_whole(name, "max_documents", max_documents, least=1)
    limit = lengths.size if max_documents is None else min(int(max_documents), lengths.size)
    return read_only(np.ascontiguousarray(lengths)), max(1, limit)


def _check_range(name: str, found: tuple[int, int], capacity: int) -> None:
    """Refuse the shortest and the longest of the lengths; (1, 0) if there are none."""
    if found[0] < 1 or found[1] > capacity:
        raise ValueError(
            f"{name}: lengths must lie between 1 and the capacity, {capacity}, got {found[0]} to "
            f"{found[1]}; pack_bins cuts and drops documents first"
        )


def check_whole(
    where: str, name: str, value: int, *, least: int | None = None, most: int | None = None
) -> None:
    """Refuse an argument of `where` that is no integer, or out of its range."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    beyond = whole and most is not None and value > most
    if not whole or beyond or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        bound = f" of at most {most}" if beyond else bound
        raise ValueError(f"{where}: {name} must be an integer{bound}, got {value!r}")


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view that cannot be written: numba compiles a loop anew for one that can be."""
    view = array.view()
    view.flags.writeable = False
    return view


def most_bins(task: Task) -> int:
    """Return how many bins a fit can open that opens one only when no other has room.

    All bins but one, and but those that `limit` has closed, are more than half full: of two that
    are not, the first would have had room for the pieces of the second.
    """
    bound = 2 * task.total // task.capacity + 1 + task.keys.size // task.limit
    return max(1, min(task.keys.size, bound))


def by_length(task: Task) -> tuple[IntArray, np.ndarray[Any, Any]]:
    """Return where the pieces of key k end, `ends[k]`, if they are sorted, and room for bins.

    Bins are written for pieces by length and, of one length, by arrival: one after the other.
    """
    ends = np.zeros(task.sizes.size, np.int64)
    _count(task.keys, ends)
    size = task.keys.size
    return np.cumsum(ends, out=ends), np.empty(size, np.int32 if size < INT32 else np.int64)


def in_arrival_order(task: Task, ends: IntArray, bins: np.ndarray[Any, Any]) -> IntArray:
    """Return the bin of each piece, from the bins of pieces by length; `ends` are used up."""
    bin_of = np.empty(task.keys.size, np.int64)
    ends[1:] = ends[:-1]
    _arrive(task.keys, ends, bins, bin_of)
    return bin_of


def sorted_by(keys: IntArray, count: int) -> tuple[np.ndarray[Any, Any], IntArray]:
    """Sort the indices of keys in [0, count), stably; those of key k end at `ends[k]`."""
    order = np.empty(keys.size, np.int32 if keys.size < INT32 else np.int64)
    ends = np.zeros(count, np.int64)
    _counting_sort(keys, order, ends)
    return order, ends


@jit
def extent(values: Any) -> Any:
    """Return the smallest and the largest value and the sum; (1, 0, 0) of none."""
    if values.size == 0:
        return 1, 0, 0
    smallest, largest, total = values[0], values[0], 0
    for index in range(values.size):
        value = values[index]
        smallest, largest = min(smallest, value), max(largest, value)
        total += value
    return smallest, largest, total


@jit
def _counting_sort(keys: Any, order: Any, ends: Any) -> None:
    for key in keys:
        ends[key] += 1
    place = 0
    for key in range(ends.size):  # now where each key begins
        ends[key], place = place, place + ends[key]
    for index in range(keys.size):
        order[ends[keys[index]]] = index
        ends[keys[index]] += 1


# --------------------------------------------------------------------------------- compiled loops


@jit
def _sequential(lengths: Any, capacity: int, limit: int, bin_of: Any) -> Any:
    """Write the bins, and return the shortest and the longest length, which take no time here."""
    # No branches: a bin ends at every third or fourth piece, which no processor foresees (a million
    # pieces in 1.5 ms instead of 2.6). `opens` is -1, all bits set, or 0.
    current, space, room = -1, 0, limit
    shortest, longest = 1, 0
    for piece in range(lengths.size):
        length = lengths[piece]
        shortest, longest = min(shortest, length), max(longest, length)
        space -= length
        room -= 1
        opens = (space | room) >> 63
        space += opens & (capacity - length - space)
        room += opens & (limit - 1 - room)
        current -= opens
        bin_of[piece] = current
    return shortest, longest


@jit
def _count(keys: Any, counts: Any) -> None:
    for key in keys:
        counts[key] += 1


@jit
def _arrive(keys: Any, places: Any, bins: Any, bin_of: Any) -> None:
    for piece in range(keys.size):
        place = places[keys[piece]]
        places[keys[piece]] = place + 1
        bin_of[piece] = bins[place]


@jit
def _best_fit(  # noqa: PLR0917 (an array is a parameter)
    keys: Any, sizes: Any, capacity: int, limit: int, runs: Any, segments: Any, firsts: Any
) -> None:
    """Write into which bins the pieces of each length go, in order of arrival, from `firsts` on.

    A segment is pieces of one length in consecutive bins: the first bin, the end, the pieces in
    each, and these again for `_assign` to count down.

    A run is consecutive bins that are alike: it takes what pieces there are of a length at once, so
    that this depends on the lengths that there are, and hardly on the number of pieces.
    """
    begin, count, space = runs[:, 0], runs[:, 1], runs[:, 2]
    room, earlier = runs[:, 3], runs[:, 4]
    ready = np.empty(len(runs), np.int64)  # the stack
    waiting = np.full(sizes.size, -1)  # by the longest that has space: the run filed last
    every = sizes[-1] == sizes.size - 1
    for key in keys:
        firsts[key] += 1
    num_bins = num_runs = num_segments = 0
    num_ready = np.int64(0)  # as a literal 0 numba would compile `_join` a second time
    for key in range(sizes.size - 1, 0, -1):
        length = sizes[key]
        num_ready = _join(ready, num_ready, waiting[key], earlier, space, every)
        left, firsts[key] = firsts[key], num_segments
        while left > 0:
            if num_ready == 0:
                each = min(capacity // length, limit)
                begin[num_runs], count[num_runs] = num_bins, (left + each - 1) // each
                space[num_runs], room[num_runs] = capacity, limit
                num_bins += count[num_runs]
                ready[num_ready] = num_runs
                num_ready, num_runs = 1, num_runs + 1
            run = ready[num_ready - 1]
            each = _taken(length, space[run], room[run], left)
            bins = min(count[run], left // each)
            if bins < count[run]:  # the others stay on the stack
                part = num_runs
                num_runs += 1
                begin[part], count[part] = begin[run], bins
                space[part], room[part] = space[run], room[run]
                begin[run] += bins
                count[run] -= bins
                run = part
            else:
                num_ready -= 1
            segments[num_segments, 0], segments[num_segments, 1] = begin[run], begin[run] + bins
            segments[num_segments, 2] = segments[num_segments, 3] = each
            num_segments += 1
            left -= bins * each
            space[run] -= each * length
            room[run] -= each
            if room[run] == 0:
                continue
            if space[run] >= length:
                ready[num_ready] = run
                num_ready += 1
            else:
                file = space[run] if every else np.searchsorted(sizes, space[run], "right") - 1
                earlier[run] = waiting[file]
                waiting[file] = run


@jit
def _join(  # noqa: PLR0917 (an array is a parameter)
    ready: Any, num_ready: Any, run: int, earlier: Any, space: Any, every: bool
) -> int:
    """Put the runs of one file on the stack, the fullest on top; return its height."""
    joined = num_ready
    while run >= 0:
        ready[num_ready] = run
        num_ready += 1
        run = earlier[run]
    if not every and num_ready - joined > 1:  # else their spaces are the same
        # In loops: as expressions of arrays these lines take numba five seconds to compile.
        top = ready[joined:num_ready].copy()
        fullness = np.empty(top.size, np.int64)
        for place in range(top.size):
            fullness[place] = -space[top[place]]
        order = np.argsort(fullness, kind="mergesort")
        for place in range(top.size):
            ready[joined + place] = top[order[place]]
    return num_ready


@jit
def _assign(keys: Any, segments: Any, firsts: Any, bin_of: Any) -> None:
    """Deal the pieces to the segments of their lengths, which are used up."""
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
        length, place, end = sizes[key], ends[key - 1], ends[key]
        while place < end:
            if tree[1] >= length:
                node = 1
                while node < leaves:
                    node *= 2
                    if tree[node] < length:
                        node += 1
            else:
                node = leaves + num_bins
                tree[node], room[num_bins] = capacity, limit
                num_bins += 1
            bin_ = node - leaves
            taken = _taken(length, tree[node], room[bin_], end - place)
            bins[place : place + taken] = bin_
            place += taken
            room[bin_] -= taken
            tree[node] = tree[node] - taken * length if room[bin_] > 0 else 0
            while node > 1:
                node //= 2
                largest = max(tree[2 * node], tree[2 * node + 1])
                if tree[node] == largest:
                    break
                tree[node] = largest


@jit
def _taken(length: int, space: int, room: int, left: int) -> int:
    """Return how many of `left` pieces of one length a bin takes that has room for one."""
    if left == 1 or room == 1 or space - length < length:  # most often, and a division is slow
        return 1
    return min(space // length, room, left)
