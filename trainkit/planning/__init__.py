"""What a layout costs before it is run: bytes of each rank, communication, an estimate of time.

`plan` lists the layouts of a world; the formulas are functions of their own, of shapes alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
