"""Data: from text or token files to the microbatches of a step."""

from __future__ import annotations

from trainkit.data.corpus import fingerprint, held_out, held_out_documents, open_corpus
from trainkit.data.library import is_library_source, standard_library
from trainkit.data.steps import eval_batches, step_batch
from trainkit.data.tokenizers import ByteTokenizer, byte_tokenizer, encode_document
from trainkit.data.tokens import TokenCorpus, open_tokens, verify_tokens, write_corpus

__all__ = [
    "ByteTokenizer",
    "TokenCorpus",
    "byte_tokenizer",
    "encode_document",
    "eval_batches",
    "fingerprint",
    "held_out",
    "held_out_documents",
    "is_library_source",
    "open_corpus",
    "open_tokens",
    "standard_library",
    "step_batch",
    "verify_tokens",
    "write_corpus",
]
