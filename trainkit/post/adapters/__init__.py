"""Low-rank adapters for frozen models, quantized matrices, and linear layers in low precision.

`lowrank` has the computation of LoRA and DoRA, `transform` adds adapters to a model, and `base`
identifies the frozen model, which checkpoints of adapters leave out. `merge` adds adapters to their
base; `peft` and `export` convert them to PEFT's format and back. `formats` quantizes matrices,
`frozen` is the transform that stores a model's matrices quantized, and `fake` and `float8` change
how linear layers compute.
"""

from trainkit.post.adapters.aqn import add_quantization_noise
from trainkit.post.adapters.base import exclude_frozen_, open_base_weights
from trainkit.post.adapters.export import (
    export_peft,
)
from trainkit.post.adapters.fake import (
    fake_quantize,
    make_linear_transforms,
    quantize_model_,
)
from trainkit.post.adapters.float8 import float8
from trainkit.post.adapters.formats import (
    dequantize,
    quantize,
    quantize_dequantize,
)
from trainkit.post.adapters.freeze import Freeze, apply_freeze_, make_freeze_facts, select_frozen
from trainkit.post.adapters.frozen import (
    quantized,
)
from trainkit.post.adapters.lowrank import Lora, select_adapter_
from trainkit.post.adapters.merge import merge_adapters_, restart_adapters_, use_merged_adapters
from trainkit.post.adapters.peft import read_peft
from trainkit.post.adapters.trained import build_trained_stages
from trainkit.post.adapters.transform import find_problems, lora

__all__ = [
    "Freeze",
    "Lora",
    "add_quantization_noise",
    "apply_freeze_",
    "build_trained_stages",
    "dequantize",
    "exclude_frozen_",
    "export_peft",
    "fake_quantize",
    "find_problems",
    "float8",
    "lora",
    "make_freeze_facts",
    "make_linear_transforms",
    "merge_adapters_",
    "open_base_weights",
    "quantize",
    "quantize_dequantize",
    "quantize_model_",
    "quantized",
    "read_peft",
    "restart_adapters_",
    "select_adapter_",
    "select_frozen",
    "use_merged_adapters",
]
