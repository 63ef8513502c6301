"""Models: plain `nn.Module`s without buffers; their values are functions of a seed and of names.

`decoder` is the dense Llama and Qwen3 family, `sizes` names its public and small sizes, `generate`
draws text.
"""

from __future__ import annotations

from trainkit.models.decoder import (
    Decoder,
    DecoderConfig,
    Llama3Scaling,
    build_decoder,
    count_parameters,
    init_weights,
)
from trainkit.models.generate import generate
from trainkit.models.sizes import config_from_facts, decoder_config, decoder_sizes

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Llama3Scaling",
    "build_decoder",
    "config_from_facts",
    "count_parameters",
    "decoder_config",
    "decoder_sizes",
    "generate",
    "init_weights",
]
