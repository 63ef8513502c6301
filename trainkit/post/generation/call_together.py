"""Calls of a model that all ranks make equally often, and errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from trainkit.collectives import all_max, get_comm_device, run_on_all_ranks
from trainkit.models.call import CachedCall
from trainkit.types import Axis, Call, Stages

T = TypeVar("T")

# What a rank does next. The largest number of all ranks is what all of them do.
_FINISH, _CALL, _FAIL = 0, 1, 2


class _OtherRankError(Exception):
    """Another rank has failed; its error is received afterwards."""


def call_together(work: Callable[[Call], T], call: Call, *, axis: Axis, communicates: bool) -> T:
    """Return `work(call)`, with a call that all ranks of an axis make equally often.

    A rank whose work is done repeats its last call until all are done, because a sharded model
    needs every rank. An error on one rank ends the work of all before their next call. An error
    inside a call that communicates raises at once, on this rank alone: the others wait in its
    collectives, and can receive nothing.

    Args:
        work: What this rank does with the call, once for each token, for instance.
        call: Runs a batch through the model.
        axis: The ranks.
        communicates: Whether `call` does.

    Raises:
        Exception: On the rank that failed, its error. On the others, the first error with its rank,
            as from `collectives.run_on_all_ranks`.

    Effects:
        Communicates on `axis`: an all-reduce of one byte for each call and at the end.

    Examples:
        >>> from trainkit.types import SOLO
        >>> def call(model, batch):
        ...     return model(batch)
        >>> call_together(lambda call: call(abs, -3), call, axis=SOLO, communicates=False)
        3
    """
    if axis.count == 1:
        return work(call)
    newest: list[tuple[nn.Module, Mapping[str, Any]]] = []
    is_calling = False

    def run(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        nonlocal is_calling
        newest[:] = [(model, batch)]
        _announce(_CALL, axis)
        is_calling = True
        output = call(model, batch)
        is_calling = False
        return output

    def raise_failure() -> None:
        if failure is not None:
            raise failure

    failure: Exception | None = None
    try:
        result = work(CachedCall(run) if isinstance(call, CachedCall) else run)
        while _announce(_FINISH, axis) == _CALL:
            is_calling = True
            call(*newest[0])
            is_calling = False
    except _OtherRankError:
        pass
    except Exception as error:
        if is_calling and communicates:
            raise
        failure = error
        _announce(_FAIL, axis)
    else:
        return result
    run_on_all_ranks(raise_failure, axis)
    raise AssertionError("call_together: no rank has the error that ended all of them")


def _announce(action: int, axis: Axis) -> int:
    """Return what all ranks do next; raise if another one has failed."""
    # In 8 bits on the host where the ranks can talk there: it costs no sync with the device.
    actions = torch.tensor([action], dtype=torch.uint8, device=get_comm_device(axis))
    together = int(all_max(actions, axis))
    if together == _FAIL and action != _FAIL:
        raise _OtherRankError
    return together


def is_sharded_model(stages_or_model: Stages | nn.Module) -> bool:
    """Return whether a forward pass of a model needs other ranks than those of its own rows.

    Examples:
        >>> is_sharded_model(nn.Linear(1, 1))
        False
    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (a second of import time)
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (likewise)

    if isinstance(stages_or_model, Stages):
        stages = stages_or_model
        is_split = stages.world.count > stages.dp.count or stages.layout.ep > 1
        return is_split or any(is_sharded_model(stage) for stage in stages)
    return any(
        isinstance(module, FSDPModule)
        or any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
        for module in stages_or_model.modules()
    )
