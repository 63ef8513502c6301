"""Between backward and the next step: sums over ranks, the norm, the clip and the step.

All of it works on the local shards of parameters, whatever they are sharded over: the norm is the
norm of the whole model's gradient, each element counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.collectives import all_sum
from trainkit.parallel.naming import is_tied_copy, named_parameters_of
from trainkit.parallel.reduction import sum_gradients_
from trainkit.types import SOLO, Axis

__all__ = [
    "clip_and_step",
    "grad_norm",
    "named_parameters_of",
    "parameters_of",
    "sum_gradients_",
    "sync_sp_grads",
]

_BUCKET_ELEMENTS = 16 * 1024 * 1024


def parameters_of(stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the trainable parameters of a list of stages, each once.

    Examples:
        >>> [tuple(p.shape) for p in parameters_of([nn.Linear(2, 3)])]
        [(3, 2), (3,)]
    """
    return [p for p in named_parameters_of(stages).values() if p.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    if type(tensor) is Tensor:
        return tensor
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@torch.no_grad()
def sync_sp_grads(params: Iterable[nn.Parameter], axis: Axis) -> None:
    """Sum gradients over the sequence-parallel ranks that nothing else sums over.

    Call it once a step, after the last backward pass: a second call would sum the sums again. Left
    out, it shows as a gradient norm that differs between ranks.

    Gradients travel in a few flat buffers, one per dtype and 16 million elements: one call per
    tensor would cost as many waits. A parameter without a gradient on this rank counts as zeros, so
    ranks cannot disagree on what is sent; one that has none on any rank keeps none.

    Args:
        params: The same parameters on every rank of the axis.
        axis: `ps.sp_unfolded`.

    Effects:
        Replaces the values of `.grad`; communicates on `axis`: one all-reduce per buffer, and one
        that tells who has a gradient. Nothing at size 1.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> sync_sp_grads([nn.Parameter(torch.ones(2))], solo_parallel().sp_unfolded)
    """
    if axis.count == 1:
        return
    trainable = [p for p in params if p.requires_grad]
    if not trainable:
        return
    own = [float(p.grad is not None) for p in trainable]
    used = all_sum(torch.tensor(own, device=trainable[0].device), axis)
    if not all(own):  # only a rank that lacks a gradient waits to hear who has it
        for p, count in zip(trainable, used.tolist(), strict=True):
            if p.grad is None and count:
                p.grad = torch.zeros_like(p)
    grads = [_local(p.grad) for p in trainable if p.grad is not None]
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=axis.group)
        parts = flat.split([grad.numel() for grad in bucket])
        for grad, part in zip(bucket, parts, strict=True):
            grad.copy_(part.view_as(grad))


def _buckets(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, in order, into lists of a bounded number of elements."""
    open_buckets: dict[Any, list[Tensor]] = {}
    sizes: dict[Any, int] = {}
    full: list[list[Tensor]] = []
    for grad in grads:
        kind = (grad.dtype, grad.device)
        if kind in open_buckets and sizes[kind] + grad.numel() > _BUCKET_ELEMENTS:
            full.append(open_buckets.pop(kind))
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(grad)
        sizes[kind] = sizes.get(kind, 0) + grad.numel()
    return [*full, *open_buckets.values()]


# -------------------------------------------------------------------------------------------- norm


def _norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of a list of plain tensors, accumulated in at least fp32."""
    double = any(grad.dtype == torch.float64 for grad in grads)
    dtype = torch.float64 if double else torch.float32
    parts = torch._foreach_norm(list(grads), 2.0, dtype=dtype)  # noqa: SLF001 (torch.nn.utils too)
    return torch.linalg.vector_norm(torch.stack(parts))


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
def grad_norm(params: Iterable[nn.Parameter], *, axis: Axis = SOLO) -> Tensor:
    """Return the 2-norm of the whole model's gradient.

    Squares are summed over exactly the mesh dimensions that a parameter is sharded over, never over
    its replicas, and then over the pipeline stages. Parameters may live on different meshes. The
    last stage's copy of a tied embedding is not counted.

    Args:
        params: Parameters of this rank, plain or DTensor; those without a gradient count as zero.
        axis: The pipeline axis, `ps.pp`, whose ranks hold different parameters. It is no
            data-parallel axis: what parameters are sharded over is read off them.

    Returns:
        A 0-d tensor of fp32, or fp64 for fp64 gradients, equal on all ranks (in fp32 on a pipeline
        stage with nothing to train).

    Raises:
        ValueError: A gradient is still a partial sum.

    Effects:
        Communicates: one all-reduce of a number per mesh dimension that parameters are sharded
            over, and on `axis`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> p = nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> grad_norm([p], axis=solo_parallel().pp)
        tensor(5.)
    """
    # Grouped by the parameters, which all ranks have in the same order, not by the gradients.
    groups: dict[Any, list[nn.Parameter]] = {}
    copies: list[nn.Parameter] = []
    for p in params:
        if p.requires_grad and is_tied_copy(p):
            copies.append(p)
        elif p.requires_grad:
            where = None if type(p) is nn.Parameter else _sharded_over(p)
            groups.setdefault(where, []).append(p)
    totals = [_group_norm(where, members) for where, members in groups.items()]
    # A stage that trains its tied copy alone must clip it as the first stage clips the owner.
    totals = totals or [_zero_like(p) for p in copies[:1]]
    norm = totals[0] if len(totals) == 1 else _combined(totals)
    if axis.count == 1:
        return norm
    # In fp64, as stages may differ in dtype, and one may have nothing to train at all.
    square = norm.double().square().to(_device_of_axis(axis) if not totals else norm.device)
    return all_sum(square, axis).sqrt().to(norm.dtype)


def _group_norm(where: Any, members: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm over parameters that are sharded alike: `where` is (mesh, its dimensions)."""
    grads = [p.grad for p in members if p.grad is not None]
    for grad in grads if where is not None else ():
        _sharded_over(grad)
    total = _norm([_local(grad) for grad in grads]) if grads else _zero_like(members[0])
    if where is None or not where[1]:
        return total
    total = total.square()
    for dim in where[1]:
        dist.all_reduce(total, group=where[0].get_group(dim))
    return total.sqrt()


def _device_of_axis(axis: Axis) -> torch.device:
    """Return the device that the other ranks' parameters are on, for a rank that has none."""
    assert axis.group is not None
    kinds = [device.type for device in axis.group._device_types]  # noqa: SLF001 (no public name up to 2.13)
    return torch.device("cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu")


def _zero_like(p: Tensor) -> Tensor:
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return torch.zeros((), dtype=dtype, device=p.device)


def _combined(totals: Sequence[Tensor]) -> Tensor:
    if not totals:
        return torch.zeros(())
    widest = max((total.dtype for total in totals), key=lambda dtype: dtype.itemsize)
    return torch.linalg.vector_norm(torch.stack([total.to(widest) for total in totals]))


# -------------------------------------------------------------------------------------------- step


@torch.no_grad()
def clip_and_step(
    params: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    max_norm: float | None,
    axis: Axis = SOLO,
) -> Tensor:
    """Clip the gradient to a norm, take one optimizer step, and clear the gradients.

    A gradient whose norm is not finite changes nothing: parameters and moments keep every bit. The
    optimizer decides that on the device where it can (`found_inf`, as fused AdamW), else the host
    waits for the norm.

    Args:
        params: The parameters of this rank that `optimizer` steps.
        optimizer: Any torch optimizer; a group's rate becomes `lr * group.get("lr_scale", 1)`.
        lr: The learning rate of this step.
        max_norm: Gradients are scaled by min(1, max_norm / (norm + 1e-6)), as by torch's
            `clip_grad_norm_`; None only measures.
        axis: The pipeline axis, `ps.pp`; see `grad_norm`.

    Returns:
        The norm before clipping, a 0-d tensor, equal on all ranks; not finite when the step was
        skipped.

    Raises:
        ValueError: `lr` is not finite, `max_norm` is not positive, or a gradient is still a
            partial sum.

    Effects:
        Writes parameters and optimizer state, sets every `.grad` to None; communicates as
        `grad_norm`.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> p = nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([p])
        >>> clip_and_step([p], optimizer, lr=1.0, max_norm=None, axis=solo_parallel().pp)
        tensor(5.)
        >>> p.data, p.grad
        (tensor([-3., -4.]), None)
    """
    if not math.isfinite(lr):
        raise ValueError(f"clip_and_step: lr must be finite, got {lr}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(
            f"clip_and_step: max_norm must be positive, got {max_norm}; None only measures"
        )
    params = list(params)  # they are walked more than once, and may be a generator
    norm = grad_norm(params, axis=axis)
    if max_norm is not None and math.isfinite(max_norm):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = [_local(p.grad) for p in params if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, scale)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1)
    _step_if_finite(optimizer, norm)
    for p in params:
        p.grad = None
    return norm


def _step_if_finite(optimizer: Any, norm: Tensor) -> None:
    # By this torch's GradScaler knows optimizers that skip on the device (2.11 to 2.13).
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # 1.0 where the norm is not finite (x - x is then NaN); isfinite costs 4 us more on a CPU.
        optimizer.found_inf = (norm - norm).ne(0.0).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
    elif torch.isfinite(norm):
        optimizer.step()
