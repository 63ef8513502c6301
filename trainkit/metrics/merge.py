"""Merge the states of all ranks, of any number of metrics, in one packed all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainkit.collectives import get_compute_device, start_all_reduce
from trainkit.metrics.records import MergedState, Metric, State, refuse_merged
from trainkit.metrics.reduce import start_packed_sum
from trainkit.types import Axis


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
        Communicates: one all-reduce on `axis`, and a second if a tensor is merged by max or min.
        There is no host sync on an accelerator.

    Examples:
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
    local = {name: x.detach().to(device) for name, x in state.items()}
    sums = {name: x for name, x in local.items() if metric.merge[name] == "sum"}
    # min(x) is -max(-x), so that both travel together.
    signs = {"max": 1.0, "min": -1.0}
    maxima = {
        (op, name): signs[op] * local[name] for name, op in metric.merge.items() if op in signs
    }
    # Backends differ in whether a maximum passes a NaN on, so NaNs are counted.
    nans = {f"NaN {op} {name}": x.isnan() for (op, name), x in maxima.items()}
    finish_sums = start_packed_sum("merge_over_ranks", sums | nans, axis)
    finish_maxima = start_all_reduce(_pack(maxima), axis, op="max") if maxima else None

    def finish() -> MergedState:
        totals = finish_sums()
        merged = {name: totals[name] for name in sums}
        packed = finish_maxima() if finish_maxima else torch.empty(0)
        for op, name in sorted(maxima):
            shape = maxima[op, name].shape
            value, packed = packed.tensor_split([shape.numel()])
            has_nan = totals[f"NaN {op} {name}"] != 0
            merged[name] = torch.where(has_nan, torch.nan, signs[op] * value.view(shape))
        return MergedState({name: merged[name] for name in metric.merge})

    return finish


def _pack(tensors: Mapping[tuple[str, str], Tensor]) -> Tensor:
    """Return one flat tensor, without NaNs, of a size that hardly ever differs between ranks."""
    flat = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    flat = flat.masked_fill(flat.isnan(), -torch.inf)
    # Gloo aborts the process when sizes differ, before `start_packed_sum` can say that names do.
    return torch.nn.functional.pad(flat, (0, -len(flat) % 256))
