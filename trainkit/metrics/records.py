"""A metric as a record of functions: what it has seen is a plain dict of tensors.

`update` returns a new state and changes nothing, so there is no reset, and no copy of a state that
is out of date. How states combine is data, one of sum, max and min for each tensor, so that the
states of all ranks, of any number of metrics, merge in one packed all-reduce (`merge_over_ranks`).

References:
    CLU's `Metric`, which is a value too that is merged and computed; d9d's metrics, of which a rank
    updates its own part alone, however often parts are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from trainkit.types import CheckpointError, Share

State = dict[str, Tensor]
"""What a metric has seen on this rank: fp64 tensors by name."""

Value = Tensor | dict[str, Tensor]
"""What a metric computes: a tensor, or several by name."""

Reduction = Literal["sum", "max", "min"]

# A state that has seen nothing changes none that it is merged with.
_NEUTRAL: dict[str, float] = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}


@attrs.frozen(eq=False)
class MergedState:
    """The states of all ranks in one, from `merge_over_ranks`.

    It is not a `State`: no function updates it or merges it again, because every rank has it, and
    what one rank had seen would count once for each of them.
    """

    tensors: Mapping[str, Tensor]
    """By name, equal on all ranks; to be saved, and read by `restore_state`."""


@attrs.frozen(eq=False)
class Metric:
    """Four values that make a metric, from `make_metric` or any function that uses it."""

    init: Callable[..., State]
    """`init(device=None)` returns the state that has seen nothing, on the device of the inputs."""

    update: Callable[..., State]
    """`update(state, *inputs)` returns a new state, which has seen the inputs too."""

    merge: Mapping[str, Reduction]
    """How each tensor of two states combines."""

    compute: Callable[[State | MergedState], Value]
    """The value of a state: of this rank's own, or of the merged one."""


def make_metric(
    merge: Mapping[str, Reduction],
    *,
    update: Callable[..., State],
    compute: Callable[[Mapping[str, Tensor]], Value],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Metric:
    """Make a metric from two functions and the tensors of its state.

    All tensors are fp64, in which counts are exact up to 2^53. They start at 0 for a sum, -inf for
    a max and inf for a min, so that a rank that has seen nothing adds nothing.

    Args:
        merge: How each tensor of two states combines: "sum", "max" or "min".
        update: `update(state, *inputs)` returns the tensors after these inputs. It runs without
            gradients, and must not write to the state.
        compute: Returns the value of the tensors.
        shapes: The shapes of tensors that are not 0-d.

    Returns:
        A metric whose `update` raises ValueError for a `MergedState`, and for a function that does
        not return these tensors.

    Raises:
        ValueError: There is no tensor, an unknown way to combine one, or a shape of no tensor.

    Examples:
        >>> def update(state, x):
        ...     return {"n": state["n"] + x.numel(), "top": torch.maximum(state["top"], x.max())}
        >>> metric = make_metric({"n": "sum", "top": "max"}, update=update, compute=dict)
        >>> metric.compute(metric.update(metric.init(), torch.tensor([3, 5])))
        {'n': tensor(2., dtype=torch.float64), 'top': tensor(5., dtype=torch.float64)}
    """
    if not merge:
        raise ValueError("make_metric: a state needs at least one tensor, got none")
    for name, op in merge.items():
        if op not in _NEUTRAL:
            raise ValueError(
                f'make_metric: {name!r} must merge by "sum", "max" or "min", got {op!r}; a mean is '
                "two sums, divided in compute"
            )
    shapes = dict(shapes or {})
    if unknown := sorted(set(shapes) - set(merge)):
        raise ValueError(f"make_metric: shapes has {unknown}, which merge lacks: {sorted(merge)}")

    def init(device: torch.device | str | None = None) -> State:
        return {
            name: torch.full(shapes.get(name, ()), _NEUTRAL[op], dtype=torch.float64, device=device)
            for name, op in merge.items()
        }

    @torch.no_grad()
    def checked_update(state: State, *inputs: Any) -> State:
        refuse_merged("update", state)
        found = update(state, *inputs)
        if found.keys() != merge.keys():
            raise ValueError(
                f"make_metric: update must return the tensors {sorted(merge)}, got {sorted(found)}"
            )
        return found

    def compute_either(state: State | MergedState) -> Value:
        return compute(state.tensors if isinstance(state, MergedState) else state)

    return Metric(init, checked_update, dict(merge), compute_either)


def refuse_merged(by: str, state: State | MergedState) -> None:
    """Raise ValueError for a merged state, which would be counted once for each rank.

    Examples:
        >>> refuse_merged("update", {"total": torch.tensor(1.0)})
    """
    if isinstance(state, MergedState):
        raise ValueError(  # noqa: TRY004 (as for all bad arguments)
            f"{by}: this state is merged over ranks, and would count once for each of them; use "
            "the state of this rank that it was merged from, or restore_state, which gives it to "
            "one rank"
        )


def merge_states(metric: Metric, *states: State) -> State:
    """Return the state that has seen what these states have seen.

    Args:
        metric: The metric of all of them.
        states: States of this process that have seen different inputs; none for `metric.init()`.

    Raises:
        ValueError: One of them is a `MergedState`.

    Examples:
        >>> from trainkit.metrics import make_sum
        >>> total = make_sum()
        >>> states = [total.update(total.init(), torch.tensor(x)) for x in (1.0, 2.0)]
        >>> total.compute(merge_states(total, *states))
        tensor(3., dtype=torch.float64)
    """
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    for state in states:
        refuse_merged("merge_states", state)
    merged, *others = states or [metric.init()]
    for state in others:
        merged = {name: combine[op](merged[name], state[name]) for name, op in metric.merge.items()}
    return merged


def restore_state(metric: Metric, tensors: Mapping[str, Tensor], share: Share) -> State:
    """Return this rank's state of a saved one: the first rank gets it, the others start anew.

    So what was seen before counts once, on whatever number of ranks a run resumes.

    Args:
        metric: The metric that it was saved from.
        tensors: `MergedState.tensors`, or the state of a single process.
        share: Which rank of how many: `axis.share` of the axis that states are merged over.

    Raises:
        CheckpointError: Names or shapes are not those of the metric.

    Examples:
        >>> from trainkit.metrics import make_sum
        >>> restore_state(make_sum(), {"total": torch.tensor(6.0)}, Share(0, 2))
        {'total': tensor(6., dtype=torch.float64)}
        >>> restore_state(make_sum(), {"total": torch.tensor(6.0)}, Share(1, 2))
        {'total': tensor(0., dtype=torch.float64)}
    """
    state = metric.init(next(iter(tensors.values())).device if tensors else None)
    found = {name: tuple(x.shape) for name, x in tensors.items()}
    want = {name: tuple(x.shape) for name, x in state.items()}
    if found != want:
        raise CheckpointError(
            f"restore_state: the saved state is not of this metric: it has {found}, and the metric "
            f"has {want}",
            got=found,
            want=want,
            hint="restore it with the metric that it was saved from, or start with metric.init()",
        )
    if share.index != 0:
        return state
    return {name: tensors[name].to(torch.float64) for name in state}
