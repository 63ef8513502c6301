"""Tokenizers, which convert text to ids and back: any object with `encode` and `decode`."""

from trainkit.text.tokenizers.bytes import make_byte_tokenizer
from trainkit.text.tokenizers.documents import (
    encode_document,
    get_text,
    make_sample_encoder,
)
from trainkit.text.tokenizers.hf import (
    add_tokens,
    open_hf_tokenizer,
    save_tokenizer,
    train_bpe,
)
from trainkit.text.tokenizers.open import (
    find_tokenizer,
    open_tokenizer,
    tokenizer_hash,
)

__all__ = [
    "add_tokens",
    "encode_document",
    "find_tokenizer",
    "get_text",
    "make_byte_tokenizer",
    "make_sample_encoder",
    "open_hf_tokenizer",
    "open_tokenizer",
    "save_tokenizer",
    "tokenizer_hash",
    "train_bpe",
]
