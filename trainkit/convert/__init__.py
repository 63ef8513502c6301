"""Others' checkpoints, read without running what they hold, into a folder of weights.

A tool of its own: nothing that trains imports this. Pickles are read in a process that holds
nothing else, by torch's loader of weights alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
