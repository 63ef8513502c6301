"""The byte tokenizer: the bytes of UTF-8, without a file or training.

A special token in a text is encoded as that token, as in `transformers`; only `encode_document`
adds some.
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
"""The range of each token in a text: (start, end) in characters."""

# After 256 bytes, BOS, EOS and padding.
_FIRST_SPECIAL = 259


@attrs.frozen
class ByteTokenizer:
    """The 256 bytes of UTF-8, BOS, EOS and padding, and after them the tokens in `special`."""

    special: tuple[str, ...] = ()
    bos_id: int = 256
    eos_id: int = 257
    pad_id: int = 258

    @property
    def vocab_size(self) -> int:
        """The number of ids: 259, and one for each token in `special`."""
        return _FIRST_SPECIAL + len(self.special)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of the tokens in `special`, by their text."""
        return {text: _FIRST_SPECIAL + i for i, text in enumerate(self.special)}

    @property
    def identity(self) -> str:
        """A text that identifies the mapping to ids."""
        return repr(self)

    @property
    def covers(self) -> tuple[ByteTokenizer, ...]:
        """The tokenizers with a prefix of `special`: their ids have the same meaning here."""
        return tuple(attrs.evolve(self, special=self.special[:i]) for i in range(len(self.special)))

    def encode(self, text: str) -> list[int]:
        """Encode a text to its bytes, and to the ids of the special tokens in it."""
        return _encode(self, text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """Encode texts to int64 arrays."""
        return [_encode(self, text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Encode a text; return the ids, and the characters `[start, end)` of each."""
        ids: list[int] = []
        offsets: Offsets = []
        special = self.special_ids
        position = 0
        for i, part in enumerate(_split_at_special(self, text)):
            # A special token is one unit, other text has one for each character, of 1 to 4 bytes.
            for unit in [part] if i % 2 else part:
                tokens = [special[unit]] if i % 2 else unit.encode()
                ids += tokens
                offsets += [(position, position + len(unit))] * len(tokens)
                position += len(unit)
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens are dropped, and invalid UTF-8 becomes U+FFFD."""
        # A sampler may draw ids above 255; tensors become integers by `int`.
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each id separately: `<0xC3>` for a byte that is not a character."""
        # In the order of their ids, from 256 on.
        names = (BOS, EOS, PAD, *self.special)
        return [format_byte(int(i)) if i < 256 else names[int(i) - 256] for i in ids]


def make_byte_tokenizer(special: Sequence[str] = ()) -> ByteTokenizer:
    """Make a byte tokenizer: one token per byte of UTF-8, without training.

    Args:
        special: Texts that are one token each, wherever they occur, with ids from 259 on. If two
            match at a position, the longer one is taken.

    Raises:
        ValueError: A special token is empty, or occurs twice.

    Examples:
        >>> tokenizer = make_byte_tokenizer()
        >>> tokenizer.encode("hi"), tokenizer.decode([256, 104, 105, 257])
        ([104, 105], 'hi')
        >>> make_byte_tokenizer(["<|end|>"]).encode("a<|end|>")
        [97, 259]
    """
    # One text would be taken for its letters.
    special = (special,) if isinstance(special, str) else tuple(special)
    if "" in special or len(set(special)) < len(special):
        raise ValueError(
            f"make_byte_tokenizer: special tokens must be different texts, got {special}"
        )
    return ByteTokenizer(special)


def format_byte(byte: int) -> str:
    """Return a text for one byte: `<0xC3>` if it is not a character by itself.

    Examples:
        >>> format_byte(65), format_byte(195)
        ('A', '<0xC3>')
    """
    return chr(byte) if byte < 128 else f"<0x{byte:02X}>"


def _split_at_special(tokenizer: ByteTokenizer, text: str) -> list[str]:
    """Split a text at the special tokens, which have the odd indices of the result."""
    if not tokenizer.special:
        return [text]
    longest_first = sorted(tokenizer.special, key=len, reverse=True)
    # With a group in the pattern, `re.split` returns the separators too.
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text)


def _encode(tokenizer: ByteTokenizer, text: str) -> IntArray:
    special = tokenizer.special_ids
    # The odd parts are special tokens.
    parts = [
        np.array([special[part]]) if i % 2 else np.frombuffer(part.encode(), np.uint8)
        for i, part in enumerate(_split_at_special(tokenizer, text))
    ]
    return np.concatenate(parts, dtype=np.int64)
