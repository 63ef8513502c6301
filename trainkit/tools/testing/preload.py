"""Imports of the forkserver of `run_ranks`, which the ranks then need not repeat.

On two cores they take a process 5 s, and a rank that is forked after them 0.05 s.
"""

from __future__ import annotations

import gc
from importlib import import_module
from importlib.util import find_spec

MODULES = (
    "networkx",  # these two are what compiling loads: 2 s in each rank
    "torch._inductor.pattern_matcher",
    "einops._torch_specific",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    # This, config and run: what a recipe loads, 1 s in each rank.
    "trainkit.weights.checkpoint.guard",
    "trainkit.run.config",
    "trainkit.data",
    "trainkit.post.evaluation",
    "trainkit.weights.hub",
    "trainkit.noise.hashing",
    "trainkit.noise.counters",
    "trainkit.run.open_run",
    "trainkit.tools.testing.builtin",
)

for _name in MODULES:
    import_module(_name)
if find_spec("tyro"):  # an extra, which reads a recipe's flags: 0.1 s in each rank that is one
    _config = import_module("trainkit.run.config")
    _config.load_config(_config.RunConfig, [])
# numba's first calls: 0.5 s in each rank that packs, collates and fills weights, or once here.
import_module("trainkit.tools.testing.builtin").decoder_batch(0)
import_module("trainkit.tools.testing.train").certificate_weights("warm", (2, 2), (0, 0))
with import_module("torch._subclasses").FakeTensorMode():  # DTensor's: 0.1 s in each rank
    import_module("torch").empty(1)
gc.collect()
gc.freeze()  # a rank's garbage collector need not walk through these objects
