"""What the forkserver of `run_ranks` imports once, so that no rank pays for it again.

On two cores a process takes 3 s to import all of this, and a rank forked from one that has 0.05 s.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np

from trainkit.packing import pack_bins

MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "trainkit.checkpoint",
    "trainkit.data",
    "trainkit.noise.hashing",
    "trainkit.noise.counters",
    "trainkit.testing.builtin",
)

for _name in MODULES:
    import_module(_name)
pack_bins(
    np.ones(1, np.int64), 1
)  # numba's first call: 0.4 s in each rank that packs, or once here
