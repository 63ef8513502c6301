"""What tests of trainkit, and of code built on it, need.

`run_ranks` runs a function on several ranks; `certify` shows that a layout changes no number of a
model; `count_collectives` lists what a step sends. Faults to put into a run on purpose are wrappers
of train steps: `kill_at`, `nan_loss_at` and the like; see `trainkit.testing.faults`.
"""

from trainkit.tools.testing.cases import Case, default_cases
from trainkit.tools.testing.certificate import Certificate, Row, Tier, as_markdown, as_text
from trainkit.tools.testing.certify import certify
from trainkit.tools.testing.ledger import Collective, Ledger, count_collectives
from trainkit.tools.testing.packing import (
    PACKING_BOUNDS,
    PackingDifference,
    PackingError,
    check_packing,
)
from trainkit.tools.testing.ranks import RankError, run_ranks

__all__ = [
    "PACKING_BOUNDS",
    "Case",
    "Certificate",
    "Collective",
    "Ledger",
    "PackingDifference",
    "PackingError",
    "RankError",
    "Row",
    "Tier",
    "as_markdown",
    "as_text",
    "certify",
    "check_packing",
    "count_collectives",
    "default_cases",
    "run_ranks",
]
