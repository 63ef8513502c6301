"""What the forkserver of `run_ranks` imports once, so that no rank pays for it again.

On two cores a process takes 3 s to import all of this, and a rank forked from one that has 0.05 s.
"""

from __future__ import annotations

from importlib import import_module

MODULES = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "trainkit.hashing",
    "trainkit.noise",
    "trainkit.testing.builtin",
)

for _name in MODULES:
    import_module(_name)
