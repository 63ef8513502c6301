"""The position of each rank of a layout on the axes, and its shards of tokens and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.run.plots import drawing
from trainkit.types import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LIMIT = 64  # ranks; columns of more would be too narrow for their numbers
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
    """Return the position of each rank of a layout.

    Tokens differ over dp_replicate, dp_shard, ring and ulysses. Parameters differ over pp, tp, and
    the axes that they are sharded over: dp_shard, and ring and ulysses as `fold_sp` says.

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
        indices = np.unravel_index(rank, tuple(sizes.values()))  # the last axis is innermost
        index = dict(zip(sizes, map(int, indices), strict=True))
        tokens = _flatten_index(index, sizes, axes["loss"])
        parameters = _flatten_index(index, sizes, ("pp", *axes["fsdp"], "tp"))
        if layout.ep > 1:  # ep and expert_fsdp divide the same ranks as fsdp
            shape = tuple(layout.expert_axes.values())
            indices = np.unravel_index(_flatten_index(index, sizes, axes["fsdp"]), shape)
            index |= zip(layout.expert_axes, map(int, indices), strict=True)
        places.append(RankPlace(rank, index, tokens, parameters))
    return places


def _flatten_index(
    index: Mapping[str, int], sizes: Mapping[str, int], names: tuple[str, ...]
) -> int:
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
        path: The file to write; its suffix sets the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is missing.
        ValueError: There are more than 64 ranks, or the suffix is no known format.
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
    # An axis of one rank divides nothing, and has no row.
    names = [name for name in layout.axes["world"] if layout.count(name) > 1]
    rows = [*names, "rank", "tokens", "parameters"]
    rows += ["ep", "expert_fsdp"] if layout.ep > 1 else []
    width = max(5.0, 1.2 + 0.42 * len(places))  # inches
    figure = drawing.new_figure(width, 0.34 * len(rows) + 0.85)
    axes = figure.subplots()
    _draw_axes(axes, places, names)
    for row, name in enumerate(rows[len(names) :], len(names)):
        _draw_leaves(axes, places, row + 0.25 * (name != "rank"), name)
    # A gap below the ranks separates the axes from what their ranks hold.
    heights = [row + 0.5 + 0.25 * (row > len(names)) for row in range(len(rows))]
    axes.set_yticks(heights, rows)
    axes.set_ylim(len(rows) + 0.3, 0)
    axes.set_xlim(0, len(places))
    axes.set_xticks([])
    axes.set_title(
        f"{_format_count(len(places), 'rank')}: {layout}" if names else "1 rank",
        loc="left",
        fontsize=11,
        color=drawing.INK,
    )
    num_tokens = len({place.tokens for place in places})
    num_parameters = len({place.parameters for place in places})
    label = f"{_format_count(num_tokens, 'part')} of the tokens, {num_parameters} of the parameters"
    axes.set_xlabel(label, loc="left", color=drawing.GREY)
    drawing.bare(axes)
    # After `bare`, which makes all labels grey.
    axes.tick_params(axis="y", labelcolor=drawing.INK)
    return drawing.save_picture("plot_mesh", figure, path)


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _draw_axes(axes: Axes, places: list[RankPlace], names: list[str]) -> None:
    """Draw each axis as a row of boxes, divided where an axis above it is."""
    for row in range(len(names)):
        # The default binds the row of this turn, not that of the last.
        def get_indices(place: RankPlace, depth: int = row + 1) -> tuple[int, ...]:
            return tuple(place.index[name] for name in names[:depth])

        for indices, group in groupby(places, get_indices):
            ranks = [place.rank for place in group]
            colour = ("#dbe4ee", "#b6c8db")[indices[-1] % 2]
            _draw_box(axes, ranks, row, str(indices[-1]), colour)


def _draw_leaves(axes: Axes, places: list[RankPlace], row: float, name: str) -> None:
    """Draw ranks, tokens, parameters or experts, with one box for neighbors of equal value."""
    values = (x.index[name] if name in x.index else getattr(x, name) for x in places)
    for value, group in groupby(enumerate(values), lambda pair: pair[1]):
        ranks = [rank for rank, _ in group]
        text = _format_letters(value) if name == "tokens" else str(value)
        colour = "#ffffff" if name == "rank" else drawing.colour_of(value)
        _draw_box(axes, ranks, row, text, colour)


def _format_letters(value: int) -> str:
    """Return A to Z, then AA, AB, and so on."""
    # Like the columns of a spreadsheet: there is no zero among the letters.
    before = _format_letters(value // 26 - 1) if value >= len(_LETTERS) else ""
    return before + _LETTERS[value % 26]


def _draw_box(axes: Axes, ranks: list[int], row: float, text: str, colour: str) -> None:
    edge = "#c4c8cf" if colour == "#ffffff" else "white"
    sides = (row + 0.05, 0.9)
    width = len(ranks)
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
