"""Replicated data parallelism: summed gradients, sign votes, or local SGD by averaged parameters.

FSDP over `dp_replicate` sums gradients unit by unit. `ddp` sums all of them at the end of a step,
or leaves the sum to the recipe, which may then omit it in most steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.collectives import all_sum
from trainkit.parallel.check_modules import refuse_max_norm
from trainkit.parallel.grad_reduction import (
    check_dense,
    find_used,
    get_local,
    list_gradients,
    make_buckets,
    make_flags,
    mark_partial_,
    mark_replicated_,
)
from trainkit.parallel.transforms import Transform
from trainkit.types import Axis, ParallelState, check_choice


def ddp(*, sums: bool = True) -> Transform:
    """Return the transform that replicates over `ps.dp_replicate` and sums gradients there.

    Unlike torch's DDP it does not divide by the number of replicas. Each rank keeps its parameters,
    full, or sharded by an `fsdp` later in the plan, which then does not use `dp_replicate`.
    Gradients are summed in a few flat buffers after the last microbatch. Nothing is wrapped, so
    that parameters keep their names.

    Args:
        sums: False leaves each replica its own gradients. The recipe then sums them by
            `sync_sp_grads(params, ps.dp_replicate)`, combines them by `vote_signs`, or steps each
            replica separately and calls `average_parameters` at intervals.

    Returns:
        A transform for `build_stages`.

    Raises:
        ConfigError: When applied: an embedding has a `max_norm`.

    References:
        Li et al., "PyTorch Distributed" (2020), without its overlap with the backward pass.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(1, 1)
        >>> ddp()(model, solo_parallel()) is model
        True
    """

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if ps.dp_replicate.count > 1:
            refuse_max_norm(module, by="ddp")
        # With sums=False too: then `fsdp` must not sum over replicas either.
        mark_replicated_(module)
        for part in module.modules() if sums else ():
            names = [name for name, _ in part.named_parameters(recurse=False)]
            mark_partial_(part, names, ps.dp_replicate)
        return module

    return Transform(apply, kind="ddp", axes=("dp_replicate",))


@torch.no_grad()
def average_parameters(
    params: Iterable[nn.Parameter], axis: Axis, *, weight: Tensor | float = 1.0
) -> None:
    """Replace parameters by their weighted mean over replicas.

    In local SGD replicas step separately, each with its own number of tokens as the denominator,
    and average their parameters at intervals. The weight is then the number of tokens that a
    replica has trained on since the last average. Each replica keeps its own optimizer moments. A
    checkpoint holds one replica, so save only after an average.

        sums = forward_backward(batch.microbatches, denominator=all_sum(tokens, ps.fsdp))
        if step < start:
            sync_sp_grads(params, ps.dp_replicate)  # and the denominator over ps.loss
        update = clip_and_step(params, optimizer, ...)
        if step >= start and due(step + 1, period):
            average_parameters(params, ps.dp_replicate, weight=tokens_since)

    Args:
        params: The parameters of this rank, plain or DTensor, the same on every rank of the axis.
        axis: The replicas, `ps.dp_replicate` of a plan with `ddp(sums=False)`.
        weight: The weight of this replica, at least 0; if all are 0, all count equally.

    Effects:
        Writes the parameters, which are then equal on all ranks of the axis, bit for bit. Those
        that were equal do not change, up to a total weight of 2^29. Communicates on `axis`: the
        weights, and the parameters in fp64, 16 million in one all-reduce. Nothing at size 1.

    References:
        Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2020).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> average_parameters([nn.Parameter(torch.ones(2))], solo_parallel().dp_replicate)
    """
    params = list(dict.fromkeys(params))
    if axis.count == 1 or not params:
        return
    own = torch.as_tensor(weight, dtype=torch.float64, device=get_local(params[0]).device)
    total = all_sum(own, axis)
    # On the device, without a host sync: weights of 0 everywhere count as 1.
    own = torch.where(total > 0, own, 1.0)
    total = torch.where(total > 0, total, float(axis.count))
    for bucket in make_buckets(params):
        shards = [get_local(p) for p in bucket]
        # fp64 holds an fp32 times a weight below 2^29 exactly, hence equal values stay equal.
        flat = torch.cat([x.reshape(-1) for x in shards]).double().mul_(own)
        dist.all_reduce(flat, group=axis.group)
        means = flat.div_(total).split([x.numel() for x in shards])
        for shard, mean in zip(shards, means, strict=True):
            shard.copy_(mean.view_as(shard))


@torch.no_grad()
def vote_signs(
    params: Iterable[nn.Parameter],
    axis: Axis,
    *,
    count: Literal["majority", "mean"] = "majority",
) -> None:
    """Replace gradients by a vote of the replicas on the sign of each element.

    Each replica votes with the sign of its own gradient (0 for an element of 0), in one byte per
    element, or four beyond 127 replicas. Call it once a step, after the last backward pass. The
    result is not the sign of the summed gradient, so that it depends on the number of replicas,
    unlike everything else in training. It does not depend on the axes that a replica is sharded
    over, since FSDP has summed those gradients before.

    Args:
        params: The parameters of this rank, the same on every rank of the axis.
        axis: The voters, `ps.dp_replicate` of a plan with `ddp(sums=False)`.
        count: "majority" gives the sign of the sum of votes, 0 for a tie; "mean" the sum divided
            by the number of voters.

    Raises:
        ValueError: `count` is unknown, or a gradient is sparse.

    Effects:
        Replaces the values of `.grad`; communicates on `axis`: one all-reduce per dtype and 16
        million elements. If a gradient of a voter is not finite, all gradients of its all-reduce
        become NaN on all ranks, so that no step is taken.

    References:
        Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant"
        (2019).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> p = nn.Parameter(torch.zeros(3))
        >>> p.grad = torch.tensor([0.1, -7.0, 0.0])
        >>> vote_signs([p], solo_parallel().dp_replicate)
        >>> p.grad
        tensor([ 1., -1.,  0.])
    """
    check_choice(("majority", "mean"), "vote_signs", count=count)
    for bucket in make_buckets([p for p in dict.fromkeys(params) if p.requires_grad]):
        check_dense(bucket)
        has = [p.grad is not None for p in bucket]
        # A voter without a gradient votes 0.
        grads = list_gradients(bucket)
        shards = [get_local(grad) for grad in grads]
        flat = torch.cat([x.reshape(-1) for x in shards])
        is_bad = flat.isfinite().all().logical_not().reshape(1)
        # One message: which parameters have a gradient, whether one is not finite, the votes.
        ballots = torch.cat([make_flags(has, flat), is_bad.to(flat), flat.sign()])
        # A sum of 127 signs fits into a byte.
        votes = ballots.to(torch.int8 if axis.count < 128 else torch.int32)
        if axis.count > 1:
            dist.all_reduce(votes, group=axis.group)
        owners, bad, votes = votes.split([len(shards), 1, flat.numel()])
        direction = votes.sign() if count == "majority" else votes / axis.count
        direction = direction.to(flat.dtype).masked_fill(bad > 0, math.nan)
        parts = direction.split([x.numel() for x in shards])
        for shard, values in zip(shards, parts, strict=True):
            shard.copy_(values.view_as(shard))
        for p, grad, is_used in zip(bucket, grads, find_used(has, owners), strict=True):
            p.grad = grad if is_used else None
