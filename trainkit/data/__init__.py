"""Data: packed corpora, and the microbatches of a step on one rank."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
