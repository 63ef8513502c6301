"""What tests of trainkit, and of code built on it, need.

`run_ranks` runs a function on several ranks; `certify` shows that a layout changes no number of a
model; `count_collectives` lists what a step sends.
"""

from __future__ import annotations

from trainkit.testing.certificate import Certificate, Row, Tier, as_markdown, as_text
from trainkit.testing.certify import certify
from trainkit.testing.layouts import Layout, default_layouts
from trainkit.testing.ledger import Collective, Ledger, count_collectives, ledger_table
from trainkit.testing.ranks import RankError, run_ranks

__all__ = [
    "Certificate",
    "Collective",
    "Layout",
    "Ledger",
    "RankError",
    "Row",
    "Tier",
    "as_markdown",
    "as_text",
    "certify",
    "count_collectives",
    "default_layouts",
    "ledger_table",
    "run_ranks",
]
