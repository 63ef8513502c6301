"""Models: plain `nn.Module`s; their values are functions of a seed and of names.

`config` describes a decoder of the Llama, Gemma, GPT-2, Mixtral, DeepSeek-V3 and other families,
`decoder` is its modules, `latent` the attention of the last, `experts` its layers of experts,
`routers` what chooses among them and `dispatch` what takes tokens there and back, `initial` its
first values, `upcycled`
those that a dense one has, `sizes` its public and small sizes by name; `call` enters a batch into a
model, `cache` is what generation keeps of a text, `bare` runs a module in fewer calls. There are no
buffers but those of a router, which a step moves and a checkpoint holds.
"""

from trainkit.models.cache import Cache
from trainkit.models.call import CachedCall, call_cached, call_model, call_routed, call_with_noise
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
from trainkit.models.dispatch import ep_combine, ep_dispatch, ep_dispatch_keys
from trainkit.models.experts import (
    ExpertMlp,
    Router,
    Tape,
    advance_routers_,
    balance_sum,
    grouped_linear,
    update_expert_bias,
)
from trainkit.models.initial import init_weights
from trainkit.models.layers import norm_of
from trainkit.models.routers import (
    Routing,
    capacity_of,
    jittered,
    limited,
    sigmoid_topk,
    softmax_topk,
)
from trainkit.models.sizes import (
    config_from_facts,
    decoder_config,
    decoder_sizes,
    round_up_vocabulary,
)
from trainkit.models.upcycling import upcycled

__all__ = [
    "Cache",
    "CachedCall",
    "Decoder",
    "DecoderConfig",
    "ExpertMlp",
    "Experts",
    "FeedForward",
    "Latents",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Norms",
    "Router",
    "Routing",
    "Sliding",
    "Tape",
    "YarnScaling",
    "advance_routers_",
    "balance_sum",
    "build_decoder",
    "call_cached",
    "call_model",
    "call_routed",
    "call_with_noise",
    "capacity_of",
    "config_from_facts",
    "count_active_parameters",
    "count_parameters",
    "decoder_config",
    "decoder_sizes",
    "ep_combine",
    "ep_dispatch",
    "ep_dispatch_keys",
    "grouped_linear",
    "init_weights",
    "jittered",
    "limited",
    "norm_of",
    "round_up_vocabulary",
    "sigmoid_topk",
    "softmax_topk",
    "upcycled",
    "update_expert_bias",
]
