"""Tools for tests of trainkit, and of code built on it.

`run_ranks` runs a function on several ranks; `certify` shows that a layout changes no number of a
model; `count_collectives` lists the communication of a step. The faults of
`trainkit.tools.testing.faults` wrap a train step: `kill_at`, `nan_loss_at` and others.
"""

from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certify import certify
from trainkit.tools.testing.ledger import count_collectives
from trainkit.tools.testing.packing import PackingError, check_packing
from trainkit.tools.testing.ranks import RankError, run_ranks

__all__ = [
    "LayoutCase",
    "PackingError",
    "RankError",
    "certify",
    "check_packing",
    "count_collectives",
    "run_ranks",
]
