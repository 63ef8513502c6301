"""Merge the states of all ranks, of any number of metrics, in one packed all-reduce."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trainkit.collectives import get_compute_device
from trainkit.metrics.records import MergedState, Metric, State, refuse_merged
from trainkit.metrics.reduce import start_packed_sum
from trainkit.types import Axis

# Of the values of all ranks, in the first dimension; a NaN among them is the result.
_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x,
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}


def merge_over_ranks(metric: Metric, state: State, axis: Axis) -> MergedState:
    """Merge the states of a metric over ranks.

    The state stays as it is, and is updated further; a later merge counts everything once. For
    several metrics merge their composition (`compose_metrics`).

    Args:
        metric: The metric, with the same tensors on all ranks.
        state: What this rank has seen.
        axis: The ranks that have seen different inputs, such as `ps.loss`.

    Returns:
        The state of all ranks, equal on all of them, on the device that they compute on.

    Raises:
        ValueError: The state is merged already, or is not of this metric; on a CPU, on all ranks,
            if they passed different metrics (elsewhere all values are NaN).

    Effects:
        Communicates: one all-reduce on `axis`, in which a tensor that is merged by max or min has
        a copy for each rank. There is no host sync on an accelerator.

    Examples:
        >>> import torch
        >>> from trainkit.metrics import make_weighted_mean
        >>> from trainkit.types import SOLO
        >>> mean = make_weighted_mean()
        >>> state = mean.update(mean.init(), torch.tensor([1.0, 2.0]))
        >>> mean.compute(merge_over_ranks(mean, state, SOLO))
        tensor(1.5000, dtype=torch.float64)
    """
    return start_merge_over_ranks(metric, state, axis)()


def start_merge_over_ranks(metric: Metric, state: State, axis: Axis) -> Callable[[], MergedState]:
    """Start `merge_over_ranks`, and return a function that waits for it and returns its result.

    Call it at the next line that is logged, for example: the exchange runs while the model
    computes. Updates in between are not in the result.

    Args:
        metric: The metric, with the same tensors on all ranks.
        state: What this rank has seen.
        axis: The ranks that have seen different inputs.

    Raises:
        ValueError: As `merge_over_ranks`; names of ranks are compared when the result is taken.

    Effects:
        Communicates as `merge_over_ranks`. Ranks start merges in the same order.

    Examples:
        >>> import torch
        >>> from trainkit.metrics import make_sum
        >>> from trainkit.types import SOLO
        >>> total = make_sum()
        >>> finish = start_merge_over_ranks(total, total.init(), SOLO)
        >>> total.compute(finish())
        tensor(0., dtype=torch.float64)
    """
    refuse_merged("merge_over_ranks", state)
    if state.keys() != metric.merge.keys():
        raise ValueError(
            f"merge_over_ranks: the state has {sorted(state)}, and the metric "
            f"{sorted(metric.merge)}; pass a state of the same metric"
        )
    if axis.count == 1:
        return lambda: MergedState(dict(state))
    # All ranks must send from the same device.
    device = get_compute_device(axis)
    packed: dict[str, Tensor] = {}
    for name, op in metric.merge.items():
        x = state[name].detach().to(device)
        if op != "sum":
            # A place for each rank, which is 0 on all others: the sum has every rank's value, an
            # infinity or a NaN too. So extremes travel with the sums.
            places = x.new_zeros(axis.count, *x.shape)
            places[axis.index] = x
            x = places
        packed[f"{op} {name}"] = x
    finish_sum = start_packed_sum("merge_over_ranks", packed, axis)

    def finish() -> MergedState:
        totals = finish_sum()
        return MergedState(
            {name: _COMBINE[op](totals[f"{op} {name}"]) for name, op in metric.merge.items()}
        )

    return finish
