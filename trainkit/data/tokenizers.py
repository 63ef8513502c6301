"""From text to token ids and back. Any object with `encode` and `decode` serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainkit.types import IntArray, Tokenizer


@attrs.frozen
class ByteTokenizer:
    """The 256 bytes of UTF-8, and three special tokens after them."""

    vocab_size: int = 259
    bos_id: int = 256
    eos_id: int = 257
    pad_id: int = 258

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text, without special tokens."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; special tokens are dropped, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")


def byte_tokenizer() -> ByteTokenizer:
    """Return the tokenizer that needs no training: one token per byte of UTF-8.

    Examples:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.encode("hi"), tokenizer.decode([256, 104, 105, 257])
        ([104, 105], 'hi')
    """
    return ByteTokenizer()


def encode_document(tokenizer: Tokenizer, text: str) -> IntArray:
    """Return a document's tokens: `bos_id`, the text's, `eos_id`, where the tokenizer has them.

    Returns:
        int64 `[N]`.

    Raises:
        ValueError: A token is below 0, or not below the tokenizer's `vocab_size`.

    Examples:
        >>> encode_document(byte_tokenizer(), "hi")
        array([256, 104, 105, 257])
    """
    begin, end = (getattr(tokenizer, name, None) for name in ("bos_id", "eos_id"))
    tokens = np.concatenate(
        [
            np.array([] if begin is None else [begin], np.int64),
            np.asarray(tokenizer.encode(text), np.int64),
            np.array([] if end is None else [end], np.int64),
        ]
    )
    vocab_size = getattr(tokenizer, "vocab_size", None)
    if tokens.size and (tokens.min() < 0 or (vocab_size and tokens.max() >= vocab_size)):
        raise ValueError(
            f"encode_document: tokens {tokens.min()} to {tokens.max()} do not lie in "
            f"[0, {vocab_size}), the vocabulary of {type(tokenizer).__name__}"
        )
    return tokens
