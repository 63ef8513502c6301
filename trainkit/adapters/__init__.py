"""Low-rank adapters beside the matrices of a model that stays as it is.

`lowrank` is what they compute, `lora` the transform that puts them there, `base` what is known of
the model beneath, which no checkpoint of adapters holds; `merge` adds them to it, `peft` and
`export` bring them to others and back. `formats` are matrices in few bits, and `frozen` is the
transform that holds a model's in them.
"""

from __future__ import annotations

from trainkit.adapters.base import adapter_facts, base_weights, keep_base_
from trainkit.adapters.export import Saved, export_peft, merged_weights, saved_adapters
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
from trainkit.adapters.merge import merge_, merged, restart_
from trainkit.adapters.peft import LowRanks, Peft, open_peft, to_peft
from trainkit.adapters.trained import build_trained

__all__ = [
    "NF4_VALUES",
    "Format",
    "Lora",
    "LowRanks",
    "Packing",
    "Peft",
    "Quantized",
    "Saved",
    "activate_",
    "adapter_facts",
    "add_low_rank",
    "base_weights",
    "build_trained",
    "dequantize",
    "dequantized",
    "export_peft",
    "keep_base_",
    "lora",
    "merge_",
    "merged",
    "merged_weights",
    "open_peft",
    "packings_of",
    "problems",
    "quantize",
    "quantize_fp8_block",
    "quantize_int8",
    "quantize_nf4",
    "quantized",
    "restart_",
    "rounded_weights",
    "saved_adapters",
    "shards_bytes",
    "to_peft",
]
