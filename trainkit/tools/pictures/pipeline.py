"""The timeline of a pipeline: which stage works on which microbatch when, and the bubble.

Unit times: the forward pass of all layers of one rank takes 1, their backward pass 2; where a
schedule splits the backward pass, the part for the input and the part for the weights take 1 each.
Sending takes no time. Of v stages on a rank, each takes the v-th part.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trainkit.run.plots import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; the two halves of a backward: for the input, for the weights."""

_UNITS: dict[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
_SHADES: dict[Kind, tuple[str, str]] = {  # of the first stage of a rank, and of the others
    "F": ("#0072b2", "#7cc0e8"),
    "B": ("#e69f00", "#f6d58a"),
    "I": ("#e69f00", "#f6d58a"),
    "W": ("#00795a", "#8fd3bd"),
}
_BUBBLE = {"facecolor": "#f3f4f6", "edgecolor": "#c4c8cf", "hatch": "////"}

Action = tuple[Kind, int, int]


@attrs.frozen
class PipelineTask:
    """One piece of work of a pipeline: a rank, a stage, a microbatch, and from when to when."""

    rank: int
    stage: int
    microbatch: int
    kind: Kind
    begin: float
    end: float


def simulate_pipeline(
    schedule: str, *, pp: int, microbatches: int, stages_per_rank: int | None = None
) -> list[PipelineTask]:
    """Return when each rank works on what, if every rank begins as soon as it can.

    The order of work is that of torch's schedules, which the executor of a pipeline runs. The
    times are those of this file: an ideal, in which all layers cost the same.

    Args:
        schedule: A name of `parallel.split.SCHEDULES`.
        pp: The number of ranks.
        microbatches: The number of microbatches of a step.
        stages_per_rank: Stages on each rank; by default 1 for gpipe and 1f1b, else 2.

    Returns:
        The tasks in the order of their beginnings, then of their ranks.

    Raises:
        ConfigError: There is no such schedule, or it cannot have so many stages on a rank.
        ValueError: It cannot have these numbers.

    Examples:
        >>> tasks = simulate_pipeline("1f1b", pp=2, microbatches=2)
        >>> [(task.kind, task.microbatch, task.begin) for task in tasks if task.rank == 1]
        [('F', 0, 1.0), ('B', 0, 2.0), ('F', 1, 4.0), ('B', 1, 5.0)]
    """
    from trainkit.parallel.split import assign_stages  # noqa: PLC0415 -- it imports torch

    if pp < 1 or microbatches < 1:
        raise ValueError(
            f"simulate_pipeline: pp and microbatches must be at least 1, got {pp}, {microbatches}"
        )
    stages = len(assign_stages(schedule, pp, per_rank=stages_per_rank)) // pp
    if schedule in ("gpipe", "1f1b"):
        orders = [_list_single_order(schedule, rank, pp, microbatches) for rank in range(pp)]
    elif stages > 1:
        orders = _torch_orders(schedule, pp, microbatches, stages)
    else:
        raise ValueError(f"simulate_pipeline: {schedule} is drawn with at least two stages a rank")
    return _assign_times(orders, last=pp * stages - 1, per_rank=stages)


def bubble_fraction(tasks: Sequence[PipelineTask]) -> float:
    """Return the part of all ranks' time in which they wait, from the first task to the last.

    Examples:
        >>> bubble_fraction(simulate_pipeline("1f1b", pp=4, microbatches=12))  # 3 / (12 + 3)
        0.2
    """
    ranks = len({task.rank for task in tasks})
    work = sum(task.end - task.begin for task in tasks)
    whole = ranks * (max(task.end for task in tasks) - min(task.begin for task in tasks))
    return round(1 - work / whole, 12)


def _list_single_order(schedule: str, rank: int, pp: int, microbatches: int) -> list[Action]:
    """Return the order of one stage: so many forwards, then backwards and forwards in turn.

    Not asked of torch: its record of 1F1B for the last rank begins with microbatch 1, which is not
    what it runs (from 2.11 on).
    """
    ahead = min(microbatches, pp - rank) if schedule == "1f1b" else microbatches
    order: list[Action] = [("F", rank, index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("B", rank, index))
        if ahead + index < microbatches:
            order.append(("F", rank, ahead + index))
    return order


def _torch_orders(schedule: str, pp: int, microbatches: int, stages: int) -> list[list[Action]]:
    """Return the order of each rank as torch's schedule has it."""
    # Imported here: it takes 2 s. A private module, the same from torch 2.11 on.
    from torch.distributed.pipelining._schedule_visualizer import (  # noqa: PLC0415 -- see above
        get_schedule_ops,
    )

    from trainkit.parallel.split import schedule_kind  # noqa: PLC0415 -- it imports torch

    name = schedule_kind(schedule).torch_name.removeprefix("Schedule")
    try:
        found = get_schedule_ops(name, pp, microbatches, stages)
    except ValueError as error:
        raise ValueError(f"simulate_pipeline: {schedule}: {error}") from error
    # A forward and a backward that DualPipeV overlaps come one after the other here.
    flat = [
        [p for action in order if action for p in action.sub_actions or [action]] for order in found
    ]
    return [
        [_action(action) for action in order if action.computation_type.value in _UNITS]
        for order in flat
    ]


def _action(action: Any) -> Action:
    return action.computation_type.value, action.stage_index, action.microbatch_index


def _assign_times(orders: list[list[Action]], *, last: int, per_rank: int) -> list[PipelineTask]:
    """Let each rank do its actions in order, each as soon as what it needs is there."""
    ends: dict[Action, int] = {}
    free = [0] * len(orders)
    tasks: list[PipelineTask] = []
    todo = [list(order) for order in orders]
    while any(todo):
        before = len(tasks)
        for rank, queue in enumerate(todo):
            while queue and (ready := _find_ready_time(queue[0], ends, last)) is not None:
                action = kind, stage, microbatch = queue.pop(0)
                begin = max(free[rank], ready)
                ends[action] = free[rank] = end = begin + _UNITS[kind]
                times = begin / per_rank, end / per_rank
                tasks.append(PipelineTask(rank, stage, microbatch, kind, *times))
        assert len(tasks) > before, f"the schedule waits for ever at {[q[:1] for q in todo]}"
    return sorted(tasks, key=lambda task: (task.begin, task.rank))


def _find_ready_time(action: Action, ends: dict[Action, int], last: int) -> int | None:
    """Return when what an action needs is there, or None while that is not known."""
    kind, stage, microbatch = action
    if kind == "F":
        return ends.get(("F", stage - 1, microbatch)) if stage else 0
    if kind == "W":
        return ends.get(("I", stage, microbatch))
    if stage == last:
        return ends.get(("F", stage, microbatch))
    above: tuple[Kind, Kind] = ("B", "I")
    found = [ends[key] for half in above if (key := (half, stage + 1, microbatch)) in ends]
    return found[0] if found else None


# ---------------------------------------------------------------------------------- the picture


def plot_pipeline(
    schedules: str | Sequence[str],
    path: str | Path,
    *,
    pp: int,
    microbatches: int,
    stages_per_rank: int | None = None,
) -> Path:
    """Draw the timeline of a schedule, or of several above one another; return where.

    Numbers are microbatches, pale colours the later stages of a rank, hatched areas the bubble,
    whose share of all ranks' time the title says.

    Args:
        schedules: One or more names of `parallel.split.SCHEDULES`.
        path: The picture; the name says the format (.png, .svg, .pdf).
        pp: The number of ranks.
        microbatches: The number of microbatches of a step.
        stages_per_rank: As in `simulate_pipeline`.

    Raises:
        ConfigError: There is no such schedule, or matplotlib is missing.
        ValueError: A schedule cannot have these numbers; the name says no format.
        DiskError: The picture cannot be written.

    Effects:
        Writes `path`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_pipeline("1f1b", f"{folder}/pipeline.svg", pp=2, microbatches=4).name
        'pipeline.svg'
    """
    drawing.check_picture("plot_pipeline", Path(path))
    names = [schedules] if isinstance(schedules, str) else list(schedules)
    timelines = {
        name: simulate_pipeline(
            name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank
        )
        for name in names
    }
    longest = max(task.end for tasks in timelines.values() for task in tasks)
    figure = drawing.new_figure(
        min(max(5.0, 0.27 * longest), 16), (0.3 * pp + 0.5) * len(names) + 0.65
    )
    every = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, tasks) in zip(every, timelines.items(), strict=True):
        _draw_timeline(axes, tasks, pp)
        title = f"{name}: bubble {100 * bubble_fraction(tasks):.1f} %"
        axes.set_title(title, loc="left", fontsize=10, color=drawing.INK)
    every[-1].set_xlim(0, longest)
    every[-1].tick_params(axis="x", length=3)
    every[-1].set_xlabel("time; the forward pass of a rank's layers takes 1", color=drawing.GREY)
    _draw_legend(every[-1], {task.kind for tasks in timelines.values() for task in tasks})
    return drawing.save_picture("plot_pipeline", figure, path)


def _draw_timeline(axes: Axes, tasks: Sequence[PipelineTask], pp: int) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 -- an extra, there by now

    whole = max(task.end for task in tasks)
    for rank in range(pp):
        axes.broken_barh([(0, whole)], (rank + 0.06, 0.88), linewidth=0, **_BUBBLE)
    colours = [_SHADES[task.kind][task.stage >= pp] for task in tasks]
    boxes = [_make_box(task.begin, task.end, task.rank + 0.06, task.rank + 0.94) for task in tasks]
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolor="white", linewidth=0.8))
    for task, colour in zip(tasks, colours, strict=True):
        axes.text(
            (task.begin + task.end) / 2,
            task.rank + 0.51,
            str(task.microbatch),
            fontsize=8 if task.end - task.begin >= 1 else 6.5,
            color=drawing.ink_on(colour),
            ha="center",
            va="center",
        )
    axes.set_ylim(pp, 0)
    axes.set_yticks([rank + 0.5 for rank in range(pp)], [f"rank {rank}" for rank in range(pp)])
    drawing.bare(axes)


def _make_box(left: float, right: float, top: float, bottom: float) -> list[tuple[float, float]]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _draw_legend(axes: Axes, kinds: set[Kind]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 -- an extra, there by now

    labels = {
        "F": "forward",
        "B": "backward, or its part for the input" if "I" in kinds else "backward",
        "I": "backward for the input",
        "W": "backward for the weights",
    }
    shown = [kind for kind in _UNITS if kind in kinds and not (kind == "I" and "B" in kinds)]
    handles = [Patch(facecolor=_SHADES[kind][0], label=labels[kind]) for kind in shown]
    handles.append(Patch(label="bubble", **_BUBBLE))
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=drawing.INK,
    )
