"""Low-rank adapters beside the matrices of a model that stays as it is.

`lowrank` is what they compute, `lora` the transform that puts them there, `base` what is known of
the model beneath, which no checkpoint of adapters holds; `merge` adds them to it, `peft` and
`export` bring them to others and back.
"""

from __future__ import annotations

from trainkit.adapters.base import adapter_facts, base_weights, keep_base_
from trainkit.adapters.export import Saved, export_peft, merged_weights, saved_adapters
from trainkit.adapters.lora import lora, problems
from trainkit.adapters.lowrank import Lora, activate_
from trainkit.adapters.merge import merge_, merged, restart_
from trainkit.adapters.peft import LowRanks, Peft, open_peft, to_peft

__all__ = [
    "Lora",
    "LowRanks",
    "Peft",
    "Saved",
    "activate_",
    "adapter_facts",
    "base_weights",
    "export_peft",
    "keep_base_",
    "lora",
    "merge_",
    "merged",
    "merged_weights",
    "open_peft",
    "problems",
    "restart_",
    "saved_adapters",
    "to_peft",
]
