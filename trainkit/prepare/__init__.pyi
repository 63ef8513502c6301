# The table of contents, which __init__.py loads lazily.
from .prepare import Prepared as Prepared
from .prepare import Progress as Progress
from .prepare import prepare_corpus as prepare_corpus
