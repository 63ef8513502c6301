# The table of contents, which __init__.py loads lazily.
from .blocks import rows_of_blocks as rows_of_blocks
from .epochs import epoch_of as epoch_of
from .epochs import plan_steps as plan_steps
from .epochs import rows_of_epochs as rows_of_epochs
from .mixtures import Phase as Phase
from .mixtures import facts_with_phases as facts_with_phases
from .mixtures import make_phases as make_phases
from .mixtures import mixture_weights as mixture_weights
from .mixtures import phase_at as phase_at
from .mixtures import rows_of_mixture as rows_of_mixture
from .permutation import permute as permute
from .shares import share_of_rows as share_of_rows
