"""What stands around a run: its directory, its exit code and last words, signals and watch.

The errors need no torch, so the table of contents, `__init__.pyi`, is lazy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
