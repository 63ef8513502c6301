"""Packing: which pieces of which documents fill which row.

A `Fit` says which bin each piece goes to; `pack_bins` does everything around it: it cuts overlong
documents, aligns, groups, and writes the result down as a table. Nothing here imports torch.
"""

from trainkit.packing.balancing import balanced
from trainkit.packing.bins import pack_bins, take_rows
from trainkit.packing.fits import VersionedFit, best_fit, first_fit, sequential, with_version
from trainkit.packing.report import bins_hash, overlong_warning, packing_report, row_costs

__all__ = [
    "VersionedFit",
    "balanced",
    "best_fit",
    "bins_hash",
    "first_fit",
    "overlong_warning",
    "pack_bins",
    "packing_report",
    "row_costs",
    "sequential",
    "take_rows",
    "with_version",
]
