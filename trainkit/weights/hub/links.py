"""Which elements of our tensors are which of theirs: a map of names and boxes that goes both ways.

A family declares a table, from our names to a `HFTensor` each; its links follow from the shapes of
a decoder. What reads one side box by box then reads the other, whatever box is asked for.
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
    """Where a tensor of ours is in a model of a family, in a folder or in memory.

    Attributes:
        name: The tensor there. `{e}` in it stands for the number of an expert: one tensor for each.
        joined: It is the rows of `name` that follow those of the tensors before it in the table.
        transposed: Its two dimensions are the other way round.
        pairs: The property of a `DecoderConfig` that says how many rows a head has, of which the
            last `rotary_size` are rotary pairs: neighbours there, in halves here.

    Examples:
        >>> HFTensor("self_attn.qkv_proj.weight", joined=True).transposed
        False
    """

    name: str
    joined: bool = False
    transposed: bool = False
    pairs: str | None = None


@attrs.frozen
class Part:
    """The elements of a tensor that a link speaks of.

    Index dimension j runs along dimension `dims[j]` of the tensor, from `offset[dims[j]]` on, every
    `steps[j]`; of the tensor's other dimensions it is the one index that `offset` says.
    """

    name: str
    offset: Shape
    dims: Shape
    steps: Shape

    def elements(self, shape: Sequence[int]) -> Shape:
        """Return the least shape of a tensor that has these elements.

        Examples:
            >>> Part("a", (0, 5), (1,), (2,)).elements((3,))
            (1, 10)
        """
        ends = [start + 1 for start in self.offset]
        for dim, step, length in zip(self.dims, self.steps, shape, strict=True):
            ends[dim] = self.offset[dim] + (length - 1) * step + 1
        return tuple(ends)


@attrs.frozen
class Link:
    """Elements of a tensor of ours and those of one of theirs that have the same values."""

    shape: Shape
    ours: Part
    theirs: Part

    def turned(self) -> Link:
        """Return the same with the sides exchanged."""
        return Link(self.shape, self.theirs, self.ours)


def make_links(
    table: Mapping[str, HFTensor],
    shapes: Mapping[str, Sequence[int]],
    *,
    heads: Mapping[str, int],
    rotary: int,
) -> list[Link]:
    """Return the links of tensors by a table of whole names.

    Args:
        table: Where each tensor of ours is, `There.name` too being a whole name.
        shapes: Our tensors.
        heads: The rows of a head by the names that `There.pairs` may have.
        rotary: How many of them, the last ones, are rotary pairs.

    Raises:
        ConfigError: A tensor of ours has no place there, or no dimension; all are named.

    Examples:
        >>> table = {"q": HFTensor("qk", joined=True), "k": HFTensor("qk", joined=True)}
        >>> links = make_links(table, {"q": (4, 2), "k": (2, 2)}, heads={}, rotary=0)
        >>> [(link.ours.name, link.theirs.offset) for link in links], their_shapes(links)
        ([('q', (0, 0)), ('k', (4, 0))], {'qk': (6, 2)})
    """
    lost = [name for name in shapes if name not in table]
    if lost:
        raise ConfigError(
            f"make_links: the family has no name for {shorten(lost)}", where="names", got=lost
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
    ends: dict[str, int] = {}
    for name, there in table.items():
        if name not in shapes:
            continue
        shape = tuple(shapes[name])
        begin = ends.get(there.name, 0) if there.joined else 0
        ends[there.name] = begin + shape[0]
        if there.pairs is not None:
            rows = {"head": heads[there.pairs], "rotary": rotary}
            links += _paired(name, there.name, shape, begin, **rows)
        elif "{e}" in there.name:
            links += [
                _expert(name, there.name.format(e=e), e, shape, transposed=there.transposed)
                for e in range(shape[0])
            ]
        else:
            links.append(_whole(name, there, shape, begin))
    return links


def _whole(name: str, there: HFTensor, shape: Shape, begin: int) -> Link:
    every, ones, zeros = tuple(range(len(shape))), (1,) * len(shape), (0,) * len(shape)
    dims = every[::-1] if there.transposed else every
    offset = list(zeros)
    offset[dims[0]] = begin
    theirs = Part(there.name, tuple(offset), dims, ones)
    return Link(shape, Part(name, zeros, every, ones), theirs)


def _expert(name: str, there: str, expert: int, shape: Shape, *, transposed: bool) -> Link:
    own = shape[1:]
    every, ones, zeros = tuple(range(len(own))), (1,) * len(own), (0,) * len(own)
    ours = Part(name, (expert, *zeros), tuple(dim + 1 for dim in every), ones)
    return Link(own, ours, Part(there, zeros, every[::-1] if transposed else every, ones))


def _paired(
    name: str, there: str, shape: Shape, begin: int, *, head: int, rotary: int
) -> Iterator[Link]:
    """Yield the links of heads whose rotary rows are neighbours there: even ones first here."""
    rest = (0,) * (len(shape) - 1)
    every, ones = tuple(range(len(shape))), (1,) * len(shape)
    plain, half = head - rotary, rotary // 2
    for first in range(0, shape[0], head):
        parts = ((0, 0, plain, 1), (plain, plain, half, 2), (plain + half, plain + 1, half, 2))
        for here, far, rows, step in parts:
            if rows:
                ours = Part(name, (first + here, *rest), every, ones)
                theirs = Part(there, (begin + first + far, *rest), every, (step, *ones[1:]))
                yield Link((rows, *shape[1:]), ours, theirs)


def their_shapes(links: Iterable[Link]) -> dict[str, Shape]:
    """Return the shapes of the tensors that the other side of some links is."""
    found: dict[str, Shape] = {}
    for link in links:
        part = link.theirs
        elements = part.elements(link.shape)
        known = found.get(part.name, (0,) * len(elements))
        found[part.name] = tuple(map(max, known, elements))
    return found


def check_links(links: Sequence[Link], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse links that are no map both ways: by number, of elements that no link has or two have.

    Args:
        links: The links.
        shapes: Our tensors.

    Raises:
        ConfigError: A tensor on either side is not linked once and whole; all are named.

    Examples:
        >>> whole = make_links({"a": HFTensor("b")}, {"a": (2, 2)}, heads={}, rotary=0)
        >>> check_links(whole, {"a": (2, 2)})
        >>> check_links(whole, {"a": (3, 2)})
        Traceback (most recent call last):
        trainkit.types.ConfigError: check_links: a: 4 of 6 elements are linked
    """
    problems: list[str] = []
    for side, whole in ((links, shapes), ([x.turned() for x in links], their_shapes(links))):
        counts = dict.fromkeys(whole, 0)
        for link in side:
            counts[link.ours.name] += math.prod(link.shape)
        problems += [
            f"{name}: {count} of {math.prod(whole[name])} elements are linked"
            for name, count in counts.items()
            if count != math.prod(whole[name])
        ]
    if problems:
        raise ConfigError(f"check_links: {shorten(problems)}", where="names", got=problems)


def linked(weights: Weights, links: Iterable[Link], shapes: Mapping[str, Sequence[int]]) -> Weights:
    """Return a `Weights` function of our tensors, which reads theirs; of `turned` links, theirs.

    Only the elements of a box that are asked for are read, and what lies between every other row of
    a rotary pair.

    Args:
        weights: Reads a box of a tensor of theirs.
        links: The links.
        shapes: Our tensors.

    Returns:
        A `Weights` function. A box is of the dtype that its parts have, or that they promote to.

    Raises:
        ValueError: When it is called: there is no such tensor, or the box is not inside it.

    Examples:
        >>> table = {"q": HFTensor("qk", joined=True), "k": HFTensor("qk", joined=True)}
        >>> shapes = {"q": (4, 2), "k": (2, 2)}
        >>> both = torch.arange(12.0).view(6, 2)
        >>> read = lambda name, shape, offset: both[offset[0] : offset[0] + shape[0]]
        >>> found = linked(read, make_links(table, shapes, heads={}, rotary=0), shapes)
        >>> found("k", (1, 2), (1, 0))
        tensor([[10., 11.]])
    """
    by_name: dict[str, list[Link]] = {name: [] for name in shapes}
    for link in links:
        by_name[link.ours.name].append(link)

    def read(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        whole = shapes.get(name, ())
        inside = len(shape) == len(offset) == len(whole) and all(
            start >= 0 and start + length <= full
            for start, length, full in zip(offset, shape, whole, strict=True)
        )
        if name not in by_name or not inside:
            found = f"a tensor of {list(whole)}" if name in by_name else "no tensor"
            raise ValueError(
                f"linked: {name!r} is {found}; a box of {list(shape)} at {list(offset)} was asked"
            )
        return _box(weights, by_name[name], tuple(shape), tuple(offset))

    return read


def _box(weights: Weights, links: Sequence[Link], shape: Shape, offset: Shape) -> Tensor:
    found = []
    for link in links:
        ranges = _wanted(link, shape, offset)
        if ranges is not None:
            found.append((link.ours, ranges, _values(weights, link.theirs, ranges)))
    if len(found) == 1 and found[0][2].shape == shape and found[0][0].dims == (*range(len(shape)),):
        return found[0][2]
    kinds = [values.dtype for _, _, values in found]
    out = torch.empty(shape, dtype=functools.reduce(torch.promote_types, kinds or [torch.float32]))
    for part, ranges, values in found:
        inside = tuple(a - b for a, b in zip(part.offset, offset, strict=True))
        _seen(out, attrs.evolve(part, offset=inside), ranges).copy_(values)
    return out


def _wanted(link: Link, shape: Shape, offset: Shape) -> list[range] | None:
    """Return which indices of a link lie in a box of our tensor, or None."""
    part = link.ours
    for dim, start in enumerate(part.offset):
        if dim not in part.dims and not offset[dim] <= start < offset[dim] + shape[dim]:
            return None
    found = []
    for dim, step, length in zip(part.dims, part.steps, link.shape, strict=True):
        low = max(0, -((part.offset[dim] - offset[dim]) // step))
        high = min(length, -((part.offset[dim] - offset[dim] - shape[dim]) // step))
        if low >= high:
            return None
        found.append(range(low, high))
    return found


def _values(weights: Weights, part: Part, ranges: Sequence[range]) -> Tensor:
    """Read the elements of a part that some indices are, in the order of the indices."""
    offset, shape = list(part.offset), [1] * len(part.offset)
    for dim, step, wanted in zip(part.dims, part.steps, ranges, strict=True):
        offset[dim] += wanted.start * step
        shape[dim] = (len(wanted) - 1) * step + 1
    here = attrs.evolve(part, offset=(0,) * len(offset))
    read = weights(part.name, tuple(shape), tuple(offset))
    return _seen(read, here, [range(len(wanted)) for wanted in ranges])


def _seen(x: Tensor, part: Part, ranges: Sequence[range]) -> Tensor:
    """Return a view of a tensor: the elements of a part, by the dimensions of its indices."""
    index: list[int | slice] = list(part.offset)
    for dim, step, wanted in zip(part.dims, part.steps, ranges, strict=True):
        first = part.offset[dim] + wanted.start * step
        index[dim] = slice(first, first + (len(wanted) - 1) * step + 1, step)
    order = sorted(part.dims)
    return x[tuple(index)].permute([order.index(dim) for dim in part.dims])
