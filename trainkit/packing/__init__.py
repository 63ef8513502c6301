"""Packing: which pieces of which documents fill which row.

A `Fit` says which bin each piece goes to; `pack_bins` does everything around it: it cuts overlong
documents, aligns, groups, and writes the result down as a table. Nothing here imports torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
