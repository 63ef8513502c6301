"""Whole matrices of sharded parameters, dealt over ranks: each is put together on one of them.

What is computed of a whole matrix, as an orthogonal factor is, would else be computed by every rank
alike, or by all together in another order of sums. Here one rank gets the parts of a matrix,
computes, and sends each part of the result back. Who computes what, and what is sent, is planned
once, without a word between ranks: it follows from shapes and placements, which all of them know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

Box = tuple[int, int, int, int]
"""A part of a matrix: its first row, its number of rows, its first column, its number of columns.
"""

Key = tuple[int, Box]
"""A part of one of several matrices: the number of the matrix, and the box."""

Move = tuple[Key, int, int]
"""What goes from one rank of a grid to another."""


@attrs.frozen(eq=False)
class Grid:
    """The ranks that hold matrices: the sizes of a mesh, this rank's place in it, its groups.

    Ranks are numbered with the last mesh dimension running fastest. A group is that of this rank's
    line along a mesh dimension.
    """

    sizes: tuple[int, ...] = ()
    here: int = 0
    groups: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def at(self, rank: int, dim: int) -> int:
        """Return the coordinate of a rank along a mesh dimension."""
        return rank // math.prod(self.sizes[dim + 1 :]) % self.sizes[dim]

    def apart(self, one: int, other: int) -> int:
        """Return along how many mesh dimensions two ranks are apart."""
        return sum(self.at(one, d) != self.at(other, d) for d in range(len(self.sizes)))


@attrs.frozen(eq=False)
class Matrix:
    """A matrix and its parts: by rank of a grid the box that it holds, where it holds any.

    `cost` is what computing takes, in any unit, and `nbytes` what the whole takes of memory.
    """

    shape: tuple[int, int]
    boxes: Mapping[int, Box]
    cost: int
    nbytes: int


def dealt(
    costs: Sequence[int], ranks: int, *, among: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Return the rank that each piece of work goes to, so that all have about as much.

    The dearest is given first, each to the rank that has least so far (Graham, "Bounds on
    multiprocessing timing anomalies", 1969: at most 4/3 of the best there is). Work that few may do
    comes before work that all may do.

    Args:
        costs: What each piece costs.
        ranks: The number of ranks.
        among: The ranks that may do each piece; nobody means anybody, and so does None.

    Examples:
        >>> dealt([3, 1, 2, 2], 2)
        [0, 0, 1, 1]
        >>> dealt([1, 1, 1], 2, among=[[1], [1], []])
        [1, 1, 0]
    """
    loads, owners = [0] * ranks, [0] * len(costs)
    able = [among[i] if among and among[i] else range(ranks) for i in range(len(costs))]
    for i in sorted(range(len(costs)), key=lambda i: (len(able[i]), -costs[i], i)):
        owners[i] = min(able[i], key=loads.__getitem__)
        loads[owners[i]] += costs[i]
    return owners


# -------------------------------------------------------------------------------------- the journey


@attrs.frozen(eq=False)
class Hop:
    """One all-to-all along a mesh dimension, as this rank sees it."""

    group: Any
    sent: Sequence[Key]
    received: Sequence[Key]
    sent_sizes: Sequence[int]
    received_sizes: Sequence[int]


@attrs.frozen(eq=False)
class Round:
    """Matrices that are computed at the same time, of which this rank computes `own`.

    `given` are the parts that this rank holds and gives to be put together, `kept` those that it
    shall have of the results.
    """

    own: Sequence[int]
    given: Sequence[Key]
    kept: Sequence[Key]
    there: Sequence[Hop]
    back: Sequence[Hop]
    parts: Mapping[int, Sequence[Box]]


def rounds_of(matrices: Sequence[Matrix], grid: Grid, *, bucket_bytes: int) -> list[Round]:
    """Plan who computes what, and which parts travel where: the same on all ranks of a grid.

    A matrix that some rank holds whole stays with such a rank, and its parts travel no farther than
    they must: of replicas only one sends. In a round no rank has more than `bucket_bytes` of whole
    matrices, or it has one.

    Args:
        matrices: All matrices of the grid, in the same order on every rank.
        grid: The ranks.
        bucket_bytes: The most that a rank puts together at a time; less takes less memory, and
            more messages.

    Examples:
        >>> halves = Matrix((4, 2), {0: (0, 2, 0, 2), 1: (2, 2, 0, 2)}, cost=1, nbytes=32)
        >>> (only,) = rounds_of([halves, halves], Grid((2,), 0, (None,)), bucket_bytes=100)
        >>> only.own, only.given
        ([0], [(0, (0, 2, 0, 2)), (1, (0, 2, 0, 2))])
    """
    wholes = [[r for r, box in x.boxes.items() if box[1::2] == x.shape] for x in matrices]
    owners = dealt([x.cost for x in matrices], grid.count, among=wholes)
    rounds: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, i)):
        number, used = filled.get(owners[i], (0, 0))
        if used and used + matrices[i].nbytes > bucket_bytes:
            number, used = number + 1, 0
        filled[owners[i]] = number, used + matrices[i].nbytes
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(i)
    return [_round(members, matrices, owners, grid) for members in rounds]


def _round(
    members: Sequence[int], matrices: Sequence[Matrix], owners: Sequence[int], grid: Grid
) -> Round:
    there: list[Move] = []
    back: list[Move] = []
    for i in members:
        holders: dict[Box, list[int]] = {}
        for rank, box in matrices[i].boxes.items():
            holders.setdefault(box, []).append(rank)
            back.append(((i, box), owners[i], rank))
        for box, ranks in holders.items():
            nearest = min(ranks, key=lambda rank: grid.apart(rank, owners[i]))
            there.append(((i, box), nearest, owners[i]))
    own = [i for i in members if owners[i] == grid.here]
    dims = range(len(grid.sizes))
    return Round(
        own,
        given=[key for key, source, _ in there if source == grid.here],
        kept=[key for key, _, target in back if target == grid.here],
        there=_hops(there, grid, reversed(dims)),
        back=_hops(back, grid, dims),
        parts={i: list(dict.fromkeys(matrices[i].boxes.values())) for i in own},
    )


def _hops(moves: Sequence[Move], grid: Grid, dims: Iterable[int]) -> list[Hop]:
    """Return the all-to-alls that bring everything to its place, one mesh dimension after another.

    What goes to several ranks travels as one as long as their ways are the same.
    """
    places = [source for _, source, _ in moves]
    hops: list[Hop] = []
    for dim in dims:
        steps: dict[Move, None] = {}
        stride = math.prod(grid.sizes[dim + 1 :])
        for n, (key, _, target) in enumerate(moves):
            place = places[n] + (grid.at(target, dim) - grid.at(places[n], dim)) * stride
            if place != places[n]:
                steps[key, places[n], place] = None
            places[n] = place
        line = [x for x in steps if _in_line(grid, x[1], dim)]
        if line:
            hops.append(_hop(line, grid, dim))
    return hops


def _in_line(grid: Grid, rank: int, dim: int) -> bool:
    """Say whether a rank is on this rank's line along a mesh dimension."""
    return all(
        grid.at(rank, d) == grid.at(grid.here, d) for d in range(len(grid.sizes)) if d != dim
    )


def _hop(line: Sequence[Move], grid: Grid, dim: int) -> Hop:
    sent: list[list[Key]] = [[] for _ in range(grid.sizes[dim])]
    received: list[list[Key]] = [[] for _ in range(grid.sizes[dim])]
    for key, source, target in line:
        if source == grid.here:
            sent[grid.at(target, dim)].append(key)
        if target == grid.here:
            received[grid.at(source, dim)].append(key)
    return Hop(
        grid.groups[dim],
        [key for keys in sent for key in keys],
        [key for keys in received for key in keys],
        [sum(map(_numel, keys)) for keys in sent],
        [sum(map(_numel, keys)) for keys in received],
    )


def _numel(key: Key) -> int:
    return key[1][1] * key[1][3]


# ------------------------------------------------------------------------------------------ a round


def compute_whole(
    planned: Round,
    *,
    read: Callable[[int, Box], Tensor],
    compute: Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor]],
    write: Callable[[int, Box, Tensor], None],
    like: Tensor,
) -> None:
    """Put the matrices of a round together, compute, and hand the parts of the results out.

    Args:
        planned: A round; all ranks of its grid take the same ones in the same order.
        read: Returns a part that this rank holds, `[rows, columns]` of the box.
        compute: From the numbers of this rank's matrices, and the matrices, to as many results of
            the same shapes.
        write: Is given each part of a result that this rank shall have.
        like: A tensor of the dtype and device of all of these.

    Effects:
        Those of `write`; communicates: one all-to-all there and one back for each mesh dimension
        along which a part has to travel. Nothing where every matrix is whole on its rank.

    Examples:
        >>> whole = Matrix((1, 2), {0: (0, 1, 0, 2)}, cost=1, nbytes=8)
        >>> (only,) = rounds_of([whole], Grid(), bucket_bytes=8)
        >>> compute_whole(
        ...     only,
        ...     read=lambda number, box: torch.ones(1, 2),
        ...     compute=lambda numbers, wholes: [2 * x for x in wholes],
        ...     write=lambda number, box, x: print(x),
        ...     like=torch.empty(0),
        ... )
        tensor([[2., 2.]])
    """
    held = _travelled({key: read(*key) for key in planned.given}, planned.there, like)
    wholes = [_assembled([(box, held[i, box]) for box in planned.parts[i]]) for i in planned.own]
    results = compute(planned.own, wholes)
    held = {
        (i, box): x[box[0] : box[0] + box[1], box[2] : box[2] + box[3]]
        for i, x in zip(planned.own, results, strict=True)
        for box in planned.parts[i]
    }
    held = _travelled(held, planned.back, like)
    for i, box in planned.kept:
        write(i, box, held[i, box])


def _assembled(parts: Sequence[tuple[Box, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][1]
    rows, columns = (max(box[d] + box[d + 1] for box, _ in parts) for d in (0, 2))
    whole = parts[0][1].new_empty(rows, columns)
    for (row, height, column, width), part in parts:
        whole[row : row + height, column : column + width] = part
    return whole


def _travelled(held: dict[Key, Tensor], hops: Sequence[Hop], like: Tensor) -> dict[Key, Tensor]:
    """Return what this rank holds after some hops, and what it has passed on."""
    for hop in hops:
        sent = torch.cat([like.new_empty(0), *(held[key].reshape(-1) for key in hop.sent)])
        received = like.new_empty(sum(hop.received_sizes))
        dist.all_to_all_single(
            received, sent, [*hop.received_sizes], [*hop.sent_sizes], group=hop.group
        )
        parts = received.split([_numel(key) for key in hop.received])
        boxes = [key[1] for key in hop.received]
        shaped = [part.view(box[1], box[3]) for part, box in zip(parts, boxes, strict=True)]
        held = held | dict(zip(hop.received, shaped, strict=True))
    return held
