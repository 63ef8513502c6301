"""Optimizer state in host memory; on the device there is the state of one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from trainkit.grads import use_single_parameter
from trainkit.parallel.grad_reduction import get_local


def offload_optimizer_(optimizer: torch.optim.Optimizer) -> None:
    """Store the state of an optimizer in host memory, while its parameters are on a device.

    A step copies the state of a parameter to the device, steps that parameter there, and copies
    the state back. Results are bitwise unchanged, and so are checkpoints. `Muon`, which distributes
    its matrices over ranks, then has one matrix at a time to distribute. If parameters are in host
    memory as well (`Layout.cpu_offload`), the copies gain nothing.

    Args:
        optimizer: Any optimizer, or the result of `combine_optimizers`.

    Effects:
        Replaces `optimizer.step`, which then waits for the device. The next step moves existing
        state.

    References:
        Ren et al., "ZeRO-Offload" (2021).

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.5)
        >>> offload_optimizer_(optimizer)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.data, optimizer.state[weight]["exp_avg"]
        (tensor([0.4950, 0.4950]), tensor([0.1000, 0.1000]))
    """
    vars(optimizer)["step"] = _Offloaded(optimizer, optimizer.step)


def is_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `offload_optimizer_` has been called with an optimizer.

    Examples:
        >>> is_offloaded(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
        False
    """
    return isinstance(optimizer.step, _Offloaded)


@attrs.frozen(eq=False)
class _Offloaded:
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]

    @torch.no_grad()
    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = self.optimizer.state
        with use_single_parameter(self.optimizer) as select:
            for p in params:  # without a gradient too: other ranks may have one
                on_host = {x: y for x, y in state.get(p, {}).items() if _is_moved(y)}
                for name, x in on_host.items():
                    state[p][name] = x.to(p.device, copy=True, non_blocking=True)
                select(p)
                self.step()
                for name, x in state.get(p, {}).items():
                    if not _is_moved(x):
                        continue
                    host = on_host.get(name)
                    if host is None or get_local(host).device.type != "cpu":
                        state[p][name] = copy_to_pinned(x)  # new state, or loaded onto the device
                    else:
                        get_local(host).copy_(get_local(x))
                        state[p][name] = host
        return loss


def _is_moved(x: Any) -> bool:
    # Counters stay on the device that their optimizer requires.
    return isinstance(x, Tensor) and x.dim() > 0


def copy_to_pinned(x: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, with the same placements; pinned if there is a GPU.

    Examples:
        >>> copy_to_pinned(torch.ones(2))
        tensor([1., 1.])
    """
    copied = x.to("cpu", copy=True)
    if torch.cuda.is_available():  # only from pinned memory are copies to the device asynchronous
        local = get_local(copied)
        local.data = local.pin_memory()
    return copied
