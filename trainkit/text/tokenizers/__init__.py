"""Tokenizers: from text to ids and back. Anything with `encode` and `decode` is one."""

from trainkit.text.tokenizers.bytes import ByteTokenizer, byte_tokenizer
from trainkit.text.tokenizers.documents import (
    encode_document,
    sample_encoder,
    text_encoder,
    text_of,
)
from trainkit.text.tokenizers.hf import (
    HFTokenizer,
    add_tokens,
    hf_tokenizer,
    save_tokenizer,
    train_bpe,
)
from trainkit.text.tokenizers.open import (
    covered_hashes,
    find_tokenizer,
    open_tokenizer,
    tokenizer_hash,
)
from trainkit.text.tokenizers.special import CHAT_SPECIAL

__all__ = [
    "CHAT_SPECIAL",
    "ByteTokenizer",
    "HFTokenizer",
    "add_tokens",
    "byte_tokenizer",
    "covered_hashes",
    "encode_document",
    "find_tokenizer",
    "hf_tokenizer",
    "open_tokenizer",
    "sample_encoder",
    "save_tokenizer",
    "text_encoder",
    "text_of",
    "tokenizer_hash",
    "train_bpe",
]
