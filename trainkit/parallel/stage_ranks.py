"""Where a rank's stages stand in the pipeline, and which parameters two of them share."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.models.call import call_model
from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.notes import Note
from trainkit.parallel.parameters import get_named_parameters, mark_tied_copy_
from trainkit.parallel.split import assign_stages
from trainkit.types import SOLO, Axis, Call, ConfigError, Layout, ParallelState, Stages


@attrs.frozen
class StagePlace:
    """Where a stage stands: its number, and the pipeline rank that holds each of them."""

    index: int
    ranks: tuple[int, ...]

    @property
    def last(self) -> bool:
        """Whether no stage follows."""
        return self.index == len(self.ranks) - 1


_PLACE = Note[StagePlace | None]("stage_place", default=None)
_TIED: Note[Mapping[str, tuple[int, int]]] = Note("tied_names", default=MappingProxyType({}))


def placed_(stage: nn.Module, place: StagePlace, tied: dict[str, tuple[int, int]]) -> nn.Module:
    """Write on a stage where it stands, and on its parameters which are copies of another's.

    Args:
        stage: A stage.
        place: Where it stands.
        tied: Of what two stages share by name: the owner's number, the copy's.

    Effects:
        Sets attributes of the stage and of its parameters.
    """
    _PLACE.write_(stage, place)
    _TIED.write_(stage, {name: pair for name, pair in tied.items() if place.index in pair})
    for name, parameter in get_named_parameters([stage]).items():
        if name in tied and place.index == tied[name][1]:
            mark_tied_copy_(parameter)
    return stage


def attach_axes(
    modules: Sequence[nn.Module],
    ps: ParallelState,
    *,
    schedule: str = "1f1b",
    call: Call = call_model,
) -> Stages:
    """Return modules as the stages of this rank, with the axes of a layout.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> attach_axes([nn.Linear(1, 1)], solo_parallel()).world.count
        1
    """
    axes = {x.name: getattr(ps, x.name) for x in attrs.fields(Stages) if x.type == "Axis"}
    layout = Layout(**ps.degrees, schedule=schedule)
    return Stages(modules=tuple(modules), call=call, layout=layout, **axes)


def as_stages(
    stages_or_model: Stages | nn.Module,
    by: str,
    *,
    axis: Axis = SOLO,
    call: Call | None = None,
) -> Stages:
    """Return a plain module as the only stage of its model; a `Stages` as it is.

    Args:
        stages_or_model: What `build_stages` or `make_stages` returned, or any module.
        by: The function that was called, for the message.
        axis: The ranks over which the data of a plain module is split. A `Stages` has its own.
        call: How a batch enters, in place of the stages' own and of `call_model`.

    Raises:
        ConfigError: It is neither.

    Effects:
        None; nothing is written, and the axes are only passed on.

    Examples:
        >>> len(as_stages(nn.Linear(1, 1), "evaluate"))
        1
    """
    if isinstance(stages_or_model, nn.Module):
        return Stages((stages_or_model,), call=call or call_model, dp=axis, loss=axis)
    if not isinstance(stages_or_model, Stages):
        raise ConfigError(
            f"{by}: it takes a module or a Stages, not a {type(stages_or_model).__name__}; pass "
            "what build_stages returned, or make_stages for modules that are stages already",
            where="stages",
            got=type(stages_or_model).__name__,
        )
    return stages_or_model if call is None else attrs.evolve(stages_or_model, call=call)


def make_stages(
    stages: Sequence[nn.Module],
    ps: ParallelState,
    *,
    schedule: str = "1f1b",
    tied: Collection[str] = (),
    call: Call = call_model,
) -> Stages:
    """Return modules that are pipeline stages already as a `Stages`.

    For a model that was cut by hand, in place of `build_stages`: each rank passes the stages that
    it holds. A stage needs a method `boundary(batch)`, which gives the shape
    and dtype of what it passes on as a tensor on the meta device. Transforms come before: call this
    with modules that are sharded already.

    Args:
        stages: This rank's stages, first ones first. Parameters have the names that they have in
            the whole model: blocks under their own numbers, `nn.ModuleDict({"3": block})`.
        ps: The layout.
        schedule: The schedule, a name of `parallel.split.SCHEDULES`; with several stages on a rank
            one that places them so: rank r of P holds stages r, P + r, ... ("interleaved_1f1b"), or
            r and 2P - 1 - r ("zero_bubble_v").
        tied: The names of parameters that two stages share, each with a copy of the same values.
        call: How a batch enters a stage.

    Returns:
        The stages, with the axes of the layout.

    Raises:
        ConfigError: The schedule has another number of stages on a rank, ranks pass different
            numbers, two stages hold a parameter of one name that is not in `tied`, one that is in
            `tied` is not in two stages, or the two hold other values.

    Effects:
        Sets attributes of the stages and their parameters; communicates on `ps.pp`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> stages = make_stages([nn.Linear(1, 1)], solo_parallel())
        >>> places_of(stages, stages.pp)
        [StagePlace(index=0, ranks=(0,))]
    """
    axis = ps.pp
    ranks = assign_stages(schedule, axis.count, per_rank=len(stages))
    own = [index for index, rank in enumerate(ranks) if rank == axis.index]
    held = [
        {name: _digest(p) if name in tied else "" for name, p in get_named_parameters([x]).items()}
        for x in stages
    ]
    every = all_gather_objects(held, axis)
    if {len(x) for x in every} != {len(stages)}:
        raise ConfigError(
            f"make_stages: ranks of the pipeline pass {[len(x) for x in every]} stages; every "
            "rank holds as many",
            where="stages",
            got=[len(x) for x in every],
        )
    left = [iter(parts) for parts in every]
    order = [next(left[rank]) for rank in ranks]
    shared = _shared_names(order, tied)
    for stage, index in zip(stages, own, strict=True):
        placed_(stage, StagePlace(index, ranks), shared)
    return attach_axes(stages, ps, schedule=schedule, call=call)


def _shared_names(
    stages: Sequence[Mapping[str, str]], tied: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return which two stages hold each tied parameter; stages are {name: digest of a tied one}."""
    where: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in stage:
            where.setdefault(name, []).append(index)
    for name, found in where.items():
        if len(found) > 1 and name not in tied:
            raise ConfigError(
                f"make_stages: stages {found[0]} and {found[1]} both hold a parameter {name!r}; "
                "give parameters the names that they have in the whole model (blocks under their "
                'own numbers, nn.ModuleDict({"3": block})), or name it in `tied` if it is one '
                "parameter with a copy",
                where=name,
                got=found,
            )
    for name in tied:
        found = where.get(name, [])
        if len(found) != 2:
            raise ConfigError(
                f"make_stages: {name!r} is in `tied`, and must be in two stages; it is in "
                f"{found or 'none'}",
                where=name,
                got=found,
                want="two stages",
            )
        if stages[found[0]][name] != stages[found[1]][name]:
            raise ConfigError(
                f"make_stages: stages {found[0]} and {found[1]} hold other values of {name!r}, "
                "which is in `tied`; copy one to the other before they are sharded",
                where=name,
                got=found,
            )
    return {name: (where[name][0], where[name][1]) for name in tied}


def _digest(parameter: nn.Parameter) -> str:
    """Return a hash of what this rank holds of a parameter."""
    values = get_local(parameter.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def places_of(stages: Sequence[nn.Module], axis: Axis = SOLO) -> list[StagePlace]:
    """Return where each of a rank's stages stands in the pipeline.

    Args:
        stages: The stages of this rank, from `build_stages` or `make_stages`; or one module of
            one's own, which is taken for the stage of this rank's number.
        axis: The pipeline axis.

    Raises:
        ConfigError: Several modules have no number, or the stages are of another layout.

    Effects:
        None; of the axis only the size is read.

    Examples:
        >>> places_of([nn.Linear(1, 1)])
        [StagePlace(index=0, ranks=(0,))]
    """
    found = [_PLACE.read(stage) for stage in stages]
    if len(found) == 1 and found[0] is None:
        return [StagePlace(axis.index, tuple(range(axis.count)))]
    places = [place for place in found if place is not None]
    fits = all({*p.ranks} == {*range(axis.count)} for p in places) and (
        [p.index for p in places]
        == [i for i, rank in enumerate(places[0].ranks if places else ()) if rank == axis.index]
    )
    if len(places) < len(found) or not places or not fits:
        raise ConfigError(
            f"these {len(stages)} modules are not the stages of rank {axis.index} of "
            f"{axis.count} pipeline ranks; pass what build_stages gave, or make_stages for "
            "modules that are stages already",
            where="stages",
            got=[None if p is None else p.index for p in found],
        )
    return places


def tied_of(stage: nn.Module) -> dict[str, tuple[int, int]]:
    """Return which parameters of a stage another has a copy of: {name: (owner, copy)}.

    Examples:
        >>> tied_of(nn.Linear(1, 1))
        {}
    """
    return dict(_TIED.read(stage))
