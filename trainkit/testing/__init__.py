"""What tests of trainkit, and of code built on it, need.

`run_ranks` runs a function on several ranks; `certify` shows that a layout changes no number of a
model; `count_collectives` lists what a step sends. Faults to put into a run on purpose are wrappers
of train steps: `kill_at`, `nan_loss_at` and the like; see `trainkit.testing.faults`.
"""

from __future__ import annotations

from trainkit.testing.cases import Case, covering, default_cases
from trainkit.testing.certificate import Certificate, Row, Tier, as_markdown, as_text
from trainkit.testing.certify import certify
from trainkit.testing.ledger import Collective, Ledger, count_collectives
from trainkit.testing.ranks import RankError, run_ranks

__all__ = [
    "Case",
    "Certificate",
    "Collective",
    "Ledger",
    "RankError",
    "Row",
    "Tier",
    "as_markdown",
    "as_text",
    "certify",
    "count_collectives",
    "covering",
    "default_cases",
    "run_ranks",
]
