"""Packing: fill rows with pieces of documents.

A `Fit` assigns pieces to bins. `pack_bins` does everything else: it splits overlong documents,
aligns and groups the pieces, and writes the table of rows. Nothing here imports torch.
"""

from trainkit.packing.balancing import make_balanced_fit
from trainkit.packing.bins import pack_bins, select_rows
from trainkit.packing.fits import VersionedFit, best_fit, first_fit, next_fit, with_version
from trainkit.packing.report import bins_hash, format_overlong_warning, report_packing, row_costs

__all__ = [
    "VersionedFit",
    "best_fit",
    "bins_hash",
    "first_fit",
    "format_overlong_warning",
    "make_balanced_fit",
    "next_fit",
    "pack_bins",
    "report_packing",
    "row_costs",
    "select_rows",
    "with_version",
]
