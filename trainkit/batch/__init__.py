"""From rows of pieces to tensors, to parts of them, and to what is read off a batch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
