"""The zigzag shards of a packed row, and the blocks of ring attention of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.run.plots import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@attrs.frozen
class ZigzagChunk:
    """One of the 2N chunks of a document: tokens `begin` to `end` of the row, on `rank`."""

    document: int
    index: int
    rank: int
    begin: int
    end: int


@attrs.frozen
class RingBlock:
    """A chunk of queries and one of keys, which `rank` computes at `step` of the ring.

    `pairs` counts the pairs of query and key under the causal mask: n^2 of chunks of n tokens, or
    n (n + 1) / 2 where both are the same chunk.
    """

    query: ZigzagChunk
    key: ZigzagChunk
    rank: int
    step: int
    pairs: int


def zigzag_chunks(lengths: Sequence[int], ring: int) -> list[ZigzagChunk]:
    """Return the chunks of a packed row in the order of its tokens.

    Rank r of N has chunks r and 2N-1-r of each document, as by `batch.zigzag_shard`.

    Args:
        lengths: The documents of the row, in tokens; each a multiple of 2N.
        ring: The number of ranks N.

    Raises:
        ValueError: A length does not divide by 2N, or there is no document or no rank.

    Examples:
        >>> [chunk.rank for chunk in zigzag_chunks([8], 2)]
        [0, 1, 1, 0]
    """
    if ring < 1 or not len(lengths) or min(lengths) < 1:
        raise ValueError(f"zigzag_chunks: no ring of {ring} ranks over documents of {lengths}")
    uneven = [length for length in lengths if length % (2 * ring)]
    if uneven:
        raise ValueError(
            f"zigzag_chunks: a document of {uneven[0]} tokens is no multiple of {2 * ring} (2 parts"
            f" for each of {ring} ranks); pack with multiple_of={2 * ring}"
        )
    chunks: list[ZigzagChunk] = []
    start = 0
    for document, length in enumerate(lengths):
        size = length // (2 * ring)
        for index in range(2 * ring):
            # A late chunk attends to many keys and its mirror image to few: all ranks have equal
            # work.
            rank = min(index, 2 * ring - 1 - index)
            chunks.append(ZigzagChunk(document, index, rank, start, start + size))
            start += size
    return chunks


def ring_blocks(lengths: Sequence[int], ring: int) -> list[RingBlock]:
    """Return the blocks of causal attention of a packed row that are not entirely masked.

    At step s of the ring, rank r has the keys and values of rank r - s. Of each document's two by
    two blocks it computes those that are not masked, which is equal work on all ranks at every step
    (Zhu, "Ring flash attention", 2024).

    Args:
        lengths: The documents of the row, in tokens; each a multiple of 2N.
        ring: The number of ranks N.

    Raises:
        ValueError: As `zigzag_chunks`.

    Examples:
        >>> blocks = ring_blocks([8], 2)
        >>> [sum(b.pairs for b in blocks if (b.rank, b.step) == (rank, 1)) for rank in (0, 1)]
        [8, 8]
    """
    chunks = zigzag_chunks(lengths, ring)
    blocks: list[RingBlock] = []
    for query in chunks:
        size = query.end - query.begin
        for key in chunks:
            # Other documents and later chunks are masked entirely.
            if key.document == query.document and key.index <= query.index:
                pairs = size * (size + 1) // 2 if key is query else size * size
                step = (query.rank - key.rank) % ring
                blocks.append(RingBlock(query, key, query.rank, step, pairs))
    return blocks


def plot_zigzag(lengths: Sequence[int], ring: int, path: str | Path) -> Path:
    """Draw the shards of a packed row, and the attention that each rank computes; return the path.

    At the top are the row, and each rank's shard of it, colored by rank. At the bottom left is the
    attention mask: the color of a block is the rank that computes it, the number the step of the
    ring at which its keys arrive. At the bottom right is the work of each rank by step.

    Args:
        lengths: The documents of the row, in tokens; each a multiple of 2N.
        ring: The number of ranks N, at most 8.
        path: The file to write; its suffix sets the format (.png, .svg, .pdf).

    Raises:
        ValueError: A length does not divide by 2N, there are more than 8 ranks, or the suffix is no
            known format.
        ConfigError: matplotlib is missing.
        DiskError: The picture cannot be written.

    Effects:
        Writes `path`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_zigzag([64, 40], 4, f"{folder}/zigzag.svg").name
        'zigzag.svg'
    """
    drawing.check_picture("plot_zigzag", Path(path))
    if ring > 8:
        raise ValueError(f"plot_zigzag: there are colors for at most 8 ranks, got {ring}")
    chunks = zigzag_chunks(lengths, ring)
    blocks = ring_blocks(lengths, ring)
    height = 0.24 * (ring + 1) + 0.2  # inches of the shards, a row for each rank
    figure = drawing.new_figure(9, height + 5.2)
    grid = figure.add_gridspec(2, 2, height_ratios=[height, 4.6], width_ratios=[4.6, 2.6])
    _draw_shards(figure.add_subplot(grid[0, :]), chunks, ring)
    _draw_blocks(figure.add_subplot(grid[1, 0]), blocks, lengths)
    _draw_work(figure.add_subplot(grid[1, 1]), blocks, ring)
    return drawing.save_picture("plot_zigzag", figure, path)


def _draw_shards(axes: Axes, chunks: Sequence[ZigzagChunk], ring: int) -> None:
    """Draw the row, and below it each rank's shard, with the numbers of chunks where they fit."""
    filled = [0] * ring  # tokens of each rank that are drawn
    for chunk in chunks:
        size = chunk.end - chunk.begin
        color = drawing.colour_of(chunk.rank)
        # Once in the row, at its place, and once in its rank's shard, after the chunks before it.
        for row, start in ((0.0, chunk.begin), (chunk.rank + 1.3, filled[chunk.rank])):
            axes.broken_barh(
                [(start, size)],
                (row + 0.06, 0.88),
                facecolor=color,
                edgecolor="white",
                linewidth=0.8,
            )
            if size * 60 > chunks[-1].end:  # the chunk is wide enough for its number
                _write(axes, start + size / 2, row + 0.52, str(chunk.index), color)
        filled[chunk.rank] += size
        if chunk.index == 0:  # a line where a document starts
            axes.plot(
                [chunk.begin] * 2, [-0.15, 1.1], color=drawing.INK, linewidth=1.6, clip_on=False
            )
    axes.set_xlim(0, chunks[-1].end)
    axes.set_ylim(ring + 1.3, -0.1)
    rows = [0.5, *(rank + 1.8 for rank in range(ring))]
    axes.set_yticks(rows, ["row", *(f"rank {rank}" for rank in range(ring))])
    axes.set_xlabel("tokens", fontsize=9, color=drawing.GREY)
    title = (
        f"each document cut into {2 * ring} chunks: rank r holds chunks r and {2 * ring - 1} - r"
    )
    axes.set_title(title, loc="left", fontsize=10, color=drawing.INK)
    drawing.bare(axes)


def _draw_blocks(axes: Axes, blocks: Sequence[RingBlock], lengths: Sequence[int]) -> None:
    """Draw the causal blocks, those on the diagonal as triangles."""
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 -- an extra, there by now

    total = sum(lengths)
    shapes: list[list[tuple[int, int]]] = []
    for block in blocks:
        left, right = block.key.begin, block.key.end
        top, bottom = block.query.begin, block.query.end
        # Below the diagonal of a chunk with itself queries come after keys.
        corners = [(left, top), (left, bottom), (right, bottom)]
        shapes.append(corners if block.key is block.query else [*corners, (right, top)])
        x, y = (left + right) / 2, (top + bottom) / 2
        room = 28
        if block.key is block.query:  # the centroid of a triangle
            x = left + (right - left) / 3
            y = top + (bottom - top) * 2 / 3
            room = 22
        if (right - left) * room > total:  # otherwise the number is larger than the block
            _write(axes, x, y, str(block.step), drawing.colour_of(block.rank))
    colours = [drawing.colour_of(block.rank) for block in blocks]
    axes.add_collection(
        PolyCollection(shapes, facecolors=colours, edgecolor="white", linewidth=0.6)
    )
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        # The left and the lower edge of the document's square.
        axes.plot([start, start, end], [start, end, end], color=drawing.INK, linewidth=0.8)
    axes.set_xlim(0, total)
    # The first query is at the top, as in a matrix.
    axes.set_ylim(total, 0)
    axes.set_aspect("equal")
    axes.set_xlabel("keys", fontsize=9, color=drawing.GREY)
    axes.set_ylabel("queries", fontsize=9, color=drawing.GREY)
    axes.set_title(
        "what is computed: colour is the rank, number the step",
        loc="left",
        fontsize=10,
        color=drawing.INK,
    )
    drawing.bare(axes, sides=("top", "right"))
    axes.spines["left"].set_color(drawing.GREY)


def _draw_work(axes: Axes, blocks: Sequence[RingBlock], ring: int) -> None:
    """Draw the work of each rank as a stacked bar of its steps."""
    pairs = np.zeros((ring, ring))
    for block in blocks:
        # `[step, rank]`, summed over documents.
        pairs[block.step, block.rank] += block.pairs
    percent = 100 * pairs / pairs.sum()
    below = np.zeros(ring)
    colours = [drawing.colour_of(rank) for rank in range(ring)]
    for step in range(ring):
        axes.bar(range(ring), percent[step], 0.8, below, color=colours, edgecolor="white")
        for rank in range(ring):
            _write(axes, rank, below[rank] + percent[step, rank] / 2, str(step), colours[rank])
        below += percent[step]
    axes.set_xticks(
        range(ring), [f"rank {rank}" if ring < 5 else str(rank) for rank in range(ring)]
    )
    axes.set_yticks([0, below.max()], ["0", f"{below.max():.3g} %"])
    axes.set_title("the work of each rank, by step", loc="left", fontsize=10, color=drawing.INK)
    drawing.bare(axes)


def _write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=drawing.ink_on(colour))
