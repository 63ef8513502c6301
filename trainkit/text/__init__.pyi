# The subpackages, which __init__.py loads lazily.
from . import chat as chat
from . import corpora as corpora
from . import prepare as prepare
from . import streams as streams
from . import tokenizers as tokenizers
