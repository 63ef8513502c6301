"""Full matrices of sharded parameters: each is assembled on one rank, computed there, and returned.

A function of a full matrix, such as its orthogonal factor, would otherwise be computed by every
rank, or by all together in another order of sums. Here one rank receives the shards of a matrix,
computes, and sends each shard of the result back. The plan needs no communication: it follows from
shapes and placements, which all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

Box = tuple[int, int, int, int]
"""A part of a matrix: its first row, its number of rows, its first column, its number of columns.
"""

Key = tuple[int, Box]
"""A part of one of several matrices: the index of the matrix, and the box."""

Move = tuple[Key, int, int]
"""A part that goes from one rank of a grid to another."""


@attrs.frozen(eq=False)
class Grid:
    """The ranks that hold matrices: the sizes of a mesh, this rank's index, its process groups.

    Ranks are counted with the last mesh dimension running fastest. There is one group per mesh
    dimension: the ranks that differ from this one in that coordinate only.
    """

    sizes: tuple[int, ...] = ()
    here: int = 0
    groups: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def get_coordinate(self, rank: int, dim: int) -> int:
        """Return the coordinate of a rank along a mesh dimension."""
        return rank // math.prod(self.sizes[dim + 1 :]) % self.sizes[dim]

    def distance(self, a: int, b: int, *, ignore: int | None = None) -> int:
        """Return the number of mesh dimensions, without `ignore`, in which two ranks differ."""
        return sum(
            self.get_coordinate(a, dim) != self.get_coordinate(b, dim)
            for dim in range(len(self.sizes))
            if dim != ignore
        )


@attrs.frozen(eq=False)
class Matrix:
    """A matrix and its shards: the box of each rank of a grid that has one.

    `cost` is the work of computing it, in any unit, and `num_bytes` the size of the full matrix.
    """

    shape: tuple[int, int]
    boxes: Mapping[int, Box]
    cost: int
    num_bytes: int


def assign_owners(
    costs: Sequence[int], ranks: int, *, allowed: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Assign each piece of work to a rank, so that all ranks have about the same cost.

    The most expensive piece is assigned first, each to the rank with the least cost so far (Graham,
    "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the optimum). Pieces with few
    allowed ranks come before pieces that any rank may take.

    Args:
        costs: The cost of each piece.
        ranks: The number of ranks.
        allowed: The ranks that may take each piece; an empty list, like None, allows all.

    Examples:
        >>> assign_owners([3, 1, 2, 2], 2)
        [0, 0, 1, 1]
        >>> assign_owners([1, 1, 1], 2, allowed=[[1], [1], []])
        [1, 1, 0]
    """
    loads = [0] * ranks
    owners = [0] * len(costs)
    everyone = range(ranks)
    choices = [x or everyone for x in allowed] if allowed else [everyone] * len(costs)
    # Ties go to the first index: all ranks must compute the same assignment.
    order = sorted(range(len(costs)), key=lambda i: (len(choices[i]), -costs[i], i))
    for i in order:
        owners[i] = min(choices[i], key=loads.__getitem__)
        loads[owners[i]] += costs[i]
    return owners


# ----------------------------------------------------------------------------------------- the plan


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
    """Matrices that are computed at the same time.

    Attributes:
        owned: The indices of those that this rank computes.
        inputs: The shards that this rank contributes; of equal copies, one rank's is used.
        outputs: The shards of results that this rank receives.
        gather: The hops that bring the inputs to the owners.
        scatter: The hops that bring the outputs back.
        boxes: The distinct shards of each matrix in `owned`.
    """

    owned: Sequence[int]
    inputs: Sequence[Key]
    outputs: Sequence[Key]
    gather: Sequence[Hop]
    scatter: Sequence[Hop]
    boxes: Mapping[int, Sequence[Box]]


def plan_rounds(matrices: Sequence[Matrix], grid: Grid, *, bucket_bytes: int) -> list[Round]:
    """Plan which rank computes each matrix and how shards travel; equal on all ranks of a grid.

    A matrix that one rank holds in full stays with such a rank. Shards travel along as few mesh
    dimensions as possible, and of replicas only one sends. In a round no rank has more than
    `bucket_bytes` of full matrices, unless it has only one.

    Args:
        matrices: All matrices of the grid, in the same order on every rank.
        grid: The ranks.
        bucket_bytes: The most that a rank assembles at a time; less takes less memory, and more
            messages.

    Examples:
        >>> halves = Matrix((4, 2), {0: (0, 2, 0, 2), 1: (2, 2, 0, 2)}, cost=1, num_bytes=32)
        >>> (only,) = plan_rounds([halves, halves], Grid((2,), 0, (None,)), bucket_bytes=100)
        >>> only.owned, only.inputs
        ([0], [(0, (0, 2, 0, 2)), (1, (0, 2, 0, 2))])
    """
    # A box is (row, rows, column, columns): every second number is the shape of the shard.
    full_on = [
        [rank for rank, box in matrix.boxes.items() if box[1::2] == matrix.shape]
        for matrix in matrices
    ]
    owners = assign_owners([x.cost for x in matrices], grid.count, allowed=full_on)
    rounds: list[list[int]] = []
    # By owner: its last round, and the bytes that it has there.
    filled: dict[int, tuple[int, int]] = {}
    # By cost: the matrices of a round then cost about the same, so ranks wait little for each
    # other, and those of one shape come one after another, so that `compute` can stack them.
    for i in sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, i)):
        round_index, used = filled.get(owners[i], (0, 0))
        if used and used + matrices[i].num_bytes > bucket_bytes:
            round_index, used = round_index + 1, 0
        filled[owners[i]] = round_index, used + matrices[i].num_bytes
        if round_index == len(rounds):
            rounds.append([])
        rounds[round_index].append(i)
    return [_plan_round(members, matrices, owners, grid) for members in rounds]


def _plan_round(
    members: Sequence[int], matrices: Sequence[Matrix], owners: Sequence[int], grid: Grid
) -> Round:
    gather: list[Move] = []
    scatter: list[Move] = []
    for i in members:
        replicas: dict[Box, list[int]] = {}
        for rank, box in matrices[i].boxes.items():
            replicas.setdefault(box, []).append(rank)
            scatter.append(((i, box), owners[i], rank))
        for box, ranks in replicas.items():
            # Equal boxes are replicas, of which one sends: the one with the fewest hops to the
            # owner.
            nearest = min(ranks, key=lambda rank: grid.distance(rank, owners[i]))
            gather.append(((i, box), nearest, owners[i]))
    owned = [i for i in members if owners[i] == grid.here]
    dims = range(len(grid.sizes))
    return Round(
        owned,
        inputs=[key for key, source, _ in gather if source == grid.here],
        outputs=[key for key, _, target in scatter if target == grid.here],
        # Back along the same route: the dimension that was gathered last is scattered first.
        gather=_plan_hops(gather, grid, reversed(dims)),
        scatter=_plan_hops(scatter, grid, dims),
        boxes={i: list(dict.fromkeys(matrices[i].boxes.values())) for i in owned},
    )


def _plan_hops(moves: Sequence[Move], grid: Grid, dims: Iterable[int]) -> list[Hop]:
    """Return the all-to-alls that complete some moves, one mesh dimension after another.

    A part that goes to several ranks is sent once as long as their routes are the same.
    """
    # The rank where each part is now; a hop moves it to its target's coordinate in one dimension.
    positions = [source for _, source, _ in moves]
    hops: list[Hop] = []
    for dim in dims:
        steps: dict[Move, None] = {}  # an ordered set: all ranks must agree on the order
        stride = math.prod(grid.sizes[dim + 1 :])
        for n, (key, _, target) in enumerate(moves):
            start = positions[n]
            offset = grid.get_coordinate(target, dim) - grid.get_coordinate(start, dim)
            positions[n] += offset * stride
            if positions[n] != start:
                steps[key, start, positions[n]] = None
        # Those in this rank's group: every member takes part, also one that has nothing to send.
        steps = {x: None for x in steps if grid.distance(x[1], grid.here, ignore=dim) == 0}
        # All ranks of the group see the same, and skip the all-to-all.
        if not steps:
            continue
        sent: list[list[Key]] = [[] for _ in range(grid.sizes[dim])]
        received: list[list[Key]] = [[] for _ in range(grid.sizes[dim])]
        for key, source, target in steps:
            if source == grid.here:
                sent[grid.get_coordinate(target, dim)].append(key)
            if target == grid.here:
                received[grid.get_coordinate(source, dim)].append(key)
        hops.append(
            Hop(
                group=grid.groups[dim],
                sent=[*chain.from_iterable(sent)],
                received=[*chain.from_iterable(received)],
                sent_sizes=[sum(map(_numel, keys)) for keys in sent],
                received_sizes=[sum(map(_numel, keys)) for keys in received],
            )
        )
    return hops


def _numel(key: Key) -> int:
    _, (_, rows, _, columns) = key
    return rows * columns


# ------------------------------------------------------------------------------------------ a round


def compute_on_owners(
    planned: Round,
    *,
    read: Callable[[int, Box], Tensor],
    compute: Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor]],
    write: Callable[[int, Box, Tensor], None],
    like: Tensor,
) -> None:
    """Assemble the matrices of a round on their owners, compute, and send the results back.

    Args:
        planned: A round; all ranks of its grid run the same rounds in the same order.
        read: Returns a shard of this rank, `[rows, columns]` of the box.
        compute: From the indices of this rank's matrices, and the full matrices, to as many results
            of the same shapes.
        write: Called with each shard of a result that this rank receives.
        like: A tensor of the dtype and device of all of these.

    Effects:
        Those of `write`. Communicates: one all-to-all before and one after for each mesh dimension
        along which a shard travels; none if every matrix is complete on its owner.

    Examples:
        >>> whole = Matrix((1, 2), {0: (0, 1, 0, 2)}, cost=1, num_bytes=8)
        >>> (only,) = plan_rounds([whole], Grid(), bucket_bytes=8)
        >>> compute_on_owners(
        ...     only,
        ...     read=lambda index, box: torch.ones(1, 2),
        ...     compute=lambda indices, matrices: [2 * x for x in matrices],
        ...     write=lambda index, box, x: print(x),
        ...     like=torch.empty(0),
        ... )
        tensor([[2., 2.]])
    """
    shards = _exchange({key: read(*key) for key in planned.inputs}, planned.gather, like)
    matrices: list[Tensor] = []
    for i in planned.owned:
        boxes = planned.boxes[i]
        if len(boxes) == 1:
            matrices.append(shards[i, boxes[0]])
            continue
        rows = max(row + count for row, count, _, _ in boxes)
        columns = max(column + count for _, _, column, count in boxes)
        # Every element is written: the boxes cover the matrix.
        full = like.new_empty(rows, columns)
        for box in boxes:
            _view_box(full, box).copy_(shards[i, box])
        matrices.append(full)
    results = compute(planned.owned, matrices)
    shards = {
        (i, box): _view_box(x, box)
        for i, x in zip(planned.owned, results, strict=True)
        for box in planned.boxes[i]
    }
    shards = _exchange(shards, planned.scatter, like)
    for key in planned.outputs:
        write(*key, shards[key])


def _view_box(matrix: Tensor, box: Box) -> Tensor:
    row, rows, column, columns = box
    return matrix[row : row + rows, column : column + columns]


def _exchange(shards: dict[Key, Tensor], hops: Sequence[Hop], like: Tensor) -> dict[Key, Tensor]:
    """Run some hops; return the shards that this rank had, received, or passed on."""
    shards = dict(shards)
    for hop in hops:
        flat = (shards[key].reshape(-1) for key in hop.sent)
        # The empty tensor is for a rank that sends nothing: `cat` takes no empty list.
        sent = torch.cat([like.new_empty(0), *flat])
        received = like.new_empty(sum(hop.received_sizes))
        dist.all_to_all_single(
            received, sent, [*hop.received_sizes], [*hop.sent_sizes], group=hop.group
        )
        parts = received.split([_numel(key) for key in hop.received])
        for key, part in zip(hop.received, parts, strict=True):
            _, (_, rows, _, columns) = key
            shards[key] = part.view(rows, columns)
    return shards
