"""Faults of numbers: NaN in a loss, a gradient, a parameter or a moment, and flipped bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainkit.parallel.parameters import canonical_name, get_local_box, get_named_parameters
from trainkit.tools.testing.faults.steps import At, Injector, Ranks, act_at, until_next, wrap_step
from trainkit.types import Hidden, RoutedOutput

_Value = float | Callable[[Tensor], Tensor]  # the new value, or a function of the old one
_Handles = Mapping[int, RemovableHandle]  # of hooks, by the id of their module or parameter


def nan_loss_at(
    at: At, stages: Sequence[nn.Module], *, rank: Ranks = None, value: float = math.nan
) -> Injector:
    """Return an injector that makes the loss of a step NaN, and with it every gradient.

    The output of this rank's last stage is multiplied by `value` in all microbatches, and again if
    the same batch is computed once more before the next step. Evaluations are unchanged.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: The ranks; all by default.
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
        # An evaluation runs the same hook.
        if not stage.training:
            return output
        if isinstance(output, RoutedOutput):
            return RoutedOutput(scaled(stage, None, output.output), output.sums)
        if isinstance(output, tuple):  # of a decoder with head="hidden"
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
    """Return an injector that overwrites an element of a gradient; the loss stays finite.

    It changes this rank's gradient of every microbatch, before any reduction over ranks, and again
    if the same batch is computed once more before the next step.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: The ranks; all by default.
        name: The parameter's name in the whole model; by default the first trainable one with
            elements on this rank.
        element: The index of the element in the gradient that backward computes on this rank.
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

    def overwrite(gradient: Tensor) -> Tensor:
        # A hook must not write into its argument (torch.Tensor.register_hook).
        gradient = gradient.clone()
        _write_element(gradient, element, value)
        return gradient

    def hook() -> _Handles:
        modules, leaf = _find_owner(stages, name or _find_first_name(stages))
        handles: dict[int, RemovableHandle] = {}

        # FSDP puts the gathered parameter in place for the forward pass, so only then it can be
        # hooked.
        def hook_parameter(*_: Any) -> None:
            # Not `get_parameter`, which would return the cast copy that `precision` shows instead.
            parameter = dict(modules[-1].named_parameters(recurse=False))[leaf]
            if id(parameter) not in handles:
                handles[id(parameter)] = parameter.register_hook(overwrite)

        # Any of them may be the unit that FSDP gathers, and the hook of the innermost runs last.
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
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: The ranks; all by default.
        name: The parameter's name in the whole model; by default the first trainable one with
            elements on this rank.
        element: The index of the element in this rank's shard.
        value: The value to write.

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
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        optimizer: Their optimizer, which has taken a step.
        rank: The ranks; all by default.
        name: The parameter's name in the whole model; by default the first trainable one with
            elements on this rank.
        moment: The key of the tensor in the optimizer's state.
        element: The index of the element in this rank's shard.
        value: The value to write.

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
    return _overwrite_at(
        at,
        rank,
        lambda: optimizer.state[_get_parameter(stages, name)][moment],
        element,
        value,
    )


def large_update_at(
    at: At,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    factor: float,
    rank: Ranks = None,
    name: str | None = None,
) -> Injector:
    """Return an injector that multiplies updates, as a learning rate that is too high does.

    Rules that multiply the rate with all that they add, as SGD and AdamW do, take the step of a
    rate that is `factor` times as high. A parameter that a step does not change stays as it is.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        optimizer: Their optimizer.
        factor: What to multiply with.
        rank: The ranks; all by default, since replicas would differ otherwise.
        name: The parameter's name in the whole model; by default all.

    Effects:
        Registers two hooks of the optimizer, for as long as it lives. What is watched by hooks
        that are registered later, as `run.layers.watch_layers` does, has the multiplied update.

    Examples:
        >>> from trainkit.types import TrainState
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> _ = nn.init.ones_(model.weight)
        >>> def train_step(state, batch):
        ...     model.weight.grad = torch.ones(1, 1)
        ...     return state, optimizer.step()
        >>> step = large_update_at(1, [model], optimizer, factor=4.0)(train_step)
        >>> _ = step(TrainState(), None)
        >>> model.weight.data
        tensor([[-1.]])
    """
    is_active = False
    before: dict[str, Tensor] = {}

    def get_parameters() -> Mapping[str, nn.Parameter]:
        return (
            get_named_parameters(stages) if name is None else {name: _get_parameter(stages, name)}
        )

    def remember(*_: Any) -> None:
        if is_active:
            before.update({key: p.detach().clone() for key, p in get_parameters().items()})

    @torch.no_grad()
    def enlarge(*_: Any) -> None:
        for key, old in before.items():
            parameter = get_parameters()[key]
            parameter.add_(parameter - old, alpha=factor - 1.0)
        before.clear()

    @contextmanager
    def be_active() -> Iterator[None]:
        nonlocal is_active
        is_active = True
        try:
            yield
        finally:
            is_active = False

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(enlarge)
    return wrap_step(at, be_active, rank=rank)


def flip_bit_at(
    at: At,
    stages: Sequence[nn.Module],
    *,
    rank: Ranks = None,
    name: str | None = None,
    element: int = 0,
    bit: int = 20,
) -> Injector:
    """Return an injector that flips one bit of a parameter before a step, on one replica, say.

    Args:
        at: The steps; see `trainkit.tools.testing.faults.steps`.
        stages: This rank's stages.
        rank: The ranks; all by default.
        name: The parameter's name in the whole model; by default the first trainable one with
            elements on this rank.
        element: The index of the element in this rank's shard.
        bit: The index of the bit; 0 is the lowest of the mantissa, which the next update may round
            away.

    Examples:
        >>> from trainkit.types import TrainState
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> step = flip_bit_at(1, [model], bit=22)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> model.weight.data
        tensor([[1.5000]])
    """

    def flip(value: Tensor) -> Tensor:
        # A 0-d tensor has no view of another element size.
        value = value.reshape(1).clone()
        value.view(torch.uint8)[bit // 8] ^= 1 << bit % 8  # the machine is little-endian
        return value[0]

    return _overwrite_at(at, rank, lambda: _get_parameter(stages, name), element, flip)


def _find_first_name(stages: Sequence[nn.Module]) -> str:
    """Return the name of the first trainable parameter with elements on this rank."""
    named = get_named_parameters(stages)
    return next(n for n, p in named.items() if p.requires_grad and get_local_box(p).local.numel())


def _get_parameter(stages: Sequence[nn.Module], name: str | None) -> nn.Parameter:
    named = get_named_parameters(stages)
    if name is not None and name not in named:
        raise _make_unknown_error(name, stages)
    return named[name or _find_first_name(stages)]


def _make_unknown_error(name: str, stages: Sequence[nn.Module]) -> ValueError:
    known = ", ".join(get_named_parameters(stages))
    return ValueError(f"faults: no parameter is called {name!r}; there are {known}")


def _find_owner(stages: Sequence[nn.Module], name: str) -> tuple[list[nn.Module], str]:
    """Return the modules from a stage down to the one that owns a parameter, and its name there."""
    for stage in stages:
        for path, module in stage.named_modules():
            for leaf, _ in module.named_parameters(recurse=False):
                if canonical_name(f"{path}.{leaf}" if path else leaf) == name:
                    # "a.b" gives the paths "", "a" and "a.b", from the stage down.
                    parts = path.split(".") if path else []
                    paths = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
                    return [stage.get_submodule(part) for part in paths], leaf
    raise _make_unknown_error(name, stages)


def _write_element(tensor: Tensor, element: int, value: _Value) -> None:
    """Overwrite one element of this rank's shard of a tensor."""
    local = get_local_box(tensor).local
    if not 0 <= element < local.numel():
        raise ValueError(f"faults: this rank has {local.numel()} elements, none is {element}")
    index = torch.unravel_index(torch.tensor(element), local.shape)
    local[index] = value(local[index]) if callable(value) else value


def _overwrite_at(
    at: At, ranks: Ranks, find: Callable[[], Tensor], element: int, value: _Value
) -> Injector:
    """Return an injector that overwrites an element of a tensor before a step."""
    return act_at(at, lambda _: _write_element(find(), element, value), rank=ranks)


@contextmanager
def _use_hook(hook: Callable[[], _Handles]) -> Iterator[None]:
    """Install a hook for a block, and remove all of its handles at the end."""
    handles = hook()
    try:
        yield
    finally:
        for handle in handles.values():
            handle.remove()
