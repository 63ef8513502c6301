"""From tokens to text while they come: whole characters, and the strings that end a text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import attrs

from trainkit.types import Tokenizer

_BROKEN = "\ufffd"
_BEFORE = 8  # tokens of the prompt that the first new one is decoded with


@attrs.define(eq=False)
class Reader:
    """What the new tokens of one row say so far.

    Tokens are decoded with those just before them, as a decoder may drop a blank at the beginning;
    so each costs the same, however long the text is.

    Attributes:
        tokenizer: What decodes.
        stop: Strings of which the first to appear ends the text; it is not part of it.
        ids: The last tokens of the prompt, and what has been read.
        known: How many of them have been decoded; the others are no whole character yet.
        first: Where those that are decoded next begin.
        text: What was said, without what may still become a character.
        shown: How many characters of it have been handed out: not those that may begin a stop
            string.
        ends: How long the text was with each token that was read.
        stopped: Whether one of `stop` has appeared.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> reader = reader_of(make_byte_tokenizer(), [65], stop=["END"])
        >>> [reader.read(byte) for byte in "né E.END".encode()]
        ['n', '', 'é', ' ', '', 'E.', '', '', '']
        >>> reader.text, reader.stopped
        ('né E.', True)
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    ids: list[int]
    known: int
    first: int = 0
    text: str = ""
    shown: int = 0
    ends: list[int] = attrs.field(factory=list)
    stopped: bool = False

    def read(self, token: int) -> str:
        """Take the next token, and return what to show of it."""
        self.ids.append(token)
        if self._decoded().endswith(_BROKEN):
            return ""
        self._advance()
        found = [i for i in (self.text.find(s, self.shown) for s in self.stop) if i >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self._show(len(self.text) - (0 if found else self._held()))

    def end(self) -> str:
        """Return what has been held back, when no more tokens come."""
        if not self.stopped:
            self._advance()
        return self._show(len(self.text))

    def whole_tokens(self) -> int:
        """Return how many tokens stand wholly in the text."""
        return bisect_right(self.ends, len(self.text))

    def _decoded(self) -> str:
        return self.tokenizer.decode(self.ids[self.first :])

    def _advance(self) -> None:
        before = len(self.tokenizer.decode(self.ids[self.first : self.known]))
        piece = self._decoded()[before:]
        self.text += piece
        self.ends += [len(self.text)] * (len(self.ids) - self.known)
        # Without a letter there is nothing that the next tokens could be decoded with.
        self.first, self.known = self.known if piece else self.first, len(self.ids)

    def _held(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        new = self.text[self.shown :]
        lengths = [n for s in self.stop for n in range(1, len(s)) if new.endswith(s[:n])]
        return max(lengths, default=0)

    def _show(self, to: int) -> str:
        piece, self.shown = self.text[self.shown : to], max(self.shown, to)
        return piece


def reader_of(tokenizer: Tokenizer, prompt: Sequence[int], *, stop: Sequence[str]) -> Reader:
    """Return the reader of the text that goes on from a prompt.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> reader_of(make_byte_tokenizer(), [65], stop=[]).read(66)
        'B'
    """
    before = [int(i) for i in prompt[-_BEFORE:]]
    return Reader(tokenizer, tuple(stop), before, known=len(before))
