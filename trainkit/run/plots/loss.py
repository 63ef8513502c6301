"""A plot of a run: the training loss, the losses of evaluations, the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.run.plots import drawing
from trainkit.run.sinks.jsonl import join_evaluations, read_jsonl
from trainkit.types import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE = "#2a6f97"
_ORANGE = "#e07a2f"


def plot_loss(metrics_path: str | Path, image_path: str | Path) -> Path:
    """Plot the training loss (each step light, smoothed dark) and the learning rate below it.

    Losses of evaluations (`eval/loss` in the `events.jsonl` of the same directory, see
    `read_metrics`) appear as points. Steps without a finite loss are left out, and the title counts
    them.

    Args:
        metrics_path: A file that `jsonl` wrote, with `step`, `loss` and perhaps `lr`. A loss is one
            per pair or per answer where steps count `pairs` or `answers`, else per token.
        image_path: The picture; its suffix is the format (.png, .svg, .pdf).

    Returns:
        The path of the picture.

    Raises:
        DataError: The metrics have no step with a finite loss.
        ValueError: The suffix of the picture is no known format.
        ConfigError: matplotlib is missing.
        DiskError: The picture cannot be written.

    Effects:
        Writes `image_path`.
    """
    drawing.check_picture("plot_loss", Path(image_path))
    events = read_jsonl(Path(metrics_path).with_name("events.jsonl"))
    lines = join_evaluations(read_jsonl(metrics_path), events)
    metrics = [line for line in lines if "loss" in line]
    steps = [line for line in metrics if line["loss"] is not None]
    if not steps:
        raise DataError(
            f"plot_loss: {metrics_path} has no step with a finite loss", where=str(metrics_path)
        )
    # Of several evaluations at a step the last counts.
    held_out = {
        line["step"]: line["eval/loss"] for line in lines if line.get("eval/loss") is not None
    }
    figure = _make_figure(steps, held_out, num_skipped=len(metrics) - len(steps))
    return drawing.save_picture("plot_loss", figure, image_path)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and its neighbours, `window` in all.

    The window is centered, so the curve does not lag behind the values as an exponential average
    does. Near the start, where a loss is steep, it shrinks on both sides; at the end on one.

    Examples:
        >>> smooth([8.0, 3.0, 1.0, 2.0], window=3)
        [8.0, 4.0, 2.0, 1.5]
    """
    # sums[i] is the sum of the first i values, so each window's sum is one difference.
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    half = np.minimum(window // 2, index)
    start = index - half
    end = np.minimum(index + half + 1, len(values))
    return ((sums[end] - sums[start]) / (end - start)).tolist()


def _make_figure(
    steps: list[dict[str, Any]], held_out: dict[int, float], *, num_skipped: int
) -> Figure:
    figure = drawing.new_figure(8, 5)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    title = _plot_losses(top, steps, held_out)
    rates = [(line["step"], line["lr"]) for line in steps if line.get("lr") is not None]
    if rates:
        # A line through one point would not be seen.
        marker = "o" if len(rates) == 1 else None
        bottom.plot(*zip(*rates, strict=True), marker=marker, color=drawing.GREY, linewidth=1.5)
    bottom.set_ylabel("learning rate", color=drawing.GREY, fontsize=9)
    # 1.0 if there is no rate above 0: matplotlib warns of an empty range.
    highest = max((rate for _, rate in rates), default=0.0)
    bottom.set_ylim(0, 1.15 * highest or 1.0)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(drawing.GREY)
        axes.tick_params(colors=drawing.GREY, labelsize=9)
        axes.grid(axis="y", color=drawing.PALE, linewidth=0.8)
        axes.set_axisbelow(True)
    # At least two steps wide, for a run of one.
    bottom.set_xlim(0, max(2, 1.02 * steps[-1]["step"]))
    bottom.locator_params(axis="x", integer=True)
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    bottom.locator_params(axis="y", nbins=2)
    bottom.yaxis.set_major_formatter("{x:.2g}")
    bottom.set_xlabel("step", color=drawing.GREY)
    if num_skipped:
        title += f"  ({num_skipped} steps without a finite loss)"
    top.set_title(title, loc="left", fontsize=11, color=drawing.INK, pad=10)
    return figure


def _plot_losses(axes: Axes, steps: list[dict[str, Any]], held_out: dict[int, float]) -> str:
    """Plot the losses, and return a title with the last ones."""
    x = [line["step"] for line in steps]
    loss = [line["loss"] for line in steps]
    window = len(x) // 50 | 1  # a fiftieth of the steps, and odd, so that it has a middle
    curve = smooth(loss, window)
    if window > 1:
        axes.plot(x, loss, color=_BLUE, alpha=0.3, linewidth=0.8, label="training, each step")
    label = f"training, mean of {window} steps" if window > 1 else "training"
    marker = "o" if len(x) == 1 else None
    axes.plot(x, curve, marker=marker, color=_BLUE, linewidth=2, label=label)
    title = f"step {x[-1]:,}: training loss {curve[-1]:.3f}"
    if held_out:
        losses = list(held_out.values())
        axes.plot(
            list(held_out),
            losses,
            "o-",
            color=_ORANGE,
            markersize=5,
            linewidth=1.2,
            label="held out",
        )
        title += f", held out {losses[-1]:.3f}"
    # Preference and policy training count pairs or answers in place of tokens.
    unit = next((f"per {x}" for x in ("pair", "answer") if f"{x}s" in steps[-1]), "nats per token")
    axes.set_ylabel(f"loss ({unit})", color=drawing.GREY)
    axes.legend(frameon=False, fontsize=9, labelcolor=drawing.GREY)
    return title
