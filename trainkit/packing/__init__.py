"""Packing: fill rows with pieces of documents.

A `Fit` assigns pieces to bins. `pack_bins` does everything else: it splits overlong documents,
aligns and groups the pieces, and writes the table of rows. Nothing here imports torch.
"""

from trainkit.packing.balancing import make_balanced_fit
from trainkit.packing.bins import pack_bins
from trainkit.packing.fits import best_fit, first_fit, next_fit
from trainkit.packing.report import report_packing, row_costs

__all__ = [
    "best_fit",
    "first_fit",
    "make_balanced_fit",
    "next_fit",
    "pack_bins",
    "report_packing",
    "row_costs",
]
