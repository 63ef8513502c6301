# The subpackages, which __init__.py loads lazily.
from . import adapters as adapters
from . import evaluation as evaluation
from . import generation as generation
from . import objectives as objectives
