"""Documents in, documents out: tokenizers, conversations, corpora, streams.

What reads or writes documents belongs here.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
