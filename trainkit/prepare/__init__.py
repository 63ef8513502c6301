"""Preparing a corpus: text into a token file, in parallel and restartable."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
