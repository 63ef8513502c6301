"""Freeze and unfreeze parameters by pattern, as a function of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
from torch import nn

from trainkit.parallel.grad_reduction import find_reducers, fsdp_groups, reshard_
from trainkit.parallel.name_patterns import match_names
from trainkit.parallel.parameters import COPY_SUFFIX, get_named_parameters, is_base
from trainkit.types import ConfigError
from trainkit.weights.checkpoint.boxes import shorten


@attrs.frozen
class Freeze:
    """A pattern of parameters to freeze or to unfreeze.

    Attributes:
        pattern: A pattern of names of parameters, such as "layers.[01].**".
        frozen: Whether they are frozen or trained.
    """

    pattern: str
    frozen: bool = True


FreezeSchedule = Mapping[int, Sequence[Freeze]]
"""The changes at each of some steps."""


def select_frozen(
    names: Iterable[str], base: Sequence[Freeze], schedule: FreezeSchedule, step: int
) -> frozenset[str]:
    """Return the names of the parameters that are frozen in a step.

    `base` applies first, then the schedule's entries up to this step, in order. The last match of a
    name decides.

    Args:
        names: All parameters of the whole model, in every layout; a decoder's are the keys of
            `models.config.parameter_shapes(config)`.
        base: The patterns that apply from the start.
        schedule: Later changes, by step.
        step: The step about to be taken.

    Raises:
        ConfigError: A pattern is invalid or matches nothing, at any step.

    Examples:
        >>> schedule = {10: [Freeze("head.*", frozen=False)]}
        >>> names, base = ["embedding.weight", "head.weight"], [Freeze("**")]
        >>> sorted(select_frozen(names, base, schedule, 9))
        ['embedding.weight', 'head.weight']
        >>> sorted(select_frozen(names, base, schedule, 10))
        ['embedding.weight']
    """
    names = list(names)
    is_frozen: dict[str, bool] = {}
    for start, specs in [(0, base), *sorted(schedule.items())]:
        for spec in specs:
            # Patterns of later steps are matched too, so that a mistake raises before the run.
            matched = match_names(spec.pattern, names, function="select_frozen", kind="parameter")
            if start <= step:
                is_frozen |= dict.fromkeys(matched, spec.frozen)
    return frozenset(name for name, frozen in is_frozen.items() if frozen)


def make_freeze_facts(base: Sequence[Freeze], schedule: FreezeSchedule) -> dict[str, Any]:
    """Return the freezing schedule as a fact of the run, which a resume compares.

    Consecutive patterns that all freeze or all unfreeze mean the same in any order, so they are
    sorted.

    Examples:
        >>> make_freeze_facts([Freeze("norm.*"), Freeze("head.*")], {})
        {'freeze': [[0, 'head.*', True], [0, 'norm.*', True]]}
    """
    entries: list[list[Any]] = []
    for start, specs in [(0, base), *sorted(schedule.items())]:
        for frozen, group in groupby(specs, key=lambda spec: spec.frozen):
            entries += [[start, pattern, frozen] for pattern in sorted({x.pattern for x in group})]
    return {"freeze": entries}


def apply_freeze_(stages: Iterable[nn.Module], frozen: Collection[str]) -> None:
    """Freeze some parameters and train all others, before any step.

    Optimizers must have all parameters that any step trains, so make them before the first call. A
    frozen parameter gets no gradient and no update, and its moments stay. A run calls this with
    `select_frozen(..., state.step)` before each step in which the set changes, and after a resume.

    Args:
        stages: This rank's stages, in any layout without DDP.
        frozen: The names of frozen parameters; names of other stages are ignored.

    Raises:
        ConfigError: A parameter to train belongs to a base that checkpoints leave out; or DDP
            reduces the gradients, and fixes which ones when it is set up.

    Effects:
        Sets `requires_grad` of every parameter, and updates FSDP2's record of it.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> apply_freeze_([model], {"bias"})
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['weight']
    """
    stages = list(stages)
    reducers = [find_reducers(stage) for stage in stages]
    if any(reducer.ddp for reducer in reducers):
        raise ConfigError(
            "apply_freeze_: DDP has fixed which gradients it waits for; take fsdp()", where="DDP"
        )
    for reducer in reducers:
        reshard_(reducer)  # FSDP's sharded parameters are those whose flag counts
    # A rank with the first and the last stage has a tied embedding twice, under one name here.
    named: dict[str, list[nn.Parameter]] = {}
    for name, p in get_named_parameters(stages).items():
        named.setdefault(name.removesuffix(COPY_SUFFIX), []).append(p)
    lost = [
        name
        for name, parameters in named.items()
        if name not in frozen and any(map(is_base, parameters))
    ]
    if lost:
        raise ConfigError(
            f"apply_freeze_: {shorten(lost)} would be trained, and is of a base that no "
            "checkpoint holds; leave exclude_frozen_ out, or keep it frozen",
            where=lost[0],
        )
    for name, parameters in named.items():
        for p in parameters:
            p.requires_grad_(name not in frozen)
    for reducer in reducers:
        for _, module in reducer.fsdp:
            for unit in fsdp_groups(module):
                # A unit that was frozen in its first forward pass has no reduce dtype yet.
                unit._init_mp_dtypes()  # noqa: SLF001 (FSDP2 calls it once, in the first forward pass)
