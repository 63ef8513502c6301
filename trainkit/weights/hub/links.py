"""A map between the elements of a decoder's tensors and those of a Hugging Face model.

A family declares a table, from our names to an `HFTensor` each; its links follow from the shapes of
a decoder. With them a function that reads boxes of one side can read any box of the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from trainkit.types import ConfigError, Weights
from trainkit.weights.checkpoint.boxes import shorten

Shape = tuple[int, ...]


@attrs.frozen
class HFTensor:
    """Where one of our tensors is in a Hugging Face model, in a folder or in memory.

    Attributes:
        name: The name of the tensor there. `{e}` in it is the index of an expert: one tensor each.
        fused: Several of our tensors are rows of `name`, in the order of the table.
        rows: The dimension of these rows in ours; 1 where all experts are in one tensor there too.
        groups: The rows of each of these are in so many equal groups, which take turns: the first
            group of every tensor, then the second of every tensor.
        unit: A dimension of size 1 there, which ours lacks.
        transposed: Its last two dimensions are exchanged.
        every: (n, i) if its rows are every n-th row there, from row i on. Rows are the dimension
            after that of experts.
        interleaved: The property of a `DecoderConfig` with the number of rows of a head. The two
            rows of a rotary pair, in the last `rotary_size` of them, are neighbors there; here they
            are in the two halves.

    Examples:
        >>> HFTensor("self_attn.qkv_proj.weight", fused=True).transposed
        False
    """

    name: str
    fused: bool = False
    rows: int = 0
    groups: int = 1
    unit: int | None = None
    transposed: bool = False
    every: tuple[int, int] | None = None
    interleaved: str | None = None


@attrs.frozen
class StridedBox:
    """A strided selection of elements of a tensor.

    Index dimension j runs along dimension `dims[j]` of the tensor, from `offset[dims[j]]` on, in
    steps of `steps[j]`; in the tensor's other dimensions the index is that of `offset`.
    """

    name: str
    offset: Shape
    dims: Shape
    steps: Shape

    def min_shape(self, shape: Sequence[int]) -> Shape:
        """Return the smallest shape of a tensor that contains a selection of this shape.

        Examples:
            >>> StridedBox("a", (0, 5), (1,), (2,)).min_shape((3,))
            (1, 10)
        """
        ends = [start + 1 for start in self.offset]
        for dim, step, length in zip(self.dims, self.steps, shape, strict=True):
            ends[dim] = self.offset[dim] + (length - 1) * step + 1
        return tuple(ends)


@attrs.frozen
class Link:
    """Elements of one of our tensors and the elements of one of theirs with the same values."""

    shape: Shape
    ours: StridedBox
    theirs: StridedBox

    def swap_sides(self) -> Link:
        """Return the link with its sides exchanged."""
        return Link(self.shape, self.theirs, self.ours)


def make_links(
    table: Mapping[str, HFTensor],
    shapes: Mapping[str, Sequence[int]],
    *,
    heads: Mapping[str, int],
    rotary: int,
) -> list[Link]:
    """Return the links of tensors by a table of complete names.

    Args:
        table: Where each of our tensors is; the names have no `{i}` any more.
        shapes: The shapes of our tensors.
        heads: The rows of a head, by the values of `HFTensor.interleaved`.
        rotary: How many of them, the last ones, are rotary.

    Raises:
        ConfigError: One of our tensors is not in the table, or has no dimension; all are named.

    Examples:
        >>> table = {"q": HFTensor("qk", fused=True), "k": HFTensor("qk", fused=True)}
        >>> links = make_links(table, {"q": (4, 2), "k": (2, 2)}, heads={}, rotary=0)
        >>> [(link.ours.name, link.theirs.offset) for link in links], get_foreign_shapes(links)
        ([('q', (0, 0)), ('k', (4, 0))], {'qk': (6, 2)})
    """
    missing = [name for name in shapes if name not in table]
    if missing:
        raise ConfigError(
            f"make_links: the family has no name for {shorten(missing)}",
            where="names",
            got=missing,
        )
    scalars = [name for name, shape in shapes.items() if not len(shape)]
    if scalars:
        raise ConfigError(
            f"make_links: {shorten(scalars)} must have a dimension, got the shape (); tensors "
            "are linked by their rows: give a number the shape (1,) on both sides",
            where="shapes",
            got=scalars,
        )
    links: list[Link] = []
    # A decoder lacks some of a table's tensors: biases or norms, for instance.
    table = {name: there for name, there in table.items() if name in shapes}
    # The rows of a group of each fused tensor, and how many of them the parts so far have.
    sizes: dict[str, int] = {}
    for name, there in table.items():
        sizes[there.name] = sizes.get(there.name, 0) + shapes[name][there.rows] // there.groups
    ends: dict[str, int] = {}
    for name, there in table.items():
        shape = tuple(shapes[name])
        # Rows of a fused tensor follow each other in the order of the table.
        start = ends.get(there.name, 0) if there.fused else 0
        rows = shape[there.rows] // there.groups
        ends[there.name] = start + rows
        if there.interleaved is not None:
            links += _link_heads(
                name, there.name, shape, start, head=heads[there.interleaved], rotary=rotary
            )
        elif "{e}" in there.name:
            # Ours holds all experts, [E, ...]; theirs has a tensor for each.
            links += [_link_tensor(name, there, shape[1:], 0, (e,)) for e in range(shape[0])]
        else:
            part = tuple(rows if dim == there.rows else n for dim, n in enumerate(shape))
            for group in range(there.groups):
                first = start + group * sizes[there.name]
                links.append(_link_tensor(name, there, part, first, our_start=group * rows))
    return links


def _link_tensor(
    name: str,
    there: HFTensor,
    shape: Shape,
    start: int,
    expert: tuple[int, ...] = (),
    *,
    our_start: int = 0,
) -> Link:
    """Link rows from `our_start` on to rows from `start` on.

    With `expert` they are those of one index of our first dimension.
    """
    dims = tuple(range(len(shape)))
    ones = (1,) * len(shape)
    zeros = (0,) * len(shape)
    # The expert's index is fixed by the offset, and no dimension of the link.
    our_dims = tuple(dim + len(expert) for dim in dims)
    our_offset = tuple(our_start * (dim == there.rows) for dim in dims)
    ours = StridedBox(name, (*expert, *our_offset), our_dims, ones)
    their_dims = (*dims[:-2], *dims[:-3:-1]) if there.transposed else dims
    steps = list(ones)
    offset = list(zeros)
    offset[their_dims[there.rows]] = (
        start  # rows are counted on our side; there they may be columns
    )
    if there.every is not None:
        steps[1], offset[their_dims[1]] = there.every
    if there.unit is not None:
        offset.insert(there.unit, 0)
        their_dims = tuple(dim + (dim >= there.unit) for dim in their_dims)
    their_name = there.name.format(e=expert[0]) if expert else there.name
    return Link(shape, ours, StridedBox(their_name, tuple(offset), their_dims, tuple(steps)))


def _link_heads(
    name: str, there: str, shape: Shape, start: int, *, head: int, rotary: int
) -> Iterator[Link]:
    """Yield the links of heads whose rotary rows are interleaved there, and in halves here."""
    zeros = (0,) * (len(shape) - 1)
    dims = tuple(range(len(shape)))
    ones = (1,) * len(shape)
    # Rotary position embedding turns pairs of rows. DeepSeek's code pairs neighbors (0 and 1, 2 and
    # 3); ours pairs row i with row i + half, so a permutation of rows makes them equal.
    plain = head - rotary
    half = rotary // 2
    # Our first row, their first row, number of rows, step between their rows.
    parts = (
        (0, 0, plain, 1),  # rows without positions
        (plain, plain, half, 2),  # the first of each pair
        (plain + half, plain + 1, half, 2),  # the second of each pair
    )
    for first in range(0, shape[0], head):
        for our_row, their_row, rows, step in parts:
            if rows:
                ours = StridedBox(name, (first + our_row, *zeros), dims, ones)
                theirs = StridedBox(
                    there, (start + first + their_row, *zeros), dims, (step, *ones[1:])
                )
                yield Link((rows, *shape[1:]), ours, theirs)


def get_foreign_shapes(links: Iterable[Link]) -> dict[str, Shape]:
    """Return the shapes of the tensors on the other side of some links."""
    shapes: dict[str, Shape] = {}
    for link in links:
        shape = link.theirs.min_shape(link.shape)
        largest = shapes.get(link.theirs.name, (0,) * len(shape))
        shapes[link.theirs.name] = tuple(map(max, largest, shape))
    return shapes


def check_links(links: Sequence[Link], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError unless links cover each tensor of both sides exactly, by element counts.

    Args:
        links: The links.
        shapes: The shapes of our tensors.

    Raises:
        ConfigError: Too few or too many elements of a tensor are linked; all are named.

    Examples:
        >>> links = make_links({"a": HFTensor("b")}, {"a": (2, 2)}, heads={}, rotary=0)
        >>> check_links(links, {"a": (2, 2)})
        >>> check_links(links, {"a": (3, 2)})
        Traceback (most recent call last):
        trainkit.types.ConfigError: check_links: a: 4 of 6 elements are linked
    """
    problems: list[str] = []
    # Both sides with the same code: what is theirs on one is ours on the other.
    swapped = [link.swap_sides() for link in links]
    for side, side_shapes in ((links, shapes), (swapped, get_foreign_shapes(links))):
        counts = dict.fromkeys(side_shapes, 0)
        for link in side:
            counts[link.ours.name] += math.prod(link.shape)
        problems += [
            f"{name}: {count} of {math.prod(side_shapes[name])} elements are linked"
            for name, count in counts.items()
            if count != math.prod(side_shapes[name])
        ]
    if problems:
        raise ConfigError(f"check_links: {shorten(problems)}", where="names", got=problems)


def map_weights(
    weights: Weights, links: Iterable[Link], shapes: Mapping[str, Sequence[int]]
) -> Weights:
    """Return a `Weights` function of our tensors that reads theirs; of swapped links, the reverse.

    It reads only the requested elements of a box, and the rows between those of interleaved pairs.

    Args:
        weights: Reads a box of one of their tensors.
        links: The links.
        shapes: The shapes of our tensors.

    Returns:
        A `Weights` function. The dtype of a box is that of its parts, promoted if they differ.

    Raises:
        ValueError: When it is called: there is no such tensor, or the box is not inside it.

    Examples:
        >>> table = {"q": HFTensor("qk", fused=True), "k": HFTensor("qk", fused=True)}
        >>> shapes = {"q": (4, 2), "k": (2, 2)}
        >>> both = torch.arange(12.0).view(6, 2)
        >>> read = lambda name, shape, offset: both[offset[0] : offset[0] + shape[0]]
        >>> ours = map_weights(read, make_links(table, shapes, heads={}, rotary=0), shapes)
        >>> ours("k", (1, 2), (1, 0))
        tensor([[10., 11.]])
    """
    by_name: dict[str, list[Link]] = {name: [] for name in shapes}
    for link in links:
        by_name[link.ours.name].append(link)

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        full_shape = shapes.get(name, ())
        is_inside = len(shape) == len(offset) == len(full_shape) and all(
            start >= 0 and start + length <= full
            for start, length, full in zip(offset, shape, full_shape, strict=True)
        )
        if name not in by_name or not is_inside:
            tensor = f"a tensor of {list(full_shape)}" if name in by_name else "no tensor"
            raise ValueError(
                f"map_weights: {name!r} is {tensor}, but a box of {list(shape)} at "
                f"{list(offset)} was requested"
            )
        return _read_box(weights, by_name[name], tuple(shape), tuple(offset))

    return read


def _read_box(weights: Weights, links: Sequence[Link], shape: Shape, offset: Shape) -> Tensor:
    parts: list[tuple[StridedBox, list[range], Tensor]] = []
    for link in links:
        ranges = _intersect(link, shape, offset)
        if ranges is None:
            continue
        # `Weights` reads dense boxes, so the rows between those of a stride are read too.
        theirs = link.theirs
        dense_offset = list(theirs.offset)
        dense_shape = [1] * len(theirs.offset)
        for dim, step, indices in zip(theirs.dims, theirs.steps, ranges, strict=True):
            dense_offset[dim] += indices.start * step
            dense_shape[dim] = (len(indices) - 1) * step + 1
        dense = weights(theirs.name, tuple(dense_shape), tuple(dense_offset))
        in_dense = attrs.evolve(theirs, offset=(0,) * len(dense_shape))
        from_zero = [range(len(indices)) for indices in ranges]
        parts.append((link.ours, ranges, _view_part(dense, in_dense, from_zero)))
    if len(parts) == 1:  # most boxes: of a tensor that is the same on both sides
        part, _, values = parts[0]
        if values.shape == shape and part.dims == (*range(len(shape)),):
            return values  # without a copy
    dtypes = [values.dtype for _, _, values in parts] or [torch.float32]
    box = torch.empty(shape, dtype=functools.reduce(torch.promote_types, dtypes))
    for part, ranges, values in parts:
        # Relative to the box; negative where the link begins before it.
        inside = tuple(a - b for a, b in zip(part.offset, offset, strict=True))
        _view_part(box, attrs.evolve(part, offset=inside), ranges).copy_(values)
    return box


def _intersect(link: Link, shape: Shape, offset: Shape) -> list[range] | None:
    """Return the indices of a link that lie in a box of our tensor, or None."""
    part = link.ours
    # The fixed dimensions first: the index of an expert, inside the box or not.
    for dim, start in enumerate(part.offset):
        if dim not in part.dims and not offset[dim] <= start < offset[dim] + shape[dim]:
            return None
    ranges = []
    for dim, step, length in zip(part.dims, part.steps, link.shape, strict=True):
        # The first index inside the box, and the first one behind it; -(a // b) rounds -a / b up.
        from_box = part.offset[dim] - offset[dim]  # where the link begins, seen from the box
        low = max(0, -(from_box // step))
        high = min(length, -((from_box - shape[dim]) // step))
        if low >= high:
            return None
        ranges.append(range(low, high))
    return ranges


def _view_part(x: Tensor, part: StridedBox, ranges: Sequence[range]) -> Tensor:
    """Return a view of the elements of a strided box, with the dimensions of its indices."""
    index: list[int | slice] = list(part.offset)
    for dim, step, indices in zip(part.dims, part.steps, ranges, strict=True):
        first = part.offset[dim] + indices.start * step
        index[dim] = slice(first, first + (len(indices) - 1) * step + 1, step)
    # Indexing drops the dimensions that have a number, and leaves the others in the tensor's order.
    order = sorted(part.dims)
    return x[tuple(index)].permute([order.index(dim) for dim in part.dims])
