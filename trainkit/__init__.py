"""Train language models with functions: any layout gives the numbers of one process.

The table of contents stands in `__init__.pyi`. It is lazy: `import trainkit` loads neither torch
nor numba, and a name is imported from its home when it is first used. Families stay behind their
module: `tk.losses`, `tk.schedules`, `tk.models`, `tk.attention`, and so on.

Examples:
    >>> import trainkit as tk
    >>> bins = tk.pack_bins([5, 3, 4], capacity=8)
    >>> len(bins)
    2
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
