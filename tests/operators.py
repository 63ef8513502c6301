"""Watch the operators that run in a `with` block, and let tensors pass for those of a device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """Calls `watch(operator, result)` after each operator."""

    def __init__(self, watch):
        super().__init__()
        self.watch_operator = watch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.watch_operator(function, result)
        return result


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on another device, "cpu:0", which torch makes of the host.

    Functions with a shorter way for tensors of the host take the way of a device, with values.
    """

    device = property(lambda _: torch.device("cpu", 0))


def move(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one that is on an accelerator."""
    return x.as_subclass(Elsewhere)
