"""Corpora: files of text or tokens as documents of tokens, checked and mapped."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
