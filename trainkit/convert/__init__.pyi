# The table of contents, which __init__.py loads lazily.
from .foreign import foreign_tensors as foreign_tensors
from .weights import convert_weights as convert_weights
