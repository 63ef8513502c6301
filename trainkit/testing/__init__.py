"""What tests of trainkit, and of code built on it, need: functions that run on several ranks."""

from __future__ import annotations

from trainkit.testing.ranks import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
