"""Which parameters an optimizer treats alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.parallel.parameters import COPY_SUFFIX, fitting_names
from trainkit.types import SOLO, Axis, ConfigError, check_range

Named = Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


def check_numbers(optimizer: str, group: Mapping[str, Any]) -> None:
    """Refuse a group's lr, weight_decay, eps, betas and momentum that are out of their range.

    Raises:
        ValueError: One is.

    Examples:
        >>> check_numbers("Momentum", {"lr": 0.1, "momentum": 1.5})
        Traceback (most recent call last):
        ...
        ValueError: Momentum: momentum must be at least 0 and below 1, got 1.5
    """
    for option in ("lr", "weight_decay", "eps"):
        check_range(optimizer, at_least=0, **{option: group.get(option)})
    check_range(optimizer, at_least=0, below=1, momentum=group.get("momentum"))
    if (betas := group.get("betas")) is not None:
        if len(betas) != 2:
            raise ValueError(f"{optimizer}: betas must be two numbers, got {betas}")
        for index, beta in enumerate(betas):
            check_range(optimizer, at_least=0, below=1, **{f"betas[{index}]": beta})


def decay_groups(named_parameters: Named, *, weight_decay: float) -> list[dict[str, Any]]:
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
            given, with its "param_names".

    Raises:
        ValueError: if there is no parameter, or `weight_decay` is negative or not finite.

    Examples:
        >>> from torch import nn
        >>> groups = decay_groups(nn.Linear(3, 2).named_parameters(), weight_decay=0.1)
        >>> [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in groups]
        [(0.1, [(2, 3)]), (0.0, [(2,)])]
    """
    check_range("decay_groups", at_least=0, weight_decay=weight_decay)
    is_mapping = isinstance(named_parameters, Mapping)
    pairs: Any = list(named_parameters.items() if is_mapping else named_parameters)
    if not pairs:
        raise ValueError("decay_groups: at least one parameter is needed, got none")
    return grouped(pairs, weight_decay=weight_decay)


def grouped(
    pairs: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return the groups of `decay_groups`, of any number of parameters.

    Examples:
        >>> [group["params"] for group in grouped([], weight_decay=0.1)]
        [[], []]
    """
    unique: dict[int, tuple[str, nn.Parameter]] = {}
    for name, p in pairs:
        unique.setdefault(id(p), (name, p))
    trained = [(name, p) for name, p in unique.values() if p.requires_grad]
    parts = [(weight_decay, [x for x in trained if x[1].ndim >= 2])]
    parts += [(0.0, [x for x in trained if x[1].ndim < 2])]
    return [
        {
            "params": [p for _, p in part],
            "param_names": [name for name, _ in part],
            "weight_decay": decay,
        }
        for decay, part in parts
    ]


def split_by_pattern(
    named: Mapping[str, nn.Parameter], patterns: Sequence[str], *, axis: Axis = SOLO
) -> list[dict[str, nn.Parameter]]:
    r"""Return the parameters that each regular expression matches as a whole, then the rest.

    Args:
        named: The parameters of this rank, by their names in the whole model.
        patterns: Regular expressions of such names.
        axis: The ranks that hold the parts of the model, `ps.pp`: a pattern must match a name of
            the whole.

    Raises:
        ConfigError: A pattern is none, or matches nothing; or two match the same name.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 3), "head": nn.Linear(3, 4)})
        >>> parts = split_by_pattern(dict(model.named_parameters()), [r".*\.bias", "head.weight"])
        >>> [list(part) for part in parts]
        [['up.bias', 'head.bias'], ['head.weight'], ['up.weight']]
    """
    own = [name.removesuffix(COPY_SUFFIX) for name in named]
    names = list(dict.fromkeys(name for part in all_gather_objects(own, axis) for name in part))
    owner: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        for name in fitting_names(pattern, names, by="optimizer groups", what="parameter"):
            if name in owner:
                both = f"{patterns[owner[name]]!r} and {pattern!r}"
                told = f"optimizer groups: {name} is matched by {both}; a parameter is in one group"
                raise ConfigError(told, where="pattern", got=pattern)
            owner[name] = index
    parts: list[dict[str, nn.Parameter]] = [{} for _ in (*patterns, None)]
    for name, whole in zip(named, own, strict=True):
        parts[owner.get(whole, -1)][name] = named[name]
    return parts
