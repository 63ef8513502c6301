"""Tokens to the ranks that hold their experts, in the order of experts, and back.

Each is a gather or an exchange whose gradient is its inverse: nothing is summed in an order that
could vary. On an axis of size 1 nothing is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainkit.batch.denominators import can_read_values
from trainkit.collectives import all_to_all_rows
from trainkit.types import SOLO, Axis


class Route(NamedTuple):
    """Which way rows went, for `ep_combine`.

    `order` `[T * k]` are the choices in the order of experts, `inverse` the way back from it;
    `sent` and `received` count the rows that went to and came from each rank, and `arrived` and
    `back` put received rows in the order of experts and back (None on an axis of size 1).
    """

    order: Tensor
    inverse: Tensor
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    arrived: Tensor | None = None
    back: Tensor | None = None


class Dispatched(NamedTuple):
    """Rows `[N, D]` for the experts of this rank, those of the first one first.

    `counts` int64 `[E / ep]` are the rows of each, which must sum to N: experts compute every row.
    """

    rows: Tensor
    counts: Tensor
    route: Any


class Dispatch(Protocol):
    """Takes tokens `[T, D]`, choices `[T, k]` and their counts `[E]` to the experts."""

    def __call__(self, x: Tensor, indices: Tensor, counts: Tensor, /) -> Dispatched: ...


class Combine(Protocol):
    """Takes rows `[N, D]` back, and returns the weighted sum `[T, D]` of each token's k rows."""

    def __call__(self, rows: Tensor, weights: Tensor, route: Any, /) -> Tensor: ...


class DispatchKeys(Protocol):
    """Takes noise keys `[T, k]`, one for each choice, the way that rows went: `[N]`."""

    def __call__(self, keys: Tensor, route: Any, /) -> Tensor: ...


def ep_dispatch(
    x: Tensor,
    indices: Tensor,
    counts: Tensor,
    axis: Axis = SOLO,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Dispatched:
    """Send tokens to the ranks that hold the experts they go to, in the order of experts.

    The experts are dealt in equal neighbourly parts: rank r holds those from r * E / ep on. A
    choice of E, which padding has, is sent to nobody; on one rank it goes with the last expert's
    rows, as a row of zeros.

    Args:
        x: Tokens `[T, D]`; ranks may have different numbers of them, or none.
        indices: int64 `[T, k]`, the experts of each, in [0, E].
        counts: int64 `[E]`, how often each expert stands in `indices`.
        axis: The ranks that hold the experts, `ps.ep`.
        wire_dtype: What rows travel in, there and in backward, if not in their own dtype; bf16
            halves the traffic of fp32.

    Returns:
        The rows of this rank's experts, of an expert in the order of ranks and tokens; how many
        each has; and the way back.

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
    order = indices.flatten().argsort(stable=True)
    inverse = _inverse(order)
    rows = _InOrder.apply(x, order, inverse, counts)
    if axis.count == 1:
        counts = torch.cat([counts[:-1], len(order) - counts[:-1].sum(0, keepdim=True)])
        return Dispatched(rows, counts, Route(order, inverse))
    equal = [len(counts) // axis.count] * axis.count
    arriving = all_to_all_rows(counts, axis, sent=equal, received=equal, length=len(counts))
    both = torch.stack([counts, arriving]).unflatten(1, (axis.count, -1))
    sent, received = both.sum(-1).tolist()  # the host sync
    own = torch.arange(both.shape[-1], device=x.device).repeat(axis.count)
    expert_of = own.repeat_interleave(arriving, output_size=sum(received))
    arrived = expert_of.argsort(stable=True)
    route = Route(order, inverse, tuple(sent), tuple(received), arrived, _inverse(arrived))
    how: dict[str, Any] = {"sent": sent, "received": received, "length": sum(received)}
    wide = rows.dtype
    rows = all_to_all_rows(rows.to(wire_dtype or wide), axis, **how).to(wide)
    return Dispatched(_gathered(rows, arrived, route.back), both[1].sum(0), route)


def ep_dispatch_keys(keys: Tensor, route: Route, axis: Axis = SOLO) -> Tensor:
    """Send a noise key for each choice after the rows, for adapters of experts with dropout.

    Args:
        keys: int64 `[T, k]`, from `noise.split_keys`: those of the tokens at the experts that
            they chose, so that it does not matter which rank draws from them.
        route: What `ep_dispatch` returned.
        axis: As there.

    Returns:
        int64 `[N]`, of the rows that `ep_dispatch` returned.

    Raises:
        TypeError: The route is another dispatch's.

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
            "ep_dispatch; give expert() its own dispatch_keys=, or set the dropout of experts' "
            "adapters to 0"
        )
    rows = keys.flatten().index_select(0, route.order)
    if route.arrived is None:
        return rows
    how: dict[str, Any] = {"sent": route.sent, "received": route.received}
    how["length"] = len(route.arrived)
    return all_to_all_rows(rows, axis, **how).index_select(0, route.arrived)


def ep_combine(
    rows: Tensor,
    weights: Tensor,
    route: Route,
    axis: Axis = SOLO,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Bring rows back to the tokens that they are of, and add them up with weights.

    Args:
        rows: `[N, D]`, of the experts of this rank, in the order of `ep_dispatch`.
        weights: `[T, k]`; where they sum to 1 this is the inverse of `ep_dispatch`.
        route: What `ep_dispatch` returned.
        axis: As there.
        wire_dtype: As there. What arrives is weighed and summed in the dtype of `weights`, fp32.

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
        wide = rows.dtype
        rows = _gathered(rows, route.back, route.arrived).to(wire_dtype or wide)
        how: dict[str, Any] = {"sent": route.received, "received": route.sent}
        how["length"] = len(route.order)
        rows = all_to_all_rows(rows, axis, **how).to(wide)
    return _WeightedSum.apply(rows, weights, route.order, route.inverse)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _InOrder(torch.autograd.Function):
    """Rows of tokens, each k times, in a given order, and zeros where they are nobody's.

    The gradient is gathered, not scattered.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, counts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.chosen = max(len(order) // max(len(x), 1), 1)
        rows = x.index_select(0, order // ctx.chosen)  # faster than x[...] on a CPU
        # Most often there are no such rows, and a pass over all rows is saved.
        if can_read_values(counts):
            rows[int(counts.sum()) :] = 0
            return rows
        is_nobodys = torch.arange(len(rows), device=x.device) >= counts.sum()
        return rows.masked_fill_(is_nobodys.unsqueeze(1), 0)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_rows: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _summed(d_rows, inverse.view(-1, ctx.chosen)), None, None, None


class _Gathered(torch.autograd.Function):
    """Rows in another order, whose inverse is known."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor
    ) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_rows: Tensor
    ) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _gathered(d_rows, inverse, order), None, None


def _gathered(rows: Tensor, order: Any, inverse: Any) -> Tensor:
    return _Gathered.apply(rows, order, inverse)


class _WeightedSum(torch.autograd.Function):
    """The sum of each token's rows with its weights, which are read where they are."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        y = _summed(rows.to(weights.dtype), inverse.view_as(weights), weights)
        return y.to(rows.dtype)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, d_y: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        token = order // weights.shape[1]
        products = d_y.index_select(0, token).to(weights.dtype).mul_(rows)
        d_weights = products.sum(-1).index_select(0, inverse).view_as(weights)
        del products  # before there is another of its size
        d_rows = d_y.index_select(0, token).to(weights.dtype)
        d_rows.mul_(weights.flatten().index_select(0, order).unsqueeze(-1))
        return d_rows.to(rows.dtype), d_weights, None, None


def _summed(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted sums `[T, D]` of the rows at places `[T, k]`; none of them is copied."""
    sums = torch.nn.functional.embedding_bag
    return sums(places, rows, mode="sum", per_sample_weights=weights)
