"""Which parameters an optimizer treats alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


def decay_groups(
    named_parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Return parameter groups that decay matrices and leave vectors alone.

    Parameters with two or more dimensions (weights, embeddings) decay; norms' gains and biases do
    not: pulling a gain towards zero is no regularization. Frozen parameters are left out, a
    parameter with two names (tied) counts once, and every trainable parameter is in exactly one
    group. Both groups are always there, if need be empty, so that all stages of a pipeline have the
    same ones, as a checkpoint wants it: one that is frozen as a whole takes every step with the
    others, and trains nothing.

    Args:
        named_parameters: (name, parameter) pairs, or a mapping.
        weight_decay: the decay of the first group.

    Returns:
        Groups as `torch.optim` takes them: the one that decays, then the other, each in the order
            given.

    Raises:
        ValueError: if there is no parameter, or `weight_decay` is negative or not finite.

    Examples:
        >>> from torch import nn
        >>> groups = decay_groups(nn.Linear(3, 2).named_parameters(), weight_decay=0.1)
        >>> [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in groups]
        [(0.1, [(2, 3)]), (0.0, [(2,)])]
    """
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(
            f"decay_groups: weight_decay must be finite and at least 0, got {weight_decay}"
        )
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    parameters = {id(p): p for _, p in pairs}.values()
    if not parameters:
        raise ValueError("decay_groups: at least one parameter is needed, got none")
    trainable = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
