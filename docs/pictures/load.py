"""Draw load.png: how often the experts of a run of recipes/moe.py were chosen.

python recipes/moe.py --out runs/moe && python docs/pictures/load.py runs/moe
"""
# ruff: noqa: INP001 -- a script

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.run.plots import plot_expert_load

if __name__ == "__main__":
    plot_expert_load(Path(sys.argv[1]) / "metrics.jsonl", Path(__file__).with_suffix(".png"))
