"""Keys, hashes and random numbers that no layout changes, and the loops that compute them.

Random numbers are functions of a seed, a name and an index: there is no generator to save.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
