"""Dispatch of tokens to the ranks that hold their experts, sorted by expert, and the way back.

Each step is a gather or an all-to-all whose gradient is its inverse, so no sum depends on an order
of execution. On an axis of size 1 nothing is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainkit.batch.denominators import can_read_values
from trainkit.collectives import all_to_all_rows
from trainkit.types import SOLO, Axis


class Route(NamedTuple):
    """The permutations and counts of a dispatch, for `ep_combine`.

    Attributes:
        order: `[T * k]`, the permutation that sorts choices by expert.
        inverse: Its inverse.
        sent: The number of rows sent to each rank.
        received: The number of rows received from each rank.
        arrived: The permutation that sorts received rows by expert; None on an axis of size 1.
        back: Its inverse.
    """

    order: Tensor
    inverse: Tensor
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    arrived: Tensor | None = None
    back: Tensor | None = None


class Dispatched(NamedTuple):
    """Rows `[N, D]` for the experts of this rank, sorted by expert.

    `counts`, int64 `[E / ep]`, is the number of rows of each. They sum to N: experts compute every
    row.
    """

    rows: Tensor
    counts: Tensor
    route: Any


class Dispatch(Protocol):
    """Sends tokens `[T, D]` to the experts, given choices `[T, k]` and their counts `[E]`."""

    def __call__(self, x: Tensor, indices: Tensor, counts: Tensor, /) -> Dispatched: ...


class Combine(Protocol):
    """Sends rows `[N, D]` back, and returns the weighted sum `[T, D]` of each token's k rows."""

    def __call__(self, rows: Tensor, weights: Tensor, route: Any, /) -> Tensor: ...


class DispatchKeys(Protocol):
    """Sends noise keys `[T, k]`, one for each choice, along the route of the rows: `[N]`."""

    def __call__(self, keys: Tensor, route: Any, /) -> Tensor: ...


def ep_dispatch(
    x: Tensor,
    indices: Tensor,
    counts: Tensor,
    axis: Axis = SOLO,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Dispatched:
    """Send tokens to the ranks of their experts, sorted by expert.

    Rank r has experts r * E / ep to (r + 1) * E / ep - 1. A choice of E, that of padding, is not
    sent; on one rank it is a row of zeros after those of the last expert.

    Args:
        x: Tokens `[T, D]`; ranks may have different numbers of them, or none.
        indices: int64 `[T, k]`, the experts of each token, in [0, E].
        counts: int64 `[E]`, the number of choices of each expert in `indices`.
        axis: The ranks that hold the experts, `ps.ep`.
        wire_dtype: The dtype in which rows are sent, in forward and backward; by default their own.
            bf16 halves the traffic of fp32.

    Returns:
        The rows of this rank's experts, those of an expert in the order of ranks and tokens; their
        counts; and the route back.

    Effects:
        Communicates: two all-to-alls on `axis`, of counts and of rows, and in backward one. One
        host sync, for the counts; both again where the forward pass is recomputed.

    References:
        Lepikhin et al., "GShard" (2020), for the exchange; Gale et al., "MegaBlocks" (2022), for
        one without dropped tokens.

    Examples:
        >>> x, indices = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [0, 2]])
        >>> rows, counts, _ = ep_dispatch(x, indices, torch.tensor([2, 1, 1]))
        >>> rows.flatten().tolist(), counts.tolist()
        ([1.0, 2.0, 1.0, 2.0], [2, 1, 1])
    """
    # Stable: an expert's rows keep the order of their tokens.
    order = indices.flatten().argsort(stable=True)
    inverse = _invert(order)
    rows = _SortRows.apply(x, order, inverse, counts)
    if axis.count == 1:
        # Rows of padding, zeros at the end, go to the last expert: experts compute every row.
        others = counts[:-1]
        last = len(order) - others.sum(0, keepdim=True)
        counts = torch.cat([others, last])
        return Dispatched(rows, counts, Route(order, inverse))
    # Each rank sends the others the numbers of rows for each of their experts.
    equal = [len(counts) // axis.count] * axis.count
    arriving = all_to_all_rows(counts, axis, sent=equal, received=equal, length=len(counts))
    both = torch.stack([counts, arriving]).unflatten(1, (axis.count, -1))
    sent, received = both.sum(-1).tolist()  # the host sync
    # Rows arrive by rank, and from each rank by expert; here they are sorted by expert alone.
    local_experts = torch.arange(both.shape[-1], device=x.device).repeat(axis.count)
    expert_of_row = local_experts.repeat_interleave(arriving, output_size=sum(received))
    arrived = expert_of_row.argsort(stable=True)
    route = Route(
        order=order,
        inverse=inverse,
        sent=tuple(sent),
        received=tuple(received),
        arrived=arrived,
        back=_invert(arrived),
    )
    dtype = rows.dtype
    rows = all_to_all_rows(
        rows.to(wire_dtype or dtype),
        axis,
        sent=sent,
        received=received,
        length=sum(received),
    ).to(dtype)
    local_counts = both[1].sum(0)  # over the ranks that the rows come from
    return Dispatched(_gather_rows(rows, arrived, route.back), local_counts, route)


def ep_dispatch_keys(keys: Tensor, route: Route, axis: Axis = SOLO) -> Tensor:
    """Send a noise key for each choice along the route of its row, for adapters with dropout.

    Args:
        keys: int64 `[T, k]`, from `noise.split_keys`: a key depends on the token and the expert, so
            the noise does not depend on the rank that draws it.
        route: The route that `ep_dispatch` returned.
        axis: The same as for `ep_dispatch`.

    Returns:
        int64 `[N]`, the keys of the rows that `ep_dispatch` returned.

    Raises:
        TypeError: The route is that of another dispatch function.

    Effects:
        Communicates: one all-to-all on `axis`, of 8 bytes a row. No host sync.

    Examples:
        >>> x, indices = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [0, 2]])
        >>> _, _, route = ep_dispatch(x, indices, torch.tensor([2, 1, 1]))
        >>> ep_dispatch_keys(torch.tensor([[11, 10], [20, 22]]), route).tolist()
        [10, 20, 11, 22]
    """
    if not isinstance(route, Route):
        raise TypeError(
            f"ep_dispatch_keys: the route is a {type(route).__name__}, of another dispatch than "
            "ep_dispatch; give expert_parallel() its own dispatch_keys=, or set the dropout of "
            "experts' adapters to 0"
        )
    sorted_keys = keys.flatten().index_select(0, route.order)
    if route.arrived is None:
        return sorted_keys
    received = all_to_all_rows(
        sorted_keys,
        axis,
        sent=route.sent,
        received=route.received,
        length=len(route.arrived),
    )
    return received.index_select(0, route.arrived)


def ep_combine(
    rows: Tensor,
    weights: Tensor,
    route: Route,
    axis: Axis = SOLO,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Send rows back to their tokens, and return the weighted sum for each token.

    Args:
        rows: `[N, D]`, of the experts of this rank, in the order of `ep_dispatch`.
        weights: `[T, k]`; if they sum to 1, this is the inverse of `ep_dispatch`.
        route: The route that `ep_dispatch` returned.
        axis: The same as for `ep_dispatch`.
        wire_dtype: The same as for `ep_dispatch`. Sums are in the dtype of `weights`, fp32.

    Returns:
        `[T, D]`.

    Effects:
        Communicates: one all-to-all on `axis`, and in backward another.

    Examples:
        >>> x, indices = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [0, 2]])
        >>> rows, _, route = ep_dispatch(x, indices, torch.tensor([2, 1, 1]))
        >>> ep_combine(rows, torch.tensor([[0.25, 0.75], [0.5, 0.5]]), route)
        tensor([[1.],
                [2.]])
    """
    if route.arrived is not None:
        dtype = rows.dtype
        rows = _gather_rows(rows, route.back, route.arrived).to(wire_dtype or dtype)
        rows = all_to_all_rows(
            rows,
            axis,
            sent=route.received,
            received=route.sent,
            length=len(route.order),
        ).to(dtype)
    return _WeightedSum.apply(rows, weights, route.order, route.inverse)


def _invert(order: Tensor) -> Tensor:
    positions = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


class _SortRows(torch.autograd.Function):
    """Rows of tokens, each k times, in a given order, with zeros for choices of no expert.

    The gradient is a gather, not a scatter, so it is deterministic.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        x: Tensor,
        order: Tensor,
        inverse: Tensor,
        counts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.chosen = max(len(order) // max(len(x), 1), 1)
        rows = x.index_select(0, order // ctx.chosen)  # faster than x[...] on a CPU
        # Most often all choices have an expert, and this saves a pass over all rows.
        if can_read_values(counts):
            rows[int(counts.sum()) :] = 0
            return rows
        is_unused = torch.arange(len(rows), device=x.device) >= counts.sum()
        return rows.masked_fill_(is_unused.unsqueeze(1), 0)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_rows: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _sum_rows(d_rows, inverse.view(-1, ctx.chosen)), None, None, None


class _GatherRows(torch.autograd.Function):
    """Rows in another order; the gradient is a gather by the inverse."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        rows: Tensor,
        order: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_rows: Tensor
    ) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _gather_rows(d_rows, inverse, order), None, None


def _gather_rows(rows: Tensor, order: Any, inverse: Any) -> Tensor:
    return _GatherRows.apply(rows, order, inverse)


class _WeightedSum(torch.autograd.Function):
    """The weighted sum of each token's rows, without a copy of the rows."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        order: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        y = _sum_rows(rows.to(weights.dtype), inverse.view_as(weights), weights)
        return y.to(rows.dtype)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_y: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        # y_t = sum of w_tj row_tj, so dw_tj = <dy_t, row_tj> and drow_tj = w_tj dy_t.
        token = order // weights.shape[1]
        products = d_y.index_select(0, token).to(weights.dtype).mul_(rows)
        d_weights = products.sum(-1).index_select(0, inverse).view_as(weights)
        del products  # before another tensor of its size is allocated
        d_rows = d_y.index_select(0, token).to(weights.dtype)
        d_rows.mul_(weights.flatten().index_select(0, order).unsqueeze(-1))
        return d_rows.to(rows.dtype), d_weights, None, None


def _sum_rows(rows: Tensor, indices: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted sums `[T, D]` of the rows at indices `[T, k]`, without copying them."""
    return torch.nn.functional.embedding_bag(indices, rows, mode="sum", per_sample_weights=weights)
