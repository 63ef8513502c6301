"""The tokenizer that needs no file and no training: the bytes of UTF-8.

A special token that stands in a text is read as that token, as in `transformers`; none is added but
by `encode_document`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trainkit.text.tokenizers.special import BOS, EOS, PAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainkit.types import IntArray

Offsets = list[tuple[int, int]]
"""Where in a text each token stands: (begin, end) in characters."""

_FIRST_SPECIAL = 259


@attrs.frozen
class ByteTokenizer:
    """The 256 bytes of UTF-8, three special tokens, and special tokens of your own after them."""

    special: tuple[str, ...] = ()
    bos_id: int = 256
    eos_id: int = 257
    pad_id: int = 258

    @property
    def vocab_size(self) -> int:
        """The number of ids: 259 and your special tokens."""
        return _FIRST_SPECIAL + len(self.special)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The id of each of your special tokens, by its text."""
        return {text: _FIRST_SPECIAL + i for i, text in enumerate(self.special)}

    @property
    def identity(self) -> str:
        """A text that changes with the ids it gives."""
        return repr(self)

    @property
    def covers(self) -> tuple[ByteTokenizer, ...]:
        """Those with fewer of its special tokens, in its order: their ids mean the same here."""
        return tuple(attrs.evolve(self, special=self.special[:i]) for i in range(len(self.special)))

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text, and the ids of your special tokens that stand in it."""
        return _ids(self, text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """Return what `encode` does of each text, as int64 arrays."""
        return [_ids(self, text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Return the ids, and of each the characters `[begin, end)` that it belongs to."""
        ids: list[int] = []
        offsets: Offsets = []
        special, place = self.special_ids, 0
        for i, part in enumerate(_cut(self, text)):
            for unit in [part] if i % 2 else part:
                tokens = [special[unit]] if i % 2 else unit.encode()
                ids += tokens
                offsets += [(place, place + len(unit))] * len(tokens)
                place += len(unit)
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; special tokens are dropped, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each id alone: `<0xC3>` for a byte that is no character by itself."""
        names = (BOS, EOS, PAD, *self.special)
        return [byte_name(int(i)) if i < 256 else names[int(i) - 256] for i in ids]


def make_byte_tokenizer(special: Sequence[str] = ()) -> ByteTokenizer:
    """Return the tokenizer that needs no training: one token per byte of UTF-8.

    Args:
        special: Texts that are one token each, wherever they stand, with ids from 259 on. Where two
            fit, the longer one is taken.

    Raises:
        ValueError: A special token is empty, or is there twice.

    Examples:
        >>> tokenizer = make_byte_tokenizer()
        >>> tokenizer.encode("hi"), tokenizer.decode([256, 104, 105, 257])
        ([104, 105], 'hi')
        >>> make_byte_tokenizer(["<|end|>"]).encode("a<|end|>")
        [97, 259]
    """
    special = (special,) if isinstance(special, str) else tuple(special)
    if "" in special or len(set(special)) < len(special):
        raise ValueError(
            f"make_byte_tokenizer: special tokens must be different texts, got {special}"
        )
    return ByteTokenizer(special)


def byte_name(byte: int) -> str:
    """Return a text for one byte: `<0xC3>` where it is no character by itself.

    Examples:
        >>> byte_name(65), byte_name(195)
        ('A', '<0xC3>')
    """
    return chr(byte) if byte < 128 else f"<0x{byte:02X}>"


def _cut(tokenizer: ByteTokenizer, text: str) -> list[str]:
    """Cut a text at the special tokens: they are at the odd places."""
    if not tokenizer.special:
        return [text]
    longest_first = sorted(tokenizer.special, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text)


def _ids(tokenizer: ByteTokenizer, text: str) -> IntArray:
    special = tokenizer.special_ids
    parts = [
        np.array([special[part]]) if i % 2 else np.frombuffer(part.encode(), np.uint8)
        for i, part in enumerate(_cut(tokenizer, text))
    ]
    return np.concatenate(parts, dtype=np.int64)
