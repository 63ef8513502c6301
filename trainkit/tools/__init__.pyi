# The subpackages, which __init__.py loads lazily.
from . import pictures as pictures
from . import planning as planning
from . import report as report
from . import testing as testing
