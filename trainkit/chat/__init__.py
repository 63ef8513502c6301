"""Conversations: from messages to tokens with a mask, and pairs of answers to prefer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
