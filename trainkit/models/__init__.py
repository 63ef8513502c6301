"""Models: plain `nn.Module`s whose initial values are functions of a seed and of names.

- `config`: the architecture of a decoder of the Llama, Gemma, GPT-2, Mixtral, DeepSeek-V3 and other
  families, and the shapes of its parameters; `decoder_sizes`: published and small ones by name.
- `decoder`: its modules, with `layers`, `rotary`, `latent_attention` and
  `delta_attention`.
- `experts`: mixture-of-experts layers, with `routers`, and `dispatch` to the ranks of experts.
- `init_weights`: initial values; `upcycling`: those of a decoder with experts from a dense one.
- `call`: the call of a model with a batch; `kv_cache`: keys and values of earlier tokens.
- `functional`: modules without the overhead of `nn.Module`; `mixins`: changes of existing modules.

The only buffers are those of routers.
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
    Delta,
    Experts,
    FeedForward,
    FullHeads,
    Latents,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norms,
    ProportionalScaling,
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
    biased_topk,
    hash_experts,
    scale_by_load,
    softmax_topk,
)
from trainkit.models.upcycling import upcycle_weights

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Delta",
    "ExpertMlp",
    "Experts",
    "FeedForward",
    "FullHeads",
    "KVCache",
    "Latents",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Norms",
    "ProportionalScaling",
    "Router",
    "RoutingTape",
    "Sliding",
    "YarnScaling",
    "biased_topk",
    "build_decoder",
    "call_model",
    "call_routed",
    "call_with_cache",
    "call_with_noise",
    "count_active_parameters",
    "count_parameters",
    "grouped_linear",
    "hash_experts",
    "init_weights",
    "list_decoder_sizes",
    "make_decoder_config",
    "make_norm",
    "pad_vocab_size",
    "scale_by_load",
    "softmax_topk",
    "upcycle_weights",
    "update_routers_",
]
