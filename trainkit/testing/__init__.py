"""What tests of trainkit, and of code built on it, need.

`run_ranks` runs a function on several ranks; `certify` shows that a layout changes no number of a
model; `count_collectives` lists what a step sends. Faults to put into a run on purpose are wrappers
of train steps: `kill_at`, `nan_loss_at` and the like; see `trainkit.testing.faults`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
