"""Models: plain `nn.Module`s; their values are functions of a seed and of names.

`config` describes a decoder of the Llama, Gemma, GPT-2, Mixtral, DeepSeek-V3 and other families,
`decoder` is its modules, `latent` the attention of the last, `experts` its layers of experts,
`routers` what chooses among them and `dispatch` what takes tokens there and back, `initial` its
first values, `upcycled`
those that a dense one has, `sizes` its public and small sizes by name; `call` enters a batch into a
model, `cache` is what generation keeps of a text, `bare` runs a module in fewer calls. There are no
buffers but those of a router, which a step moves and a checkpoint holds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
