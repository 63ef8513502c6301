"""For people who look at training: plans, pictures, tests, commands.

What no training run needs belongs here.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
