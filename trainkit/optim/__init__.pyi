# The table of contents, which __init__.py loads lazily.
from .adamw import adamw as adamw
from .elementwise import Elementwise as Elementwise
from .groups import decay_groups as decay_groups
from .groups import split_by_pattern as split_by_pattern
from .muon import Muon as Muon
from .muon import hidden_matrices as hidden_matrices
from .muon import orthogonalized as orthogonalized
from .rules import Lion as Lion
from .rules import Momentum as Momentum
from .rules import NarrowAdamW as NarrowAdamW
from .rules import ScheduleFree as ScheduleFree
from .rules import SignSGD as SignSGD
from .table import OPTIMIZERS as OPTIMIZERS
from .table import make_optimizer as make_optimizer
from .table import state_bytes as state_bytes
from .together import averaged as averaged
from .together import together as together
