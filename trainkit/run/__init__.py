"""What stands around a run: its directory, its exit code and last words, signals and watch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
