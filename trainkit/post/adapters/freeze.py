"""What is trained, by patterns and by the step: a function of a counter, as all else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
from torch import nn

from trainkit.parallel.grad_reduction import find_reducers, fsdp_groups, reshard_
from trainkit.parallel.parameters import COPY_SUFFIX, get_named_parameters, is_base, match_names
from trainkit.types import ConfigError
from trainkit.weights.checkpoint.boxes import shorten


@attrs.frozen
class Freeze:
    """Which parameters are frozen from some step on, or trained again.

    Attributes:
        pattern: A regular expression, which matches the whole of a parameter's name.
        frozen: Whether what it matches is frozen.
    """

    pattern: str
    frozen: bool = True


Schedule = Mapping[int, Sequence[Freeze]]
"""What holds from each of some steps on."""


def select_frozen(
    names: Iterable[str], base: Sequence[Freeze], schedule: Schedule, step: int
) -> frozenset[str]:
    """Return which parameters are frozen in a step: of all that match, the last word counts.

    First speaks `base`, then the schedule from each step up to this one, in order.

    Args:
        names: All parameters of the whole model, in every layout; a decoder's are the keys of
            `models.config.parameter_shapes(config)`.
        base: What holds from the beginning.
        schedule: What changes later.
        step: The step about to be taken.

    Raises:
        ConfigError: A pattern is none, or matches nothing, whenever it would speak.

    Examples:
        >>> schedule = {10: [Freeze("head.*", frozen=False)]}
        >>> names, base = ["embedding.weight", "head.weight"], [Freeze(".*")]
        >>> sorted(select_frozen(names, base, schedule, 9))
        ['embedding.weight', 'head.weight']
        >>> sorted(select_frozen(names, base, schedule, 10))
        ['embedding.weight']
    """
    names = list(names)
    found: dict[str, bool] = {}
    for start, specs in [(0, base), *sorted(schedule.items())]:
        for spec in specs:
            matched = match_names(spec.pattern, names, function="select_frozen", kind="parameter")
            if start <= step:
                found |= dict.fromkeys(matched, spec.frozen)
    return frozenset(name for name, frozen in found.items() if frozen)


def make_freeze_facts(base: Sequence[Freeze], schedule: Schedule) -> dict[str, Any]:
    """Return the fact that a run is continued with: what is frozen when.

    Patterns that follow one another and say the same, frozen or not, mean the same in any order,
    and stand in the alphabet's.

    Examples:
        >>> make_freeze_facts([Freeze("norm.*"), Freeze("head.*")], {})
        {'freeze': [[0, 'head.*', True], [0, 'norm.*', True]]}
    """
    found: list[list[Any]] = []
    for start, specs in [(0, base), *sorted(schedule.items())]:
        for frozen, alike in groupby(specs, key=lambda spec: spec.frozen):
            found += [[start, pattern, frozen] for pattern in sorted({x.pattern for x in alike})]
    return {"freeze": found}


def apply_freeze_(stages: Iterable[nn.Module], frozen: Collection[str]) -> None:
    """Freeze some parameters, and train all others; before a step, between steps as well.

    Optimizers must hold all that is trained in any step (make them before the first call); what is
    frozen has no gradient, is not stepped, and keeps its moments. A run calls it with
    `select_frozen(..., state.step)` before each step in which that changes, and after a resume.

    Args:
        stages: This rank's stages, in any layout but with DDP.
        frozen: The names of what is frozen; those of other stages may be among them.

    Raises:
        ConfigError: A parameter would be trained which is of a base that no checkpoint holds; or
            DDP reduces gradients, which has fixed what it waits for.

    Effects:
        Sets `requires_grad` of every parameter, and what FSDP2 knows of it.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> apply_freeze_([model], {"bias"})
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['weight']
    """
    stages = list(stages)
    reducers = [find_reducers(stage) for stage in stages]
    if any(found.ddp for found in reducers):
        raise ConfigError(
            "apply_freeze_: DDP has fixed which gradients it waits for; take fsdp()", where="DDP"
        )
    for found in reducers:
        reshard_(found)
    named = {name.removesuffix(COPY_SUFFIX): [] for name in get_named_parameters(stages)}
    for name, p in get_named_parameters(stages).items():
        named[name.removesuffix(COPY_SUFFIX)].append(p)
    lost = [name for name, ps in named.items() if name not in frozen and any(map(is_base, ps))]
    if lost:
        raise ConfigError(
            f"apply_freeze_: {shorten(lost)} would be trained, and is of a base that no "
            "checkpoint holds; leave exclude_frozen_ out, or keep it frozen",
            where=lost[0],
        )
    for name, ps in named.items():
        for p in ps:
            p.requires_grad_(name not in frozen)
    for found in reducers:
        for _, module in found.fsdp:
            for unit in fsdp_groups(module):
                # A unit in which all was frozen at first does not know what to reduce in.
                unit._init_mp_dtypes()  # noqa: SLF001 (once, at the first forward pass, else)
