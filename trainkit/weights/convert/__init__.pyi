# The table of contents, which __init__.py loads lazily: torch is not needed for all of it.
from .maps import TensorMap as TensorMap
from .maps import chain as chain
from .maps import join as join
from .maps import rename as rename
from .maps import split as split
from .maps import stack as stack
from .maps import transpose as transpose
from .weights import convert_weights as convert_weights
