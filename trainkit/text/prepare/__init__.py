"""Preparing a corpus: text into a token file, in parallel and restartable."""

from trainkit.text.prepare.prepare import Prepared, Progress, prepare_corpus

__all__ = [
    "Prepared",
    "Progress",
    "prepare_corpus",
]
