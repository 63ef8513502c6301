"""A picture of a packing: how long the documents are, where the padding is, what rows hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.packing import report_packing
from trainkit.run.plots.drawing import GREY, INK, check_picture, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from trainkit.types import Bins, IntArray

_PIECES = ("#1d4e6f", "#2a6f97", "#4f93b8", "#89bdd6")
_THIN = "#b9d6e5"
_ORANGE = "#e07a2f"
_ROWS = 24
_ROW_INCHES = 0.165


def plot_packing(bins: Bins, path: str | Path, *, lengths: ArrayLike | None = None) -> Path:
    """Draw what a packing comes to, the histogram of lengths, and some rows; return where.

    Of many rows 24 are drawn, at even distances and from the first one on: fits that begin with the
    longest documents have rows of one piece first. Pieces are blue, padding is orange; neighbours
    too thin for the picture are drawn as one pale piece.

    Args:
        bins: What `pack_bins` returned.
        path: The picture; the name says the format (.png, .svg, .pdf).
        lengths: What it was given, integers `[N]`: then the histogram is of documents instead of
            pieces, and the text says how many were cut or dropped.

    Raises:
        ValueError: The bins were made from other lengths; the name says no format.
        ConfigError: matplotlib is missing.
        DiskError: The picture cannot be written.

    Effects:
        Writes `path`.
    """
    check_picture("plot_packing", Path(path))  # before the work
    figure = _figure(bins, None if lengths is None else np.asarray(lengths, np.int64))
    return save_picture("plot_packing", figure, path)


def _figure(bins: Bins, lengths: IntArray | None) -> Figure:
    report = report_packing(bins, lengths)
    inches = 1.6, _ROW_INCHES * max(min(_ROWS, len(bins)), 1)  # of the two halves; then the text
    figure = new_figure(8, sum(inches) + 1.75)
    top, bottom = figure.subplots(2, 1, height_ratios=inches)
    _draw_lengths(top, bins, lengths)
    if len(bins):
        _draw_rows(bottom, bins)
    bottom.set_visible(len(bins) > 0)
    for axes in (top, bottom):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GREY)
        axes.tick_params(colors=GREY, labelsize=9, length=0)
        axes.tick_params(axis="x", which="major", length=3)
    efficiency = min(report["efficiency"], 0.9999) if _padding(report) else 1.0
    rows = f"{len(bins):,} row{'s' * (len(bins) != 1)} of {bins.capacity:,} tokens"
    headline = f"efficiency {efficiency:.2%}: {rows}" if len(bins) else "no rows"
    title = figure.suptitle(headline, ha="left", fontsize=13, color=INK)
    top.set_title(_facts(report) + "\n\n" + top.get_title(loc="left"), loc="left", fontsize=9)
    figure.draw_without_rendering()  # says where the axes are
    title.set_x(top.get_position().x0)
    return figure


def _padding(report: dict[str, int | float]) -> int | float:
    return report["row_padding"] + report["alignment_padding"]


def _facts(report: dict[str, int | float]) -> str:
    """Say where the padding is, and what became of documents that are not whole in a row."""
    names = ("empty", "split", "truncated", "dropped")
    counts = {name: report.get(f"{name}_documents", 0) for name in names}
    documents = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    padding = (
        f"{_padding(report):,} tokens of padding: {report['row_padding']:,} at the ends of rows, "
        f"{report['alignment_padding']:,} to align pieces"
    )
    return padding + (f"\nof {report['documents']:,} documents: {documents}" if documents else "")


def _draw_lengths(axes: Axes, bins: Bins, lengths: IntArray | None) -> None:
    """Draw the histogram of lengths on a log scale, and a line at the capacity."""
    values = bins.lengths if lengths is None else lengths[lengths > 0]
    longest = max(int(values.max(initial=1)), bins.capacity)
    # Steps of a quarter of an octave, and of no less than one token.
    edges = np.unique(np.round(2 ** np.arange(0, np.log2(longest) + 1.25, 0.25))) - 0.5
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
    what = "pieces" if lengths is None else "documents"
    title = f"{what} per bar, by length in tokens (the highest bar: {counts.max():,})"
    axes.set_title(title if values.size else f"no {what}", loc="left", fontsize=9, color=GREY)


def _draw_rows(axes: Axes, bins: Bins) -> None:
    """Draw rows as bars: pieces in turn in one of four blues, then padding."""
    shown = np.unique(np.linspace(0, len(bins) - 1, min(_ROWS, len(bins))).astype(np.int64))
    merged = False
    for place, row in enumerate(shown.tolist()):
        begins, tokens, thin = _spans(bins, row)
        spans = list(zip(begins.tolist(), tokens.tolist(), strict=True))
        merged |= bool(thin.any())
        bar = (place + 0.12, 0.76)
        blues = [_THIN if thin[at] else _PIECES[at % len(_PIECES)] for at in range(len(spans))]
        axes.broken_barh([(0, bins.capacity)], bar, color=_ORANGE, linewidth=0)
        axes.broken_barh(spans, bar, facecolors=blues, linewidth=0)
    axes.set_xlim(0, bins.capacity)
    axes.set_ylim(len(shown), 0)
    axes.set_yticks(np.arange(len(shown)) + 0.5, [f"{row:,}" for row in shown.tolist()])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("tokens", fontsize=9, color=GREY)
    some = "the rows" if len(shown) == len(bins) else f"{len(shown)} of {len(bins):,} rows"
    title = f"{some}: pieces blue, padding orange" + ", many thin pieces pale" * merged
    axes.set_title(title, loc="left", fontsize=9, color=GREY)


def _spans(bins: Bins, row: int) -> tuple[IntArray, IntArray, np.ndarray[Any, Any]]:
    """Return what is drawn of a row: begins, tokens, and which are several thin pieces.

    Single pieces below two pixels would be a pattern that the row does not have.
    """
    lengths = bins.lengths[bins.offsets[row] : bins.offsets[row + 1]]
    aligned = -(-lengths // bins.multiple_of) * bins.multiple_of
    begins = np.cumsum(aligned) - aligned
    thin = np.concatenate([[False], aligned < bins.capacity / 400])
    firsts = np.flatnonzero(~(thin[1:] & thin[:-1]))
    tokens = np.add.reduceat(lengths, firsts)
    return begins[firsts], tokens, np.diff(firsts, append=len(lengths)) > 1
