"""Find the operation that first makes a NaN."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.parallel.grad_reduction import get_local
from trainkit.phases import get_phase_times
from trainkit.types import NumericsError

# Operators whose results are whatever stood in memory: unused, or bytes under another dtype.
_UNREAD = ("empty", "new_empty", "resize", "view.dtype")


@contextlib.contextmanager
def find_first_nan(get_step: Callable[[], int] | None = None) -> Iterator[None]:
    """Raise at the first operation of a block that makes a NaN from numbers without one.

    Both passes are watched: the traceback of an operation of the forward pass is where it was
    called, and for one of the backward pass torch prints where its forward pass was called
    (`torch.autograd.set_detect_anomaly`). Infinities are no fault, since masks are made of them.
    Every operation waits for the device, so a step takes many times as long. Compiled code is seen
    as a whole. Evaluations and samples of a run (`phases.BETWEEN_STEPS`) are not watched.

    Args:
        get_step: Returns the step that is being taken, for the message.

    Raises:
        NumericsError: An operation makes a NaN; the message has its name and the shapes of its
            arguments.

    Examples:
        >>> with find_first_nan():
        ...     x = torch.zeros(2)
        ...     y = x / x
        Traceback (most recent call last):
        trainkit.types.NumericsError: find_first_nan: aten.div.Tensor makes 2 NaN of 2 ...
    """
    with torch.autograd.set_detect_anomaly(True, check_nan=False), _Watch(get_step):
        yield


class _Watch(TorchDispatchMode):
    """Looks at the results of every operator."""

    def __init__(self, get_step: Callable[[], int] | None) -> None:
        super().__init__()
        self.get_step = get_step

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        times = get_phase_times()
        if times is not None and times.is_between_steps():
            return func(*args, **kwargs)
        # Before the call: an operator may write into its arguments.
        arguments = tree_leaves((args, kwargs))
        was_nan = any(_count_nan(x) for x in arguments)
        results = func(*args, **kwargs)
        if was_nan or func.name().rpartition("::")[2].startswith(_UNREAD):
            return results
        # Operators on lists, as an optimizer's, return nothing: their results are in the arguments.
        made = [results, arguments] if func._schema.is_mutable else results  # noqa: SLF001
        for result in tree_leaves(made):
            if count := _count_nan(result):
                shapes = [
                    list(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
                ]
                step = None if self.get_step is None else self.get_step()
                raise NumericsError(
                    f"find_first_nan: {'' if step is None else f'in step {step} '}{func} makes "
                    f"{count} NaN of {result.numel()} values from arguments of shapes {shapes}, "
                    "which had none",
                    where=str(func),
                    got=count,
                    step=step,
                )
        return results


def _count_nan(x: Any) -> int:
    if isinstance(x, float):  # a fill value, as of `torch.full`
        return int(math.isnan(x))
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return 0
    local = get_local(x)
    return int(local.isnan().sum()) if local.device.type != "meta" else 0
