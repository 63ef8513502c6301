"""How the state of a delta layer passes through the parts of a document around a ring."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.run.plots import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def state_hops(ring: int) -> list[tuple[int, int]]:
    """Return the ranks before and after each border of a document's 2N zigzag parts.

    A state passes every border, in this order; it is sent where the two ranks differ.

    Args:
        ring: The number of ranks N.

    Examples:
        >>> state_hops(2)
        [(0, 1), (1, 1), (1, 0)]
    """
    owners = [min(part, 2 * ring - 1 - part) for part in range(2 * ring)]
    return list(pairwise(owners))


def plot_delta_scan(ring: int, path: str | Path) -> Path:
    """Draw the three steps of a delta layer around a ring, for one document; return the path.

    From the top: the parts of the document, colored by rank; the map of each part, which its rank
    computes without any other; the state, which passes from part to part; and what tokens read.

    Args:
        ring: The number of ranks N, from 2 to 4.
        path: The file to write; its suffix sets the format (.png, .svg, .pdf).

    Raises:
        ValueError: The number of ranks is not drawn, or the suffix is no known format.
        ConfigError: matplotlib is missing.
        DiskError: The picture cannot be written.

    Effects:
        Writes `path`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_delta_scan(2, f"{folder}/scan.svg").name
        'scan.svg'
    """
    drawing.check_picture("plot_delta_scan", Path(path))
    if not 2 <= ring <= 4:
        raise ValueError(f"plot_delta_scan: 2 to 4 ranks have room for their words, got {ring}")
    figure = drawing.new_figure(9, 4.6)
    axes = figure.subplots()
    parts = 2 * ring
    hops = state_hops(ring)
    owners = [0, *(after for _, after in hops)]
    for part, rank in enumerate(owners):
        colour = drawing.colour_of(rank)
        _box(axes, part, 0.0, 1.0, colour=colour, text=f"part {part}\nrank {rank}")
        _box(axes, part + 0.12, 1.9, 0.76, colour=colour, text="S → A S + B")
        _box(axes, part + 0.12, 5.0, 0.76, colour=colour, text="outputs")
    _title(axes, -0.2, "a document in zigzag parts: rank r of N has parts r and 2N - 1 - r")
    _title(axes, 1.7, "1   all ranks at once: the matrices A and B of each part, from its tokens")
    _title(axes, 3.2, "2   part by part: the state S, D x E numbers a head, however long the text")
    _title(axes, 4.8, "3   all ranks at once: tokens read the state before their part")
    for part, rank in enumerate(owners):
        name = "0" if part == 0 else f"S{part}"
        x = part + 0.5
        colour = drawing.colour_of(rank)
        axes.plot([x], [3.85], "o", markersize=21, color=colour)
        axes.text(x, 3.85, name, ha="center", va="center", fontsize=9, color=drawing.ink_on(colour))
        _arrow(axes, (x, 4.15), (x, 4.5))
    for part, (before, after) in enumerate(hops):
        _arrow(axes, (part + 0.76, 3.85), (part + 1.24, 3.85))
        text = "stays" if before == after else "sent"
        axes.text(part + 1, 3.68, text, ha="center", va="bottom", fontsize=8, color=drawing.GREY)
    axes.set_xlim(-0.02, parts + 0.02)
    axes.set_ylim(5.85, -0.6)
    axes.set_xticks([])
    axes.set_yticks([])
    drawing.bare(axes)
    return drawing.save_picture("plot_delta_scan", figure, path)


def _box(axes: Axes, x: float, y: float, width: float, *, colour: str, text: str) -> None:
    axes.broken_barh([(x, width)], (y, 0.75), facecolor=colour, edgecolor="white", linewidth=1.5)
    axes.text(
        x + width / 2,
        y + 0.38,
        text,
        ha="center",
        va="center",
        fontsize=8,
        color=drawing.ink_on(colour),
    )


def _title(axes: Axes, y: float, text: str) -> None:
    axes.text(0, y, text, ha="left", va="bottom", fontsize=10, color=drawing.INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "->", "color": drawing.INK, "linewidth": 1.1}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
