"""What stands beside the matrices of a model that stay as they are, and how these are held.

`formats` are matrices in few bits, `frozen` the transform that a model's are held in them by.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
