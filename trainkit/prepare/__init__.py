"""Preparing a corpus: text into a token file, in parallel and restartable."""

from __future__ import annotations

from trainkit.prepare.prepare import Prepared, Progress, prepare_corpus

__all__ = ["Prepared", "Progress", "prepare_corpus"]
