"""Bytes on disk: checkpoints of a run, Hugging Face folders, checkpoints of others.

What is about weights in files belongs here.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
