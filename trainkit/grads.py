"""From the last backward pass to the optimizer step: gradient sums, norms, clipping, stepping.

All functions work on the local shards of parameters, in any layout: a norm is that of the whole
model's gradient, with each element counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.batch.denominators import can_read_values
from trainkit.collectives import all_gather_objects, all_sum, get_compute_device
from trainkit.parallel.grad_reduction import (
    Reduce,
    all_reduce_gradients_,
    check_dense,
    check_not_averaging,
    find_reducers,
    get_local,
    list_summed_at_end,
    sum_gradients_,
)
from trainkit.parallel.parameters import (
    canonical_name,
    get_named_parameters,
    is_tied_copy,
    modules_of,
)
from trainkit.phases import as_phase
from trainkit.types import SOLO, Axis, ConfigError, Log, Stages, Update

__all__ = [
    "clip_and_step",
    "clip_grads_",
    "find_nonfinite",
    "get_named_parameters",
    "get_parameters",
    "grad_norm",
    "make_step_in_backward",
    "sum_gradients_",
    "sync_sp_grads",
]


_MAX_CAUSES = 3  # of a bad step that are listed; the others are counted

Params = Iterable[nn.Parameter] | Stages | nn.Module
"""Parameters; or a module or a `Stages`, which stands for its trainable parameters."""


def get_parameters(stages: Iterable[nn.Module] | nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of a model or its stages, each once.

    It also checks that FSDP2 and DDP modules sum gradients, since they average by default. That
    cannot be checked for a list of parameters.

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


def _list_params(
    function: str, params: Params, axis: Axis = SOLO
) -> tuple[list[nn.Parameter], Axis]:
    """Return each parameter once, and the pipeline axis: that of a `Stages`, else `axis`."""
    if not isinstance(params, Stages | nn.Module):
        # Each once, and in the caller's order, by which the all-reduces of ranks match.
        listed = list(dict.fromkeys(params))
        if listed and isinstance(listed[0], nn.Module):
            raise ValueError(
                f"{function}: params must be parameters, a module or a Stages, got a list of "
                "modules; pass get_parameters(modules)"
            )
        return listed, axis
    modules = modules_of(params)
    for module in modules:
        check_not_averaging(function, find_reducers(module))
    # As `get_parameters`, but without the names: they would cost 0.3 ms in every step.
    trained = dict.fromkeys(p for x in modules for p in x.parameters() if p.requires_grad)
    return list(trained), params.pp if isinstance(params, Stages) else axis


@as_phase("reduce")
def sync_sp_grads(params: Params, axis: Axis) -> None:
    """Sum gradients over the sequence-parallel ranks that do not shard parameters.

    Call it once a step, after the last backward pass: a second call would sum the sums again.
    Without it the gradient norm differs between ranks.

    Gradients are all-reduced in a few flat buffers, one per dtype and 16 million elements. A
    parameter without a gradient on this rank counts as zeros; one without a gradient on any rank
    has none afterwards.

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
            all_reduce_gradients_(_list_params("sync_sp_grads", params)[0], axis.group)


# -------------------------------------------------------------------------------------------- norm


def _local_norms(
    params: Sequence[nn.Parameter], norm_type: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return the norms of this rank's gradients, accumulated in at least fp32."""
    # One norm each and then the norm of the norms, as torch's get_total_norm does.
    grads = [p.grad for p in params if p.grad is not None]
    for grad in grads:
        if type(grad) is not Tensor:
            _find_mesh_dims(grad)  # raises for a partial sum
    shards = [get_local(grad) for grad in grads]
    if norm_type == math.inf:  # torch raises for an empty shard, which has no largest element
        shards = [shard for shard in shards if shard.numel()]
    if not shards:
        return []
    return list(torch._foreach_norm(shards, norm_type, dtype=dtype))  # noqa: SLF001 (torch.nn.utils too)


def _find_mesh_dims(grad: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the mesh of a DTensor and the mesh dimensions that it is sharded over."""
    if not hasattr(grad, "placements"):
        return None
    # Replicas hold the same gradient, which counts once; a dimension of one rank needs no sum.
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

    Powers are summed over the mesh dimensions that a parameter is sharded over, not over its
    replicas, and then over the pipeline stages. Parameters may be on different meshes. The last
    stage's copy of a tied embedding is not counted.

    Args:
        params: Parameters of this rank, plain or DTensor, a module or a `Stages`; parameters
            without a gradient count as zero, and one that is listed twice counts once.
        axis: The pipeline axis of plain parameters; a `Stages` has its own. Not a data-parallel
            axis: the axes that parameters are sharded over follow from their placements.
        norm_type: p, above 0; `math.inf` for the largest absolute value of an element. As in
            `torch.nn.utils.get_total_norm`, powers are computed in the norm's dtype; except for p =
            2 they are all-reduced in fp64.

    Returns:
        A 0-d tensor of fp32, or fp64 for fp64 gradients, equal on all ranks (in fp32 on a pipeline
        stage with nothing to train).

    Raises:
        ConfigError: Parameters are sharded or replicated over ranks of `axis`.
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
    params, axis = _list_params("grad_norm", params, axis)
    return _compute_norms([params], axis, norm_type)[0]


def _compute_norms(
    parts: Sequence[Sequence[nn.Parameter]],
    axis: Axis,
    norm_type: float,
    measured: Mapping[nn.Parameter, Tensor] | None = None,
    groups: Iterable[Mapping[str, Any]] = (),
) -> Tensor:
    """Return the norm of each part of the parameters, `[parts]`, with one all-reduce for all parts.

    `measured` are the norms of local gradients that were freed since, and `groups` those of an
    optimizer, for names in messages.
    """
    if not norm_type > 0:
        raise ValueError(
            f"grad_norm: norm_type must be above 0, or math.inf for the largest element; got "
            f"{norm_type}"
        )
    # Grouped by the parameters, which all ranks have in the same order, not by the gradients.
    by_sharding: dict[Any, list[list[nn.Parameter]]] = {}
    copies: list[nn.Parameter] = []
    for index, params in enumerate(parts):
        check_dense(params, groups)
        for p in params:
            if p.requires_grad and is_tied_copy(p):
                copies.append(p)  # its gradient is that of the embedding, on the first stage
            elif p.requires_grad:
                sharding = None if type(p) is nn.Parameter else _find_mesh_dims(p)
                if sharding not in by_sharding:
                    by_sharding[sharding] = [[] for _ in parts]
                by_sharding[sharding][index].append(p)
    totals = [
        _compute_sharded_norms(sharding, members, norm_type, measured)
        for sharding, members in by_sharding.items()
    ]
    if not totals:
        # A last stage that trains only its tied copy counts as 0, and is clipped by the whole norm.
        totals = [_zeros(len(parts), copies[:1])]
    norms = totals[0]
    if len(totals) > 1:
        # Each total is the norm of other parameters, so the norm of the totals is that of all:
        # [shardings, parts] -> [parts].
        dtype = max((total.dtype for total in totals), key=lambda dtype: dtype.itemsize)
        stacked = torch.stack([total.to(dtype) for total in totals])
        norms = torch.linalg.vector_norm(stacked, norm_type, dim=0)
    if axis.count == 1:
        return norms
    _refuse_sharded_axis(axis, {sharding[0] for sharding in by_sharding if sharding is not None})
    # In fp64, as stages may differ in dtype, and a stage may have no trainable parameter.
    device = norms.device if by_sharding or copies else get_compute_device(axis)
    total = _reduce_norms(norms.double().to(device), [axis.group], norm_type)
    return total.to(norms.dtype)


def _refuse_sharded_axis(axis: Axis, meshes: Iterable[Any]) -> None:
    """Raise ConfigError if ranks of the axis share parameters, whose norm would be summed twice."""
    ranks = {*dist.get_process_group_ranks(axis.group)}
    for mesh in meshes:
        shared = ranks.intersection(mesh.mesh.flatten().tolist())
        # A rank of a pipeline shares its parameters with no other stage.
        if len(shared) > 1:
            raise ConfigError(
                f"grad_norm: ranks {sorted(shared)} of axis={axis.name!r} hold shards or copies of "
                "the same parameters, whose norm is summed over them already; give axis=ps.pp, or "
                "none without a pipeline",
                where="axis",
                got=axis.name,
                want="pp",
            )


def _compute_sharded_norms(
    sharding: Any,
    parts: Sequence[Sequence[nn.Parameter]],
    norm_type: float,
    measured: Mapping[nn.Parameter, Tensor] | None,
) -> Tensor:
    """Return the norm of each part; all parameters have the sharding (mesh, dimensions) or None."""
    params = [p for part in parts for p in part]
    dtype = _get_norm_dtype(params)
    norms: list[Tensor] = []
    for part in parts:
        if measured is None:
            local = _local_norms(part, norm_type, dtype)
        else:
            local = [measured[p].to(dtype) for p in part if p in measured]
        if local:
            norms.append(torch.linalg.vector_norm(torch.stack(local), norm_type, keepdim=True))
        else:
            # Not left out: all ranks of the mesh all-reduce a tensor of one size.
            norms.append(_zeros(1, params))
    stacked = norms[0] if len(norms) == 1 else torch.cat(norms)
    groups = [] if sharding is None else [sharding[0].get_group(dim) for dim in sharding[1]]
    return _reduce_norms(stacked, groups, norm_type)


def _reduce_norms(norms: Tensor, groups: Sequence[Any], norm_type: float) -> Tensor:
    """Combine the norms of all ranks of some process groups."""
    if not groups:
        return norms
    if norm_type == math.inf:  # a maximum over ranks may drop NaN, so its mask is reduced as well
        is_nan = norms.isnan()
        largest = torch.stack([norms.masked_fill(is_nan, 0.0), is_nan.to(norms.dtype)])
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return largest[0].masked_fill(largest[1] > 0, math.nan)
    # Powers other than squares soon leave the range of fp32.
    powers = norms.square() if norm_type == 2 else norms.double() ** norm_type
    for group in groups:
        dist.all_reduce(powers, group=group)
    return powers.sqrt() if norm_type == 2 else (powers ** (1 / norm_type)).to(norms.dtype)


def _zeros(count: int, params: Sequence[nn.Parameter]) -> Tensor:
    """Return zeros with the device of some parameters, and the dtype of their norms."""
    device = params[0].device if params else None
    return torch.zeros(count, dtype=_get_norm_dtype(params), device=device)


def _get_norm_dtype(params: Iterable[nn.Parameter]) -> torch.dtype:
    return torch.float64 if torch.float64 in [p.dtype for p in params] else torch.float32


# -------------------------------------------------------------------------------------------- step


@torch.no_grad()
def clip_grads_(
    params: Params,
    *,
    max_norm: float | None,
    axis: Axis = SOLO,
    norm_type: float = 2.0,
    groups: Iterable[Mapping[str, Any]] = (),
) -> Tensor:
    """Clip the norm of the whole model's gradient: torch's `clip_grad_norm_` for any layout.

    If the norm is not finite, the gradients are unchanged.

    Args:
        params: The parameters of this rank, a module or a `Stages`; a parameter that is listed
            twice is scaled once.
        max_norm: Gradients are scaled by min(1, max_norm / (norm + 1e-6)); None only measures.
        axis: The pipeline axis of plain parameters; see `grad_norm`.
        norm_type: The type of the norm; see `grad_norm`.
        groups: Parameter groups, as in `optimizer.param_groups`, the same on all ranks and stages.
            A group with a "max_norm" (`math.inf` never clips) is measured and clipped separately,
            all other parameters together, by `max_norm`.

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
    params, axis = _list_params("clip_grads_", params, axis)
    return _clip_grads_(
        params, max_norm=max_norm, axis=axis, norm_type=norm_type, groups=groups, scale=None
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
    """Clip as `clip_grads_`; return the norm, and whether it is not finite."""
    groups = list(groups)
    parts = _split_by_max_norm(params, max_norm, groups)
    norms = _compute_norms([members for members, _ in parts], axis, norm_type, groups=groups)
    norms = norms if scale is None else norms / scale
    # The p-norm of the parts' norms is the norm of all gradients.
    norm = norms.view(()) if len(parts) == 1 else torch.linalg.vector_norm(norms, norm_type)
    # On a CPU the norm can be read for free; elsewhere everything below stays on the device, and
    # the factor of a refused step is 1.
    is_on_host = can_read_values(norm) and scale is None
    is_nonfinite = _is_nonfinite(norm)
    if is_on_host and is_nonfinite:
        return norm, is_nonfinite
    for index, (members, limit) in enumerate(parts):
        # With a scale gradients are divided even if nothing clips.
        if scale is None and (limit is None or not math.isfinite(limit)):
            continue
        part_norm = norm if len(parts) == 1 else norms[index]
        if is_on_host:
            # The bits of `_clip_factor`, by NumPy's scalars, which are faster than torch's kernels.
            # torch computes limit / x as limit times the reciprocal, and so does this.
            number = np.float64 if part_norm.dtype == torch.float64 else np.float32
            host_factor = number(1) / (number(part_norm.item()) + number(1e-6)) * number(limit)
            if host_factor >= 1:
                continue
            factor = torch.full((), float(host_factor), dtype=part_norm.dtype)
        else:
            factor = _clip_factor(part_norm, limit, is_nonfinite, scale)
        grads = [get_local(p.grad) for p in members if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
    return norm, is_nonfinite


def _clip_factor(
    norm: Tensor, limit: float | None, refused: Tensor, scale: Tensor | float | None
) -> Tensor:
    factor = norm.new_ones(())
    if limit is not None and math.isfinite(limit):
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    factor = factor if scale is None else factor / scale
    # The factor of a norm that is NaN would make all gradients NaN.
    return torch.where(refused, 1.0, factor)


def _split_by_max_norm(
    params: Sequence[nn.Parameter], max_norm: float | None, groups: Iterable[Mapping[str, Any]]
) -> list[tuple[list[nn.Parameter], float | None]]:
    """Split parameters into those without a "max_norm" of their group, and each group with one."""
    limited = [group for group in groups if group.get("max_norm") is not None]
    for limit in (max_norm, *(group["max_norm"] for group in limited)):
        if limit is not None and not limit > 0:
            raise ValueError(
                f"clip_grads_: max_norm must be positive, got {limit}; None only measures"
            )
    if not limited:
        return [(list(params), max_norm)]
    # An ordered set: the order of parameters is the order in which norms are summed.
    remaining = dict.fromkeys(params)
    # A group may have parameters that are not in `params`, of another model for instance.
    separate = [
        ([p for p in group["params"] if p in remaining], group["max_norm"]) for group in limited
    ]
    for members, _ in separate:
        for p in members:
            del remaining[p]
    return [(list(remaining), max_norm), *separate]


@as_phase("step")
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
    """Clip the gradient norm, take one optimizer step, and clear the gradients.

    A skipped step changes nothing: parameters and optimizer state stay bitwise equal. The optimizer
    skips on the device if it can (`found_inf`, as fused AdamW); otherwise the host waits for the
    norm.

    Args:
        params: The parameters of this rank that `optimizer` steps, a module or a `Stages`.
        optimizer: Any torch optimizer; a group's rate becomes `lr * group.get("lr_scale", 1)`, and
            a group with a "max_norm" is clipped separately, as by `clip_grads_`.
        lr: The learning rate of this step, which is set in a skipped step too.
        max_norm: Gradients are scaled by min(1, max_norm / (norm + 1e-6)), as by torch's
            `clip_grad_norm_`; None only measures.
        axis: The pipeline axis of plain parameters; see `grad_norm`.
        should_apply: From the norm to whether to take the step, both 0-d tensors, as
            `health.make_finite_check` makes it. A step whose norm is not finite is never taken.
        world: All ranks that take the step of plain parameters; a `Stages` has its own. If one rank
            skips the step, all do. That protects ranks which compute equal numbers without
            a collective, if the hardware of one makes an error.
        norm_type: The type of the norm; see `grad_norm`.
        scale: The loss scale of the gradients (`health.get_loss_scale`); gradients and norm are
            divided by it, before the norm is compared with `max_norm`.

    Returns:
        The norm before clipping, and whether the step was taken, which is equal on all ranks of
        `world`: two 0-d tensors. With a `scale` also the scale, and whether the norm was not finite
        on any rank.

    Raises:
        ValueError: `lr` is negative or not finite, a `max_norm` or `norm_type` is not positive, a
            gradient is sparse or still a partial sum, or a parameter with a gradient is in no group
            of `optimizer`.

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
    _check_lr("clip_and_step", lr)
    world = params.world if isinstance(params, Stages) else world
    params, axis = _list_params("clip_and_step", params, axis)
    groups = optimizer.param_groups
    stepped = {id(p) for group in groups for p in group["params"]}
    # Otherwise their gradients would be cleared below, and they never be trained.
    missing = [p for p in params if id(p) not in stepped and p.grad is not None and p.requires_grad]
    if missing:
        shapes = ", ".join(str(tuple(p.shape)) for p in missing[:3])
        raise ValueError(
            f"clip_and_step: {len(missing)} of {len(params)} parameters have gradients but are in "
            f"no group of the optimizer (shapes {shapes}{', ...' if len(missing) > 3 else ''}); "
            "give the optimizer all of params, or freeze these by requires_grad_(False)"
        )
    with torch.no_grad():
        norm, overflowed = _clip_grads_(
            params, max_norm=max_norm, axis=axis, norm_type=norm_type, groups=groups, scale=scale
        )
        # 0-d tensors from here on: the host waits for none of them, unless the optimizer cannot
        # skip a step on the device.
        refused = overflowed
        if should_apply is not None:
            refused = refused | should_apply(norm).logical_not().to(norm.device)
        if world.count > 1:
            # One message; a sum above 0 means that some rank has the flag.
            flags = torch.stack([refused, overflowed]).to(torch.float32)
            refused, overflowed = (all_sum(flags, world) > 0).unbind()
        _set_lr(optimizer, lr)
        _step_unless(refused, optimizer)
        # None, not zeros: the next backward pass then writes a gradient rather than adds to one.
        for p in params:
            p.grad = None
        return Update(norm, refused.logical_not(), scale, overflowed)


def _is_nonfinite(x: Tensor) -> Tensor:
    if can_read_values(x) and not x.ndim:
        return torch.full((), not math.isfinite(x.item()))  # torch.tensor takes twice as long
    # x - x is NaN where x is not finite; isfinite costs 4 us more on a CPU.
    return (x - x).ne(0.0)


def _check_lr(function: str, lr: float | None) -> None:
    if lr is not None and not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"{function}: lr must be finite and at least 0, got {lr}")


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1)


def _step_unless(refused: Tensor, optimizer: Any) -> None:
    """Take an optimizer step, unless a 0-d tensor is true."""
    # torch's optimizers raise for gradients of another dtype than the parameter. Ours, whose groups
    # have the option "moments", take any.
    other_dtype = [
        p
        for group in optimizer.param_groups
        if "moments" not in group
        for p in group["params"]
        if p.grad is not None and p.grad.dtype != p.dtype
    ]
    with _use_cast_gradients(other_dtype):
        if not can_read_values(refused) and _can_skip_on_device(optimizer):
            # The protocol of torch's GradScaler: where it is above 0, the kernel writes nothing.
            optimizer.found_inf = refused.to(torch.float32)
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf
        elif not refused:
            optimizer.step()


@contextmanager
def _use_cast_gradients(params: Sequence[Any]) -> Iterator[None]:
    """Cast gradients to the dtypes of their parameters for the length of a block."""
    originals = [(p, p.grad, p.grad_dtype) for p in params]
    for p, grad, _ in originals:
        p.grad_dtype = None  # any: torch refuses a gradient of another dtype than this one
        p.grad = grad.to(p.dtype)
    try:
        yield
    finally:
        for p, grad, dtype in originals:
            p.grad = grad
            p.grad_dtype = dtype


def _can_skip_on_device(optimizer: Any) -> bool:
    # The attribute by which torch's GradScaler finds such optimizers (2.11 to 2.13).
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # A fused SGD that skips its first step leaves its momentum uninitialized.
    return not isinstance(optimizer, torch.optim.SGD) or all(
        optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
        if p.grad is not None
    )


# ------------------------------------------------------------------------------------- in backward


class StepInBackward(Protocol):
    """A context manager that steps parameters within the backward passes of its block.

    It yields a function that returns the `Update` after the block; see `make_step_in_backward`.
    """

    def __call__(
        self,
        *,
        lr: float | None,
        max_norm: float | None = None,
        norm: Tensor | float | None = None,
        microbatches: int = 1,
        scale: Tensor | float | None = None,
    ) -> AbstractContextManager[Callable[[], Update]]: ...


def make_step_in_backward(
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    axis: Axis,
    sp: Axis,
    log: Log,
    reduce: Reduce = "last",
) -> StepInBackward:
    """Return a context manager that steps parameters, and frees gradients, within backward passes.

    With one microbatch there are only a few gradients at a time: those of one parameter, or of one
    FSDP unit. The context manager replaces `clip_and_step`:

        with step_in_backward(lr=lr, max_norm=1.0, norm=state.health["norms"][-1]) as updated:
            sums = forward_backward(batch.microbatches, denominator=tokens)
        update = updated()

    The norm of a step is known only after its parameters have been stepped. So `norm`, by which
    gradients are clipped, is that of the last step; or, for twice the computation, the exact one
    from a first pass that only measures (`lr=None`), and then a step whose norm is not finite is
    skipped. Otherwise a bad step cannot be skipped, and `health.judge_step` asks for a roll-back at
    once. The same holds for an overflow with a loss scale: the roll-back restores the scale too, so
    lower it, or it overflows again.

    With several microbatches, pass their number: a parameter is stepped after the last one, and
    gradients accumulate as usual. Parameters whose gradients are summed over ranks after the
    backward passes (`ddp`, norms under tp), or that some microbatch does not use, are stepped when
    the block ends. Under FSDP an unused parameter is stepped with a zero gradient, like one that
    only other ranks use.

    Args:
        stages: The model, in a list; it may use FSDP2 (shards are stepped when they are reduced),
            `ddp` and tensor parallelism.
        optimizer: An elementwise optimizer, or any that steps each parameter separately, with every
            trainable parameter of `stages`.
        axis: The pipeline axis, `ps.pp`, of size 1: a pipeline interleaves its microbatches.
        sp: `ps.sp_unfolded`, of size 1: `sync_sp_grads` would come too late.
        log: Called once with a message for the log: that bad steps cannot be skipped.
        reduce: The same as for `forward_backward`.

    Returns:
        `step_in_backward(*, lr, max_norm=None, norm=None, microbatches=1, scale=None)`. `norm` is
        a 0-d tensor or a number; if it is not finite, nothing is stepped. `scale` is that of
        `clip_and_step`. A block that fails leaves some parameters stepped, and their gradients
        freed: resume from a checkpoint.

    Raises:
        ConfigError: `axis` or `sp` has not size 1.
        ValueError: The optimizer lacks a trainable parameter, or has a group with a "max_norm". The
            context manager raises it for a number out of range, and for `max_norm` without `norm`.

    Effects:
        The context manager writes parameters and optimizer state, sets every `.grad` to None, and
        communicates as `grad_norm` when the block ends.

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
    for mesh_axis in (axis, sp):
        if mesh_axis.count > 1:
            raise ConfigError(
                f"make_step_in_backward: a gradient is not complete when it arrives in a layout "
                f"with {mesh_axis.name} = {mesh_axis.count}; call clip_and_step after the backward "
                "pass",
                where=mesh_axis.name,
                got=mesh_axis.count,
                want=1,
            )
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [tuple(p.shape) for p in params if p not in stepped]
    if missing:
        raise ValueError(
            f"make_step_in_backward: the optimizer lacks {len(missing)} parameters, of shapes "
            f"{missing[:3]}; it must have every trainable parameter"
        )
    if any(group.get("max_norm") is not None for group in optimizer.param_groups):
        raise ValueError(
            "make_step_in_backward: the optimizer clips by group; it must have no group with a "
            "max_norm"
        )
    log(
        "parameters are stepped within the backward pass: a bad step cannot be skipped, only undone"
    )
    return partial(_step_in_backward, modules_of(stages), params, optimizer, reduce)


@contextmanager
def _step_in_backward(
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
    _check_lr("step_in_backward", lr)
    factor, refused = _clip_by_given_norm(norm, max_norm, scale, device=_zeros(0, params).device)
    # The gradients that each parameter still gets before it can be stepped.
    remaining = _count_gradients(stages, params, microbatches, reduce=reduce)
    # The norms of gradients that are freed; a parameter in here has been stepped.
    norms: dict[nn.Parameter, Tensor] = {}
    if lr is not None:
        _set_lr(optimizer, lr)

    @torch.no_grad()
    def step(p: nn.Parameter) -> None:
        # Before clipping, as in the `Update` of `clip_and_step`.
        (norms[p],) = _local_norms([p], 2.0, _get_norm_dtype([p]))
        if isinstance(factor, Tensor) or factor != 1:
            get_local(p.grad).mul_(factor)
        if lr is not None:
            select(p)
            _step_unless(refused, optimizer)
        p.grad = None

    def receive_gradient(p: nn.Parameter) -> None:
        if p in norms:
            raise RuntimeError(
                f"step_in_backward: a gradient of shape {tuple(p.shape)} arrived after its "
                f"parameter had been stepped, with microbatches={microbatches}; pass the number of "
                "microbatches, call forward_backward once, and resume from a checkpoint"
            )
        remaining[p] -= 1
        if not remaining[p]:
            step(p)

    # A list, since the caller gets the function before there is a result.
    update: list[Update] = []
    with use_single_parameter(optimizer) as select, _use_hooks(remaining, receive_gradient):
        yield lambda: update[0]
        # What is left: gradients that are summed over ranks at the end of the backward passes, and
        # parameters that fewer microbatches used than were announced.
        for p in params:
            if p.grad is not None:
                step(p)
    total = _compute_norms([params], SOLO, 2.0, norms)[0]
    total = total if scale is None else total / scale
    applied = torch.full_like(refused, lr is not None) & ~refused
    update.append(Update(total, applied, scale, _is_nonfinite(total)))


def _clip_by_given_norm(
    norm: Tensor | float | None,
    max_norm: float | None,
    scale: Tensor | float | None,
    *,
    device: torch.device,
) -> tuple[Any, Tensor]:
    """Return the factor of the gradients, and whether the norm that was given is not finite."""
    if max_norm is not None and (norm is None or not max_norm > 0):
        raise ValueError(
            f"step_in_backward: max_norm must be positive and needs the norm to clip by, got "
            f"{max_norm} and norm={norm}; pass that of the last step, or measure it with lr=None"
        )
    dtype = getattr(norm, "dtype", torch.float64)
    norm = torch.as_tensor(0.0 if norm is None else norm, dtype=dtype, device=device)
    factor: Any = 1.0 if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return factor if scale is None else factor / scale, _is_nonfinite(norm)


def _count_gradients(
    stages: Sequence[nn.Module],
    params: Sequence[nn.Parameter],
    microbatches: int,
    *,
    reduce: Reduce,
) -> dict[nn.Parameter, int]:
    """Return how often each parameter gets a gradient, of those without a sum at the end."""
    all_reducers = [find_reducers(stage) for stage in stages]
    summed = {p for reducers in all_reducers for p in list_summed_at_end(reducers)}
    modules = [module for reducers in all_reducers for _, module in reducers.fsdp]
    # With "last" FSDP2 accumulates microbatches in gathered gradients, and reduces them once.
    once = {p for module in modules for p in module.parameters()} if reduce == "last" else set()
    return {p: 1 if p in once else microbatches for p in params if p not in summed}


@contextmanager
def _use_hooks(
    params: Iterable[nn.Parameter], hook: Callable[[nn.Parameter], None]
) -> Iterator[None]:
    handles = [p.register_post_accumulate_grad_hook(hook) for p in params]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -------------------------------------------------------------------------------------- non-finite


def find_nonfinite(
    replay: Callable[[], Mapping[str, Tensor]],
    stages: Iterable[nn.Module] | nn.Module,
    axis: Axis,
) -> list[str]:
    """Find the terms and gradients that are not finite in a bad step, and the ranks that have them.

    A bad step is skipped, so its parameters are unchanged, and its backward pass can be repeated.
    Gradients are checked before they are summed over ranks, so the message names the ranks that
    computed a non-finite one. They are listed in the order of the backward pass, since non-finite
    values spread from the first one.

    Args:
        replay: Repeats the step's forward and backward passes and returns the terms of the loss, as
            `partial(forward_backward, batch.microbatches, denominator=tokens)` does.
        stages: This rank's stages.
        axis: All ranks, `ps.world`.

    Returns:
        Descriptions of the first three causes and the number of further ones, equal on all ranks.

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
    by_rank = all_gather_objects(_replay_step(replay, stages), axis)
    terms = [rank["terms"] for rank in by_rank]
    local = [rank["local"] for rank in by_rank]
    summed = [rank["summed"] for rank in by_rank]
    checked = [rank["checked"] for rank in by_rank]
    # What is bad first in a step explains the rest: the loss, then local gradients, then their
    # sums.
    if any(terms):
        causes = _name_ranks(terms, "{} on {}")
    elif any(local):
        causes = _name_ranks(local, "the {} on {}")
    else:
        causes = _name_ranks(summed, "the summed {}, held by {}")
        # Hooks may not see the gradients of compiled code.
        if {*chain(*summed)} <= {*chain(*checked)}:
            causes.append("computed again, each rank's own numbers are finite")
    more = len(causes) - _MAX_CAUSES
    return causes if more <= 0 else [*causes[:_MAX_CAUSES], f"and {more} more"]


def _replay_step(
    replay: Callable[[], Mapping[str, Tensor]], stages: Sequence[nn.Module]
) -> dict[str, list[str]]:
    """Repeat a step's backward pass; return the names of this rank's non-finite values by kind."""
    is_finite: dict[str, Tensor] = {}

    def check(name: str, gradient: Tensor) -> None:
        # It stays on the device: reading it here would wait for every gradient.
        result = get_local(gradient).isfinite().all()
        is_finite[name] = is_finite[name] & result if name in is_finite else result

    with _use_gradient_hooks(stages, check):
        sums = replay()
    named = get_named_parameters(stages)
    grads = {name: get_local(p.grad) for name, p in named.items() if p.grad is not None}
    # In the order of the backward pass, which starts at the last parameters.
    summed = [name for name, grad in reversed(grads.items()) if not grad.isfinite().all()]
    names = {
        "terms": [f"the {name}" for name, value in sums.items() if not value.isfinite().all()],
        "local": [f"gradient of {name}" for name, finite in is_finite.items() if not finite],
        "summed": [f"gradient of {name}" for name in summed],
        "checked": [f"gradient of {name}" for name in is_finite],
    }
    for p in named.values():
        p.grad = None
    return names


@contextmanager
def _use_gradient_hooks(
    stages: Sequence[nn.Module], check: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `check(name, gradient)` for each gradient of this rank, before it is summed."""
    # By the id of a module (its pre-hook) or of a parameter (the hook of its gradient).
    handles: dict[int, Any] = {}

    # Under FSDP the gathered parameters exist from the forward pass on.
    def hook(path: str, module: nn.Module, _: object) -> None:
        for name, p in module.named_parameters(path):
            if p.requires_grad and id(p) not in handles:
                handles[id(p)] = p.register_hook(partial(check, canonical_name(name)))

    for stage in stages:
        for path, module in stage.named_modules():
            handles[id(module)] = module.register_forward_pre_hook(partial(hook, path))
    try:
        yield
    finally:
        for handle in handles.values():
            handle.remove()


def _name_ranks(by_rank: Sequence[Sequence[str]], template: str) -> list[str]:
    """Format each distinct name with the ranks that have it, those of a last stage first."""
    ranks: dict[str, list[int]] = {}
    for rank in reversed(range(len(by_rank))):
        for name in by_rank[rank]:
            ranks.setdefault(name, []).insert(0, rank)
    return [template.format(name, format_ranks(which)) for name, which in ranks.items()]


def format_ranks(which: Sequence[int]) -> str:
    """Format a list of ranks for a message; up to eight are listed one by one.

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
    """Restrict an optimizer to one parameter at a time for the length of a block.

    Yields a function that selects the parameter; until its first call the optimizer has none.

    Args:
        optimizer: Any optimizer.

    Effects:
        Replaces the "params" of its groups, and their "param_names", for the length of the block.

    Examples:
        >>> one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.SGD([one, other])
        >>> with use_single_parameter(optimizer) as select:
        ...     select(other)
        ...     print(*(len(p) for p in optimizer.param_groups[0]["params"]))
        3
    """
    originals = [
        {key: group[key] for key in ("params", "param_names") if key in group}
        for group in optimizer.param_groups
    ]
    positions = {
        p: (group_index, index)
        for group_index, original in enumerate(originals)
        for index, p in enumerate(original["params"])
    }

    def select(p: nn.Parameter | None) -> None:
        # No group has the index -1, so that all lists become empty.
        selected, index = (-1, 0) if p is None else positions[p]
        for i, (group, original) in enumerate(zip(optimizer.param_groups, originals, strict=True)):
            for key, values in original.items():
                group[key] = values[index : index + 1] if i == selected else []

    select(None)
    try:
        yield select
    finally:
        for group, original in zip(optimizer.param_groups, originals, strict=True):
            group.update(original)
