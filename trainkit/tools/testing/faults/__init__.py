"""Faults to put into a run on purpose: what a trainer must survive, in the tests of anybody.

`steps` says what an injector is, and when and where it acts; a rank's process goes wrong in
`processes`, its numbers in `numbers`, and files in `files`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
