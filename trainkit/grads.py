"""Between backward and the next step: sums over ranks, the norm, the clip and the step.

All of it works on the local shards of parameters, whatever they are sharded over: the norm is the
norm of the whole model's gradient, each element counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.batch.denominators import can_read_values
from trainkit.collectives import all_gather_objects, all_sum, get_compute_device
from trainkit.parallel.grad_reduction import (
    Reduce,
    check_dense,
    check_not_averaging,
    find_reducers,
    get_local,
    list_summed_at_end,
    sum_gradients_,
    sum_grads_,
)
from trainkit.parallel.parameters import (
    canonical_name,
    get_named_parameters,
    is_tied_copy,
    modules_of,
)
from trainkit.types import SOLO, Axis, ConfigError, Log, Stages, Update

__all__ = [
    "clip_and_step",
    "clip_grads_",
    "find_nonfinite",
    "format_ranks",
    "get_named_parameters",
    "get_parameters",
    "grad_norm",
    "make_step_in_backward",
    "sum_gradients_",
    "sync_sp_grads",
]


Params = Iterable[nn.Parameter] | Stages | nn.Module
"""Parameters; or what has them, a module or a `Stages`, which are then its trainable ones."""


def get_parameters(stages: Iterable[nn.Module] | nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of a model, or of its stages, each once.

    Whoever runs a backward pass of their own gets the gradients that FSDP2 and DDP leave, and these
    average by default. A parameter does not show it, so it is asked here, where the modules are
    seen: parameters that are listed by hand cannot be checked by anything that takes them.

    Raises:
        ValueError: A module averages gradients over ranks; call `sum_gradients_` first.

    Examples:
        >>> [tuple(p.shape) for p in get_parameters(nn.Linear(2, 3))]
        [(3, 2), (3,)]
    """
    stages = modules_of(stages)
    for stage in stages:
        check_not_averaging("get_parameters", find_reducers(stage))
    return [p for p in get_named_parameters(stages).values() if p.requires_grad]


def _list_params(params: Params, axis: Axis = SOLO) -> tuple[list[nn.Parameter], Axis]:
    """Return each parameter once, and the pipeline axis: that of a `Stages`, else `axis`."""
    if not isinstance(params, Stages | nn.Module):
        return list(dict.fromkeys(params)), axis
    modules = modules_of(params)
    for module in modules:
        check_not_averaging("get_parameters", find_reducers(module))
    # As `get_parameters`, but without the names: they would cost 0.3 ms in every step.
    trained = dict.fromkeys(p for x in modules for p in x.parameters() if p.requires_grad)
    return list(trained), params.pp if isinstance(params, Stages) else axis


def sync_sp_grads(params: Params, axis: Axis) -> None:
    """Sum gradients over the sequence-parallel ranks that nothing else sums over.

    Call it once a step, after the last backward pass: a second call would sum the sums again. Left
    out, it shows as a gradient norm that differs between ranks.

    Gradients travel in a few flat buffers, one per dtype and 16 million elements: one call per
    tensor would cost as many waits. A parameter without a gradient on this rank counts as zeros, so
    ranks cannot disagree on what is sent; one that has none on any rank keeps none.

    Args:
        params: Parameters, a module or a `Stages`; the same on every rank of the axis.
        axis: `ps.sp_unfolded`.

    Raises:
        ValueError: A gradient is sparse.

    Effects:
        Replaces the values of `.grad`; communicates on `axis`: one all-reduce per buffer. Nothing
        at size 1.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> sync_sp_grads([nn.Parameter(torch.ones(2))], solo_parallel().sp_unfolded)
    """
    if axis.count > 1:
        assert axis.group is not None
        with torch.no_grad():
            sum_grads_(_list_params(params)[0], axis.group)


# -------------------------------------------------------------------------------------------- norm


LocalNorms = Callable[[Sequence[nn.Parameter], float, torch.dtype], list[Tensor]]
"""From parameters to the norms of what this rank holds of their gradients."""


def _local_norms(
    params: Sequence[nn.Parameter], norm_type: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return the norms of this rank's gradients, accumulated in at least fp32."""
    grads = [p.grad for p in params if p.grad is not None]
    for grad in grads:
        if type(grad) is not Tensor:
            _sharded_over(grad)
    parts = [get_local(grad) for grad in grads]
    if norm_type == math.inf:  # an empty shard has no largest element, and torch refuses it
        parts = [part for part in parts if part.numel()]
    if not parts:
        return []
    return list(torch._foreach_norm(parts, norm_type, dtype=dtype))  # noqa: SLF001 (torch.nn.utils too)


def _sharded_over(grad: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the mesh of a DTensor and the mesh dimensions over which its elements are spread."""
    if not hasattr(grad, "placements"):
        return None
    dims = tuple(
        dim
        for dim, placement in enumerate(grad.placements)
        if not placement.is_replicate() and grad.device_mesh.size(dim) > 1
    )
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"grad_norm: a gradient has placements {grad.placements}, a sum that was never "
            "reduced; reduce it before its norm is taken"
        )
    return grad.device_mesh, dims


@torch.no_grad()
def grad_norm(params: Params, *, axis: Axis = SOLO, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the whole model's gradient: (sum of |g|^p)^(1/p) over its elements.

    Powers are summed over exactly the mesh dimensions that a parameter is sharded over, never over
    its replicas, and then over the pipeline stages. Parameters may live on different meshes. The
    last stage's copy of a tied embedding is not counted.

    Args:
        params: Parameters of this rank, plain or DTensor, a module or a `Stages`; parameters
            without a gradient count as zero, and one that is listed twice counts once.
        axis: The ranks that hold different parameters, those of a pipeline; a `Stages` has its own.
            It is no data-parallel axis: what parameters are sharded over is read off them.
        norm_type: p, above 0; `math.inf` for the largest absolute value of an element. As in
            `torch.nn.utils.get_total_norm`, elements are raised to it in the norm's own dtype; what
            travels of any p but 2 is in fp64.

    Returns:
        A 0-d tensor of fp32, or fp64 for fp64 gradients, equal on all ranks (in fp32 on a pipeline
        stage with nothing to train).

    Raises:
        ValueError: A gradient is sparse, or still a partial sum; `norm_type` is not above 0.

    Effects:
        Communicates: one all-reduce of a number per mesh dimension that parameters are sharded
            over, and on `axis`.

    Examples:
        >>> p = nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, -4.0])
        >>> grad_norm([p])
        tensor(5.)
        >>> grad_norm([p], norm_type=1), grad_norm([p], norm_type=math.inf)
        (tensor(7.), tensor(4.))
    """
    params, axis = _list_params(params, axis)
    return _part_norms([params], axis, norm_type)[0]


def _part_norms(
    parts: Sequence[Sequence[nn.Parameter]],
    axis: Axis,
    norm_type: float,
    local: LocalNorms = _local_norms,
    names: Iterable[Mapping[str, Any]] = (),
) -> Tensor:
    """Return the norm of each part of the parameters, `[parts]`; all parts travel together."""
    if not norm_type > 0:
        raise ValueError(
            f"grad_norm: norm_type must be above 0, or math.inf for the largest element; got "
            f"{norm_type}"
        )
    # Grouped by the parameters, which all ranks have in the same order, not by the gradients.
    groups: dict[Any, list[list[nn.Parameter]]] = {}
    copies: list[nn.Parameter] = []
    for index, params in enumerate(parts):
        check_dense(params, names)
        for p in params:
            if p.requires_grad and is_tied_copy(p):
                copies.append(p)
            elif p.requires_grad:
                where = None if type(p) is nn.Parameter else _sharded_over(p)
                if where not in groups:
                    groups[where] = [[] for _ in parts]
                groups[where][index].append(p)
    totals = [_sharded_norms(*group, norm_type, local) for group in groups.items()]
    # A stage that trains its tied copy alone must clip it as the first stage clips the owner.
    totals = totals or [_zeros(len(parts), copies[:1])]
    norms = totals[0] if len(totals) == 1 else _combined(totals, norm_type)
    if axis.count == 1:
        return norms
    # In fp64, as stages may differ in dtype, and one may have nothing to train at all.
    wide = norms.double().to(norms.device if groups or copies else get_compute_device(axis))
    return _over_ranks(wide, [axis.group], norm_type).to(norms.dtype)


def _sharded_norms(
    where: Any, parts: Sequence[Sequence[nn.Parameter]], norm_type: float, local: LocalNorms
) -> Tensor:
    """Return norms over parameters that are sharded alike: `where` is (mesh, its dimensions)."""
    found: list[Tensor] = []
    dtype = _norm_dtype([p for params in parts for p in params])
    for params in parts:
        norms = local(params, norm_type, dtype)
        if norms:
            found.append(torch.linalg.vector_norm(torch.stack(norms), norm_type, keepdim=True))
        else:
            found.append(_zeros(1, [p for part in parts for p in part]))
    totals = found[0] if len(found) == 1 else torch.cat(found)
    groups = [where[0].get_group(dim) for dim in where[1]] if where is not None else []
    return _over_ranks(totals, groups, norm_type)


def _over_ranks(norms: Tensor, groups: Sequence[Any], norm_type: float) -> Tensor:
    """Return norms over what all ranks of the groups have, from those of each rank's own part."""
    if not groups:
        return norms
    if norm_type == math.inf:  # a maximum over ranks may drop NaN, which travels beside it
        is_nan = norms.isnan()
        largest = torch.stack([norms.masked_fill(is_nan, 0.0), is_nan.to(norms.dtype)])
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return largest[0].masked_fill(largest[1] > 0, math.nan)
    powers = norms.square() if norm_type == 2 else norms.double() ** norm_type
    for group in groups:
        dist.all_reduce(powers, group=group)
    return powers.sqrt() if norm_type == 2 else (powers ** (1 / norm_type)).to(norms.dtype)


def _zeros(count: int, params: Sequence[nn.Parameter]) -> Tensor:
    """Return zeros in the dtype that norms of some parameters have, and where they are."""
    device = params[0].device if params else None
    return torch.zeros(count, dtype=_norm_dtype(params), device=device)


def _norm_dtype(params: Iterable[nn.Parameter]) -> torch.dtype:
    return torch.float64 if torch.float64 in [p.dtype for p in params] else torch.float32


def _combined(totals: Sequence[Tensor], norm_type: float) -> Tensor:
    widest = max((total.dtype for total in totals), key=lambda dtype: dtype.itemsize)
    stacked = torch.stack([total.to(widest) for total in totals])
    return torch.linalg.vector_norm(stacked, norm_type, dim=0)


# -------------------------------------------------------------------------------------------- step


@torch.no_grad()
def clip_grads_(
    params: Params,
    *,
    max_norm: float | None,
    axis: Axis = SOLO,
    norm_type: float = 2.0,
    groups: Iterable[Mapping[str, Any]] = (),
    scale: Tensor | float | None = None,
) -> Tensor:
    """Scale the gradient of the whole model down to a norm; nothing is stepped or cleared.

    The twin of torch's `clip_grad_norm_` for parameters in any layout. A norm that is not finite
    leaves the gradients as they are.

    Args:
        params: The parameters of this rank, a module or a `Stages`; a parameter that is listed
            twice is scaled once.
        max_norm: Gradients are scaled by min(1, max_norm / (norm + 1e-6)); None only measures.
        axis: The pipeline axis of plain parameters; see `grad_norm`.
        norm_type: Which norm, as for `grad_norm`.
        groups: Groups of parameters, as `optimizer.param_groups` has them, the same on all ranks
            and stages. One that has a "max_norm" (`math.inf` never clips) is measured and clipped
            by itself; what is in no such group is measured and clipped together, by `max_norm`.
        scale: What the gradients are multiples of (`batch.scaled`); they are divided by it in
            the same pass, and so is the norm before anything is held against it.

    Returns:
        The norm of the whole before clipping, a 0-d tensor, equal on all ranks.

    Raises:
        ValueError: A `max_norm` or `norm_type` is not positive, or a gradient is sparse or still a
            partial sum.

    Effects:
        Writes the values of `.grad`; communicates as `grad_norm`, whatever the number of groups.

    Examples:
        >>> p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        >>> p.grad, q.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        >>> clip_grads_([p, q], max_norm=1.0, groups=[{"params": [q], "max_norm": 6.0}])
        tensor(13.)
        >>> p.grad, q.grad
        (tensor([0.6000, 0.8000]), tensor([6.0000]))
    """
    params, axis = _list_params(params, axis)
    return _clip_grads_(
        params, max_norm=max_norm, axis=axis, norm_type=norm_type, groups=groups, scale=scale
    )[0]


def _clip_grads_(
    params: Sequence[nn.Parameter],
    *,
    max_norm: float | None,
    axis: Axis,
    norm_type: float,
    groups: Iterable[Mapping[str, Any]],
    scale: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """Return the norm as `clip_grads_` does, and whether it is not finite; without gradients."""
    groups = list(groups)
    parts = _clipped_apart(params, max_norm, groups)
    norms = _part_norms([members for members, _ in parts], axis, norm_type, names=groups)
    norms = norms if scale is None else norms / scale
    norm = norms.view(()) if len(parts) == 1 else torch.linalg.vector_norm(norms, norm_type)
    looks = can_read_values(norm) and scale is None  # the host knows the norm without waiting
    refused = _not_finite(norm)
    if looks and refused:
        return norm, refused
    for index, (members, limit) in enumerate(parts):
        clips = limit is not None and math.isfinite(limit)
        if not clips and scale is None:
            continue
        own = norm if len(parts) == 1 else norms[index]
        by = _clip_on_host(own, limit) if looks else _clip_on_device(own, limit, refused, scale)
        grads = [get_local(p.grad) for p in members if p.grad is not None]
        if grads and by is not None:
            torch._foreach_mul_(grads, by)
    return norm, refused


def _clip_on_device(
    norm: Tensor, limit: float | None, refused: Tensor, scale: Tensor | float | None
) -> Tensor:
    clips = limit is not None and math.isfinite(limit)
    by = (limit / (norm + 1e-6)).clamp(max=1.0) if clips else norm.new_ones(())
    by = by if scale is None else by / scale
    return torch.where(refused, 1.0, by)


def _clip_on_host(norm: Tensor, limit: float | None) -> Tensor | None:
    """Return `_clip_on_device`, to the last bit, by numbers of the norm's dtype; None for 1."""
    number = np.float64 if norm.dtype == torch.float64 else np.float32
    by = number(1) / (number(norm.item()) + number(1e-6)) * number(limit)
    return None if by >= 1 else torch.full((), float(by), dtype=norm.dtype)


def _clipped_apart(
    params: Sequence[nn.Parameter], max_norm: float | None, groups: Iterable[Mapping[str, Any]]
) -> list[tuple[list[nn.Parameter], float | None]]:
    """Return parameters that are clipped together, and to which norm; those of no group first."""
    own = [group for group in groups if group.get("max_norm") is not None]
    for limit in (max_norm, *(group["max_norm"] for group in own)):
        if limit is not None and not limit > 0:
            raise ValueError(
                f"clip_grads_: max_norm must be positive, got {limit}; None only measures"
            )
    if not own:
        return [(list(params), max_norm)]
    rest = dict.fromkeys(params)
    apart = [([p for p in group["params"] if p in rest], group["max_norm"]) for group in own]
    for members, _ in apart:
        for p in members:
            del rest[p]
    return [(list(rest), max_norm), *apart]


def clip_and_step(
    params: Params,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    max_norm: float | None,
    axis: Axis = SOLO,
    should_apply: Callable[[Tensor], Tensor] | None = None,
    world: Axis = SOLO,
    norm_type: float = 2.0,
    scale: Tensor | float | None = None,
) -> Update:
    """Clip the gradient to a norm, take one optimizer step, and clear the gradients.

    A step that does not apply changes nothing: parameters and moments keep every bit. The optimizer
    decides that on the device where it can (`found_inf`, as fused AdamW), else the host waits for
    the norm.

    Args:
        params: The parameters of this rank that `optimizer` steps, a module or a `Stages`.
        optimizer: Any torch optimizer; a group's rate becomes `lr * group.get("lr_scale", 1)`, and
            one with a "max_norm" is clipped by itself, as by `clip_grads_`.
        lr: The learning rate of this step, which is set in a skipped step too.
        max_norm: Gradients are scaled by min(1, max_norm / (norm + 1e-6)), as by torch's
            `clip_grad_norm_`; None only measures.
        axis: The pipeline axis of plain parameters; see `grad_norm`.
        should_apply: From the norm to whether to take the step, both 0-d tensors, as
            `health.make_finite_check` makes it. A step whose norm is not finite is never taken.
        world: All ranks that take the step of plain parameters; a `Stages` has its own. A step
            that one of them refuses is refused by all. Numbers that are summed over all ranks need
            it not; those that are computed by several ranks alike do, when one of them errs.
        norm_type: Which norm, as for `grad_norm`.
        scale: What the gradients are multiples of; see `clip_grads_` and `health.loss_scale`.

    Returns:
        The norm before clipping, and whether the step was taken, which is equal on all ranks of
        `world`: two 0-d tensors. With a `scale` also that, and whether a norm was not finite
        on any rank.

    Raises:
        ValueError: `lr` is negative or not finite, a `max_norm` or `norm_type` is not positive, a
            gradient is sparse or still a partial sum, or no group of `optimizer` holds a parameter
            that has one.

    Effects:
        Writes parameters and optimizer state, sets every `.grad` to None; communicates as
        `grad_norm`, and two numbers on `world`.

    Examples:
        >>> p = nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([p])
        >>> clip_and_step([p], optimizer, lr=1.0, max_norm=None)
        Update(norm=tensor(5.), applied=tensor(True))
        >>> p.data, p.grad
        (tensor([-3., -4.]), None)
    """
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"clip_and_step: lr must be finite and at least 0, got {lr}")
    world = params.world if isinstance(params, Stages) else world
    params, axis = _list_params(params, axis)
    _check_held(params, optimizer)
    with torch.no_grad():
        groups = optimizer.param_groups
        norm, overflowed = _clip_grads_(
            params, max_norm=max_norm, axis=axis, norm_type=norm_type, groups=groups, scale=scale
        )
        refused = overflowed
        if should_apply is not None:
            refused = refused | should_apply(norm).logical_not().to(norm.device)
        if world.count > 1:
            told = torch.stack([refused, overflowed]).to(torch.float32)
            refused, overflowed = (all_sum(told, world) > 0).unbind()
        for group in groups:
            group["lr"] = lr * group.get("lr_scale", 1)
        _step_unless(refused, optimizer)
        for p in params:
            p.grad = None
        return Update(norm, refused.logical_not(), scale, overflowed)


def _check_held(params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held.issuperset(map(id, params)):
        return
    lost = [p for p in params if id(p) not in held and p.grad is not None and p.requires_grad]
    if lost:
        shapes = ", ".join(str(tuple(p.shape)) for p in lost[:3])
        raise ValueError(
            f"clip_and_step: {len(lost)} of {len(params)} parameters have gradients and are in no "
            f"group of the optimizer, so that nothing would step them (shapes {shapes}"
            f"{', ...' if len(lost) > 3 else ''}); give the optimizer all of params, or freeze "
            "these by requires_grad_(False)"
        )


def _not_finite(x: Tensor) -> Tensor:
    if can_read_values(x) and not x.ndim:
        return torch.full((), not math.isfinite(x.item()))  # torch.tensor takes twice as long
    # x - x is NaN where x is not finite; isfinite costs 4 us more on a CPU.
    return (x - x).ne(0.0)


def _step_unless(refused: Tensor, optimizer: Any) -> None:
    """Take a step, or change nothing; never by a factor of 0, for 0 times NaN is NaN."""
    if wider := _with_wider_gradients(optimizer):
        with _gradients_rounded(wider):
            _step_as_it_is(refused, optimizer)
    else:
        _step_as_it_is(refused, optimizer)


def _step_as_it_is(refused: Tensor, optimizer: Any) -> None:
    if not can_read_values(refused) and _skips_on_device(optimizer):
        optimizer.found_inf = refused.to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
    elif not refused:
        optimizer.step()


def _with_wider_gradients(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters whose gradients have another dtype than they, which torch's refuse.

    `optim.ElementwiseOptimizer`, whose groups say how moments are kept, takes any.
    """
    groups = (group for group in optimizer.param_groups if "moments" not in group)
    return [
        p
        for group in groups
        for p in group["params"]
        if (grad := p.grad) is not None and grad.dtype != p.dtype
    ]


@contextmanager
def _gradients_rounded(wider: Sequence[Any]) -> Iterator[None]:
    """Show an optimizer gradients in the dtype of their parameters."""
    kept = [(p, p.grad, p.grad_dtype) for p in wider]
    for p, grad, _ in kept:
        p.grad_dtype = None  # any
        p.grad = grad.to(p.dtype)
    try:
        yield
    finally:
        for p, grad, dtype in kept:
            p.grad = grad
            p.grad_dtype = dtype


def _skips_on_device(optimizer: Any) -> bool:
    # By this torch's GradScaler knows optimizers that skip on the device (2.11 to 2.13).
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # A fused SGD that skips its first step keeps whatever its momentum's memory held before.
    return not isinstance(optimizer, torch.optim.SGD) or all(
        optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
        if p.grad is not None
    )


# ------------------------------------------------------------------------------------- in backward


def make_step_in_backward(
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    axis: Axis,
    sp: Axis,
    log: Log,
    reduce: Reduce = "last",
) -> Callable[..., AbstractContextManager[Callable[[], Update]]]:
    """Return what steps each parameter as its gradient arrives, and frees the gradient at once.

    With one microbatch a step never holds more gradients than a few: one parameter's, or an FSDP
    unit's. What it returns stands around the backward pass, in place of `clip_and_step` after it:

        with step_in_backward(lr=lr, max_norm=1.0, norm=state.health["norms"][-1]) as updated:
            sums = forward_backward(batch.microbatches, denominator=tokens)
        update = updated()

    The norm of a step is known when its parameters have moved. So what is clipped by, `norm`, is
    that of the last step; or it is exact, of a first pass that only measures (`lr=None`), for twice
    the computation: then a step whose norm is not finite is not taken. Without that a bad step
    cannot be skipped, and `health.judge_step` calls for a roll-back at once. So with a loss scale:
    an overflow is skipped where the norm is measured first, and else is such a bad step, whose
    roll-back takes the scale back as well: lower it, or it overflows again.

    With several microbatches, say how many: a parameter is stepped after the last, and accumulated
    gradients are held as ever. What is summed over ranks after the backward passes (`ddp`, norms
    under tp), or got nothing from some microbatch, is stepped when the block ends. Under FSDP a
    parameter that nothing uses is stepped with zeros, as one that only others use is.

    Args:
        stages: The model, in a list. FSDP2 (shards are stepped when they are reduced), `ddp` and
            tensor parallelism may be in it.
        optimizer: It holds every trainable parameter of `stages`, and steps each by itself.
        axis: The pipeline axis, `ps.pp`, which must have size 1: the microbatches of a pipeline go
            back out of step.
        sp: `ps.sp_unfolded`, of size 1 too: `sync_sp_grads` would come too late.
        log: Called once with what a run should say: that it cannot skip a bad step.
        reduce: What `forward_backward` is given.

    Returns:
        `step_in_backward(*, lr, max_norm=None, norm=None, microbatches=1, scale=None)`, a context
        manager that gives a function, to be called after the block, of the `Update`. `norm` is a
        0-d tensor or a number; where it is not finite nothing is stepped. `scale` is that of
        `clip_and_step`. A block that fails leaves some parameters stepped, and their gradients
        freed: go back to a checkpoint.

    Raises:
        ConfigError: `axis` or `sp` has not size 1.
        ValueError: The optimizer lacks a trainable parameter, or has a group with a "max_norm".
            From what is returned: a number is out of range, or `max_norm` comes without `norm`.

    Effects:
        That of what is returned, around a block: writes parameters and optimizer state, sets every
        `.grad` to None; communicates as `grad_norm` when the block ends.

    References:
        Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
        (LOMO, 2024).

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> sgd = torch.optim.SGD(model.parameters())
        >>> step_in_backward = make_step_in_backward([model], sgd, axis=SOLO, sp=SOLO, log=print)
        parameters are stepped within the backward pass: a bad step cannot be skipped, only undone
        >>> with step_in_backward(lr=1.0) as updated:
        ...     model(torch.tensor([3.0, 4.0])).backward()
        >>> updated(), model.weight.data, model.weight.grad
        (Update(norm=tensor(5.), applied=tensor(True)), tensor([[-3., -4.]]), None)
    """
    params = get_parameters(stages)
    _check_in_backward(params, optimizer, axis, sp)
    log(
        "parameters are stepped within the backward pass: a bad step cannot be skipped, only undone"
    )
    return partial(_stepping_in_backward, modules_of(stages), params, optimizer, reduce)


@contextmanager
def _stepping_in_backward(
    stages: Sequence[nn.Module],
    params: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    reduce: Reduce,
    *,
    lr: float | None,
    max_norm: float | None = None,
    norm: Tensor | float | None = None,
    microbatches: int = 1,
    scale: Tensor | float | None = None,
) -> Iterator[Callable[[], Update]]:
    _check_numbers(lr, max_norm, norm)
    dtype, device = getattr(norm, "dtype", torch.float64), _zeros(0, params).device
    known = torch.as_tensor(0.0 if norm is None else norm, dtype=dtype, device=device)
    refused = _not_finite(known)
    by = None if max_norm is None else (max_norm / (known + 1e-6)).clamp(max=1.0)
    by = by if scale is None else (1.0 if by is None else by) / scale
    left = _arrivals(stages, params, microbatches, reduce=reduce)
    norms: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def take(p: nn.Parameter) -> None:
        (norms[p],) = _local_norms([p], 2.0, _zeros(0, [p]).dtype)
        if by is not None:
            get_local(p.grad).mul_(by)
        if lr is not None:
            step(p, refused)
        p.grad = None

    def arrive(p: nn.Parameter) -> None:
        if p in norms:
            raise RuntimeError(
                f"step_in_backward: a gradient of shape {tuple(p.shape)} came after its parameter "
                f"had been stepped, where {microbatches} microbatches were announced; say how many "
                "there are, call forward_backward once, and go back to a checkpoint"
            )
        left[p] -= 1
        if not left[p]:
            take(p)

    update: list[Update] = []
    with _alone(optimizer, lr) as step, _after_gradients(left, arrive):
        yield lambda: update[0]
        for p in params:
            if p.grad is not None:
                take(p)
    whole = _part_norms([params], SOLO, 2.0, partial(_of_arrived, norms))[0]
    whole = whole if scale is None else whole / scale
    applied = torch.full_like(refused, lr is not None) & ~refused
    update.append(Update(whole, applied, scale, _not_finite(whole)))


def _of_arrived(
    norms: Mapping[nn.Parameter, Tensor],
    params: Sequence[nn.Parameter],
    _: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    return [norms[p].to(dtype) for p in params if p in norms]


def _arrivals(
    stages: Sequence[nn.Module],
    params: Sequence[nn.Parameter],
    microbatches: int,
    *,
    reduce: Reduce,
) -> dict[nn.Parameter, int]:
    """Return how often gradients arrive in a step, of those that no sum over ranks comes after."""
    found = [find_reducers(stage) for stage in stages]
    late = {p for reducers in found for p in list_summed_at_end(reducers)}
    sharded = {p for each in found for _, module in each.fsdp for p in module.parameters()}
    once = sharded if reduce == "last" else set()
    return {p: 1 if p in once else microbatches for p in params if p not in late}


@contextmanager
def _after_gradients(
    params: Iterable[nn.Parameter], arrive: Callable[[nn.Parameter], None]
) -> Iterator[None]:
    """Call a function with each parameter whose gradient has been added to."""
    handles = [p.register_post_accumulate_grad_hook(arrive) for p in params]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _alone(
    optimizer: torch.optim.Optimizer, lr: float | None
) -> Iterator[Callable[[nn.Parameter, Tensor], None]]:
    """Give a function that steps one parameter, with an optimizer that meanwhile holds no other."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if lr is None else lr * group.get("lr_scale", 1)
    with use_single_parameter(optimizer) as hold:

        def step(p: nn.Parameter, refused: Tensor) -> None:
            hold(p)
            _step_unless(refused, optimizer)

        yield step


def _check_numbers(lr: float | None, max_norm: float | None, norm: object) -> None:
    if lr is not None and not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"step_in_backward: lr must be finite and at least 0, got {lr}")
    if max_norm is not None and (norm is None or not max_norm > 0):
        raise ValueError(
            f"step_in_backward: max_norm must be positive and needs the norm to clip by, got "
            f"{max_norm} and norm={norm}; take that of the last step, or measure it: lr=None"
        )


def _check_in_backward(
    params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, axis: Axis, sp: Axis
) -> None:
    for each in (axis, sp):
        if each.count > 1:
            raise ConfigError(
                f"make_step_in_backward: a gradient is not whole when it arrives in a layout with "
                f"{each.name} = {each.count}; call clip_and_step after the backward pass",
                where=each.name,
                got=each.count,
                want=1,
            )
    held = {p for group in optimizer.param_groups for p in group["params"]}
    lost = [tuple(p.shape) for p in params if p not in held]
    if lost or any(group.get("max_norm") is not None for group in optimizer.param_groups):
        what = f"lacks {len(lost)} parameters, of shapes {lost[:3]}" if lost else "clips by group"
        raise ValueError(
            f"make_step_in_backward: the optimizer {what}; it must hold every trainable parameter, "
            "and have no group with a max_norm"
        )


# ------------------------------------------------------------------------------------------- blame


def find_nonfinite(
    replay: Callable[[], Mapping[str, Tensor]],
    stages: Iterable[nn.Module] | nn.Module,
    axis: Axis,
    *,
    most: int = 3,
) -> list[str]:
    """Say where the numbers of a step stop being finite, and on which ranks; for a bad step.

    A bad step is skipped, so its parameters are still there, and its backward pass can be taken
    again. A term of the loss is named by the rank that computes it. Gradients are looked at before
    anything sums them: the rank is named whose own is not finite, and the one first that the
    backward pass comes to, since all that it reaches follows.

    Args:
        replay: Takes the step's forward and backward passes again and returns the terms of the
            loss, as `partial(forward_backward, batch.microbatches, denominator=tokens)` does.
        stages: This rank's stages.
        axis: All ranks, `ps.world`.
        most: How many are named; the others are counted.

    Returns:
        The same sentences on all ranks.

    Effects:
        Waits for the device; communicates as `replay` does, and on `axis`; leaves no gradient.

    Examples:
        >>> from trainkit.types import SOLO
        >>> model = nn.Linear(1, 1, bias=False)
        >>> def replay():
        ...     (model(torch.ones(1)) * math.inf).sum().backward()
        ...     return {"loss": torch.zeros(())}
        >>> find_nonfinite(replay, [model], SOLO)
        ['the gradient of weight on rank 0']
    """
    stages = modules_of(stages)
    told = all_gather_objects(_replayed(replay, stages), axis)
    terms, own, summed, seen = ([each[key] for each in told] for key in _LOOKED_AT)
    if any(terms):
        causes = _with_ranks(terms)
    elif any(own):
        causes = _with_ranks(own, "the {} on {}")
    else:
        causes = _with_ranks(summed, "the summed {}, held by {}")
        # What runs in compiled code may not have been seen.
        if {name for names in summed for name in names} <= {
            name for names in seen for name in names
        }:
            causes.append("computed again, each rank's own numbers are finite")
    more = len(causes) - most
    return causes if more <= 0 else [*causes[:most], f"and {more} more"]


_LOOKED_AT = ("terms", "own", "summed", "seen")


def _replayed(
    replay: Callable[[], Mapping[str, Tensor]], stages: Sequence[nn.Module]
) -> dict[str, list[str]]:
    """Take a step's backward pass again; return by name what of it on this rank is not finite."""
    finite: dict[str, Tensor] = {}

    def see(name: str, gradient: Tensor) -> None:
        verdict = get_local(gradient).isfinite().all()
        finite[name] = finite[name] & verdict if name in finite else verdict

    with _gradients_seen(stages, see):
        sums = replay()
    named = get_named_parameters(stages)
    grads = {name: get_local(p.grad) for name, p in named.items() if p.grad is not None}
    summed = [name for name, grad in reversed(grads.items()) if not grad.isfinite().all()]
    found = {
        "terms": [f"the {name}" for name, value in sums.items() if not value.isfinite().all()],
        "own": [f"gradient of {name}" for name, verdict in finite.items() if not verdict],
        "summed": [f"gradient of {name}" for name in summed],
        "seen": [f"gradient of {name}" for name in finite],
    }
    for p in named.values():
        p.grad = None
    return found


@contextmanager
def _gradients_seen(
    stages: Sequence[nn.Module], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `see(name, gradient)` for each gradient of this rank, before anything is summed."""
    handles: dict[int, Any] = {}

    # FSDP puts the gathered parameters in place for the forward pass: they are hooked when there.
    def hook(path: str, module: nn.Module, _: object) -> None:
        for name, p in module.named_parameters(path):
            if p.requires_grad and id(p) not in handles:
                handles[id(p)] = p.register_hook(partial(see, canonical_name(name)))

    for stage in stages:
        for path, module in stage.named_modules():
            handles[id(module)] = module.register_forward_pre_hook(partial(hook, path))
    try:
        yield
    finally:
        for handle in handles.values():
            handle.remove()


def _with_ranks(told: Sequence[Sequence[str]], words: str = "{} on {}") -> list[str]:
    """Return what ranks have told, each once, with its ranks; a last stage's first."""
    ranks: dict[str, list[int]] = {}
    for rank in reversed(range(len(told))):
        for text in told[rank]:
            ranks.setdefault(text, []).insert(0, rank)
    return [words.format(text, format_ranks(which)) for text, which in ranks.items()]


def format_ranks(which: Sequence[int]) -> str:
    """Return ranks as a message names them: up to eight one by one.

    Examples:
        >>> format_ranks([1]), format_ranks([0, 2, 3]), format_ranks(range(64))
        ('rank 1', 'ranks 0, 2 and 3', '64 ranks from 0 to 63')
    """
    if len(which) == 1:
        return f"rank {which[0]}"
    if len(which) > 8:
        return f"{len(which)} ranks from {which[0]} to {which[-1]}"
    return f"ranks {', '.join(map(str, which[:-1]))} and {which[-1]}"


@contextmanager
def use_single_parameter(
    optimizer: torch.optim.Optimizer,
) -> Iterator[Callable[[nn.Parameter], None]]:
    """Give a function after which an optimizer holds one parameter, and no other; then all again.

    Args:
        optimizer: It holds none until that is called.

    Effects:
        Replaces the "params" of its groups, and their "param_names", for the length of the block.

    Examples:
        >>> one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.SGD([one, other])
        >>> with use_single_parameter(optimizer) as hold:
        ...     hold(other)
        ...     print(*(len(p) for p in optimizer.param_groups[0]["params"]))
        3
    """
    lists = [
        {x: group[x] for x in ("params", "param_names") if x in group}
        for group in optimizer.param_groups
    ]
    where = {p: (i, at) for i, own in enumerate(lists) for at, p in enumerate(own["params"])}

    def hold(p: nn.Parameter | None) -> None:
        own, at = (-1, 0) if p is None else where[p]
        for i, (group, names) in enumerate(zip(optimizer.param_groups, lists, strict=True)):
            group |= {x: values[at : at + 1] if i == own else [] for x, values in names.items()}

    hold(None)
    try:
        yield hold
    finally:
        for group, own in zip(optimizer.param_groups, lists, strict=True):
            group.update(own)
