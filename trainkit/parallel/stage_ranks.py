"""The ranks of pipeline stages, the parameters that two stages share, and the record `Stages`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import attrs
from torch import nn

from trainkit.collectives import all_gather_objects
from trainkit.models.call import call_model
from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.notes import Note
from trainkit.parallel.parameters import get_named_parameters, hash_values, mark_tied_copy_
from trainkit.parallel.split import assign_stages
from trainkit.types import SOLO, Axis, Call, ConfigError, Layout, ParallelState, Stages


@attrs.frozen
class StagePlace:
    """The index of a stage, and the pipeline rank of every stage."""

    index: int
    ranks: tuple[int, ...]

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.index == len(self.ranks) - 1


# On the stages, so that lists of plain modules have them too.
_PLACE = Note[StagePlace | None]("stage_place", default=None)
_TIED: Note[Mapping[str, tuple[int, int]]] = Note("tied_names", default=MappingProxyType({}))


def place_stage_(
    stage: nn.Module, place: StagePlace, tied: dict[str, tuple[int, int]]
) -> nn.Module:
    """Attach a stage's place to it, and mark the parameters that are copies of another stage's.

    Args:
        stage: A stage.
        place: Its place.
        tied: For the name of each shared parameter the index of its owner and that of the copy.

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
    # The types of `attrs.fields` are strings here, as types.py postpones annotations.
    axes = {x.name: getattr(ps, x.name) for x in attrs.fields(Stages) if x.type == "Axis"}
    layout = Layout(**ps.degrees, schedule=schedule)
    return Stages(modules=tuple(modules), call=call, layout=layout, **axes)


def as_stages(
    stages_or_model: Stages | nn.Module,
    function: str,
    *,
    axis: Axis = SOLO,
    call: Call | None = None,
) -> Stages:
    """Return a `Stages` unchanged, and a plain module as the only stage of its model.

    Args:
        stages_or_model: The result of `build_stages` or `make_stages`, or any module.
        function: The name of the caller, for the message.
        axis: The ranks over which the data of a plain module is sharded. A `Stages` has its own.
        call: Calls a stage with a batch; by default the call of the stages, or `call_model`.

    Raises:
        ConfigError: It is neither.

    Effects:
        None: nothing is sent.

    Examples:
        >>> len(as_stages(nn.Linear(1, 1), "evaluate"))
        1
    """
    if isinstance(stages_or_model, nn.Module):
        # All other axes have size 1, so that nothing communicates but sums over the data.
        return Stages((stages_or_model,), call=call or call_model, dp=axis, loss=axis)
    if not isinstance(stages_or_model, Stages):
        raise ConfigError(
            f"{function}: it takes a module or a Stages, not a {type(stages_or_model).__name__}; "
            "pass the result of build_stages, or of make_stages for modules that are stages "
            "already",
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

    Use it in place of `build_stages` for a model that was split by hand. Each rank passes its own
    stages, after all transforms. A stage needs a method `boundary(batch)`, which returns a tensor
    on the meta device with the shape and dtype of the stage's output.

    Args:
        stages: This rank's stages, in order. Parameters have their names in the whole model: blocks
            under their own indices, `nn.ModuleDict({"3": block})`.
        ps: The layout.
        schedule: The schedule, a name of `parallel.split.SCHEDULES`. It determines the stages of a
            rank: rank r of P has stages r, P + r, ... ("interleaved_1f1b"), or r and 2P - 1 - r
            ("zero_bubble_v").
        tied: The names of parameters that two stages share, each with a copy of the same values.
        call: Calls a stage with a batch.

    Returns:
        The stages, with the axes of the layout.

    Raises:
        ConfigError: The schedule has another number of stages per rank, ranks pass different
            numbers, two stages have a parameter of one name that is not in `tied`, or a parameter
            in `tied` is not in two stages with equal values.

    Effects:
        Sets attributes of the stages and their parameters; communicates on `ps.pp`, and waits.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> stages = make_stages([nn.Linear(1, 1)], solo_parallel())
        >>> get_stage_places(stages, stages.pp)
        [StagePlace(index=0, ranks=(0,))]
    """
    axis = ps.pp
    ranks = assign_stages(schedule, axis.count, per_rank=len(stages))
    indices = [index for index, rank in enumerate(ranks) if rank == axis.index]
    # Only tied parameters are compared, so only these are hashed.
    digests = [
        {
            # Of the shards: ranks of a pipeline that share a parameter shard it alike.
            name: hash_values(get_local(p.detach())) if name in tied else ""
            for name, p in get_named_parameters([stage]).items()
        }
        for stage in stages
    ]
    by_rank = all_gather_objects(digests, axis)
    # A list of stages for each rank, each stage {name: hash}.
    counts = [len(x) for x in by_rank]
    # True on all ranks or on none, so that they raise together.
    if {*counts} != {len(stages)}:
        raise ConfigError(
            f"make_stages: ranks of the pipeline pass {counts} stages; all ranks must pass the "
            "same number",
            where="stages",
            got=counts,
        )
    # From the stages of each rank to all stages in the order of the pipeline.
    remaining = [iter(of_rank) for of_rank in by_rank]
    in_order = [next(remaining[rank]) for rank in ranks]
    shared = _find_shared(in_order, tied)
    for stage, index in zip(stages, indices, strict=True):
        place_stage_(stage, StagePlace(index, ranks), shared)
    return attach_axes(stages, ps, schedule=schedule, call=call)


def _find_shared(
    stages: Sequence[Mapping[str, str]], tied: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return the two stages of each tied parameter; each stage is {name: hash of a tied one}."""
    owners: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in stage:
            owners.setdefault(name, []).append(index)
    for name, indices in owners.items():
        if len(indices) > 1 and name not in tied:
            raise ConfigError(
                f"make_stages: stages {indices[0]} and {indices[1]} both have a parameter {name!r};"
                " give parameters their names in the whole model (blocks under their own indices, "
                'nn.ModuleDict({"3": block})), or list it in `tied` if it is one parameter with a '
                "copy",
                where=name,
                got=indices,
            )
    for name in tied:
        indices = owners.get(name, [])
        if len(indices) != 2:
            raise ConfigError(
                f"make_stages: {name!r} is in `tied`, and must be in two stages; it is in "
                f"{indices or 'none'}",
                where=name,
                got=indices,
                want="two stages",
            )
        # The optimizer keeps the two equal only if they start equal.
        if stages[indices[0]][name] != stages[indices[1]][name]:
            raise ConfigError(
                f"make_stages: stages {indices[0]} and {indices[1]} have different values of "
                f"{name!r}, which is in `tied`; copy one to the other before they are sharded",
                where=name,
                got=indices,
            )
    return {name: (owners[name][0], owners[name][1]) for name in tied}


def get_stage_places(stages: Sequence[nn.Module], axis: Axis = SOLO) -> list[StagePlace]:
    """Return the place of each of this rank's stages in the pipeline.

    Args:
        stages: The stages of this rank, from `build_stages` or `make_stages`; or a single plain
            module, whose index is then that of the rank.
        axis: The pipeline axis; only its index and size are read.

    Raises:
        ConfigError: Several modules have no place, or the stages are of another layout.

    Effects:
        None: nothing is sent.

    Examples:
        >>> get_stage_places([nn.Linear(1, 1)])
        [StagePlace(index=0, ranks=(0,))]
    """
    notes = [_PLACE.read(stage) for stage in stages]
    # A model that trainkit did not build has one stage per rank.
    if len(notes) == 1 and notes[0] is None:
        return [StagePlace(axis.index, tuple(range(axis.count)))]
    places = [place for place in notes if place is not None]
    # The stages that the first one's record gives to this rank; another pipeline has others.
    ranks = places[0].ranks if places else ()
    expected = [i for i, rank in enumerate(ranks) if rank == axis.index]
    fits = all({*place.ranks} == {*range(axis.count)} for place in places)
    indices = [place.index for place in places]
    if len(places) < len(notes) or not places or not fits or expected != indices:
        raise ConfigError(
            f"these {len(stages)} modules are not the stages of rank {axis.index} of "
            f"{axis.count} pipeline ranks; pass the result of build_stages, or of make_stages for "
            "modules that are stages already",
            where="stages",
            got=[None if place is None else place.index for place in notes],
        )
    return places


def get_tied_names(stage: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the parameters that a stage shares with another: {name: (owner, copy)}.

    Examples:
        >>> get_tied_names(nn.Linear(1, 1))
        {}
    """
    return dict(_TIED.read(stage))
