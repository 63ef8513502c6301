"""Convert foreign checkpoints to a folder of weights, without executing their pickles.

`maps` has maps of names and tensors in memory. Nothing that trains imports this package. Pickles
are read in a separate process, by torch's loader with `weights_only=True`.
"""

from trainkit.weights.convert.maps import (
    TensorMap,
    chain,
    join,
    rename,
    split,
    stack,
    transpose,
)
from trainkit.weights.convert.weights import convert_weights

__all__ = [
    "TensorMap",
    "chain",
    "convert_weights",
    "join",
    "rename",
    "split",
    "stack",
    "transpose",
]
