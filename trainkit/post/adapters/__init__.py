"""Low-rank adapters beside the matrices of a model that stays as it is.

`lowrank` is what they compute, `transform` puts them there, `base` what is known of
the model beneath, which no checkpoint of adapters holds; `merge` adds them to it, `peft` and
`export` bring them to others and back. `formats` are matrices in few bits, and `frozen` is the
transform that holds a model's in them.
"""

from trainkit.post.adapters.aqn import quantization_noise
from trainkit.post.adapters.base import adapter_facts, base_weights, keep_base_
from trainkit.post.adapters.export import (
    Saved,
    export_peft,
    merged_run,
    merged_weights,
    saved_adapters,
)
from trainkit.post.adapters.fake import LINEARS, convert_, fake_quantized, linear_transforms
from trainkit.post.adapters.float8 import float8
from trainkit.post.adapters.formats import (
    NF4_VALUES,
    Format,
    Quantized,
    add_low_rank,
    dequantize,
    quantize,
    round_trip,
)
from trainkit.post.adapters.freeze import Freeze, apply_freeze_, effective_freeze, freeze_facts
from trainkit.post.adapters.frozen import (
    Packing,
    dequantized,
    packings_of,
    quantized,
    rounded_weights,
    shards_bytes,
)
from trainkit.post.adapters.lowrank import Lora, activate_
from trainkit.post.adapters.merge import merge_, merged, restart_
from trainkit.post.adapters.peft import LowRanks, Peft, open_peft, to_peft
from trainkit.post.adapters.trained import build_trained
from trainkit.post.adapters.transform import lora, problems

__all__ = [
    "LINEARS",
    "NF4_VALUES",
    "Format",
    "Freeze",
    "Lora",
    "LowRanks",
    "Packing",
    "Peft",
    "Quantized",
    "Saved",
    "activate_",
    "adapter_facts",
    "add_low_rank",
    "apply_freeze_",
    "base_weights",
    "build_trained",
    "convert_",
    "dequantize",
    "dequantized",
    "effective_freeze",
    "export_peft",
    "fake_quantized",
    "float8",
    "freeze_facts",
    "keep_base_",
    "linear_transforms",
    "lora",
    "merge_",
    "merged",
    "merged_run",
    "merged_weights",
    "open_peft",
    "packings_of",
    "problems",
    "quantization_noise",
    "quantize",
    "quantized",
    "restart_",
    "round_trip",
    "rounded_weights",
    "saved_adapters",
    "shards_bytes",
    "to_peft",
]
