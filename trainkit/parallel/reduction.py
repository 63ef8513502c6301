"""Gradient reduction by FSDP2, DDP and over tp: sums, not averages; per step, not per microbatch.

A gradient is divided once, by the number of valid tokens in the global batch. A library that also
divides by the number of ranks gives wrong numbers, so averaging is switched off, and a module that
still averages is refused.

Under tensor parallelism some parameters are whole on every rank and see only a part of the work: a
norm that each rank applies to its part of the sequence or to its heads. Their gradients are
*partial*; `sum_partial_` sums them, all at once, at the end of a step.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotation with the class.

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.types import SOLO, Axis

Reduce = Literal["last", "each"]
_BROKEN_OFF = "_trainkit_broken_off"
_PARTIAL = "_trainkit_partial"


@attrs.frozen(eq=False)
class Reducers:
    """The modules inside a model that reduce gradients, by name: FSDP2's, DDP's, and foreign ones.

    Foreign ones (FSDP1 and composable `replicate`) always average, and are known to be refused.
    `partial` are the modules that have parameters whose gradients `sum_partial_` sums.
    """

    fsdp: Sequence[tuple[str, Any]] = ()
    ddp: Sequence[tuple[str, Any]] = ()
    foreign: Sequence[tuple[str, Any]] = ()
    partial: Sequence[tuple[str, Any]] = ()

    def __bool__(self) -> bool:
        return bool(self.fsdp or self.ddp or self.foreign or self.partial)


def reducers_of(model: nn.Module) -> Reducers:
    """Find the modules that reduce gradients; none without a process group.

    Examples:
        >>> bool(reducers_of(nn.Linear(1, 1)))
        False
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Reducers()
    # Imported here: a second of import time.
    from torch.distributed._composable.contract import _get_registry  # noqa: PLC0415
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    def is_foreign(module: nn.Module) -> bool:
        return isinstance(module, FullyShardedDataParallel) or (
            not isinstance(module, FSDPModule) and "replicate" in (_get_registry(module) or ())
        )

    modules = list(model.named_modules())
    return Reducers(
        [(name, module) for name, module in modules if isinstance(module, FSDPModule)],
        [(name, module) for name, module in modules if isinstance(module, DistributedDataParallel)],
        [(name, module) for name, module in modules if is_foreign(module)],
        [(name, module) for name, module in modules if _PARTIAL in vars(module)],
    )


def _fsdp_groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a module: one in torch 2.11, a list from 2.13 on."""
    state = module._get_fsdp_state()  # noqa: SLF001 (no public way to read the divide factor)
    many = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if many is None else many  # noqa: SLF001
    return [group for group in groups if group is not None]


def _sum_bucket(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a DDP bucket over the group without dividing."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None

    def tensor_of(done: Any) -> Tensor:
        return done.value()[0]

    return work.get_future().then(tensor_of)


def _sums(module: Any) -> bool:
    """Say whether a DDP module sums: its only hook is ours (it has no public list of them)."""
    return [hook for hook, _ in module._comm_hooks] == [_sum_bucket]  # noqa: SLF001


def sum_gradients_(model: nn.Module) -> None:
    """Make FSDP2 and DDP modules sum gradients over ranks instead of averaging them.

    Args:
        model: Any module; FSDP2 and DDP modules inside it are found.

    Effects:
        Sets the reduction of those modules. Gradients are not touched. Does nothing the second
        time.

    Examples:
        >>> sum_gradients_(nn.Linear(1, 1))
    """
    reducers = reducers_of(model)
    for _, module in reducers.fsdp:
        # Both are needed: a divide factor alone asks gloo for a reduction it does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for _, module in reducers.ddp:
        if not module._comm_hooks:  # noqa: SLF001 (see _sums)
            module.register_comm_hook(module.process_group, _sum_bucket)


def check_sums(reducers: Reducers) -> None:
    """Refuse a module that averages gradients, or that holds half of an earlier step's.

    Raises:
        ValueError: Names the first one.
    """
    for name, module in (*reducers.fsdp, *reducers.ddp):
        if getattr(module, _BROKEN_OFF, False):
            raise ValueError(
                f"forward_backward: an earlier call broke off in {name or 'the model'!r}, which "
                "holds on to a part of that step's gradient; build the model anew"
            )
        if getattr(module, "static_graph", False):
            raise ValueError(
                f"forward_backward: the DDP module {name or '(the model itself)'!r} has "
                "static_graph=True, which cannot wait for the last microbatch; leave it out"
            )
    averaging = [
        name
        for name, module in reducers.fsdp
        if any(group.gradient_divide_factor != 1.0 for group in _fsdp_groups(module))
    ]
    averaging += [name for name, module in reducers.ddp if not _sums(module)]
    averaging += [name for name, _ in reducers.foreign]
    if averaging:
        raise ValueError(
            f"forward_backward: the module {averaging[0] or '(the model itself)'!r} averages "
            "gradients over ranks, which would divide them twice; wrap it with FSDP2 or DDP, and "
            "call sum_gradients_(model) once, without a communication hook of your own"
        )


@contextmanager
def reducing(reducers: Reducers, *, last: bool, reduce: Reduce) -> Iterator[None]:
    """Run one microbatch's forward and backward with gradients reduced now or later.

    With reduce="last", nothing is reduced before the last microbatch. With "each", FSDP2
    reduce-scatters every microbatch and leaves only the all-reduce over replicas for the last. DDP
    always waits for the last: it reduces the accumulated gradient, so a sum reduced twice would
    count the first microbatches once per rank.

    Effects:
        Sets the modules' reduction flags, and sets them back.
    """
    with ExitStack() as stack:
        for _, module in reducers.fsdp:
            module.set_requires_gradient_sync(last or reduce == "each", recurse=False)
            module.set_requires_all_reduce(last, recurse=False)
        for _, module in reducers.ddp:
            stack.enter_context(nullcontext() if last else module.no_sync())
        try:
            yield
        except BaseException:
            for _, module in (*reducers.fsdp, *reducers.ddp):
                setattr(module, _BROKEN_OFF, True)
            raise
        finally:
            for _, module in reducers.fsdp:
                module.set_requires_gradient_sync(True, recurse=False)
                module.set_requires_all_reduce(True, recurse=False)


@contextmanager
def setting_aside_reduced(reducers: Reducers) -> Iterator[None]:
    """Keep gradients that are reduced already out of the next reduction; add them afterwards.

    These are what DDP and `sum_partial_` reduce: both take a parameter's whole gradient, and what
    an earlier call left there would be summed over ranks again.

    Effects:
        Sets the `.grad` of their parameters aside for the length of the block.
    """
    held: list[tuple[nn.Parameter, Tensor]] = []
    reduced = [p for _, module in reducers.ddp for p in module.parameters()]
    partial = _partial_parameters(module for _, module in reducers.partial)
    for parameter in (*reduced, *(parameter for parameter, _ in partial)):
        if parameter.grad is not None:
            held.append((parameter, parameter.grad.clone()))
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in held:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def mark_partial_(module: nn.Module, names: Sequence[str], axis: Axis) -> None:
    """Say that the gradients of some of a module's own parameters are partial over an axis.

    Args:
        module: The module that holds the parameters.
        names: The names of the parameters in that module.
        axis: The axis to sum their gradients over, `ps.tp`.

    Effects:
        Sets an attribute of the module; nothing at size 1.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> mark_partial_(nn.RMSNorm(2), ["weight"], solo_parallel().tp)
    """
    if axis.count > 1:
        setattr(module, _PARTIAL, (tuple(names), axis))


def _partial_parameters(modules: Iterable[nn.Module]) -> list[tuple[Any, Axis]]:
    """Return the trainable parameters whose gradients are partial, each once, and their axes."""
    found: dict[int, tuple[Any, Axis]] = {}
    for module in modules:
        names, axis = vars(module).get(_PARTIAL, ((), SOLO))
        for name in names:
            parameter = module._parameters[name]  # noqa: SLF001 (not what hides it, see styles.py)
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter, axis
    return list(found.values())


@torch.no_grad()
def sum_partial_(model: nn.Module) -> None:
    """Sum over tp the gradients of which each rank has only a part, in one buffer per dtype.

    For the end of a step's backward passes, after what FSDP reduces, and within
    `setting_aside_reduced`. A parameter without a gradient on this rank counts as zeros; one that
    has none on any rank keeps none.

    Args:
        model: Any module; those that `mark_partial_` has marked are found.

    Effects:
        Replaces the values of `.grad`; communicates over the axis that they were marked with, one
        all-reduce per dtype. Nothing where no parameter is partial.

    Examples:
        >>> sum_partial_(nn.Linear(1, 1))
    """
    groups: dict[Any, list[Any]] = {}
    for parameter, axis in _partial_parameters(model.modules()):
        groups.setdefault((axis.group, parameter.dtype), []).append(parameter)
    for (group, _), parameters in groups.items():
        _sum_grads_(parameters, group)


def _sum_grads_(parameters: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters of one dtype, and who has one, in one all-reduce."""
    has = [p.grad is not None for p in parameters]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    counts = torch.tensor(has).to(parts[0], non_blocking=True)
    flat = torch.cat([counts, *(part.reshape(-1) for part in parts)])
    dist.all_reduce(flat, group=group)
    counts, *sums = flat.split([len(parts), *(part.numel() for part in parts)])
    for part, total in zip(parts, sums, strict=True):
        part.copy_(total.view_as(part))
    if not all(has):  # only a rank that lacks a gradient waits to hear whether another has one
        has = counts.bool().tolist()
    for parameter, grad, kept in zip(parameters, grads, has, strict=True):
        parameter.grad = grad if kept else None


def reshard_(reducers: Reducers) -> None:
    """Free the gathered parameters of FSDP2 modules, so that the model shows its shards again.

    Effects:
        After a forward pass without backward, FSDP2 leaves the root's parameters gathered; this
        undoes it.
    """
    for _, module in reducers.fsdp:
        module.reshard()
