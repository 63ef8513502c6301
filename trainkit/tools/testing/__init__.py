"""What tests of trainkit, and of code built on it, need.

`run_ranks` runs a function on several ranks; `certify` shows that a layout changes no number of a
model; `count_collectives` lists what a step sends. Faults to put into a run on purpose are wrappers
of train steps: `kill_at`, `nan_loss_at` and the like; see `trainkit.tools.testing.faults`.
"""

from trainkit.tools.testing.cases import LayoutCase, make_default_cases
from trainkit.tools.testing.certificate import (
    Certificate,
    CertificateRow,
    Tier,
    format_markdown,
    format_text,
)
from trainkit.tools.testing.certify import certify
from trainkit.tools.testing.ledger import Collective, CollectiveLedger, count_collectives
from trainkit.tools.testing.packing import (
    PACKING_BOUNDS,
    PackingDifference,
    PackingError,
    check_packing,
)
from trainkit.tools.testing.ranks import RankError, run_ranks

__all__ = [
    "PACKING_BOUNDS",
    "Certificate",
    "CertificateRow",
    "Collective",
    "CollectiveLedger",
    "LayoutCase",
    "PackingDifference",
    "PackingError",
    "RankError",
    "Tier",
    "certify",
    "check_packing",
    "count_collectives",
    "format_markdown",
    "format_text",
    "make_default_cases",
    "run_ranks",
]
