"""Others' checkpoints, read without running what they hold, into a folder of weights.

A tool of its own: nothing that trains imports this. Pickles are read in a process that holds
nothing else, by torch's loader of weights alone.
"""

from trainkit.weights.convert.foreign import read_foreign_tensors
from trainkit.weights.convert.weights import convert_weights

__all__ = [
    "convert_weights",
    "read_foreign_tensors",
]
