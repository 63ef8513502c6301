"""Which messages are trained on, where they stand in what a template renders, and in which tokens.

Characters are counted over the whole text of a conversation, from its first segment on.
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
"""Which messages are trained on: all of the assistant's, its last, those with these numbers, or
those for which `train(number, message)` is true.
"""


def chosen_messages(messages: Sequence[Message], train: Train) -> set[int]:
    """Return the numbers of the messages to train on; a weight of 0 takes one out."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if isinstance(train, str) and train in ("assistant", "last"):
        chosen = set(answers if train == "assistant" else answers[-1:])
    elif isinstance(train, str):
        known = '"assistant", "last", numbers of messages, or a function'
        raise ValueError(f"encode_chat: train must be {known}, got {train!r}")
    elif callable(train):
        chosen = {i for i, message in enumerate(messages) if train(i, message)}
    else:
        chosen = set(train)
        if not chosen <= set(range(len(messages))):
            what = f"the messages {sorted(chosen)}; there are {len(messages)}, numbered from 0"
            raise ValueError(f"encode_chat: train asks for {what}")
    for i, message in enumerate(messages):
        if message.get("weight", 1) not in (0, 1):
            what = f"has the weight {message['weight']!r}; it must be 0 or 1"
            raise wrong_message(i, message, what)
    return {i for i in chosen if messages[i].get("weight", 1)}


def turns_said(
    segments: Sequence[Segment], chosen: set[int], messages: Sequence[Message]
) -> list[list[tuple[int, int]]]:
    """Return the ranges of characters [begin, end) that each chosen message said, in order."""
    said: dict[int, list[tuple[int, int]]] = {i: [] for i in sorted(chosen)}
    end = 0
    for segment in segments:
        begin, end = end, end + len(segment.text)
        if segment.body and segment.message in said:
            ranges = said[segment.message]
            if ranges and ranges[-1][1] == begin:  # a token may lie in both
                begin = ranges.pop()[0]
            ranges.append((begin, end))
    for i in (i for i, ranges in said.items() if not ranges):
        what = "is not to be found in what the template renders, so it cannot be trained on"
        raise wrong_message(i, messages[i], f"{what}; leave it out by its weight or by train=")
    return list(said.values())


def tokenised(
    tokenizer: Tokenizer, segments: Sequence[Segment]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the tokens of the segments, and the characters [begin, end) that each belongs to."""
    encode = getattr(tokenizer, "encode_with_offsets", None)
    if encode is not None:
        ids, offsets = encode("".join(segment.text for segment in segments))
        places = np.asarray(offsets, np.int64).reshape(-1, 2)
        # Some tokenizers trim blanks off a token's place: they are the next token's.
        ends = np.maximum.accumulate(places[:, 1])
        begins = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]])) if len(ids) else ends
        return np.asarray(ids, np.int64), begins, ends
    parts = [tokenizer.encode(segment.text) for segment in segments]
    counts = [len(part) for part in parts]
    edges = np.cumsum([0, *(len(segment.text) for segment in segments)], dtype=np.int64)
    tokens = np.concatenate([np.array([], np.int64), *(np.asarray(p, np.int64) for p in parts)])
    return tokens, np.repeat(edges[:-1], counts), np.repeat(edges[1:], counts)


def tokens_inside(
    turns: Sequence[Sequence[tuple[int, int]]], begins: IntArray, ends: IntArray
) -> np.ndarray[Any, Any]:
    """Say which tokens lie inside one range of a turn: bool `[N]`; one without letters does not."""
    inside = np.zeros(len(begins), dtype=bool)
    for begin, end in itertools.chain(*turns):
        inside |= (begins >= begin) & (ends <= end) & (begins < ends)
    return inside
