"""A picture of a packing: the lengths of documents, the padding, and some rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.packing import report_packing
from trainkit.run.plots.drawing import GREY, INK, check_picture, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

    from trainkit.types import Bins, IntArray

_PIECES = ("#1d4e6f", "#2a6f97", "#4f93b8", "#89bdd6")
_THIN = "#b9d6e5"
_ORANGE = "#e07a2f"
_FATES = ("empty", "split", "truncated", "dropped")  # of documents that are in no row as a whole
_ROWS = 24  # drawn at most
_ROW_INCHES = 0.165


def plot_packing(bins: Bins, path: str | Path, *, lengths: ArrayLike | None = None) -> Path:
    """Draw a packing's efficiency, the histogram of lengths, and some rows; return the path.

    Of many rows 24 are drawn, evenly spaced from the first: fits that start with the longest
    documents have rows of one piece first. Pieces are blue, padding is orange. Neighboring pieces
    that are too thin are drawn as one pale piece.

    Args:
        bins: Result of `pack_bins`.
        path: The file to write; its suffix sets the format (.png, .svg, .pdf).
        lengths: The lengths that were packed, integers `[N]`. With them the histogram is of
            documents, not of pieces, and the text counts those that were split or dropped.

    Raises:
        ValueError: The bins were made from other lengths, or the suffix is no known format.
        ConfigError: matplotlib is missing.
        DiskError: The picture cannot be written.

    Effects:
        Writes `path`.
    """
    check_picture("plot_packing", Path(path))  # before the work
    report = report_packing(bins, lengths)
    heights = 1.6, _ROW_INCHES * max(min(_ROWS, len(bins)), 1)
    figure = new_figure(8, sum(heights) + 1.75)  # 1.75 inches for the text
    top, bottom = figure.subplots(2, 1, height_ratios=heights)
    _draw_lengths(top, bins, None if lengths is None else np.asarray(lengths, np.int64))
    if len(bins):
        _draw_rows(bottom, bins)
    bottom.set_visible(len(bins) > 0)
    for axes in (top, bottom):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GREY)
        axes.tick_params(colors=GREY, labelsize=9, length=0)
        axes.tick_params(axis="x", which="major", length=3)
    padding = report["row_padding"] + report["alignment_padding"]
    efficiency = min(report["efficiency"], 0.9999) if padding else 1.0  # 100 % means no padding
    rows = f"{len(bins):,} row{'s' * (len(bins) != 1)} of {bins.capacity:,} tokens"
    headline = f"efficiency {efficiency:.2%}: {rows}" if len(bins) else "no rows"
    title = figure.suptitle(headline, ha="left", fontsize=13, color=INK)
    text = (
        f"{padding:,} tokens of padding: {report['row_padding']:,} at the ends of rows, "
        f"{report['alignment_padding']:,} to align pieces"
    )
    counts = {name: report.get(f"{name}_documents", 0) for name in _FATES}
    documents = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    if documents:
        text += f"\nof {report['documents']:,} documents: {documents}"
    top.set_title(f"{text}\n\n{top.get_title(loc='left')}", loc="left", fontsize=9)
    figure.draw_without_rendering()  # computes the position of the axes
    title.set_x(top.get_position().x0)
    return save_picture("plot_packing", figure, path)


def _draw_lengths(axes: Axes, bins: Bins, lengths: IntArray | None) -> None:
    """Draw the histogram of lengths on a log scale, with a line at the capacity."""
    values = bins.lengths if lengths is None else lengths[lengths > 0]
    longest = max(int(values.max(initial=1)), bins.capacity)
    # Bins of a quarter of an octave, but at least one token wide.
    octaves = np.arange(0, np.log2(longest) + 1.25, 0.25)
    edges = np.unique(np.round(2**octaves)) - 0.5
    counts, _ = np.histogram(values, edges)
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_PIECES[2])
    axes.axvline(bins.capacity, color=_ORANGE, linewidth=1.2)
    axes.annotate(
        " capacity ", (bins.capacity, 1), xycoords=("data", "axes fraction"),
        ha="left" if bins.capacity**2 < longest else "right", va="top", fontsize=9, color=_ORANGE,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, 1.2 * longest)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks([])
    axes.set_ylim(bottom=0)
    noun = "pieces" if lengths is None else "documents"
    title = f"{noun} per bar, by length in tokens (the highest bar: {counts.max():,})"
    axes.set_title(title if values.size else f"no {noun}", loc="left", fontsize=9, color=GREY)


def _draw_rows(axes: Axes, bins: Bins) -> None:
    """Draw rows as bars: pieces in four alternating blues, on orange, which shows as padding."""
    spaced = np.linspace(0, len(bins) - 1, min(_ROWS, len(bins)))
    shown = np.unique(spaced.astype(np.int64))
    has_merged = False
    for index, row in enumerate(shown.tolist()):
        starts, tokens, is_merged = _merge_thin_pieces(bins, row)
        spans = list(zip(starts.tolist(), tokens.tolist(), strict=True))
        has_merged |= bool(is_merged.any())
        bar = (index + 0.12, 0.76)
        blues = [_THIN if is_merged[i] else _PIECES[i % len(_PIECES)] for i in range(len(spans))]
        axes.broken_barh([(0, bins.capacity)], bar, color=_ORANGE, linewidth=0)
        axes.broken_barh(spans, bar, facecolors=blues, linewidth=0)
    axes.set_xlim(0, bins.capacity)
    axes.set_ylim(len(shown), 0)
    axes.set_yticks(np.arange(len(shown)) + 0.5, [f"{row:,}" for row in shown.tolist()])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("tokens", fontsize=9, color=GREY)
    some = "the rows" if len(shown) == len(bins) else f"{len(shown)} of {len(bins):,} rows"
    title = f"{some}: pieces blue, padding orange" + ", many thin pieces pale" * has_merged
    axes.set_title(title, loc="left", fontsize=9, color=GREY)


def _merge_thin_pieces(
    bins: Bins, row: int
) -> tuple[IntArray, IntArray, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return starts and tokens of a row's spans, and which of them are several thin pieces."""
    lengths = bins.lengths[bins.offsets[row] : bins.offsets[row + 1]]
    aligned = -(-lengths // bins.multiple_of) * bins.multiple_of
    starts = np.cumsum(aligned) - aligned
    # Pieces below two pixels would alias into a pattern that the row does not have.
    is_thin = np.concatenate([[False], aligned < bins.capacity / 400])
    firsts = np.flatnonzero(~(is_thin[1:] & is_thin[:-1]))
    tokens = np.add.reduceat(lengths, firsts)
    return starts[firsts], tokens, np.diff(firsts, append=len(lengths)) > 1
