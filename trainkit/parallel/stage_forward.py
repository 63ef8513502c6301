"""Forward passes through pipeline stages: shapes of sent tensors, evaluation, terms of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.collectives import all_gather_objects, broadcast
from trainkit.parallel.grad_reduction import find_reducers, reshard_
from trainkit.parallel.precision import get_compute_dtype
from trainkit.parallel.stage_ranks import StagePlace, get_stage_places
from trainkit.types import Axis, Call, ConfigError, Loss, Stages


def stage_boundary(stage: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return a stage's output for a batch as tensors on the meta device.

    The first is in the dtype that the stage computes in; see `mixed_precision`.

    Raises:
        ConfigError: The stage has no method `boundary(batch)`.
    """
    boundary = getattr(stage, "boundary", None)
    if boundary is None:
        raise ConfigError(
            f"the pipeline stage {type(stage).__name__} has no method boundary(batch), which "
            "returns a tensor on the meta device with the shape and dtype of the stage's output; "
            "add it to the class",
            where="boundary",
        )
    hidden, *extra = to_tuple(boundary(batch))
    return hidden.to(get_compute_dtype(stage) or hidden.dtype), *extra


def to_tuple(output: Any) -> tuple[Any, ...]:
    """Return the output of a stage, a tensor or a tuple of tensors, as a plain tuple.

    Examples:
        >>> to_tuple(1), to_tuple((1, 2))
        ((1,), (1, 2))
    """
    return tuple(output) if isinstance(output, tuple) else (output,)


def compute_device(stage: nn.Module) -> torch.device:
    """Return the device that a stage computes on, which offloaded parameters are not on.

    Examples:
        >>> compute_device(nn.Linear(1, 1))
        device(type='cpu')
    """
    # The first is enough: all units of a stage compute on one device.
    for _, module in find_reducers(stage).fsdp:
        return module._get_fsdp_state()._device  # noqa: SLF001 (no public way)
    # A stage without tensors computes on torch's default device.
    return next(chain(stage.parameters(), stage.buffers()), torch.empty(0)).device


# ----------------------------------------------------------------------------------------- forward


@contextmanager
def use_eval_mode(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Run a block in evaluation mode and without gradients.

    Effects:
        Sets the modules to evaluation mode for the length of the block, and then restores the mode
        of every submodule; frees the parameters that FSDP2 has gathered.

    Examples:
        >>> model = nn.Dropout().train()
        >>> with use_eval_mode([model]):
        ...     model.training
        False
        >>> model.training
        True
    """
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            # Not by `train()`, which would change the submodules as well.
            module.training = training
        for stage in stages:
            reshard_(find_reducers(stage))


def run_stage(
    stage: nn.Module,
    place: StagePlace,
    batch: Mapping[str, Any],
    edge: tuple[Tensor, ...],
    *,
    call: Call,
) -> Any:
    """Call a stage with a microbatch; after the first stage, the input replaces `input_ids`."""
    # A stage with one output hands on a tensor, not a tuple of one.
    received = edge[0] if len(edge) == 1 else edge
    return call(stage, batch if place.index == 0 else {**batch, "input_ids": received})


def check_edge(output: Any, boundary: tuple[Tensor, ...], place: StagePlace) -> tuple[Tensor, ...]:
    """Return a stage's output as contiguous tensors, after a check of their shapes and dtypes.

    Raises:
        ValueError: They differ from the stage's boundary.
    """
    # gloo ends the process where a receiver expects another size.
    edge = to_tuple(output)
    expected = [(tuple(x.shape), x.dtype) for x in boundary]
    actual = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in edge]
    if actual != expected:
        raise ValueError(
            f"pipeline stage {place.index} returns {', '.join(map(str, actual))}, but its "
            f"boundary(batch) is {', '.join(map(str, expected))}"
        )
    return tuple(x.contiguous() for x in edge)


@torch.no_grad()
def forward_stages(stages: Stages, batch: Mapping[str, Any], *, call: Call | None = None) -> Any:
    """Run one batch through the whole pipeline, forward only.

    Args:
        stages: The stages of this rank.
        batch: The batch, the same on all ranks of the pipeline.
        call: Calls a stage with a batch; by default the call of the stages.

    Returns:
        The output of the last stage on the rank that holds it, None on the others.

    Effects:
        Communicates on the pipeline axis: a hidden state is sent at each edge between ranks.
    """
    axis = stages.pp
    places = get_stage_places(stages, axis)
    ranks = places[0].ranks
    output = None
    edge: tuple[Tensor, ...] = ()
    for place, stage in zip(places, stages, strict=True):
        boundary = stage_boundary(stage, batch) if axis.count > 1 else ()
        # Otherwise the stage before is on this rank too, and has left its output in `edge`.
        if place.index and ranks[place.index - 1] != axis.index:
            device = compute_device(stage)
            edge = tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in boundary)
            for x in edge:
                dist.recv(x, group=axis.group, group_src=ranks[place.index - 1])
        output = run_stage(stage, place, batch, edge, call=call or stages.call)
        if not place.last:
            edge = check_edge(output, boundary, place)
            if ranks[place.index + 1] != axis.index:
                for x in edge:
                    dist.send(x, group=axis.group, group_dst=ranks[place.index + 1])
    return output if places[-1].last else None


# ------------------------------------------------------------------------------------------- terms


TermKind = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a term."""


def share_terms(
    sums: Mapping[str, Tensor],
    kinds: Mapping[str, TermKind],
    *,
    axis: Axis,
    source: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Broadcast the terms of the loss from the last stage to all ranks of the pipeline.

    Args:
        sums: The terms on rank `source`; not read elsewhere.
        kinds: The dtypes and shapes of the terms, from `agree_on_kinds`.
        axis: The pipeline axis.
        source: The rank of the last stage.
        device: The device of the result.

    Effects:
        Communicates: one broadcast on `axis`, in fp64.
    """
    # One message for all dtypes: fp64 holds an fp32 and any count of tokens exactly.
    sizes = [math.prod(shape) for _, shape in kinds.values()]
    packed = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    if axis.index == source:
        flat = [sums[name].detach().to(device).double().flatten() for name in kinds]
        packed = torch.cat(flat)
    values = broadcast(packed, axis, source=source).split(sizes)
    return {
        name: value.view(shape).to(getattr(torch, dtype))
        for (name, (dtype, shape)), value in zip(kinds.items(), values, strict=True)
    }


def agree_on_kinds(
    sums: Mapping[str, Tensor], terms: Sequence[str], *, axis: Axis, source: int
) -> dict[str, TermKind]:
    """Return the dtype and shape of each term, as the rank of the last stage has them.

    Raises:
        ValueError: The loss returns other terms than its attribute `terms` declares.

    Effects:
        Communicates on `axis`, and waits.
    """
    local = {name: [str(x.dtype).removeprefix("torch."), *x.shape] for name, x in sums.items()}
    kinds = all_gather_objects(local, axis)[source]
    if set(kinds) != set(terms):
        raise ValueError(
            f"the loss declares the terms {sorted(terms)}, but returns {sorted(kinds)}; correct "
            "its attribute `terms`"
        )
    # In the order of `terms`, equal on all ranks, in which `share_terms` packs them.
    return {name: (kinds[name][0], tuple(kinds[name][1:])) for name in terms}


def get_term_names(loss: Loss) -> tuple[str, ...]:
    """Return the names of the terms of a loss.

    Raises:
        ConfigError: The loss does not declare them.
    """
    terms = getattr(loss, "terms", None)
    if terms is None:
        raise ConfigError(
            f"the loss {getattr(loss, '__name__', loss)} has no attribute `terms`, the names of "
            "its terms, which ranks without the last pipeline stage need; decorate it with "
            "losses.declare_terms",
            where="loss",
        )
    return tuple(terms)
