"""Tied embeddings of a pipeline: one parameter on two ranks, and one gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.parameters import get_named_parameters
from trainkit.parallel.stage_ranks import StagePlace, get_tied_names
from trainkit.types import Axis


@contextmanager
def set_aside_tied(
    stages: Sequence[nn.Module], places: Sequence[StagePlace], axis: Axis
) -> Iterator[None]:
    """Sum the gradients of tied parameters over their two stages, those of this step alone.

    Both ranks add the owner's gradient and the copy's in that order, so that the optimizer keeps
    the two equal, bit for bit.

    Effects:
        Sets earlier gradients aside for the length of the block; replaces `.grad` after it.
        Communicates on `axis`: a gradient each way between the two ranks.
    """
    tied = _tied_parameters(stages, places)
    held = [(p, p.grad) for _, _, p in tied]
    for p, _ in held:
        p.grad = None
    try:
        yield
        _exchange_tied(tied, places[0].ranks, axis)
    finally:
        for p, grad in held:
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)


def _tied_parameters(
    stages: Sequence[nn.Module], places: Sequence[StagePlace]
) -> list[tuple[int, int, nn.Parameter]]:
    """Return this rank's tied parameters: own stage, the other one's stage, parameter."""
    found = []
    for stage, place in zip(stages, places, strict=True):
        named = get_named_parameters([stage])
        for name, (owner, copy) in sorted(get_tied_names(stage).items()):
            if named[name].requires_grad:
                other = copy if place.index == owner else owner
                found.append((place.index, other, named[name]))
    return found


@torch.no_grad()
def _exchange_tied(
    tied: Sequence[tuple[int, int, nn.Parameter]], ranks: Sequence[int], axis: Axis
) -> None:
    gradients = [
        (own, other, p, get_local(torch.zeros_like(p) if p.grad is None else p.grad))
        for own, other, p in tied
    ]
    received = []
    for own, other, _, local in gradients:
        if ranks[own] == ranks[other]:
            twins = [x for a, b, _, x in gradients if (a, b) == (other, own)]
            received.append(twins[0].clone())
            continue
        sent, buffer = local.contiguous(), torch.empty_like(local).contiguous()
        operations = [
            dist.P2POp(dist.isend, sent, group=axis.group, group_peer=ranks[other]),
            dist.P2POp(dist.irecv, buffer, group=axis.group, group_peer=ranks[other]),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        received.append(buffer)
    for (own, other, p, local), twin in zip(gradients, received, strict=True):
        local.copy_(local + twin if own < other else twin + local)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
            get_local(p.grad).copy_(local)
