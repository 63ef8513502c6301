"""Preparing a corpus: text into a token file, in parallel and restartable."""

from trainkit.text.prepare.prepare import PrepareProgress, PrepareResult, prepare_corpus

__all__ = [
    "PrepareProgress",
    "PrepareResult",
    "prepare_corpus",
]
