# The table of contents, which __init__.py loads lazily.
from .cases import Case as Case
from .cases import covering as covering
from .cases import default_cases as default_cases
from .certificate import Certificate as Certificate
from .certificate import Row as Row
from .certificate import Tier as Tier
from .certificate import as_markdown as as_markdown
from .certificate import as_text as as_text
from .certifying import certify as certify
from .ledger import Collective as Collective
from .ledger import Ledger as Ledger
from .ledger import count_collectives as count_collectives
from .ranks import RankError as RankError
from .ranks import run_ranks as run_ranks
