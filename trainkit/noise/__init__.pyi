# The table of contents, which __init__.py loads lazily: torch is not needed for all of it.
from .counters import dropout as dropout
from .counters import feature_bits as feature_bits
from .counters import mix_tensor as mix_tensor
from .counters import normal as normal
from .counters import numbered_keys as numbered_keys
from .counters import seeded_generators as seeded_generators
from .counters import signed as signed
from .counters import symmetric as symmetric
from .counters import token_keys as token_keys
from .hashing import hash_box as hash_box
from .hashing import hash_counters as hash_counters
from .hashing import key_of as key_of
from .hashing import mix as mix
from .quantiles import normal_quantiles as normal_quantiles
from .rounding import rounded_bf16 as rounded_bf16
