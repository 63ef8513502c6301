"""Faults to inject into a run, for tests of what a trainer survives.

`steps` explains injectors, and their arguments `at` and `rank`. `processes` has faults of a rank's
process, `numbers` those of its numbers, `batches` those of what makes batches, and `files` those of
files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
