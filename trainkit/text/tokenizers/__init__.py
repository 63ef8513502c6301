"""Tokenizers, which convert text to ids and back: any object with `encode` and `decode`."""

from trainkit.text.tokenizers.bytes import ByteTokenizer, make_byte_tokenizer
from trainkit.text.tokenizers.documents import (
    encode_document,
    get_text,
    make_sample_encoder,
    make_text_encoder,
)
from trainkit.text.tokenizers.hf import (
    HFTokenizer,
    add_tokens,
    open_hf_tokenizer,
    save_tokenizer,
    train_bpe,
)
from trainkit.text.tokenizers.open import (
    find_tokenizer,
    list_compatible_hashes,
    open_tokenizer,
    tokenizer_hash,
)
from trainkit.text.tokenizers.special import CHAT_SPECIAL

__all__ = [
    "CHAT_SPECIAL",
    "ByteTokenizer",
    "HFTokenizer",
    "add_tokens",
    "encode_document",
    "find_tokenizer",
    "get_text",
    "list_compatible_hashes",
    "make_byte_tokenizer",
    "make_sample_encoder",
    "make_text_encoder",
    "open_hf_tokenizer",
    "open_tokenizer",
    "save_tokenizer",
    "tokenizer_hash",
    "train_bpe",
]
