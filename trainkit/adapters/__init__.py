"""Low-rank adapters beside the matrices of a model that stays as it is.

`lowrank` is what they compute, `transform` puts them there, `base` what is known of
the model beneath, which no checkpoint of adapters holds; `merge` adds them to it, `peft` and
`export` bring them to others and back. `formats` are matrices in few bits, and `frozen` is the
transform that holds a model's in them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
