# The table of contents, which __init__.py loads lazily: torch is not needed for all of it.
from .counters import dropout as dropout
from .counters import make_random_bits as make_random_bits
from .counters import make_token_keys as make_token_keys
from .counters import mix_bits_tensor as mix_bits_tensor
from .counters import normal as normal
from .counters import seed_generators as seed_generators
from .counters import split_keys as split_keys
from .counters import to_int64 as to_int64
from .counters import uniform_symmetric as uniform_symmetric
from .hashing import make_key as make_key
from .quantiles import normal_by_quantile as normal_by_quantile
from .rounding import round_bf16_stochastic as round_bf16_stochastic
