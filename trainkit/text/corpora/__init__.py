"""Corpora: files of text or tokens as documents of tokens, checked and mapped."""

from trainkit.text.corpora.inspect import describe_corpus, verify_corpus
from trainkit.text.corpora.library import (
    docstring_conversations,
    is_library_source,
    standard_library,
)
from trainkit.text.corpora.open import (
    held_out,
    held_out_documents,
    hold_out,
    open_conversations,
    open_corpus,
    open_library,
    recorded_names,
    trainable_tokens,
)
from trainkit.text.corpora.pairs import open_pairs, prolong_answers
from trainkit.text.corpora.records import read_records
from trainkit.text.corpora.shards import left_out
from trainkit.text.corpora.tokens import open_tokens, write_corpus

__all__ = [
    "describe_corpus",
    "docstring_conversations",
    "held_out",
    "held_out_documents",
    "hold_out",
    "is_library_source",
    "left_out",
    "open_conversations",
    "open_corpus",
    "open_library",
    "open_pairs",
    "open_tokens",
    "prolong_answers",
    "read_records",
    "recorded_names",
    "standard_library",
    "trainable_tokens",
    "verify_corpus",
    "write_corpus",
]
