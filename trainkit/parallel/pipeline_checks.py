"""What a pipeline cannot run, or would run with wrong gradients: refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainkit.parallel.recompute import recomputes_selectively
from trainkit.parallel.reduction import (
    Reduce,
    check_sums,
    reducers_of,
)
from trainkit.parallel.split import Kind, Place, rank_of_stages
from trainkit.parallel.stage_forward import compute_device
from trainkit.types import Axis, ConfigError


def check_microbatches(kind: Kind, count: int, *, ranks: int, num_stages: int) -> None:
    """Refuse a number of microbatches that a schedule cannot run.

    Raises:
        ConfigError: Names the number, and one that it can run.

    Examples:
        >>> from trainkit.parallel.split import SCHEDULES
        >>> check_microbatches(SCHEDULES["1f1b"], 4, ranks=4, num_stages=4)
        >>> check_microbatches(SCHEDULES["1f1b"], 2, ranks=4, num_stages=4)
        Traceback (most recent call last):
        trainkit.types.ConfigError: ... 2 microbatches in a step, Schedule1F1B needs at least 4 ...
    """
    least = num_stages if kind.torch_name in ("Schedule1F1B", "ScheduleDualPipeV") else 1
    if count < least:
        wanted = f"at least {least} for {num_stages} stages"
    elif kind.torch_name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        rounds = max(1, count // ranks)
        if count % rounds == 0:
            return
        wanted = (
            f"a multiple of {rounds}, for rounds of at least {ranks} (such as {rounds * ranks})"
        )
    else:
        return
    raise ConfigError(
        f"forward_backward: there are {count} microbatches in a step, {kind.torch_name} needs "
        f"{wanted}; use more rows in a step, or fewer in a microbatch",
        where="microbatches",
        got=count,
        want=wanted,
    )


def check_pipeline(
    stages: Sequence[nn.Module],
    places: Sequence[Place],
    kind: Kind,
    *,
    schedule: str,
    reduce: Reduce,
    axis: Axis,
) -> None:
    """Refuse what torch would run with wrong gradients, or not at all.

    Raises:
        ConfigError: Names the stage and the choice that do not go with the schedule.

    Effects:
        None; the axis is only asked for its size.
    """
    _check_placement(places, schedule, axis)
    from trainkit.parallel.torch_pipeline import (  # noqa: PLC0415 (slow import)
        passes_to_itself,
        reshards_after_forward,
    )

    gloo = compute_device(stages[0]).type == "cpu"
    if kind.placement == "v" and gloo and not passes_to_itself():
        raise ConfigError(
            f"bind_forward_backward: this torch ({torch.__version__}) cannot run the schedule "
            f"{schedule} on the CPU: gloo has no connection from a rank to itself; use torch 2.13 "
            "or later, or another schedule",
            where="schedule",
            got=schedule,
        )
    for stage, place in zip(stages, places, strict=True):
        found = reducers_of(stage)
        if found.ddp:
            raise ConfigError(
                f"bind_forward_backward: stage {place.index} is a DDP module, which reduces at the "
                "end of its first backward pass; use fsdp() with dp_replicate",
                where="plan",
            )
        check_sums(found)
        if kind.splits_backward and recomputes_selectively(stage):
            raise ConfigError(
                f"bind_forward_backward: the schedule {schedule} goes through a stage's graph "
                'twice, which selective recomputation does not allow; take recompute("full") or '
                '"none", or a schedule that does not split the backward pass, such as 1f1b',
                where="recompute",
                got="selective",
            )
        if not kind.splits_backward or not found.fsdp:
            continue
        if reduce != "last":
            raise ConfigError(
                f"bind_forward_backward: the schedule {schedule} computes gradients of weights "
                f"after FSDP's hooks, so they can only be reduced once a step; reduce={reduce!r} "
                "needs one that does not split the backward pass, such as 1f1b",
                where="reduce",
                got=reduce,
                want="last",
            )
        names = [n for n, m in found.fsdp if reshards_after_forward(m)]
        if names:
            raise ConfigError(
                f"bind_forward_backward: {names[0] or '(the stage itself)'} of stage "
                f"{place.index} reshards after forward, with which the schedule {schedule} gives "
                "wrong gradients; build it with fsdp(reshard_after_forward=False)",
                where="reshard_after_forward",
                got=True,
                want=False,
            )


def _check_placement(places: Sequence[Place], schedule: str, axis: Axis) -> None:
    wanted = rank_of_stages(schedule, axis.count, per_rank=len(places))
    if places[0].ranks != wanted:
        raise ConfigError(
            f"bind_forward_backward: the stages are on ranks {places[0].ranks}, the schedule "
            f"{schedule} has them on {wanted}; give build_stages the same schedule",
            where="schedule",
            got=schedule,
        )
