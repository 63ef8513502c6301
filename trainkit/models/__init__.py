"""Models: plain `nn.Module`s; their values are functions of a seed and of names.

`config` describes a decoder of the Llama, Gemma, GPT-2, Mixtral, DeepSeek-V3 and other families,
`decoder` is its modules, `latent` the attention of the last, `experts` its layers of experts,
`routers` what chooses among them and `dispatch` what takes tokens there and back, `initial` its
first values, `upcycle_weights`
those that a dense one has, `sizes` its public and small sizes by name; `call` enters a batch into a
model, `cache` is what generation keeps of a text, `bare` runs a module in fewer calls. There are no
buffers but those of a router, which a step moves and a checkpoint holds.
"""

from trainkit.models.call import (
    RoutingTape,
    call_model,
    call_routed,
    call_with_cache,
    call_with_noise,
)
from trainkit.models.config import (
    DecoderConfig,
    Experts,
    FeedForward,
    Latents,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norms,
    Sliding,
    YarnScaling,
    count_active_parameters,
    count_parameters,
)
from trainkit.models.decoder import Decoder, build_decoder
from trainkit.models.decoder_sizes import (
    list_decoder_sizes,
    make_decoder_config,
    pad_vocab_size,
)
from trainkit.models.experts import (
    ExpertMlp,
    Router,
    grouped_linear,
    update_routers_,
)
from trainkit.models.init_weights import init_weights
from trainkit.models.kv_cache import KVCache
from trainkit.models.layers import make_norm
from trainkit.models.routers import (
    sigmoid_topk,
    softmax_topk,
)
from trainkit.models.upcycling import upcycle_weights

__all__ = [
    "Decoder",
    "DecoderConfig",
    "ExpertMlp",
    "Experts",
    "FeedForward",
    "KVCache",
    "Latents",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Norms",
    "Router",
    "RoutingTape",
    "Sliding",
    "YarnScaling",
    "build_decoder",
    "call_model",
    "call_routed",
    "call_with_cache",
    "call_with_noise",
    "count_active_parameters",
    "count_parameters",
    "grouped_linear",
    "init_weights",
    "list_decoder_sizes",
    "make_decoder_config",
    "make_norm",
    "pad_vocab_size",
    "sigmoid_topk",
    "softmax_topk",
    "upcycle_weights",
    "update_routers_",
]
