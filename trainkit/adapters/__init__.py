"""Low-rank adapters beside the matrices of a model that stays as it is.

`lowrank` is what they compute, `lora` the transform that puts them there, `base` what is known of
the model beneath, which no checkpoint of adapters holds. `formats` are matrices in few bits, and
`frozen` is the transform that holds a model's in them.
"""

from __future__ import annotations

from trainkit.adapters.base import base_weights, keep_base_
from trainkit.adapters.formats import (
    NF4_VALUES,
    Format,
    Quantized,
    add_low_rank,
    dequantize,
    quantize,
    quantize_fp8_block,
    quantize_int8,
    quantize_nf4,
)
from trainkit.adapters.frozen import (
    Packing,
    dequantized,
    packings_of,
    quantized,
    rounded_weights,
    shards_bytes,
)
from trainkit.adapters.lora import lora, problems
from trainkit.adapters.lowrank import Lora, activate_

__all__ = [
    "NF4_VALUES",
    "Format",
    "Lora",
    "Packing",
    "Quantized",
    "activate_",
    "add_low_rank",
    "base_weights",
    "dequantize",
    "dequantized",
    "keep_base_",
    "lora",
    "packings_of",
    "problems",
    "quantize",
    "quantize_fp8_block",
    "quantize_int8",
    "quantize_nf4",
    "quantized",
    "rounded_weights",
    "shards_bytes",
]
