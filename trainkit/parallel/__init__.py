"""Where a model's work happens: transforms of a plan, and the functions that apply them.

A transform says what becomes of a module (`tensor`, `sequence`, `expert`, `precision`,
`recompute`, `offload`, `compiled`, `fsdp`, `ddp`); `build_stages` applies a list of them. What runs
the stages of a pipeline is here too.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
