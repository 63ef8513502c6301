"""For those who have a data loader of their own: pad, shift, pool, cut, and put like with like.

trainkit's own way packs documents into rows, so no recipe needs what stands here. All of it is a
function of its arguments, like the rest: an order has no state, a cut no rank.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
