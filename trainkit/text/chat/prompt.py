"""Encode a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.text.chat.templates import chatml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainkit.text.chat.messages import Message
    from trainkit.text.chat.templates import Template
    from trainkit.types import Tokenizer


def encode_prompt(
    messages: Sequence[Message], tokenizer: Tokenizer, *, template: Template = chatml
) -> list[int]:
    r"""Encode a conversation up to the beginning of the assistant's answer.

    Args:
        messages: As in `encode_chat`; the last is not the assistant's.
        tokenizer: As in `encode_chat`.
        template: As in `encode_chat`.

    Raises:
        DataError: A message is wrong.

    Examples:
        >>> from trainkit.text.tokenizers import open_tokenizer
        >>> tokenizer = open_tokenizer("bytes")
        >>> ids = encode_prompt([{"role": "user", "content": "hi"}], tokenizer)
        >>> bytes(ids[-10:])
        b'assistant\n'
    """
    segments = template(messages, add_generation_prompt=True)
    return list(tokenizer.encode("".join(segment.text for segment in segments)))
