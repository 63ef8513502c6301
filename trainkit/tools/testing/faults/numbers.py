"""Numbers that go wrong: a loss, a gradient, a parameter, a moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainkit.parallel.parameters import canonical_name, get_local_box, get_named_parameters
from trainkit.tools.testing.faults.steps import At, Injector, Ranks, act_at, until_next
from trainkit.types import Hidden, RoutedOutput

_Value = float | Callable[[Tensor], Tensor]  # what is written, or makes it of what was there
_Handles = Mapping[int, RemovableHandle]  # hooks, by the id of what has them


def nan_loss_at(
    at: At, stages: Sequence[nn.Module], *, rank: Ranks = None, value: float = math.nan
) -> Injector:
    """Return an injector that makes the loss of a step NaN, and with it every gradient.

    What this rank's last stage returns is multiplied with `value`, in all microbatches, and again
    when the step is taken again before the next one; an evaluation is not touched.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        value: NaN, an infinity, or a number such as 10 for a spike.

    Examples:
        >>> from trainkit.types import TrainState
        >>> model = nn.Linear(1, 1)
        >>> def train_step(state, batch):
        ...     return state, model(torch.ones(1)).item()
        >>> nan_loss_at(1, [model])(train_step)(TrainState(), None)[1]
        nan
        >>> math.isfinite(train_step(TrainState(), None)[1])
        True
    """

    def scaled(stage: nn.Module, __: Any, output: Any) -> Any:
        if not stage.training:
            return output
        if isinstance(output, RoutedOutput):
            return RoutedOutput(scaled(stage, None, output.output), output.sums)
        if isinstance(output, tuple):  # in place of logits
            hidden, *weight = output
            return Hidden(hidden * value, *weight)
        return output * value

    def hook() -> _Handles:
        return {0: stages[-1].register_forward_hook(scaled)}

    return until_next(at, lambda: _use_hook(hook), rank=rank)


def nan_gradient_at(
    at: At,
    stages: Sequence[nn.Module],
    *,
    rank: Ranks = None,
    name: str | None = None,
    element: int = 0,
    value: float = math.nan,
) -> Injector:
    """Return an injector that puts a number into a gradient of a step; the loss stays finite.

    It is this rank's own gradient, of every microbatch, before ranks are summed over, and again
    when the step is taken again before the next one.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        element: Which element of the parameter, as the backward pass has it on this rank.
        value: NaN, or an infinity.

    Examples:
        >>> from trainkit.types import TrainState
        >>> model = nn.Linear(1, 1)
        >>> def train_step(state, batch):
        ...     model(torch.ones(1)).sum().backward()
        ...     return state, model.bias.grad
        >>> nan_gradient_at(1, [model], name="bias")(train_step)(TrainState(), None)[1]
        tensor([nan])
    """

    def spoiled(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        _write(gradient, element, value)
        return gradient

    def hook() -> _Handles:
        modules, leaf = _find_owner(stages, name or _find_first_name(stages))
        handles: dict[int, RemovableHandle] = {}

        # FSDP puts the gathered parameter in place for the forward pass: it is hooked when there.
        def hook_parameter(*_: Any) -> None:
            # not get_parameter, which finds what `precision` shows in its place
            parameter = dict(modules[-1].named_parameters(recurse=False))[leaf]
            if id(parameter) not in handles:
                handles[id(parameter)] = parameter.register_hook(spoiled)

        for module in modules:
            handles[id(module)] = module.register_forward_pre_hook(hook_parameter)
        return handles

    return until_next(at, lambda: _use_hook(hook), rank=rank)


def nan_parameter_at(
    at: At,
    stages: Sequence[nn.Module],
    *,
    rank: Ranks = None,
    name: str | None = None,
    element: int = 0,
    value: float = math.nan,
) -> Injector:
    """Return an injector that overwrites an element of a parameter before a step.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        element: Which element of this rank's part.
        value: What is written.

    Examples:
        >>> from trainkit.types import TrainState
        >>> model = nn.Linear(1, 1)
        >>> step = nan_parameter_at(1, [model])(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> model.weight.data
        tensor([[nan]])
    """
    return _overwrite_at(at, rank, lambda: _get_parameter(stages, name), element, value)


def nan_moment_at(
    at: At,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    rank: Ranks = None,
    name: str | None = None,
    moment: str = "exp_avg",
    element: int = 0,
    value: float = math.nan,
) -> Injector:
    """Return an injector that overwrites an element of an optimizer's moment before a step.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        optimizer: Their optimizer, which has taken a step.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        moment: Which of the optimizer's tensors.
        element: Which element of this rank's part.
        value: What is written.

    Examples:
        >>> from trainkit.types import TrainState
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1)).sum().backward()
        >>> optimizer.step()
        >>> step = nan_moment_at(2, [model], optimizer)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(step=1), None)
        >>> optimizer.state[model.weight]["exp_avg"]
        tensor([[nan]])
    """

    def moment_of() -> Tensor:
        return optimizer.state[_get_parameter(stages, name)][moment]

    return _overwrite_at(at, rank, moment_of, element, value)


def flip_bit_at(
    at: At,
    stages: Sequence[nn.Module],
    *,
    rank: Ranks = None,
    name: str | None = None,
    element: int = 0,
    bit: int = 20,
) -> Injector:
    """Return an injector that flips one bit of a parameter before a step: a replica that drifts.

    Args:
        at: When; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        element: Which element of this rank's part.
        bit: Which bit of it; 0 is the last of the mantissa, which the next update may round away.

    Examples:
        >>> from trainkit.types import TrainState
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> step = flip_bit_at(1, [model], bit=22)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> model.weight.data
        tensor([[1.5000]])
    """

    def flipped(value: Tensor) -> Tensor:
        value = value.reshape(1).clone()
        value.view(torch.uint8)[bit // 8] ^= 1 << bit % 8  # the machine is little-endian
        return value[0]

    return _overwrite_at(at, rank, lambda: _get_parameter(stages, name), element, flipped)


def _find_first_name(stages: Sequence[nn.Module]) -> str:
    """Return the name of the first trainable parameter with elements on this rank."""
    named = get_named_parameters(stages)
    return next(n for n, p in named.items() if p.requires_grad and get_local_box(p).local.numel())


def _get_parameter(stages: Sequence[nn.Module], name: str | None) -> nn.Parameter:
    named = get_named_parameters(stages)
    if name is not None and name not in named:
        raise _unknown_parameter(name, stages)
    return named[name or _find_first_name(stages)]


def _unknown_parameter(name: str, stages: Sequence[nn.Module]) -> ValueError:
    known = ", ".join(get_named_parameters(stages))
    return ValueError(f"faults: no parameter is called {name!r}; there are {known}")


def _find_owner(stages: Sequence[nn.Module], name: str) -> tuple[list[nn.Module], str]:
    """Return the modules from a stage down to the one that owns a parameter, and its name there."""
    for stage in stages:
        for path, module in stage.named_modules():
            for leaf, _ in module.named_parameters(recurse=False):
                if canonical_name(f"{path}.{leaf}" if path else leaf) == name:
                    parts = path.split(".") if path else []
                    above = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
                    return [stage.get_submodule(part) for part in above], leaf
    raise _unknown_parameter(name, stages)


def _find_element(tensor: Tensor, element: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return this rank's shard of a tensor, sharing memory, and the index of an element in it."""
    local = get_local_box(tensor).local
    if not 0 <= element < local.numel():
        raise ValueError(f"faults: this rank has {local.numel()} elements, none is {element}")
    return local, torch.unravel_index(torch.tensor(element), local.shape)


def _write(tensor: Tensor, element: int, value: _Value) -> None:
    local, place = _find_element(tensor, element)
    local[place] = value(local[place]) if callable(value) else value


def _overwrite_at(
    at: At, ranks: Ranks, find: Callable[[], Tensor], element: int, value: _Value
) -> Injector:
    """Return an injector that overwrites an element of a tensor before a step."""
    return act_at(at, lambda _: _write(find(), element, value), rank=ranks)


@contextmanager
def _use_hook(hook: Callable[[], _Handles]) -> Iterator[None]:
    """Install a hook for a block, and remove all of its handles at the end."""
    handles = hook()
    try:
        yield
    finally:
        for handle in handles.values():
            handle.remove()
