"""Losses: sums over the tokens that are trained on, and how they combine for a training step.

A run needs few of them, so the table of contents, `__init__.pyi`, is lazy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
