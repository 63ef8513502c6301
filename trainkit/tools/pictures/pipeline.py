"""The timeline of a pipeline schedule, and its bubble.

Unit times: the forward pass of all layers of one rank takes 1, their backward pass 2. If a schedule
splits the backward pass, the halves for the input and for the weights take 1 each. Sending takes no
time. A rank's stages share these times equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trainkit.run.plots import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, backward, and the halves of a backward: for the input, for the weights."""

_UNITS: dict[ActionKind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
# Colors of a rank's first stage, and of its other stages.
_SHADES: dict[ActionKind, tuple[str, str]] = {
    "F": ("#0072b2", "#7cc0e8"),
    "B": ("#e69f00", "#f6d58a"),
    "I": ("#e69f00", "#f6d58a"),
    "W": ("#00795a", "#8fd3bd"),
}
_BUBBLE_FACE, _BUBBLE_EDGE, _BUBBLE_HATCH = "#f3f4f6", "#c4c8cf", "////"

Action = tuple[ActionKind, int, int]


@attrs.frozen
class PipelineTask:
    """The forward or backward of one microbatch in one stage, on a rank, from `begin` to `end`."""

    rank: int
    stage: int
    microbatch: int
    kind: ActionKind
    begin: float
    end: float


def simulate_pipeline(
    schedule: str, *, pp: int, microbatches: int, stages_per_rank: int | None = None
) -> list[PipelineTask]:
    """Return the tasks of all ranks with their times, each started as soon as its inputs exist.

    The order is that of torch's schedules, which pipelines run. The times are ideal: all layers
    cost the same; see the head of this module for the units.

    Args:
        schedule: A name of `parallel.split.SCHEDULES`.
        pp: The number of ranks.
        microbatches: The number of microbatches of a step.
        stages_per_rank: Stages on each rank; by default 1 for gpipe and 1f1b, else 2.

    Returns:
        The tasks, sorted by start and rank.

    Raises:
        ConfigError: There is no such schedule, or it does not allow this number of stages per rank.
        ValueError: The schedule does not allow these numbers.

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
        orders = [_make_order(schedule, rank, pp, microbatches) for rank in range(pp)]
    elif stages > 1:
        orders = _read_torch_orders(schedule, pp, microbatches, stages)
    else:
        raise ValueError(f"simulate_pipeline: {schedule} is drawn with at least two stages a rank")
    return _assign_times(orders, last=pp * stages - 1, per_rank=stages)


def bubble_fraction(tasks: Sequence[PipelineTask]) -> float:
    """Return the fraction of all ranks' time that is idle, from the first task to the last.

    Examples:
        >>> bubble_fraction(simulate_pipeline("1f1b", pp=4, microbatches=12))  # 3 / (12 + 3)
        0.2
    """
    ranks = len({task.rank for task in tasks})
    busy = sum(task.end - task.begin for task in tasks)
    begin = min(task.begin for task in tasks)
    end = max(task.end for task in tasks)
    total = ranks * (end - begin)
    return round(1 - busy / total, 12)  # 0.2, not 0.19999999999999996


def _make_order(schedule: str, rank: int, pp: int, microbatches: int) -> list[Action]:
    """Return the order of GPipe or 1F1B: some forwards, then backwards and forwards in turn."""
    # Not torch's: its record of 1F1B for the last rank starts with microbatch 1, unlike what it
    # runs (from 2.11 on).
    ahead = min(microbatches, pp - rank) if schedule == "1f1b" else microbatches
    order: list[Action] = [("F", rank, index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("B", rank, index))
        if ahead + index < microbatches:
            order.append(("F", rank, ahead + index))
    return order


def _read_torch_orders(
    schedule: str, pp: int, microbatches: int, stages: int
) -> list[list[Action]]:
    """Return the order of each rank in torch's schedule."""
    # Imported here: it takes 2 s. A private module, the same from torch 2.11 on.
    from torch.distributed.pipelining._schedule_visualizer import (  # noqa: PLC0415 -- see above
        get_schedule_ops,
    )

    from trainkit.parallel.split import get_schedule_kind  # noqa: PLC0415 -- it imports torch

    name = get_schedule_kind(schedule).torch_name.removeprefix("Schedule")
    try:
        orders: Any = get_schedule_ops(name, pp, microbatches, stages)
    except ValueError as error:
        raise ValueError(f"simulate_pipeline: {schedule}: {error}") from error
    return [
        [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in order
            if action is not None  # a step in which the rank idles
            # DualPipeV overlaps a forward and a backward; here one follows the other.
            for part in action.sub_actions or [action]
            if part.computation_type.value in _UNITS  # no sends, receives and (un)shards
        ]
        for order in orders
    ]


def _assign_times(orders: list[list[Action]], *, last: int, per_rank: int) -> list[PipelineTask]:
    """Run each rank's actions in order, each as soon as its input is ready."""
    ends: dict[Action, int] = {}
    free = [0] * len(orders)  # the time at which each rank is free again
    tasks: list[PipelineTask] = []
    queues = [list(order) for order in orders]
    while any(queues):
        num_tasks = len(tasks)
        for rank, queue in enumerate(queues):
            while queue and (ready := _find_ready_time(queue[0], ends, last)) is not None:
                action = kind, stage, microbatch = queue.pop(0)
                begin = max(free[rank], ready)
                ends[action] = free[rank] = end = begin + _UNITS[kind]
                times = begin / per_rank, end / per_rank
                tasks.append(PipelineTask(rank, stage, microbatch, kind, *times))
        assert len(tasks) > num_tasks, f"the schedule deadlocks at {[q[:1] for q in queues]}"
    return sorted(tasks, key=lambda task: (task.begin, task.rank))


def _find_ready_time(action: Action, ends: dict[Action, int], last: int) -> int | None:
    """Return the time at which an action's input is ready, or None while that is unknown."""
    kind, stage, microbatch = action
    if kind == "F":
        return ends.get(("F", stage - 1, microbatch)) if stage else 0
    if kind == "W":
        return ends.get(("I", stage, microbatch))
    if stage == last:
        return ends.get(("F", stage, microbatch))
    # The gradient comes from the next stage's full backward, or its half for the input.
    full: Action = ("B", stage + 1, microbatch)
    half: Action = ("I", stage + 1, microbatch)
    return ends.get(full, ends.get(half))


# ---------------------------------------------------------------------------------- the picture


def plot_pipeline(
    schedules: str | Sequence[str],
    path: str | Path,
    *,
    pp: int,
    microbatches: int,
    stages_per_rank: int | None = None,
) -> Path:
    """Draw the timelines of one or more schedules, one below the other; return the path.

    Numbers are microbatches, pale colors the later stages of a rank, hatched areas the bubble. The
    title has the bubble's fraction of all ranks' time.

    Args:
        schedules: One or more names of `parallel.split.SCHEDULES`.
        path: The file to write; its suffix sets the format (.png, .svg, .pdf).
        pp: The number of ranks.
        microbatches: The number of microbatches of a step.
        stages_per_rank: As in `simulate_pipeline`.

    Raises:
        ConfigError: There is no such schedule, or matplotlib is missing.
        ValueError: A schedule does not allow these numbers, or the suffix is no known format.
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
    width = min(max(5.0, 0.27 * longest), 16)  # inches
    height = (0.3 * pp + 0.5) * len(names) + 0.65
    figure = drawing.new_figure(width, height)
    subplots = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, tasks) in zip(subplots, timelines.items(), strict=True):
        _draw_timeline(axes, tasks, pp)
        title = f"{name}: bubble {100 * bubble_fraction(tasks):.1f} %"
        axes.set_title(title, loc="left", fontsize=10, color=drawing.INK)
    subplots[-1].set_xlim(0, longest)
    subplots[-1].tick_params(axis="x", length=3)
    subplots[-1].set_xlabel("time; the forward pass of a rank's layers takes 1", color=drawing.GREY)
    _draw_legend(figure, {task.kind for tasks in timelines.values() for task in tasks})
    return drawing.save_picture("plot_pipeline", figure, path)


def _draw_timeline(axes: Axes, tasks: Sequence[PipelineTask], pp: int) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 -- an extra, there by now

    end = max(task.end for task in tasks)
    for rank in range(pp):
        axes.broken_barh(
            [(0, end)],
            (rank + 0.06, 0.88),
            linewidth=0,
            facecolor=_BUBBLE_FACE,
            edgecolor=_BUBBLE_EDGE,
            hatch=_BUBBLE_HATCH,
        )
    colours = [_SHADES[task.kind][task.stage >= pp] for task in tasks]
    boxes = []
    for task in tasks:
        left, right = task.begin, task.end
        top, bottom = task.rank + 0.06, task.rank + 0.94
        boxes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
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


def _draw_legend(figure: Figure, kinds: set[ActionKind]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 -- an extra, there by now

    labels = {
        "F": "forward",
        "B": "backward, or its part for the input" if "I" in kinds else "backward",
        "I": "backward for the input",
        "W": "backward for the weights",
    }
    shown = [kind for kind in _UNITS if kind in kinds and not (kind == "I" and "B" in kinds)]
    handles = [Patch(facecolor=_SHADES[kind][0], label=labels[kind]) for kind in shown]
    handles.append(
        Patch(facecolor=_BUBBLE_FACE, edgecolor=_BUBBLE_EDGE, hatch=_BUBBLE_HATCH, label="bubble")
    )
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=drawing.INK,
    )
