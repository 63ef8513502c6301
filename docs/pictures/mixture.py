"""Draw mixture.png: a mixture with an anneal, and how near it stays to its weights.

python docs/pictures/mixture.py
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

from trainkit.sampling import MixturePhase, make_mixture_phases, sample_mixture

mpl.use("agg")
from matplotlib import pyplot as plt

NUM_ROWS = {"web": 4000, "code": 1500, "chat": 300}
PHASES = make_mixture_phases(
    MixturePhase(0, {"web": 0.7, "code": 0.3, "chat": 0}),
    MixturePhase(200, {"web": 0.3, "chat": 0.4}, lr_scale=0.5),
)
STEPS, ROWS = 300, 16
COLOURS = {"web": "#4c72b0", "code": "#dd8452", "chat": "#55a868"}


def main() -> None:
    """Draw the picture."""
    rows_at = sample_mixture(NUM_ROWS, PHASES, rows_per_step=ROWS, seed=0)
    drawn = [rows_at(batch) for batch in range(STEPS)]
    ends = np.cumsum(list(NUM_ROWS.values()))
    sources = np.searchsorted(ends, np.concatenate(drawn), side="right")
    weights = np.array([list(phase.weights.values()) for phase in PHASES])
    expected = weights[(np.arange(STEPS * ROWS) >= PHASES[1].start * ROWS).astype(int)]
    chance = (np.random.default_rng(0).random((len(expected), 1)) > expected.cumsum(1)).sum(1)
    rows = np.arange(1, STEPS * ROWS + 1)
    own, random = (np.cumsum(x[:, None] == np.arange(3), axis=0) for x in (sources, chance))

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for number, (name, colour) in enumerate(COLOURS.items()):
        left.plot(rows / ROWS, own[:, number] / rows, color=colour)
        left.text(STEPS + 4, own[-1, number] / rows[-1], name, color=colour, va="center")
    left.set_title("rows of each corpus so far")
    left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    left.set_ylim(0, 1)
    left.set_xlim(0, STEPS)
    off = {"drawn at random": random, "sample_mixture": own}
    for (name, counts), colour in zip(off.items(), ("#bbbbbb", COLOURS["web"]), strict=True):
        ahead = counts[:, 0] - np.cumsum(expected[:, 0])
        right.plot(rows / ROWS, ahead, color=colour, linewidth=1, label=name)
    right.set_title("rows of web ahead of its weight")
    right.legend(frameon=False)
    right.set_xlim(0, STEPS)
    for axes in (left, right):
        axes.axvline(PHASES[1].start, color="#888888", linestyle=":", linewidth=1)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    left.text(PHASES[1].start - 4, 0.93, "anneal begins", ha="right", color="#666666")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
