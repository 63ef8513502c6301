"""What an optimizer remembers beside its `state`, where neither a save nor a load would look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (list, tuple, set, frozenset)


def hidden_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Say what an optimizer holds that its own `state` does not show.

    That is what optimizers inside of it remember of their parameters, and tensors of a parameter's
    size, or of all parameters' together, which stand in an attribute.

    Args:
        optimizer: Any optimizer, or a wrapper of several.
        names: The name of each parameter by its id.

    Returns:
        One sentence for each place.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> hidden_state(torch.optim.AdamW(model.parameters()), {})
        []
    """
    stepped = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    shown = {p: optimizer.state.get(p, {}) for p in stepped.values()}
    known = {id(x) for values in shown.values() for x in values.values() if isinstance(x, Tensor)}
    sizes = {p.numel() for p in shown} | {sum(p.numel() for p in shown)}
    found: list[str] = []
    for place, held in _held_by(optimizer):
        if not isinstance(held, Tensor):
            kind = type(held).__name__
            found += [f"{place} ({kind}) remembers {what}" for what in _unshown(held, shown, names)]
        elif held.numel() > 1 and held.numel() in sizes and id(held) not in known:
            found.append(f"{place} is a tensor of shape {tuple(held.shape)}")
    return found


def _unshown(
    part: Any, shown: Mapping[Tensor, Mapping[str, Any]], names: Mapping[int, str]
) -> Iterator[str]:
    for p, values in part.state.items():
        other = shown.get(p, {}) if isinstance(p, Tensor) else {}
        missing = [key for key, value in values.items() if other.get(key) is not value]
        if missing:
            name = names.get(id(p), "a parameter that is in no stage")
            yield f"{', '.join(map(str, missing))} of {name}"


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the optimizers that an optimizer holds, and those that they hold.

    Examples:
        >>> optimizers_in(torch.optim.SGD(nn.Linear(1, 1).parameters()))
        []
    """
    return [held for _, held in _held_by(optimizer) if not isinstance(held, Tensor)]


def _held_by(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and the optimizers in an optimizer's attributes, with their places."""
    own = ("state", "param_groups", "defaults")
    rest = [(name, value) for name, value in vars(optimizer).items() if name not in own]
    seen = {id(optimizer)}
    while rest:
        place, value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield place, value
        elif isinstance(value, Mapping):
            rest += [(f"{place}[...]", held) for held in value.values()]
        elif isinstance(value, _PLAIN):
            rest += [(f"{place}[{i}]", held) for i, held in enumerate(value)]
        elif hasattr(value, "param_groups") and hasattr(value, "state"):
            yield place, value
            inner = [(name, x) for name, x in vars(value).items() if name not in own]
            rest += [(f"{place}.{name}", held) for name, held in inner]
