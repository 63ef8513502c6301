"""Gradient reduction by FSDP2 and DDP: sums, not averages; per step, not per microbatch.

A gradient is divided once, by the number of valid tokens in the global batch. A library that also
divides by the number of ranks gives wrong numbers, so averaging is switched off, and a module that
still averages is refused.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotation with the class.

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

Reduce = Literal["last", "each"]
_BROKEN_OFF = "_trainkit_broken_off"


@attrs.frozen(eq=False)
class Reducers:
    """The modules inside a model that reduce gradients, by name: FSDP2's, DDP's, and foreign ones.

    Foreign ones (FSDP1 and composable `replicate`) always average, and are known to be refused.
    """

    fsdp: Sequence[tuple[str, Any]] = ()
    ddp: Sequence[tuple[str, Any]] = ()
    foreign: Sequence[tuple[str, Any]] = ()

    def __bool__(self) -> bool:
        return bool(self.fsdp or self.ddp or self.foreign)


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
    )


def _fsdp_groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a module: one attribute in torch 2.11, a list in 2.13."""
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
    """Keep gradients that DDP has reduced out of its next reduction; add them afterwards.

    Effects:
        Sets the `.grad` of DDP's parameters aside for the length of the block.
    """
    held: list[tuple[nn.Parameter, Tensor]] = []
    for _, module in reducers.ddp:
        for parameter in module.parameters():
            if parameter.grad is not None:
                held.append((parameter, parameter.grad.clone()))
                parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in held:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def reshard_(reducers: Reducers) -> None:
    """Free the gathered parameters of FSDP2 modules, so that the model shows its shards again.

    Effects:
        After a forward pass without backward, FSDP2 leaves the root's parameters gathered; this
        undoes it.
    """
    for _, module in reducers.fsdp:
        module.reshard()
