"""Low-rank adapters beside the matrices of a model that stays as it is.

`lowrank` is what they compute, `lora` the transform that puts them there, `base` what is known of
the model beneath, which no checkpoint of adapters holds.
"""

from __future__ import annotations

from trainkit.adapters.base import base_weights, keep_base_
from trainkit.adapters.lora import lora, problems
from trainkit.adapters.lowrank import Lora, activate_

__all__ = ["Lora", "activate_", "base_weights", "keep_base_", "lora", "problems"]
