"""Decode tokens incrementally: complete characters, and stop strings across token boundaries."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import attrs

from trainkit.types import Tokenizer

_REPLACEMENT = "\ufffd"  # decoders write it for an incomplete character
_PREFIX_TOKENS = 8  # of the prompt, which the first new token is decoded with


@attrs.define(eq=False)
class Reader:
    """An incremental decoder of the new tokens of one row.

    Tokens are decoded together with the few before them, since a decoder may drop a blank at the
    start of a text. The cost per token does not grow with the text.

    Attributes:
        tokenizer: Decodes the tokens.
        stop: Strings that end the text, which excludes them.
        ids: The last tokens of the prompt, and the tokens read.
        num_decoded: Number of tokens of `ids` in `text`; the others are an incomplete character.
        first: Index of the first token to decode next.
        text: The decoded text, without an incomplete character.
        num_shown: Number of characters of it that `read` has returned; a possible start of a stop
            string is held back.
        ends: Length of the text after each token.
        stopped: Whether a stop string has appeared.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> reader = make_reader(make_byte_tokenizer(), [65], stop=["END"])
        >>> [reader.read(byte) for byte in "né E.END".encode()]
        ['n', '', 'é', ' ', '', 'E.', '', '', '']
        >>> reader.text, reader.stopped
        ('né E.', True)
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    ids: list[int]
    num_decoded: int
    first: int = 0
    text: str = ""
    num_shown: int = 0
    ends: list[int] = attrs.field(factory=list)
    stopped: bool = False

    def read(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self.ids.append(token)
        decoded = self.tokenizer.decode(self.ids[self.first :])
        if decoded.endswith(_REPLACEMENT):
            return ""
        self._decode()
        # What was shown cannot be the start of a stop string: a possible start is held back.
        places = [self.text.find(s, self.num_shown) for s in self.stop]
        stops = [i for i in places if i >= 0]
        if stops:
            self.text = self.text[: min(stops)]
            self.stopped = True
            return self._take(len(self.text))
        # The longest end of the text that a stop string may start with.
        new = self.text[self.num_shown :]
        starts = [n for s in self.stop for n in range(1, len(s)) if new.endswith(s[:n])]
        return self._take(len(self.text) - max(starts, default=0))

    def end(self) -> str:
        """Return the text that was held back, after the last token."""
        if not self.stopped:
            self._decode()
        return self._take(len(self.text))

    def count_complete_tokens(self) -> int:
        """Count the tokens that lie completely in the text."""
        return bisect_right(self.ends, len(self.text))

    def _decode(self) -> None:
        # Decoded with the tokens before it, whose text is then removed from the front.
        before = self.tokenizer.decode(self.ids[self.first : self.num_decoded])
        decoded = self.tokenizer.decode(self.ids[self.first :])
        piece = decoded[len(before) :]
        self.text += piece
        self.ends += [len(self.text)] * (len(self.ids) - self.num_decoded)
        # A token without text is no context for the next one, so keep the tokens before it.
        if piece:
            self.first = self.num_decoded
        self.num_decoded = len(self.ids)

    def _take(self, end: int) -> str:
        piece = self.text[self.num_shown : end]
        self.num_shown = max(self.num_shown, end)
        return piece


def make_reader(tokenizer: Tokenizer, prompt: Sequence[int], *, stop: Sequence[str]) -> Reader:
    """Make a reader of the text that continues a prompt.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> make_reader(make_byte_tokenizer(), [65], stop=[]).read(66)
        'B'
    """
    prefix = [int(i) for i in prompt[-_PREFIX_TOKENS:]]
    return Reader(tokenizer, tuple(stop), prefix, num_decoded=len(prefix))
