"""Pictures of a run, of a packing and of a layout, each with the numbers that it shows.

A `plot_` function writes one file; what it shows comes from a pure function beside it, for tests
and tables. Matplotlib is needed (the extra `recipes`), torch is not.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
