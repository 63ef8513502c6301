"""Select messages to train on, and find their characters and their tokens.

Positions are characters of the whole rendered conversation, all segments concatenated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainkit.text.chat.messages import wrong_message

if TYPE_CHECKING:
    from trainkit.text.chat.messages import Message
    from trainkit.text.chat.templates import Segment
    from trainkit.types import IntArray, Tokenizer

Train = Literal["assistant", "last"] | Sequence[int] | Callable[[int, Mapping[str, Any]], bool]
"""The messages whose tokens are in the loss: all of the assistant's, its last, those with these
indices, or those for which `train(index, message)` is true.
"""


def select_messages(messages: Sequence[Message], train: Train) -> set[int]:
    """Return the indices of the messages to train on; a weight of 0 excludes a message."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if isinstance(train, str) and train in ("assistant", "last"):
        chosen = set(answers if train == "assistant" else answers[-1:])
    elif isinstance(train, str):
        raise ValueError(
            'encode_chat: train must be "assistant", "last", numbers of messages, or a function, '
            f"got {train!r}"
        )
    elif callable(train):
        chosen = {i for i, message in enumerate(messages) if train(i, message)}
    else:
        # Indices, for what neither a role nor a weight can express.
        chosen = set(train)
        if not chosen <= set(range(len(messages))):
            raise ValueError(
                f"encode_chat: train has the messages {sorted(chosen)}; there are {len(messages)}, "
                "numbered from 0"
            )
    # A weight between 0 and 1 would need a loss weight, and a mask has none.
    for i, message in enumerate(messages):
        if message.get("weight", 1) not in (0, 1):
            raise wrong_message(
                i, message, f"has the weight {message['weight']!r}; it must be 0 or 1"
            )
    return {i for i in chosen if messages[i].get("weight", 1)}


def find_turns(
    segments: Sequence[Segment], chosen: set[int], messages: Sequence[Message]
) -> list[list[tuple[int, int]]]:
    """Find the ranges of characters [start, end) of each chosen message's body, in order."""
    turns: dict[int, list[tuple[int, int]]] = {i: [] for i in sorted(chosen)}
    end = 0
    for segment in segments:
        start = end
        end += len(segment.text)
        if segment.body and segment.message in turns:
            ranges = turns[segment.message]
            # Adjacent segments become one range: a token may lie in both.
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, end))
    for i, ranges in turns.items():
        if not ranges:
            raise wrong_message(
                i,
                messages[i],
                "is not to be found in what the template renders, so it cannot be trained on; "
                "leave it out by its weight or by train=",
            )
    return list(turns.values())


def tokenize(
    tokenizer: Tokenizer, segments: Sequence[Segment]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the tokens of the segments, and the first character and the end of each token."""
    encode = getattr(tokenizer, "encode_with_offsets", None)
    if encode is not None:
        # All in one text, as in generation: a token may then cross from one segment to the next.
        ids, offsets = encode("".join(segment.text for segment in segments))
        positions = np.asarray(offsets, np.int64).reshape(-1, 2)
        # Some tokenizers leave blanks out of a token's range: they belong to the token after them.
        ends = np.maximum.accumulate(positions[:, 1])
        if len(ids) == 0:
            return np.asarray(ids, np.int64), ends, ends
        previous_ends = np.concatenate([[0], ends[:-1]])
        starts = np.minimum(positions[:, 0], previous_ends)
        return np.asarray(ids, np.int64), starts, ends
    # Segment by segment: without offsets, this is the only way to know the tokens of a turn.
    parts = [np.asarray(tokenizer.encode(segment.text), np.int64) for segment in segments]
    # All tokens of a segment have its range: they are in the loss together, or not at all.
    counts = [len(part) for part in parts]
    lengths = [len(segment.text) for segment in segments]
    edges = np.cumsum([0, *lengths], dtype=np.int64)
    tokens = np.concatenate([np.array([], np.int64), *parts])
    return tokens, np.repeat(edges[:-1], counts), np.repeat(edges[1:], counts)


def find_tokens_inside(
    turns: Sequence[Sequence[tuple[int, int]]], starts: IntArray, ends: IntArray
) -> np.ndarray[Any, Any]:
    """Return a mask of the tokens that lie inside one range of a turn: bool `[N]`.

    A token without characters lies in none.
    """
    inside = np.zeros(len(starts), dtype=bool)
    for start, end in itertools.chain(*turns):
        inside |= (starts >= start) & (ends <= end) & (starts < ends)
    return inside
