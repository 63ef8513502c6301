"""Corpora: files of text or tokens as documents of tokens, checked and mapped."""

from __future__ import annotations

from trainkit.corpora.inspect import describe_corpus, verify_corpus
from trainkit.corpora.joined import JoinedCorpus, join_corpora
from trainkit.corpora.library import docstring_conversations, is_library_source, standard_library
from trainkit.corpora.mapped import check_unchanged
from trainkit.corpora.open import (
    fingerprint,
    held_out,
    held_out_documents,
    hold_out,
    open_conversations,
    open_corpus,
    open_library,
    trainable_tokens,
)
from trainkit.corpora.pairs import open_pairs, prolong_answers
from trainkit.corpora.records import read_records
from trainkit.corpora.shards import left_out
from trainkit.corpora.tokens import (
    TokenCorpus,
    documents_of,
    memory_corpus,
    open_tokens,
    write_corpus,
)

__all__ = [
    "JoinedCorpus",
    "TokenCorpus",
    "check_unchanged",
    "describe_corpus",
    "docstring_conversations",
    "documents_of",
    "fingerprint",
    "held_out",
    "held_out_documents",
    "hold_out",
    "is_library_source",
    "join_corpora",
    "left_out",
    "memory_corpus",
    "open_conversations",
    "open_corpus",
    "open_library",
    "open_pairs",
    "open_tokens",
    "prolong_answers",
    "read_records",
    "standard_library",
    "trainable_tokens",
    "verify_corpus",
    "write_corpus",
]
