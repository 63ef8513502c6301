"""How processes become a layout: what a launcher says, how ranks meet, and the axes they share.

`parallel_session` does all of it; `axis_from_group` makes an axis of somebody else's process group.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
