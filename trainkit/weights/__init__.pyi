# The subpackages, which __init__.py loads lazily.
from . import checkpoint as checkpoint
from . import convert as convert
from . import hub as hub
