"""Convert foreign checkpoints to a folder of weights, without executing their pickles.

`maps` has maps of names and tensors in memory. Nothing that trains imports this package. Pickles
are read in a separate process, by torch's loader with `weights_only=True`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
