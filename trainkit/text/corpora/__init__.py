"""Corpora: files of text or tokens as documents of tokens, checked and mapped."""

from trainkit.text.corpora.open import (
    count_document_labels,
    held_out_documents,
    hold_out,
    is_held_out,
    open_conversations,
    open_corpus,
    open_library_corpus,
)
from trainkit.text.corpora.open_corpora import open_chats, open_corpora
from trainkit.text.corpora.pack_corpora import (
    pack_corpora,
    pack_examples,
    pack_mismatched_answers,
    split_pairs,
)
from trainkit.text.corpora.pairs import open_pairs, open_preferences
from trainkit.text.corpora.python_library import (
    is_library_source,
    standard_library,
)
from trainkit.text.corpora.records import read_records
from trainkit.text.corpora.shards import describe_unread_files
from trainkit.text.corpora.tokens import open_tokens, write_corpus
from trainkit.text.corpora.verify import verify_corpus

__all__ = [
    "count_document_labels",
    "describe_unread_files",
    "held_out_documents",
    "hold_out",
    "is_held_out",
    "is_library_source",
    "open_chats",
    "open_conversations",
    "open_corpora",
    "open_corpus",
    "open_library_corpus",
    "open_pairs",
    "open_preferences",
    "open_tokens",
    "pack_corpora",
    "pack_examples",
    "pack_mismatched_answers",
    "read_records",
    "split_pairs",
    "standard_library",
    "verify_corpus",
    "write_corpus",
]
