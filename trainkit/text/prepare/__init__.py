"""Preparing a corpus: text into a token file, in parallel and restartable."""

from trainkit.text.prepare.prepare import prepare_corpus

__all__ = [
    "prepare_corpus",
]
