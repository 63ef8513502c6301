"""Tied embeddings of a pipeline: one parameter on two stages, with one gradient."""

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
    """Sum the gradients that a `with` block adds to tied parameters over their two stages.

    Both ranks add the owner's gradient and the copy's in this order, so that the optimizer keeps
    the two parameters equal, bit for bit.

    Effects:
        Sets earlier gradients aside during the block, and adds them again after it. Communicates on
        `axis`: one gradient in each direction between the two ranks of a tie.
    """
    tied = []  # (index of this stage, index of the other one, parameter)
    for stage, place in zip(stages, places, strict=True):
        named = get_named_parameters([stage])
        for name, (owner, copy) in sorted(get_tied_names(stage).items()):
            if named[name].requires_grad:
                other = copy if place.index == owner else owner
                tied.append((place.index, other, named[name]))
    # They have been exchanged by an earlier call, and must not be summed again.
    earlier = [(p, p.grad) for _, _, p in tied]
    for p, _ in earlier:
        p.grad = None
    try:
        yield
        _exchange_tied(tied, places[0].ranks, axis)
    finally:
        for p, grad in earlier:
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)


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
        if ranks[own] == ranks[other]:  # a V schedule: the first and the last stage are here
            counterparts = [x for a, b, _, x in gradients if (a, b) == (other, own)]
            received.append(counterparts[0].clone())
            continue
        sent = local.contiguous()
        buffer = torch.empty_like(local).contiguous()
        # In one batch: two ranks that both send first would wait for each other.
        operations = [
            dist.P2POp(dist.isend, sent, group=axis.group, group_peer=ranks[other]),
            dist.P2POp(dist.irecv, buffer, group=axis.group, group_peer=ranks[other]),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        received.append(buffer)
    for (own, other, p, local), remote in zip(gradients, received, strict=True):
        local.copy_(local + remote if own < other else remote + local)
        if p.grad is None:
            # Of a DTensor with its placements, into whose shard the sum is copied.
            p.grad = torch.zeros_like(p)
            get_local(p.grad).copy_(local)
