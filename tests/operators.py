"""Watch the operators that run in a `with` block."""

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
