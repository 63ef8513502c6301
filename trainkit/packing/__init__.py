"""Packing: which pieces of which documents fill which row.

A `Fit` says which bin each piece goes to; `pack_bins` does everything around it: it cuts overlong
documents, aligns, groups, and writes the result down as a table. Nothing here imports torch.
"""

from __future__ import annotations

from trainkit.packing.bins import pack_bins, packing_report
from trainkit.packing.fits import best_fit, sequential

__all__ = ["best_fit", "pack_bins", "packing_report", "sequential"]
