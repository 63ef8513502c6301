"""Optimizers, all plain `torch.optim.Optimizer`, and parameter groups.

One can be had without the others, some of which numba compiles: the table of contents,
`__init__.pyi`, is lazy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
