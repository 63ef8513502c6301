"""Draw certificate.png and certificate-reported.png, each in light and in dark.

python docs/pictures/certificate.py

The first has the differences of layouts from one process, those of the decoder's table in
docs/certificate.md, and those of the mistakes in docs/howto/my-loss-differs.md. The second has
beside them the losses that a comment in torchtitan #3029 reports, for which a reader needs the
explanation that stands below it. The pictures carry a hash of the numbers, which the tests compare.
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS = ("loss", "gradient norm", "parameters")
ZERO = 2e-17  # where a difference of 0 is drawn
BELOW, NOTE = 2.5e-18, 1e-5  # where words stand
SIZE = 10.5  # of letters, in points
# The losses after 1 and 10 steps of kimi_k3_debugmodel, on one GPU and in 17 layouts:
# https://github.com/pytorch/torchtitan/issues/3029, in a comment of 2026-08-04
ONE_GPU = (12.05575, 9.81530)
REPORTED = {
    "fsdp2": (12.07003, 9.97418),
    "pp2": (12.04905, 9.81217),
    "cp2": (12.06936, 9.97089),
    "tp2": (12.05239, 9.95286),
    "fsdp2 x tp2 x pp2": (12.05729, 9.73056),
    "fsdp2 x tp2 x cp2": (12.04102, 9.93129),
    "tp2 x pp2 x cp2": (12.04419, 9.74151),
    "fsdp2 x pp2 x cp2": (12.07969, 9.77886),
    "ep2 x fsdp2": (12.07003, 9.96939),
    "ep2 x fsdp2 x tp2 x pp2": (12.03851, 9.80058),
    "ep2 x fsdp2 x tp2 x cp2": (12.05770, 9.92700),
    "ep2 x fsdp2 x pp2 x cp2": (12.06318, 9.77785),
    "ep8 x fsdp8": (12.03346, 9.86456),
    "pp4": (12.06240, 9.93111),
    "pp8": (12.04408, 9.81014),
    "tp4": (12.03252, 9.93343),
    "cp4": (12.07386, 9.94493),
}
THEMES = {
    "": {
        "paper": "#ffffff",
        "ink": "#1f2328",
        "soft": "#59636e",
        "line": "#d1d9e0",
        "gray": "#818b98",
        "wrong": "#cf222e",
        "colours": ("#0969da", "#8250df", "#1a7f37"),
    },
    "-dark": {
        "paper": "#0d1117",
        "ink": "#f0f6fc",
        "soft": "#9198a1",
        "line": "#3d444d",
        "gray": "#9198a1",
        "wrong": "#f85149",
        "colours": ("#4493f8", "#ab7df8", "#3fb950"),
    },
}


def read_layouts(page: str) -> list[tuple[str, int, list[float]]]:
    """Return (name, ranks, differences) of each layout in the decoder's table of the page."""
    table = page.partition("## decoder, fp64\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [
        (name, int(ranks), [float(number) for number in numbers[:3]])
        for name, ranks, *numbers in rows[2:]
        if name != "packed documents"
    ]


def read_mistakes(page: str) -> list[float]:
    """Return the largest difference of each mistake in the page's table of causes."""
    table = page.partition("| loss | norm | parameters |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    return [max(float(x) for x in re.findall(r"\d[\de.-]*", " ".join(row))) for row in rows]


def hash_numbers(layouts: list[tuple[str, int, list[float]]], mistakes: list[float]) -> str:
    """Return a hash of what is drawn."""
    numbers = layouts, mistakes, ONE_GPU, REPORTED
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def draw_layouts(axes: Any, layouts: list[tuple[str, int, list[float]]], theme: dict) -> None:
    """Draw each layout as a column of three points, grouped by the number of ranks."""
    ranks = sorted({row[1] for row in layouts})
    ordered = sorted(layouts, key=lambda row: row[1])
    places = [i + 1.5 * ranks.index(row[1]) for i, row in enumerate(ordered)]  # gaps between
    for column, name in enumerate(COLUMNS):
        numbers = [max(row[2][column], ZERO) for row in ordered]
        axes.scatter(places, numbers, s=17, color=theme["colours"][column], lw=0, label=name)
    for count in ranks:
        here = [x for x, row in zip(places, ordered, strict=True) if row[1] == count]
        middle = (here[0] + here[-1]) / 2
        axes.text(middle, BELOW, str(count), ha="center", va="center", color=theme["soft"])
        axes.plot([here[0] - 0.5, here[-1] + 0.5], [9e-18] * 2, color=theme["line"], lw=3)
    axes.set_xlabel(f"{len(layouts)} layouts, by the number of ranks", labelpad=15)
    axes.set_title("trainkit: 3 steps in fp64, by certify", loc="left")
    legend = axes.legend(loc="upper left", ncols=3, handletextpad=0.1)
    legend.get_frame().set(edgecolor="none", alpha=1)
    legend.set_title("largest relative difference from one process", {"size": SIZE})
    legend._legend_box.align = "left"  # noqa: SLF001 -- `alignment=` leaves the title centred
    axes.text(places[-1] + 0.5, 1.8e-12, "bound of the tests", ha="right", color=theme["soft"])


def write_note(axes: Any, x: float, note: str, theme: dict) -> None:
    """Write lines below the points; the grid ends where they stand."""
    paper = {"facecolor": theme["paper"], "edgecolor": "none", "pad": 3}
    axes.text(x, NOTE, note, ha="center", va="top", color=theme["soft"], bbox=paper)


def draw_mistakes(axes: Any, mistakes: list[float], theme: dict) -> None:
    """Draw what planted mistakes do to a layout."""
    axes.scatter(range(len(mistakes)), mistakes, s=30, marker="x", lw=1.3, color=theme["wrong"])
    axes.set_xlim(-2, len(mistakes) + 1)
    axes.set_title("the same, with a mistake", loc="left")
    note = f"{len(mistakes)} mistakes that\nthe tests plant, one\nat a time: largest\n"
    note += "difference, 1 step"
    write_note(axes, (len(mistakes) - 1) / 2, note, theme)


def draw_reported(axes: Any, theme: dict) -> None:
    """Draw the losses of the comment, relative to that of one GPU."""
    for place, step in enumerate((1, 10)):
        numbers = [abs(losses[place] / ONE_GPU[place] - 1) for losses in REPORTED.values()]
        spread = [place + 0.03 * (i - len(numbers) // 2) for i in range(len(numbers))]
        axes.scatter(spread, numbers, s=17, facecolors="none", edgecolors=theme["gray"], lw=1)
        axes.text(place, BELOW, f"step {step}", ha="center", va="center", color=theme["soft"])
    axes.set_xlim(-0.6, 1.6)
    axes.set_title("a comment in torchtitan #3029", loc="left")
    note = (
        "loss of a debug model, 17 layouts\nagainst one GPU; each layout has\n"
        "initial values of its own"
    )
    write_note(axes, 0.5, note, theme)


def draw(numbers: tuple[list, list], file: Path, theme: dict, *, reported: bool = False) -> None:
    """Draw the picture in one theme, with the reported losses or without."""
    # Here, as the tests read the numbers without drawing.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    style = {
        "font.family": ["Liberation Sans", "DejaVu Sans"],
        "font.size": SIZE,
        "axes.titlesize": SIZE,
        "text.color": theme["ink"],
        "axes.labelcolor": theme["soft"],
        "axes.edgecolor": theme["line"],
        "ytick.color": theme["soft"],
        "figure.facecolor": theme["paper"],
        "axes.facecolor": theme["paper"],
        "savefig.facecolor": theme["paper"],
    }
    layouts, mistakes = numbers
    with mpl.rc_context(style):
        widths = [3.4, 1.1, 1.5] if reported else [3.4, 1.1]
        figure, panels = plt.subplots(
            1,
            len(widths),
            figsize=(9.2, 3.7) if reported else (7.2, 3.3),
            width_ratios=widths,
            sharey=True,
            layout="constrained",
        )
        draw_layouts(panels[0], layouts, theme)
        draw_mistakes(panels[1], mistakes, theme)
        if reported:
            draw_reported(panels[2], theme)
        for axes in panels:
            axes.set_yscale("log")
            axes.set_ylim(9e-18, 30)
            axes.axhline(1e-12, color=theme["soft"], lw=1, ls=(0, (4, 3)))
            axes.grid(axis="y", color=theme["line"], lw=0.5, alpha=0.6)
            axes.set_axisbelow(True)
            axes.set_xticks([])
            axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
            axes.tick_params(which="both", length=0)
        exponents = range(-16, 1, 4)
        labels = ["0", *(f"1e{n}" if n else "1" for n in exponents)]
        panels[0].set_yticks([ZERO, *(10.0**n for n in exponents)], labels)
        panels[0].minorticks_off()
        figure.savefig(file, dpi=180, metadata={"Description": hash_numbers(*numbers)})
        plt.close(figure)


def read_numbers() -> tuple[list[tuple[str, int, list[float]]], list[float]]:
    """Return the layouts and the mistakes of the pages."""
    docs = HERE.parent
    return (
        read_layouts((docs / "certificate.md").read_text("utf-8")),
        read_mistakes((docs / "howto" / "my-loss-differs.md").read_text("utf-8")),
    )


def main() -> None:
    """Draw the pictures."""
    numbers = read_numbers()
    for name, theme in THEMES.items():
        draw(numbers, HERE / f"certificate{name}.png", theme)
        draw(numbers, HERE / f"certificate-reported{name}.png", theme, reported=True)


if __name__ == "__main__":
    main()
