"""Conversations: from messages to tokens with a mask that trains on chosen turns.

A template (`trainkit.text.chat.templates`) renders the messages in segments that say whose they
are. The whole text is tokenised once, and a token is trained on when all its characters lie in what
a chosen message said, its stop token included.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson

from trainkit.text.chat.messages import checked_messages, tools_of
from trainkit.text.chat.templates import chatml
from trainkit.text.chat.turns import Train, chosen_messages, tokenised, tokens_inside, turns_said
from trainkit.types import DataError, Sample, check_choice, check_range

if TYPE_CHECKING:
    from trainkit.text.chat.messages import Message
    from trainkit.text.chat.templates import Segment, Template
    from trainkit.types import Tokenizer

_PROBE = "\u00a4"
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    template: Template = chatml,
    train: Train = "assistant",
    max_length: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    overlong: Literal["error", "drop"] = "error",
    counts: Counter[str] | None = None,
) -> Sample:
    """Return the tokens of a conversation, and which of them are trained on.

    Trained on is what a chosen message says (its words, its calls and its stop token), never a
    header, nor what stands after the stop token. A token that lies only partly inside is not
    trained on: the model will never be asked for it, since a prompt ends with the whole header.
    With a tokenizer that has `encode_with_offsets` the tokens are those of the whole text, as in
    `transformers`; with another each segment is encoded by itself.

    Args:
        messages: Mappings with `role` and `content` (a text, or parts of text); an assistant's may
            have `tool_calls` and `reasoning_content`, and any may have a `weight` of 0 or 1, where
            0 leaves it untrained.
        tokenizer: Anything with `encode`; no special token is added but those of the template.
        template: How messages become text: `chatml`, `llama3`, `qwen3`, or a `make_jinja_template`.
        train: Which messages are trained on; see `Train`.
        max_length: The most tokens. A longer conversation ends with the last turn trained on that
            fits whole: no half turn is trained, and none is kept.
        tools: JSON schemas of the functions that the conversation may call.
        overlong: What becomes of a conversation of which no trained turn fits: "error", or "drop",
            which gives no tokens.
        counts: Where to add up what happened: `conversations`, `truncated`, `turns_lost` (trained
            turns beyond `max_length`), `dropped`, `answers` (turns to train on) and
            `hidden_answers` (those of which the template shows nothing; see
            `format_answers_warning`).

    Returns:
        The sample: tokens int64 `[N]`, trained bool `[N]`.

    Raises:
        DataError: A message is wrong, the template does not show it, or no trained turn fits. The
            message says which.
        ValueError: An argument is out of its range.

    Effects:
        Adds to `counts`, if there is one.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
        >>> messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        >>> sample = encode_chat(messages, tokenizer)
        >>> len(sample.tokens), sample.tokens[sample.trained]
        (26, array([ 50, 260]))
    """
    _check_lengths("encode_chat", max_length, overlong)
    checked = checked_messages(messages)
    chosen = chosen_messages(checked, train)
    segments = template(checked, tools=tools)
    _check_scaffold(segments, checked, tools)
    turns = turns_said(segments, chosen, checked)
    tokens, begins, ends = tokenised(tokenizer, segments)
    trained = tokens_inside(turns, begins, ends)
    keep, lost = len(tokens), 0
    if max_length is not None and len(tokens) > max_length:
        last_tokens = np.searchsorted(ends, [turn[-1][1] for turn in turns], side="right")
        fitting = last_tokens[last_tokens <= max_length]
        keep, lost = int(fitting.max(initial=0)), len(turns) - len(fitting)
        if keep == 0 and overlong == "error":
            first = last_tokens.min(initial=len(tokens))
            why = f"the first ends after {first} tokens, max_length is {max_length}"
            what = f"of {len(turns)} turns to train on none fits: {why}"
            hint = 'raise max_length, or ask for overlong="drop"'
            raise DataError(f"encode_chat: {what}", got=len(tokens), want=max_length, hint=hint)
    if counts is not None:
        counts["conversations"] += 1
        counts["answers"] += len(chosen)
        counts["hidden_answers"] += _count_hidden(checked, chosen, segments, template, tools)
        counts["truncated"] += 0 < keep < len(tokens)
        counts["dropped"] += keep == 0
        counts["turns_lost"] += lost
    return Sample(tokens[:keep], trained[:keep])


def make_chat_encoder(
    tokenizer: Tokenizer,
    *,
    template: Template = chatml,
    field: str | Callable[[Mapping[str, Any]], Sequence[Message]] = "messages",
    train: Train = "assistant",
    max_length: int | None = None,
    overlong: Literal["error", "drop"] = "error",
    counts: Counter[str] | None = None,
) -> Callable[[Mapping[str, Any]], Sample]:
    """Return the function from a record to its sample, for `open_corpus(encode=)` and the like.

    Args:
        tokenizer: As in `encode_chat`.
        template: As in `encode_chat`.
        field: The record's field that holds the messages, or a function that finds them, such as
            `messages_from_sharegpt`. Its field `tools`, if any, is a list of JSON schemas, or JSON
            of one.
        train: As in `encode_chat`.
        max_length: As in `encode_chat`.
        overlong: As in `encode_chat`.
        counts: As in `encode_chat`; one of the encoder's own by default.

    Returns:
        `encode(record) -> Sample`, with the tokenizer's `vocab_size` and the `counts` as its
        attributes. It raises `DataError` for a record that is wrong, or whose sample `check_mask`
        refuses.

    Raises:
        ValueError: An argument is out of its range, or the tokenizer has no token for the stop
            token of the template.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> encode = make_chat_encoder(make_byte_tokenizer(CHATML_SPECIAL), train="last")
        >>> said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        >>> sample = encode({"messages": [{"role": r, "content": c} for r, c in said]})
        >>> sample.tokens[sample.trained]
        array([100, 260])
    """
    _check_lengths("make_chat_encoder", max_length, overlong)
    counts = Counter() if counts is None else counts
    encode = partial(
        _encode_record,
        tokenizer=tokenizer,
        field=field,
        stop=find_stop_ids(tokenizer, template),
        template=template,
        train=train,
        max_length=max_length,
        overlong=overlong,
        counts=counts,
    )
    vars(encode).update(vocab_size=getattr(tokenizer, "vocab_size", None), counts=counts)
    return encode


def messages_from_sharegpt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record in ShareGPT's form: `conversations` of `from` and `value`.

    Raises:
        DataError: There are no conversations, or one of them has no `value`, or a `from` that is
            not one of human, gpt, system, tool and their like.

    Examples:
        >>> messages_from_sharegpt({"conversations": [{"from": "human", "value": "hi"}]})
        [{'role': 'user', 'content': 'hi'}]
    """
    turns = record.get("conversations")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        what = f"the record has no list `conversations`; it has {', '.join(record)}"
        raise DataError(f"messages_from_sharegpt: {what}")
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    for i, turn in enumerate(turns):
        role = _SHAREGPT.get(turn.get("from", "")) if isinstance(turn, Mapping) else None
        if role is None or "value" not in turn:
            must = f"must have a `value`, and a `from` that is one of {', '.join(_SHAREGPT)}"
            raise DataError(
                f"messages_from_sharegpt: turn {i} {must}; got {turn!r}", where=i, got=turn
            )
        messages.append({"role": role, "content": turn["value"]})
    return messages


def format_answers_warning(counts: Mapping[str, int]) -> str:
    """Return a warning of answers of which the template shows nothing; "" where there are none.

    A template that has no place for tool calls (Gemma's, for one) shows an answer that only calls
    as its stop token alone: a model that is trained on it learns to say nothing where it should
    call. A few such answers are worth a warning; more than one in a hundred are refused.

    Args:
        counts: What `encode_chat` has added up: `answers` and `hidden_answers`.

    Raises:
        DataError: More than 1 % of the answers are hidden.

    Examples:
        >>> format_answers_warning({"answers": 500, "hidden_answers": 2})
        'warning: the template shows nothing of 2 of 500 answers, such as calls of tools: ...'
        >>> format_answers_warning({"answers": 500})
        ''
    """
    answers, hidden = counts.get("answers", 0), counts.get("hidden_answers", 0)
    if not hidden:
        return ""
    found = (
        f"the template shows nothing of {hidden:,} of {answers:,} answers, such as calls of tools: "
        "their stop tokens alone are trained on"
    )
    if hidden > 0.01 * answers:
        raise DataError(
            f"chat: {found}; take a template that shows them, or leave those answers out by a "
            "weight of 0",
            got=hidden,
            want=f"<= {answers // 100}",
        )
    return f"warning: {found}"


def find_stop_ids(tokenizer: Tokenizer, template: Template = chatml) -> tuple[int, ...]:
    """Return the token that ends an assistant's turn: where generation stops.

    Raises:
        ValueError: The template ends a turn with nothing, or the tokenizer has no single token for
            it.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> find_stop_ids(make_byte_tokenizer(CHATML_SPECIAL))
        (260,)
    """
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    said = [segment.text for segment in template(probe) if segment.body and segment.message == 1]
    stop = "".join(said).rpartition(_PROBE)[2].strip()
    if not stop:
        raise ValueError("stop_ids: the template ends an assistant's turn without a stop token")
    ids = tuple(int(i) for i in tokenizer.encode(stop))
    if len(ids) != 1:
        what = f"{stop}, for which the tokenizer has {len(ids)} tokens, where one is needed"
        mend = "give it the template's: make_byte_tokenizer(CHATML_SPECIAL), tokenizers.add_tokens"
        raise ValueError(f"stop_ids: the template ends a turn with {what}; {mend}")
    return ids


def check_mask(sample: Sample, *, stop_ids: Sequence[int]) -> None:
    """Refuse a sample whose mask is empty or full, or never trains a stop token.

    A model that is trained on the first learns nothing, on the second to ask the questions too, on
    the third never to stop.

    Args:
        sample: The tokens and which are trained on.
        stop_ids: The tokens that end a turn; see `stop_ids`.

    Raises:
        DataError: It is one of those; the message says how many tokens there are.

    Examples:
        >>> check_mask(Sample(np.arange(3), np.zeros(3, bool)), stop_ids=[2])
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: check_mask: of 3 tokens none is trained on
    """
    count, total = int(np.count_nonzero(sample.trained)), len(sample.tokens)
    if len(sample.trained) != total:
        raise DataError(f"check_mask: {total} tokens have a mask of {len(sample.trained)}")
    if count == 0:
        raise DataError(f"check_mask: of {total} tokens none is trained on", got=0)
    if count == total:
        raise DataError(f"check_mask: all {total} tokens are trained on, the prompt too", got=count)
    is_stop = np.isin(sample.tokens, np.asarray(stop_ids, np.int64))
    if not (is_stop & np.asarray(sample.trained, bool)).any():
        what = f"of {count} trained tokens none is a stop token ({list(stop_ids)})"
        others = f"{int(is_stop.sum())} stand among the {total} tokens"
        raise DataError(f"check_mask: {what}; {others}", got=0)


def format_mask(sample: Sample, tokenizer: Tokenizer, *, colour: bool = True) -> str:
    """Return a sample as text, with what is trained on in green, or between `[[` and `]]`.

    Special tokens are shown, though `decode` drops them.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> sample = Sample(np.array([104, 105]), np.array([False, True]))
        >>> format_mask(sample, make_byte_tokenizer(), colour=False)
        'h[[i]]'
    """
    begin, end = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    parts = [
        f"{begin}{text}{end}" if trained else text
        for trained, text in split_by_mask(sample, tokenizer)
    ]
    return "".join(parts)


def split_by_mask(sample: Sample, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Return a sample in runs of (trained on or not, text), to draw it in a way of your own.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> split_by_mask(
        ...     Sample(np.array([104, 105]), np.array([False, True])), make_byte_tokenizer()
        ... )
        [(False, 'h'), (True, 'i')]
    """
    pairs = zip(sample.trained.astype(bool).tolist(), sample.tokens.tolist(), strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [(trained, _shown(tokenizer, [i for _, i in run])) for trained, run in runs]


def _shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode a run; tokens that decode to nothing, as special ones do, show their own text."""
    name_of: Callable[[list[int]], list[str]] | None = getattr(tokenizer, "pieces", None)
    texts: list[str] = []
    for special, run in itertools.groupby(ids, key=lambda i: not tokenizer.decode([i])):
        part = list(run)
        if not special:
            texts.append(tokenizer.decode(part))
        else:
            texts += [f"<{i}>" for i in part] if name_of is None else name_of(part)
    return "".join(texts)


_SCAFFOLD = 1 << 16
"""Letters that a template may add to any conversation, and beyond that 16 for each of its own: what
a corpus comes to is bounded by what it holds."""


def _check_scaffold(
    segments: Sequence[Segment],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
) -> None:
    made = sum(len(segment.text) for segment in segments)
    if made <= _SCAFFOLD:
        return
    held = len(orjson.dumps([list(messages), list(tools or [])], default=str))
    if made > _SCAFFOLD + 16 * held:
        raise DataError(
            f"encode_chat: the template makes {made} letters of a conversation of {held}: it may "
            f"make {_SCAFFOLD} and 16 for each of the conversation's",
            got=made,
            want=_SCAFFOLD + 16 * held,
            hint="look at the template, or take another with --template",
        )


def _count_hidden(
    messages: Sequence[Message],
    chosen: set[int],
    segments: Sequence[Segment],
    template: Template,
    tools: Sequence[Mapping[str, Any]] | None,
) -> int:
    """Count the chosen answers with calls, or words, of which the template shows nothing.

    They are those whose last word or calls' names are not in their turn, if without them the same
    text is rendered.
    """
    changed, hidden = [*messages], 0
    said: dict[int, str] = {}
    for segment in segments:
        if segment.body and segment.message is not None:
            said[segment.message] = said.get(segment.message, "") + segment.text
    for i in chosen:
        message, words = messages[i], (messages[i].get("content") or "").split()
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if names and not any(re.search(rf"\b{re.escape(x)}\b", said[i]) for x in names):
            other = {key: value for key, value in message.items() if key != "tool_calls"}
            changed[i] = {**other, "content": message.get("content", "")}
            hidden += 1
        elif words and not names and words[-1] not in said[i]:
            changed[i] = {**message, "content": _PROBE}
            hidden += 1
    if not hidden:
        return 0
    try:
        other = template(changed, tools=tools)
    except DataError:  # the template looks at what was taken away
        return 0
    same = "".join(x.text for x in other) == "".join(x.text for x in segments)
    return hidden if same else 0


def _encode_record(
    record: Mapping[str, Any],
    *,
    tokenizer: Tokenizer,
    field: str | Callable[[Mapping[str, Any]], Sequence[Message]],
    stop: Sequence[int],
    **options: Any,
) -> Sample:
    if isinstance(field, str):
        if field not in record:
            hint = "; take field=messages_from_sharegpt" if "conversations" in record else ""
            what = f"the record has no field {field!r}; it has {', '.join(record)}{hint}"
            raise DataError(f"make_chat_encoder: {what}", want=field)
        messages = record[field]
    else:
        messages = field(record)
    sample = encode_chat(messages, tokenizer, tools=tools_of(record), **options)
    if len(sample.tokens):
        check_mask(sample, stop_ids=stop)
    return sample


def _check_lengths(by: str, max_length: int | None, overlong: str) -> None:
    check_range(by, at_least=1, max_length=max_length)
    check_choice(("error", "drop"), by, overlong=overlong)
