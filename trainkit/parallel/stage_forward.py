"""A batch through a pipeline's stages: their edges, forward alone, and the last one's terms."""

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
from trainkit.parallel.precision import compute_dtype
from trainkit.parallel.stage_ranks import StagePlace, places_of
from trainkit.types import Axis, Call, ConfigError, Loss, Stages


def stage_boundary(stage: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return what crosses a stage's edge, as its method `boundary(batch)` says: a tensor or some.

    The first is in the dtype that the stage computes in; see `precision`.

    Raises:
        ConfigError: The stage has no such method.
    """
    own = getattr(stage, "boundary", None)
    if own is None:
        raise ConfigError(
            f"the pipeline stage {type(stage).__name__} has no method boundary(batch), which gives "
            "the shape and dtype of what it passes on as a tensor on the meta device; add it to "
            "the class",
            where="boundary",
        )
    hidden, *others = as_edge(own(batch))
    return hidden.to(compute_dtype(stage) or hidden.dtype), *others


def as_edge(output: Any) -> tuple[Any, ...]:
    """Return what a stage passes on as a plain tuple, of one tensor or several.

    Examples:
        >>> as_edge(1), as_edge((1, 2))
        ((1,), (1, 2))
    """
    return tuple(output) if isinstance(output, tuple) else (output,)


def compute_device(stage: nn.Module) -> torch.device:
    """Return the device a stage computes on: with offloaded parameters not the one they are on.

    Examples:
        >>> compute_device(nn.Linear(1, 1))
        device(type='cpu')
    """
    for _, module in find_reducers(stage).fsdp:
        return module._get_fsdp_state()._device  # noqa: SLF001 (no public way)
    return next(chain(stage.parameters(), stage.buffers()), torch.empty(0)).device


# ----------------------------------------------------------------------------------------- forward


@contextmanager
def evaluating(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Run a block in evaluation mode and without gradients.

    Effects:
        Puts the modules into evaluation mode for the length of the block, and then every module
        inside them back into the mode it had; frees what FSDP2 has gathered.

    Examples:
        >>> model = nn.Dropout().train()
        >>> with evaluating([model]):
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
    """Enter a microbatch into a stage; after the first, what it receives replaces `input_ids`."""
    received = edge[0] if len(edge) == 1 else edge
    return call(stage, batch if place.index == 0 else {**batch, "input_ids": received})


def check_edge(output: Any, boundary: tuple[Tensor, ...], place: StagePlace) -> tuple[Tensor, ...]:
    """Return an output that the next stage expects: unequal sizes would end a gloo process.

    Raises:
        ValueError: It is not what the stage's boundary says.
    """
    edge, wanted = as_edge(output), [(tuple(x.shape), x.dtype) for x in boundary]
    found = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in edge]
    if found != wanted:
        got, want = (", ".join(map(str, x)) for x in (found, wanted))
        raise ValueError(
            f"pipeline stage {place.index} passes on {got}, but its boundary(batch) says {want}"
        )
    return tuple(x.contiguous() for x in edge)


@torch.no_grad()
def forward_stages(stages: Stages, batch: Mapping[str, Any], *, call: Call | None = None) -> Any:
    """Run one batch through the whole pipeline, forward only.

    Args:
        stages: The stages of this rank.
        batch: The batch, the same on all ranks of the pipeline.
        call: How a batch enters a stage, in place of the stages' own call.

    Returns:
        The output of the last stage on the rank that holds it, None on the others.

    Effects:
        Communicates on the pipeline axis: a hidden state is sent at each edge between ranks.
    """
    axis, call = stages.pp, call or stages.call
    places = places_of(stages, axis)
    ranks, output, edge = places[0].ranks, None, tuple[Tensor, ...]()
    for place, stage in zip(places, stages, strict=True):
        boundary = stage_boundary(stage, batch) if axis.count > 1 else ()
        if place.index and ranks[place.index - 1] != axis.index:
            device = compute_device(stage)
            edge = tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in boundary)
            for x in edge:
                dist.recv(x, group=axis.group, group_src=ranks[place.index - 1])
        output = run_stage(stage, place, batch, edge, call=call)
        if not place.last:
            edge = check_edge(output, boundary, place)
            if ranks[place.index + 1] != axis.index:
                for x in edge:
                    dist.send(x, group=axis.group, group_dst=ranks[place.index + 1])
    return output if places[-1].last else None


# ------------------------------------------------------------------------------------------- terms


Kind = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a term."""


def share_terms(
    sums: Mapping[str, Tensor],
    kinds: Mapping[str, Kind],
    *,
    axis: Axis,
    source: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Give every rank of the pipeline the terms that the last stage's rank has.

    Args:
        sums: The terms on rank `source`; not read elsewhere.
        kinds: The terms and what they are, from `agree_on_kinds`.
        axis: The pipeline axis.
        source: The rank of the last stage.
        device: Where the terms shall be.

    Effects:
        Communicates: one broadcast on `axis`, in fp64.
    """
    sizes = [math.prod(shape) for _, shape in kinds.values()]
    packed = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    if axis.index == source:
        packed = torch.cat([sums[name].detach().to(device).double().flatten() for name in kinds])
    values = broadcast(packed, axis, source=source).split(sizes)
    return {
        name: value.view(shape).to(getattr(torch, dtype))
        for (name, (dtype, shape)), value in zip(kinds.items(), values, strict=True)
    }


def agree_on_kinds(
    sums: Mapping[str, Tensor], terms: Sequence[str], *, axis: Axis, source: int
) -> dict[str, Kind]:
    """Return what each term is, which only the rank of the last stage knows.

    Raises:
        ValueError: The loss does not report the terms that it says it reports.

    Effects:
        Communicates on `axis`, and waits.
    """
    own = {name: [str(x.dtype).removeprefix("torch."), *x.shape] for name, x in sums.items()}
    found = all_gather_objects(own, axis)[source]
    if set(found) != set(terms):
        raise ValueError(
            f"the loss says that its terms are {sorted(terms)}, and reports {sorted(found)}; "
            "correct its attribute `terms`"
        )
    return {name: (found[name][0], tuple(found[name][1:])) for name in terms}


def terms_of(loss: Loss) -> tuple[str, ...]:
    """Return the names of a loss's terms.

    Raises:
        ConfigError: It does not say.
    """
    terms = getattr(loss, "terms", None)
    if terms is None:
        raise ConfigError(
            f"the loss {getattr(loss, '__name__', loss)} has no attribute `terms`, the names that "
            "it reports, which pipeline stages that see no loss need; decorate it with "
            "losses.declare_terms",
            where="loss",
        )
    return tuple(terms)
