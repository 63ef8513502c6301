"""A plot of the load of experts over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.run.plots import drawing
from trainkit.run.sinks.jsonl import join_evaluations, read_jsonl
from trainkit.types import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_COLUMNS = 200
_MAX_PANELS = 8
_MAX_TICKS = 12  # with more experts, only three of them have a tick

Loads = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]


def plot_expert_load(metrics_path: str | Path, image_path: str | Path) -> Path:
    """Plot the load of each expert, divided by the mean of its layer, as a heat map over steps.

    White is balanced, blue below the mean, red above. Of more than 8 expert layers 8 are shown,
    the first and the last among them. Steps that share a column are summed; columns without a load
    are grey.

    Args:
        metrics_path: A file that `jsonl` wrote, with `step` and in some lines `load` (the term of
            `losses.add_router_losses`).
        image_path: The picture; its suffix is the format (.png, .svg, .pdf).

    Raises:
        DataError: The metrics hold no load.
        ValueError: The suffix of the picture is no known format.
        ConfigError: matplotlib is missing.
        DiskError: The picture cannot be written.

    Effects:
        Writes `image_path`.
    """
    drawing.check_picture("plot_expert_load", Path(image_path))
    lines = join_evaluations(read_jsonl(metrics_path), [])
    lines = [line for line in lines if line.get("load")]
    if not lines:
        raise DataError(
            f"plot_expert_load: {metrics_path} has no step with a load of experts",
            where=str(metrics_path),
        )
    first_step = lines[0]["step"]
    last_step = lines[-1]["step"]
    last_load = load_over_steps(lines[-1:], columns=1).max()
    figure = _make_figure(
        load_over_steps(lines, columns=_MAX_COLUMNS),
        (first_step, last_step),
        title=f"step {last_step:,}: largest load {last_load:.2f} times the mean",
    )
    return drawing.save_picture("plot_expert_load", figure, image_path)


def load_over_steps(lines: Iterable[Mapping[str, Any]], *, columns: int) -> Loads:
    """Return the loads of experts, divided by the mean of their layer, in columns of steps.

    Args:
        lines: Lines of metrics.jsonl with `step` and `load` `[L, E]`, all of one shape, by rising
            step.
        columns: How many there are at most, equally wide from the first step to the last.

    Returns:
        `[columns, L, E]`, 1 where balanced; NaN where no line falls into a column.

    Examples:
        >>> lines = [{"step": 1, "load": [[3, 1]]}, {"step": 2, "load": [[1, 1]]}]
        >>> load_over_steps(lines, columns=9).tolist(), load_over_steps(lines, columns=1).tolist()
        ([[[1.5, 0.5]], [[1.0, 1.0]]], [[[1.33..., 0.66...]]])
    """
    lines = list(lines)
    load = np.array([line["load"] for line in lines], dtype=np.float64)
    steps = np.array([line["step"] for line in lines])
    width = steps[-1] - steps[0] + 1
    columns = min(columns, width)
    sums = np.zeros((columns, *load.shape[1:]))
    # Not `sums[column] += load`, which would add only one of the steps that share a column.
    np.add.at(sums, (steps - steps[0]) * columns // width, load)
    with np.errstate(invalid="ignore"):  # a column without a step is 0 / 0
        return sums / sums.mean(-1, keepdims=True)


def _make_figure(load: Loads, steps: tuple[int, int], *, title: str) -> Figure:
    layers, experts = load.shape[1:]
    # Evenly spaced, with the first and the last layer.
    spaced = np.linspace(0, layers - 1, min(layers, _MAX_PANELS))
    shown = np.unique(spaced.round().astype(int))
    figure = drawing.new_figure(8, 1.2 + 1.3 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, layer in zip(panels, shown, strict=True):
        image = axes.imshow(
            load[:, layer].T,
            cmap="RdBu_r",
            # The mean, 1, is the white in the middle; loads above 2 all have the darkest red.
            vmin=0,
            vmax=2,
            aspect="auto",
            interpolation="none",
            # Half a step around the first and the last; expert 0 is at the top.
            extent=(steps[0] - 0.5, steps[1] + 0.5, experts - 0.5, -0.5),
        )
        drawing.bare(axes)
        # Columns of NaN are transparent and show this.
        axes.set_facecolor(drawing.PALE)
        axes.set_ylabel(f"expert layer {layer}", color=drawing.GREY, fontsize=9)
        axes.set_yticks(range(experts) if experts <= _MAX_TICKS else [0, experts // 2, experts - 1])
    panels[-1].locator_params(axis="x", integer=True)
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    panels[-1].set_xlabel("step", color=drawing.GREY)
    bar = figure.colorbar(image, ax=list(panels), extend="max", ticks=[0, 0.5, 1, 1.5, 2])
    bar.ax.set_yticklabels(["0", "0.5", "1  balanced", "1.5", "2"])
    bar.ax.tick_params(colors=drawing.GREY, labelsize=9, length=0)
    bar.outline.set_visible(False)
    bar.set_label("load, over the mean of the layer", color=drawing.GREY, fontsize=9)
    if len(shown) < layers:
        title += f"; {len(shown)} of {layers} layers"
    panels[0].set_title(title, loc="left", fontsize=11, color=drawing.INK, pad=10)
    return figure
