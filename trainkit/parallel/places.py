"""Where a rank's stages stand in the pipeline, and which parameters two of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from torch import nn

from trainkit.parallel.naming import mark_tied_copy_, named_parameters_of
from trainkit.types import SOLO, Axis, ConfigError

_PLACE = "_trainkit_place"
_TIED = "_trainkit_tied"


@attrs.frozen
class StagePlace:
    """Where a stage stands: its number, and the pipeline rank that holds each of them."""

    index: int
    ranks: tuple[int, ...]

    @property
    def last(self) -> bool:
        """Whether no stage follows."""
        return self.index == len(self.ranks) - 1


def placed_(stage: nn.Module, place: StagePlace, tied: dict[str, tuple[int, int]]) -> nn.Module:
    """Write on a stage where it stands, and on its parameters which are copies of another's.

    Args:
        stage: A stage.
        place: Where it stands.
        tied: Of what two stages share by name: the owner's number, the copy's.

    Effects:
        Sets attributes of the stage and of its parameters.
    """
    setattr(stage, _PLACE, place)
    setattr(stage, _TIED, {name: pair for name, pair in tied.items() if place.index in pair})
    for name, parameter in named_parameters_of([stage]).items():
        if name in tied and place.index == tied[name][1]:
            mark_tied_copy_(parameter)
    return stage


def places_of(stages: Sequence[nn.Module], axis: Axis = SOLO) -> list[StagePlace]:
    """Return where each of a rank's stages stands in the pipeline.

    Args:
        stages: The stages of this rank, from `build_stages`; or one module of one's own, which is
            taken for the stage of this rank's number.
        axis: The pipeline axis.

    Raises:
        ConfigError: Several modules do not say where they stand, or the stages are of another
            layout.

    Effects:
        None; the axis is only asked for its size.

    Examples:
        >>> places_of([nn.Linear(1, 1)])
        [StagePlace(index=0, ranks=(0,))]
    """
    found = [getattr(stage, _PLACE, None) for stage in stages]
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
            f"{axis.count} pipeline ranks; pass what build_stages gave",
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
    found: Any = getattr(stage, _TIED, {})
    return found
