"""A batch through a pipeline's stages: their edges, forward alone, and the last one's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.collectives import all_gather_json, broadcast
from trainkit.parallel.places import StagePlace, places_of
from trainkit.parallel.precision import compute_dtype
from trainkit.parallel.reduction import reducers_of, reshard_
from trainkit.types import Axis, Call, ConfigError, Loss


def stage_boundary(stage: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return what crosses a stage's edge, as its method `boundary(batch)` says.

    It is in the dtype that the stage computes in; see `precision`.

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
    meta, dtype = own(batch), compute_dtype(stage)
    return meta if dtype is None else meta.to(dtype)


def compute_device(stage: nn.Module) -> torch.device:
    """Return the device a stage computes on: with offloaded parameters not the one they are on.

    Examples:
        >>> compute_device(nn.Linear(1, 1))
        device(type='cpu')
    """
    for _, module in reducers_of(stage).fsdp:
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
            reshard_(reducers_of(stage))


def run_stage(
    stage: nn.Module,
    place: StagePlace,
    batch: Mapping[str, Any],
    hidden: Tensor | None,
    *,
    call: Call,
) -> Any:
    """Enter a microbatch into a stage; after the first, the hidden state replaces `input_ids`."""
    return call(stage, batch if place.index == 0 else {**batch, "input_ids": hidden})


def check_edge(output: Any, boundary: Tensor, place: StagePlace) -> Tensor:
    """Return an output that the next stage expects: unequal sizes would end a gloo process.

    Raises:
        ValueError: It is not what the stage's boundary says.
    """
    found = (tuple(output.shape), output.dtype) if isinstance(output, Tensor) else type(output)
    if found != (tuple(boundary.shape), boundary.dtype):
        raise ValueError(
            f"pipeline stage {place.index} passes on {found}, but its boundary(batch) says "
            f"{tuple(boundary.shape)}, {boundary.dtype}"
        )
    return output.contiguous()


@torch.no_grad()
def forward_stages(
    stages: Sequence[nn.Module],
    batch: Mapping[str, Any],
    *,
    axis: Axis,
    call: Call,
) -> Any:
    """Run one batch through the whole pipeline, forward only.

    Args:
        stages: The stages of this rank.
        batch: The batch, the same on all ranks of the pipeline.
        axis: The pipeline axis.
        call: How a batch enters a stage.

    Returns:
        The output of the last stage on the rank that holds it, None on the others.

    Effects:
        Communicates on `axis`: a hidden state is sent at each edge between ranks.
    """
    places = places_of(stages, axis)
    ranks, output = places[0].ranks, None
    for place, stage in zip(places, stages, strict=True):
        edge = stage_boundary(stage, batch) if axis.count > 1 else None
        hidden = output
        if place.index and ranks[place.index - 1] != axis.index:
            assert edge is not None
            device = compute_device(stage)
            hidden = torch.empty(edge.shape, dtype=edge.dtype, device=device)
            dist.recv(hidden, group=axis.group, group_src=ranks[place.index - 1])
        output = run_stage(stage, place, batch, hidden, call=call)
        if not place.last:
            assert edge is not None
            output = check_edge(output, edge, place)
            if ranks[place.index + 1] != axis.index:
                dist.send(output, group=axis.group, group_dst=ranks[place.index + 1])
    return output if places[-1].last else None


# ------------------------------------------------------------------------------------------- terms


def share_terms(
    sums: Mapping[str, Tensor],
    dtypes: Mapping[str, str],
    *,
    axis: Axis,
    source: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Give every rank of the pipeline the terms that the last stage's rank has.

    Args:
        sums: A scalar per term on rank `source`; not read elsewhere.
        dtypes: The terms and their dtypes, from `agree_on_dtypes`.
        axis: The pipeline axis.
        source: The rank of the last stage.
        device: Where the terms shall be.

    Effects:
        Communicates: one broadcast on `axis`, in fp64.
    """
    packed = torch.zeros(len(dtypes), dtype=torch.float64, device=device)
    if axis.index == source:
        packed = torch.stack([sums[name].detach().to(device).double() for name in dtypes])
    values = broadcast(packed, axis, source=source).unbind()
    return {
        name: value.to(getattr(torch, dtype))
        for (name, dtype), value in zip(dtypes.items(), values, strict=True)
    }


def agree_on_dtypes(
    sums: Mapping[str, Tensor], terms: Sequence[str], *, axis: Axis, source: int
) -> dict[str, str]:
    """Return the dtype of each term, which only the rank of the last stage knows.

    Raises:
        ValueError: The loss does not report the terms that it says it reports, or not as scalars.

    Effects:
        Communicates on `axis`, and waits.
    """
    own = {name: str(x.dtype).removeprefix("torch.") for name, x in sums.items() if x.ndim == 0}
    found = all_gather_json(own, axis)[source]
    if set(found) != set(terms):
        raise ValueError(
            f"the loss says that its terms are {sorted(terms)}, and reports the scalars "
            f"{sorted(found)}; correct its attribute `terms`"
        )
    return {name: found[name] for name in terms}


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
            "losses.with_terms",
            where="loss",
        )
    return tuple(terms)
