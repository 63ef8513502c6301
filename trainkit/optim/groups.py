"""Parameter groups: matrices with decay and vectors without, and groups by patterns of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.parallel.name_patterns import match_names
from trainkit.parallel.parameters import COPY_SUFFIX
from trainkit.types import SOLO, Axis, ConfigError, check_range

Named = Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


def check_numbers(optimizer: str, group: Mapping[str, Any]) -> None:
    """Check the ranges of a group's lr, weight_decay, eps, betas and momentum.

    Raises:
        ValueError: One is out of range.

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
    """Return two parameter groups: matrices with weight decay, and vectors without.

    Parameters with two or more dimensions (weights, embeddings) decay. Gains of norms and biases
    do not: shrinking a gain is no regularization. Frozen parameters are omitted, and a parameter
    with two names (tied) is in one group only. Both groups are returned even if they are empty, so
    that all stages of a pipeline, and hence their checkpoints, have the same groups.

    Args:
        named_parameters: (name, parameter) pairs, or a mapping.
        weight_decay: The decay of the first group.

    Returns:
        Groups as `torch.optim` takes them, the one that decays first; each has its "param_names".

    Raises:
        ValueError: There is no parameter, or `weight_decay` is negative or not finite.

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
    return make_decay_groups(pairs, weight_decay=weight_decay)


def make_decay_groups(
    pairs: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return the groups of `decay_groups`, also of no parameters.

    Examples:
        >>> [group["params"] for group in make_decay_groups([], weight_decay=0.1)]
        [[], []]
    """
    # torch rejects a parameter that is in two groups, so a tied one keeps its first name only.
    unique: dict[int, tuple[str, nn.Parameter]] = {}
    for name, p in pairs:
        unique.setdefault(id(p), (name, p))
    trainable = [(name, p) for name, p in unique.values() if p.requires_grad]
    # By dimensions, not by names, which differ from model to model; but the biases of experts have
    # two, of which the first counts experts.
    vectors = [pair for pair in trainable if pair[1].ndim < 2 or pair[0].endswith("bias")]
    matrices = [pair for pair in trainable if pair[1].ndim >= 2 and not pair[0].endswith("bias")]
    groups = [(weight_decay, matrices), (0.0, vectors)]
    return [
        {
            "params": [p for _, p in members],
            "param_names": [name for name, _ in members],
            "weight_decay": decay,
        }
        for decay, members in groups
    ]


def split_by_pattern(
    named: Mapping[str, nn.Parameter], patterns: Sequence[str], *, axis: Axis = SOLO
) -> list[dict[str, nn.Parameter]]:
    """Split parameters by patterns of their names; the last part matches none.

    Args:
        named: The parameters of this rank, by their names in the whole model.
        patterns: Patterns of names, such as "head.*" and "**.bias"; see `name_patterns`.
        axis: The pipeline axis, `ps.pp`: a pattern must match a name on one of its ranks.

    Raises:
        ConfigError: A pattern is not complete, or matches no name; or two patterns match
            the same name.

    Effects:
        Communicates on `axis`.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 3), "head": nn.Linear(3, 4)})
        >>> parts = split_by_pattern(dict(model.named_parameters()), ["**.bias", "head.weight"])
        >>> [list(part) for part in parts]
        [['up.bias', 'head.bias'], ['head.weight'], ['up.weight']]
    """
    # A rank with the first and the last pipeline stage has a tied embedding twice, in one group.
    local_names = [name.removesuffix(COPY_SUFFIX) for name in named]
    by_rank = all_gather_objects(local_names, axis)
    # A pattern may match names of other stages only, and all stages must reject the same patterns.
    names = list(dict.fromkeys(name for rank in by_rank for name in rank))
    group_index: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        for name in match_names(pattern, names, function="optimizer groups", kind="parameter"):
            if name in group_index:
                raise ConfigError(
                    f"optimizer groups: {name} is matched by {patterns[group_index[name]]!r} and "
                    f"{pattern!r}; a parameter is in one group",
                    where="pattern",
                    got=pattern,
                )
            group_index[name] = index
    groups: list[dict[str, nn.Parameter]] = [{} for _ in (*patterns, None)]
    for name, full_name in zip(named, local_names, strict=True):
        # Index -1 is the last part: names that no pattern matches.
        groups[group_index.get(full_name, -1)][name] = named[name]
    return groups
