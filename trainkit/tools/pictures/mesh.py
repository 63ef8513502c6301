"""Where each rank of a layout sits: on which axes, with which tokens, with which parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.run.plots import drawing
from trainkit.types import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LIMIT = 64
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@attrs.frozen
class RankPlace:
    """One rank: its index on each axis, and the indices of its shards of tokens and parameters.

    Ranks with the same `tokens` have the same tokens, those with the same `parameters` the same
    parameters. With expert parallelism `index` has "ep", the group of experts, and "expert_fsdp",
    the shard of it.
    """

    rank: int
    index: Mapping[str, int]
    tokens: int
    parameters: int


def mesh_places(layout: Layout) -> list[RankPlace]:
    """Return where each rank of a layout sits.

    Tokens differ over dp_replicate, dp_shard, ring and ulysses. Parameters differ over pp, tp and
    what they are sharded over: dp_shard and the part of ring and ulysses that `fold_sp` names.

    Args:
        layout: The layout; a dp_shard of -1 counts 1.

    Examples:
        >>> [(p.tokens, p.parameters) for p in mesh_places(Layout(dp_replicate=2, tp=2))]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    axes = layout.axes
    sizes = {name: layout.count(name) for name in axes["world"]}
    places: list[RankPlace] = []
    for rank in range(layout.world):
        found = np.unravel_index(rank, tuple(sizes.values()))
        index = dict(zip(sizes, map(int, found), strict=True))
        tokens = _number(index, sizes, axes["loss"])
        parameters = _number(index, sizes, ("pp", *axes["fsdp"], "tp"))
        if layout.ep > 1:
            shape = tuple(layout.expert_axes.values())
            found = np.unravel_index(_number(index, sizes, axes["fsdp"]), shape)
            index |= zip(layout.expert_axes, map(int, found), strict=True)
        places.append(RankPlace(rank, index, tokens, parameters))
    return places


def _number(index: Mapping[str, int], sizes: Mapping[str, int], names: tuple[str, ...]) -> int:
    shape = tuple(sizes[name] for name in names)
    return int(np.ravel_multi_index(tuple(index[name] for name in names), shape))


# ---------------------------------------------------------------------------------- the picture


def plot_mesh(layout: Layout, path: str | Path) -> Path:
    """Draw the ranks of a layout with their axes, tokens and parameters; return the path.

    A column is a rank. Each row at the top is an axis, which divides the row above it. Below, ranks
    with the same letter have the same tokens, ranks with the same number the same parameters. With
    expert parallelism, ranks with the same number on "ep" have the same experts, and "expert_fsdp"
    is the shard of them.

    Args:
        layout: The layout; a dp_shard of -1 counts 1.
        path: The picture; the name says the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is missing.
        ValueError: There are more than 64 ranks, or the name says no format.
        DiskError: The picture cannot be written.

    Effects:
        Writes `path`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_mesh(Layout(dp_shard=2, tp=2), f"{folder}/mesh.svg").name
        'mesh.svg'
    """
    drawing.check_picture("plot_mesh", Path(path))
    places = mesh_places(layout)
    if len(places) > _LIMIT:
        raise ValueError(f"plot_mesh: {len(places)} ranks are more than the {_LIMIT} drawn legibly")
    shown = [name for name in layout.axes["world"] if layout.count(name) > 1]
    rows = [*shown, "rank", "tokens", "parameters"]
    rows += ["ep", "expert_fsdp"] if layout.ep > 1 else []
    figure = drawing.new_figure(max(5.0, 1.2 + 0.42 * len(places)), 0.34 * len(rows) + 0.85)
    axes = figure.subplots()
    _draw_axes(axes, places, shown)
    for row, name in enumerate(rows[len(shown) :], len(shown)):
        _draw_leaves(axes, places, row + 0.25 * (name != "rank"), name)
    heights = [at + 0.5 + 0.25 * (at > len(shown)) for at in range(len(rows))]
    axes.set_yticks(heights, rows)
    axes.set_ylim(len(rows) + 0.3, 0)
    axes.set_xlim(0, len(places))
    axes.set_xticks([])
    axes.tick_params(axis="y", labelcolor=drawing.INK)
    axes.set_title(
        f"{_count(len(places), 'rank')}: {layout}" if shown else "1 rank",
        loc="left",
        fontsize=11,
        color=drawing.INK,
    )
    parts = [len({getattr(p, kind) for p in places}) for kind in ("tokens", "parameters")]
    label = f"{_count(parts[0], 'part')} of the tokens, {parts[1]} of the parameters"
    axes.set_xlabel(label, loc="left", color=drawing.GREY)
    drawing.bare(axes)
    axes.tick_params(axis="y", labelcolor=drawing.INK)
    return drawing.save_picture("plot_mesh", figure, path)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _draw_axes(axes: Axes, places: list[RankPlace], shown: list[str]) -> None:
    """Draw each axis as a row of boxes, cut where an axis above is cut."""
    for row in range(len(shown)):
        above = shown[: row + 1]

        def branch(place: RankPlace, above: list[str] = above) -> tuple[int, ...]:
            return tuple(place.index[axis] for axis in above)

        for key, group in groupby(places, branch):
            ranks = [place.rank for place in group]
            colour = ("#dbe4ee", "#b6c8db")[key[-1] % 2]
            _box(axes, ranks, row, str(key[-1]), colour)


def _draw_leaves(axes: Axes, places: list[RankPlace], row: float, name: str) -> None:
    """Draw the ranks, or what they hold: one box for neighbours with the same content."""
    content: dict[str, Callable[[RankPlace], int]] = {
        "rank": lambda place: place.rank,
        "tokens": lambda place: place.tokens,
        "parameters": lambda place: place.parameters,
        "ep": lambda place: place.index["ep"],
        "expert_fsdp": lambda place: place.index["expert_fsdp"],
    }
    for value, group in groupby(places, content[name]):
        ranks = [place.rank for place in group]
        text = _letters(value) if name == "tokens" else str(value)
        colour = "#ffffff" if name == "rank" else drawing.colour_of(value)
        _box(axes, ranks, row, text, colour)


def _letters(value: int) -> str:
    """Return A to Z, then AA, AB, and so on."""
    before = _letters(value // 26 - 1) if value >= len(_LETTERS) else ""
    return before + _LETTERS[value % 26]


def _box(axes: Axes, ranks: list[int], row: float, text: str, colour: str) -> None:
    edge = "#c4c8cf" if colour == "#ffffff" else "white"
    sides, width = (row + 0.05, 0.9), len(ranks)
    axes.broken_barh([(ranks[0] + 0.03, width - 0.06)], sides, facecolor=colour, edgecolor=edge)
    axes.text(
        ranks[0] + width / 2,
        row + 0.51,
        text,
        ha="center",
        va="center",
        fontsize=9,
        color=drawing.ink_on(colour),
    )
