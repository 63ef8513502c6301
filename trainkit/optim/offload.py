"""What an optimizer remembers, in host memory: on the device one parameter's at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from trainkit.grads import stepping_alone
from trainkit.parallel.grad_reduction import local_of


def offload_optimizer_(optimizer: torch.optim.Optimizer) -> None:
    """Keep what an optimizer remembers in host memory, whose parameters are on a device.

    A step brings what it remembers of a parameter to the device, steps that parameter there, and
    puts it back; so no bit of the result changes, and checkpoints are those of any other run.
    Optimizers that share out work, as `Muon` does, have one matrix at a time to share. Where
    parameters are in host memory themselves (`Layout.cpu_offload`), copies gain nothing.

    Args:
        optimizer: Any optimizer, or several as one.

    Effects:
        Replaces `optimizer.step`, which waits for the device from now on. What is remembered
        already is moved by the next step.

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
    """Say whether `offload_optimizer_` has been called with an optimizer.

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
        with stepping_alone(self.optimizer) as hold:
            for p in params:  # without a gradient too: other ranks may have one
                kept = {x: y for x, y in state.get(p, {}).items() if _is_large(y)}
                for name, x in kept.items():
                    state[p][name] = x.to(p.device, copy=True, non_blocking=True)
                hold(p)
                self.step()
                for name, x in state.get(p, {}).items():
                    if _is_large(x):
                        state[p][name] = _put_back(x, kept.get(name))
        return loss


def _is_large(x: Any) -> bool:
    """Say whether something is moved: counts stay where their optimizer wants them."""
    return isinstance(x, Tensor) and x.dim() > 0


def _put_back(x: Tensor, kept: Tensor | None) -> Tensor:
    if kept is None or local_of(kept).device.type != "cpu":
        return in_host_memory(x)
    local_of(kept).copy_(local_of(x))
    return kept


def in_host_memory(x: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, placed as it; pinned, where there is a GPU.

    Examples:
        >>> in_host_memory(torch.ones(2))
        tensor([1., 1.])
    """
    copied = x.to("cpu", copy=True)
    if torch.cuda.is_available():
        local = local_of(copied)
        local.data = local.pin_memory()
    return copied
