"""Convert foreign checkpoints to a folder of weights, without executing their pickles.

Nothing that trains imports this package. Pickles are read in a separate process, by torch's loader
with `weights_only=True`.
"""

from trainkit.weights.convert.weights import convert_weights

__all__ = ["convert_weights"]
