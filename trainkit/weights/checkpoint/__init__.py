"""trainkit's own checkpoints: written once, verified by hash, read by any layout, never unpickled.

A checkpoint is a directory `step_00000012` that appears by one rename when it is complete:

- `rank_00000.safetensors`: the parts of tensors that one rank wrote;
- `components_00000.safetensors`: the tensors of components that one rank wrote, if there are any;
- `index.json`: for every tensor its name, shape and dtype, and the boxes it was cut into;
- `state.json`: the counters of the run, facts about it, and plain values of components;
- `manifest.json`: size and sha256 of every other file, and of itself.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
