"""Others' checkpoints, read without running what they hold, into a folder of weights.

A tool of its own: nothing that trains imports this. Pickles are interpreted as data, with the few
names that a good file needs; nothing of them is imported or called.
"""

from __future__ import annotations

from trainkit.convert.foreign import foreign_tensors
from trainkit.convert.pickles import read_pickle
from trainkit.convert.weights import convert_weights

__all__ = ["convert_weights", "foreign_tensors", "read_pickle"]
