"""What all plots share: colors for every kind of vision, a figure, a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.types import DiskError, needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, PALE = "#111827", "#6b7280", "#e5e7eb"
COLOURS = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
    "#b3b3b3",
)
"""Eight colours that stay apart in every common kind of colour blindness (Okabe and Ito, 2008)."""

_FORMATS = (".png", ".svg", ".pdf")


def colour_of(index: int) -> str:
    """Return the colour of a number; numbers that differ by 8 share one.

    Examples:
        >>> colour_of(1) == colour_of(9)
        True
    """
    return COLOURS[index % len(COLOURS)]


def ink_on(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour `#rrggbb`.

    Examples:
        >>> ink_on("#f0e442"), ink_on("#0072b2")
        ('#111827', 'white')
    """
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    # The luma of ITU-R BT.601, out of 255.
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 95 else "white"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of a size in inches.

    Raises:
        ConfigError: matplotlib is missing.

    Examples:
        >>> new_figure(4, 3).get_size_inches().tolist()
        [4.0, 3.0]
    """
    with needs_extra("recipes"):
        # Not through pyplot, which stores every figure in a global.
        from matplotlib.figure import Figure  # noqa: PLC0415 -- an extra
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def bare(axes: Axes, *, sides: Iterable[str] = ("top", "right", "left", "bottom")) -> None:
    """Remove lines from an axes, and draw the remaining ones in grey.

    Examples:
        >>> axes = new_figure(1, 1).subplots()
        >>> bare(axes)
        >>> axes.spines["left"].get_visible()
        False
    """
    axes.spines[list(sides)].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=9, length=0)


def check_picture(where: str, path: Path) -> None:
    """Raise if `where` cannot write a picture to a path.

    Raises:
        ValueError: The suffix is no known format.
        DiskError: It is a directory, or its parent does not exist.

    Examples:
        >>> check_picture("plot", Path("loss.bmp"))
        Traceback (most recent call last):
        ValueError: plot: a picture ends in .png, .svg, .pdf, got 'loss.bmp'
    """
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"{where}: a picture ends in {', '.join(_FORMATS)}, got {str(path)!r}")
    if path.is_dir():
        raise DiskError(f"{where}: {path} is a directory; give a file", where=str(path))
    if not path.absolute().parent.is_dir():
        raise DiskError(f"{where}: {path.parent} is not a directory", where=str(path))


def save_picture(where: str, figure: Figure, path: str | Path) -> Path:
    """Write a figure in the format of the suffix, with the same bytes each time; return the path.

    An SVG contains text as text: it stays small, and can be searched and read aloud.

    Raises:
        ValueError: The suffix is no known format.
        DiskError: The picture cannot be written.

    Effects:
        Writes `path`.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_picture("plot", new_figure(1, 1), f"{folder}/a.svg").read_text()[:5]
        '<?xml'
    """
    check_picture(where, Path(path))
    with needs_extra("recipes"):
        from matplotlib import rc_context  # noqa: PLC0415 -- an extra
    # One font: matplotlib repeats the whole list of substitutes at every word of an SVG.
    fixed = {"svg.hashsalt": "trainkit", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    undated: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        with rc_context(fixed):
            figure.savefig(path, dpi=110, metadata=undated.get(Path(path).suffix.lower()))
    except OSError as error:
        raise DiskError(f"{where}: {path}: {error.strerror}", where=str(path)) from error
    return Path(path)
