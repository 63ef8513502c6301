"""Find optimizer state outside of `optimizer.state`, where neither a save nor a load looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SEQUENCES = (list, tuple, set, frozenset)
_OWN_ATTRIBUTES = ("state", "param_groups", "defaults")


def find_hidden_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """List the state of an optimizer that its own `state` does not contain.

    That is the state of optimizers inside it, and tensors in its attributes that have the size of a
    parameter or of all parameters together.

    Args:
        optimizer: Any optimizer, or a wrapper of several.
        names: The name of each parameter by its id.

    Returns:
        One sentence for each attribute.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> find_hidden_state(torch.optim.AdamW(model.parameters()), {})
        []
    """
    states = {
        p: optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]
    }
    values = [x for state in states.values() for x in state.values()]
    known = {id(x) for x in values if isinstance(x, Tensor)}
    total = sum(p.numel() for p in states)  # some optimizers have one flat buffer for all
    sizes = {p.numel() for p in states} | {total}
    problems: list[str] = []
    for path, value in _find_in_attributes(optimizer):
        if isinstance(value, Tensor):
            # Only the size distinguishes state from other tensors, such as a table of constants.
            if value.numel() > 1 and value.numel() in sizes and id(value) not in known:
                problems.append(f"{path} is a tensor of shape {tuple(value.shape)}")
            continue
        for p, state in value.state.items():
            outer = states.get(p, {}) if isinstance(p, Tensor) else {}
            missing = [str(key) for key, x in state.items() if outer.get(key) is not x]
            if missing:
                kind = type(value).__name__
                name = names.get(id(p), "a parameter that is in no stage")
                problems.append(f"{path} ({kind}) remembers {', '.join(missing)} of {name}")
    return problems


def find_inner_optimizers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the optimizers inside an optimizer, at any depth.

    Examples:
        >>> find_inner_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters()))
        []
    """
    return [x for _, x in _find_in_attributes(optimizer) if not isinstance(x, Tensor)]


def _find_in_attributes(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and the optimizers in an optimizer's attributes, with their paths."""
    pending = [
        (name, value) for name, value in vars(optimizer).items() if name not in _OWN_ATTRIBUTES
    ]
    # Objects may refer to each other in a circle.
    visited = {id(optimizer)}
    while pending:
        path, value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        # Parameters belong to the model, wherever an optimizer refers to them.
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield path, value
        elif isinstance(value, Mapping):
            pending += [(f"{path}[...]", x) for x in value.values()]
        elif isinstance(value, _SEQUENCES):
            pending += [(f"{path}[{i}]", x) for i, x in enumerate(value)]
        elif hasattr(value, "param_groups") and hasattr(value, "state"):
            # By its attributes and not its class: wrappers need not derive from Optimizer.
            yield path, value
            pending += [
                (f"{path}.{name}", x)
                for name, x in vars(value).items()
                if name not in _OWN_ATTRIBUTES
            ]
