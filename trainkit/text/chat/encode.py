"""Encode conversations: from messages to tokens with a loss mask on chosen turns.

A template (`trainkit.text.chat.templates`) renders the messages as segments, each of which belongs
to a message. The whole text is tokenized once, and a token is in the loss if all its characters lie
in the body of a chosen message, its stop token included.
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

from trainkit.text.chat.messages import normalize_messages, parse_tools
from trainkit.text.chat.templates import chatml
from trainkit.text.chat.turns import (
    Train,
    find_tokens_inside,
    find_turns,
    select_messages,
    tokenize,
)
from trainkit.types import DataError, Sample, check_choice, check_range

if TYPE_CHECKING:
    from trainkit.text.chat.messages import Message
    from trainkit.text.chat.templates import Segment, Template
    from trainkit.types import Tokenizer

# A character that templates do not write, in place of a content.
_PROBE = "\u00a4"
# With the roles of OpenAI's form, and LLaMA-Factory's name for the answer of a tool.
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
    """Encode a conversation to tokens and a loss mask.

    In the loss is the body of a chosen message (its content, its calls and its stop token), never a
    header, nor the text after the stop token. A token that lies only partly inside is not: the
    model never has to predict it, since a prompt ends with the whole header. With a tokenizer that
    has `encode_with_offsets` the tokens are those of the whole text, as in `transformers`; with
    another each segment is encoded separately.

    Args:
        messages: Mappings with `role` and `content` (a text, or parts of text); an assistant's may
            have `tool_calls` and `reasoning_content`, and any may have a `weight` of 0 or 1, where
            0 excludes it from the loss.
        tokenizer: Anything with `encode`; no special token is added but those of the template.
        template: Converts messages to text: `chatml`, `llama3`, `qwen3`, or one from
            `make_jinja_template` or `read_template`.
        train: The messages in the loss; see `Train`.
        max_length: The maximum number of tokens. A longer conversation is truncated after the last
            chosen turn that fits completely.
        tools: JSON schemas of the functions that the conversation may call.
        overlong: For a conversation of which no chosen turn fits: "error", or "drop", which gives
            no tokens.
        counts: Counter to add to: `conversations`, `truncated`, `turns_lost` (chosen turns beyond
            `max_length`), `dropped`, `answers` (chosen turns) and `hidden_answers` (those that the
            template does not show; see `format_answers_warning`).

    Returns:
        The sample: tokens int64 `[N]`, loss_mask bool `[N]`.

    Raises:
        DataError: A message is wrong, the template does not show it, or no chosen turn fits. The
            error says which.
        ValueError: An argument is out of range.

    Effects:
        Adds to `counts`.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> tokenizer = make_byte_tokenizer(CHATML_SPECIAL)
        >>> messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        >>> sample = encode_chat(messages, tokenizer)
        >>> len(sample.tokens), sample.tokens[sample.loss_mask]
        (26, array([ 50, 260]))
    """
    check_range("encode_chat", at_least=1, max_length=max_length)
    check_choice(("error", "drop"), "encode_chat", overlong=overlong)
    normalized = normalize_messages(messages)
    chosen = select_messages(normalized, train)
    segments = template(normalized, tools=tools)
    # A template is somebody else's program, and what it makes is bounded before it is tokenized.
    _check_scaffold(segments, normalized, tools)
    turns = find_turns(segments, chosen, normalized)
    tokens, starts, ends = tokenize(tokenizer, segments)
    loss_mask = find_tokens_inside(turns, starts, ends)
    length = len(tokens)
    num_lost = 0
    if max_length is not None and len(tokens) > max_length:
        # How many tokens the conversation has up to the end of each chosen turn.
        turn_lengths = np.searchsorted(ends, [turn[-1][1] for turn in turns], side="right")
        # After a complete turn: a truncated answer would have no stop token.
        fitting = turn_lengths[turn_lengths <= max_length]
        length = int(fitting.max(initial=0))
        num_lost = len(turns) - len(fitting)
        if length == 0 and overlong == "error":
            raise DataError(
                f"encode_chat: of {len(turns)} turns to train on none fits: the first ends after "
                f"{turn_lengths.min(initial=len(tokens))} tokens, max_length is {max_length}",
                got=len(tokens),
                want=max_length,
                hint='raise max_length, or take overlong="drop"',
            )
    # Last: a conversation that raises is not counted.
    if counts is not None:
        counts["conversations"] += 1
        counts["answers"] += len(chosen)
        counts["hidden_answers"] += _count_hidden(normalized, chosen, segments, template, tools)
        # A conversation that is dropped is not truncated as well.
        counts["truncated"] += 0 < length < len(tokens)
        counts["dropped"] += length == 0
        counts["turns_lost"] += num_lost
    return Sample(tokens[:length], loss_mask[:length])


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
    """Make a function from a record to its sample, for `open_corpus(encode=)` and the like.

    Args:
        tokenizer: As in `encode_chat`.
        template: As in `encode_chat`.
        field: The record's field that holds the messages, or a function that returns them, such as
            `messages_from_sharegpt`. Its field `tools`, if any, is a list of JSON schemas, or JSON
            of one.
        train: As in `encode_chat`.
        max_length: As in `encode_chat`.
        overlong: As in `encode_chat`.
        counts: As in `encode_chat`; a new counter by default.

    Returns:
        `encode(record) -> Sample`, with the tokenizer's `vocab_size` and the `counts` as its
        attributes. It raises `DataError` for a wrong record, or a sample that `check_mask`
        rejects.

    Raises:
        ValueError: An argument is out of range, or the tokenizer has no token for the template's
            stop token.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> encode = make_chat_encoder(make_byte_tokenizer(CHATML_SPECIAL), train="last")
        >>> turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        >>> sample = encode({"messages": [{"role": r, "content": c} for r, c in turns]})
        >>> sample.tokens[sample.loss_mask]
        array([100, 260])
    """
    check_range("make_chat_encoder", at_least=1, max_length=max_length)
    check_choice(("error", "drop"), "make_chat_encoder", overlong=overlong)
    counts = Counter() if counts is None else counts
    # Partials, not closures: processes that read a corpus get the encoder by pickle.
    encode = partial(
        _encode_record,
        encode_messages=partial(
            encode_chat,
            tokenizer=tokenizer,
            template=template,
            train=train,
            max_length=max_length,
            overlong=overlong,
            counts=counts,
        ),
        field=field,
        # Found now: a tokenizer without them is an error before any record is read.
        stop_ids=find_stop_ids(tokenizer, template),
    )
    # `open_corpus` and `prepare_corpus` read these attributes.
    vars(encode).update(vocab_size=getattr(tokenizer, "vocab_size", None), counts=counts)
    return encode


def _encode_record(
    record: Mapping[str, Any],
    *,
    encode_messages: Callable[..., Sample],
    field: str | Callable[[Mapping[str, Any]], Sequence[Message]],
    stop_ids: Sequence[int],
) -> Sample:
    # A function finds the messages of records of another form.
    if not isinstance(field, str):
        messages = field(record)
    elif field in record:
        messages = record[field]
    else:
        advice = "; take field=messages_from_sharegpt" if "conversations" in record else ""
        raise DataError(
            f"make_chat_encoder: the record has no field {field!r}; it has {', '.join(record)}"
            f"{advice}",
            want=field,
        )
    sample = encode_messages(messages, tools=parse_tools(record))
    if len(sample.tokens):
        check_mask(sample, stop_ids=stop_ids)
    return sample


def messages_from_sharegpt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a record of ShareGPT's form, `conversations` of `from` and `value`, to messages.

    Raises:
        DataError: There are no conversations; or a turn has no `value`, or a `from` that is not
            human, gpt, system, tool or the like.

    Examples:
        >>> messages_from_sharegpt({"conversations": [{"from": "human", "value": "hi"}]})
        [{'role': 'user', 'content': 'hi'}]
    """
    turns = record.get("conversations")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(
            "messages_from_sharegpt: the record has no list `conversations`; it has "
            f"{', '.join(record)}"
        )
    messages = []
    # Some data sets have the system message in a field of its own.
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    for i, turn in enumerate(turns):
        role = _SHAREGPT.get(turn.get("from", "")) if isinstance(turn, Mapping) else None
        if role is None or "value" not in turn:
            raise DataError(
                f"messages_from_sharegpt: turn {i} must have a `value`, and a `from` that is one "
                f"of {', '.join(_SHAREGPT)}; got {turn!r}",
                where=i,
                got=turn,
            )
        messages.append({"role": role, "content": turn["value"]})
    return messages


def format_answers_warning(counts: Mapping[str, int]) -> str:
    """Return a warning about answers that the template does not show; "" if there are none.

    A template without tool calls (Gemma's, for one) shows an answer that only calls a tool as a
    stop token: a model that is trained on it learns to say nothing where it should call. A few such
    answers cause a warning, more than one in a hundred an error.

    Args:
        counts: The counter of `encode_chat`, with `answers` and `hidden_answers`.

    Raises:
        DataError: More than 1 % of the answers are hidden.

    Examples:
        >>> format_answers_warning({"answers": 500, "hidden_answers": 2})
        'warning: the template shows nothing of 2 of 500 answers, such as calls of tools: ...'
        >>> format_answers_warning({"answers": 500})
        ''
    """
    answers = counts.get("answers", 0)
    hidden = counts.get("hidden_answers", 0)
    if not hidden:
        return ""
    finding = (
        f"the template shows nothing of {hidden:,} of {answers:,} answers, such as calls of tools: "
        "their stop tokens alone are trained on"
    )
    if hidden > 0.01 * answers:
        raise DataError(
            f"chat: {finding}; take a template that shows them, or leave those answers out by a "
            "weight of 0",
            got=hidden,
            want=f"<= {answers // 100}",
        )
    return f"warning: {finding}"


def find_stop_ids(tokenizer: Tokenizer, template: Template = chatml) -> tuple[int, ...]:
    """Find the token that ends an assistant's turn: generation stops at it.

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
    body = [segment.text for segment in template(probe) if segment.body and segment.message == 1]
    # The stop token is the rest of the body after the content.
    # Some templates write a blank between the content and the stop token, as Llama 2 does.
    stop = "".join(body).rpartition(_PROBE)[2].strip()
    if not stop:
        raise ValueError(
            "find_stop_ids: the template ends an assistant's turn without a stop token"
        )
    ids = tuple(int(i) for i in tokenizer.encode(stop))
    if len(ids) != 1:
        raise ValueError(
            f"find_stop_ids: the template ends a turn with {stop}, for which the tokenizer has "
            f"{len(ids)} tokens, where one is needed; add the template's tokens to it: "
            "make_byte_tokenizer(CHATML_SPECIAL), tokenizers.add_tokens"
        )
    return ids


def check_mask(sample: Sample, *, stop_ids: Sequence[int]) -> None:
    """Raise DataError if a loss mask is empty or full, or contains no stop token.

    With the first the model learns nothing, with the second it learns the prompts too, with the
    third it never learns to stop.

    Args:
        sample: The tokens and the mask.
        stop_ids: The tokens that end a turn; see `find_stop_ids`.

    Raises:
        DataError: The mask is one of those; the message has the number of tokens.

    Examples:
        >>> check_mask(Sample(np.arange(3), np.zeros(3, bool)), stop_ids=[2])
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: check_mask: of 3 tokens none is trained on
    """
    count = int(np.count_nonzero(sample.loss_mask))
    total = len(sample.tokens)
    if len(sample.loss_mask) != total:
        raise DataError(f"check_mask: {total} tokens have a mask of {len(sample.loss_mask)}")
    if count == 0:
        raise DataError(f"check_mask: of {total} tokens none is trained on", got=0)
    if count == total:
        raise DataError(f"check_mask: all {total} tokens are trained on, the prompt too", got=count)
    # A stop token outside the mask, such as that of a user's turn, teaches nothing.
    is_stop = np.isin(sample.tokens, np.asarray(stop_ids, np.int64))
    if not (is_stop & np.asarray(sample.loss_mask, bool)).any():
        raise DataError(
            f"check_mask: of {count} trained tokens none is a stop token ({list(stop_ids)}); "
            f"{int(is_stop.sum())} of all {total} are",
            got=0,
        )


def format_mask(sample: Sample, tokenizer: Tokenizer, *, colour: bool = True) -> str:
    """Return a sample as text, with the tokens in the loss in green, or between `[[` and `]]`.

    Special tokens are shown, although `decode` drops them.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> sample = Sample(np.array([104, 105]), np.array([False, True]))
        >>> format_mask(sample, make_byte_tokenizer(), colour=False)
        'h[[i]]'
    """
    start, end = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    parts = [
        f"{start}{text}{end}" if trained else text
        for trained, text in split_by_mask(sample, tokenizer)
    ]
    return "".join(parts)


def split_by_mask(sample: Sample, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Split a sample into runs of (in the loss or not, text), for another way to show it.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> split_by_mask(
        ...     Sample(np.array([104, 105]), np.array([False, True])), make_byte_tokenizer()
        ... )
        [(False, 'h'), (True, 'i')]
    """
    mask = sample.loss_mask.astype(bool)
    pairs = zip(mask.tolist(), sample.tokens.tolist(), strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [(trained, _decode_visibly(tokenizer, [i for _, i in run])) for trained, run in runs]


def _decode_visibly(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode ids; those that decode to nothing, such as special tokens, appear by name."""
    get_names: Callable[[list[int]], list[str]] | None = getattr(tokenizer, "pieces", None)
    texts: list[str] = []
    # In runs, since a character may consist of several tokens.
    for is_special, run in itertools.groupby(ids, key=lambda i: not tokenizer.decode([i])):
        run_ids = list(run)
        if not is_special:
            texts.append(tokenizer.decode(run_ids))
        elif get_names is not None:
            texts += get_names(run_ids)
        else:
            texts += [f"<{i}>" for i in run_ids]
    return "".join(texts)


_SCAFFOLD = 1 << 16
"""Characters that a template may add to any conversation; beyond that it may make 16 for each
character of the conversation. So the size of a corpus is bounded by the size of its data.
"""


def _check_scaffold(
    segments: Sequence[Segment],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
) -> None:
    rendered = sum(len(segment.text) for segment in segments)
    # The usual case, without the cost of serializing the conversation.
    if rendered <= _SCAFFOLD:
        return
    # As JSON, since calls and schemas are rendered too; `default` for values that it has not.
    given = len(orjson.dumps([list(messages), list(tools or [])], default=str))
    if rendered > _SCAFFOLD + 16 * given:
        raise DataError(
            f"encode_chat: the template renders {rendered} characters from a conversation of "
            f"{given}; the limit is {_SCAFFOLD}, and 16 for each of those",
            got=rendered,
            want=_SCAFFOLD + 16 * given,
            hint="check the template, or take another with --template",
        )


def _count_hidden(
    messages: Sequence[Message],
    chosen: set[int],
    segments: Sequence[Segment],
    template: Template,
    tools: Sequence[Mapping[str, Any]] | None,
) -> int:
    """Count the chosen answers whose calls, or content, the template does not show.

    They are those whose last word, or names of calls, are not in their turn, if the template
    renders the same text without them.
    """
    # The messages without what seems hidden: they must render to the same text.
    changed = [*messages]
    hidden = 0
    bodies: dict[int, str] = {}
    for segment in segments:
        if segment.body and segment.message is not None:
            bodies[segment.message] = bodies.get(segment.message, "") + segment.text
    # Each has a body: `find_turns` has raised otherwise.
    for i in chosen:
        message = messages[i]
        # Of the content the last word: a template may take reasoning off its beginning.
        words = (message.get("content") or "").split()
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        # As a whole word: a name may be a part of another word.
        if names and not any(re.search(rf"\b{re.escape(x)}\b", bodies[i]) for x in names):
            without_calls = {key: value for key, value in message.items() if key != "tool_calls"}
            changed[i] = {**without_calls, "content": message.get("content", "")}
            hidden += 1
        elif words and not names and words[-1] not in bodies[i]:
            changed[i] = {**message, "content": _PROBE}
            hidden += 1
    if not hidden:
        return 0
    try:
        rendered = template(changed, tools=tools)
    except DataError:  # the template needs what was removed, so it does not ignore it
        return 0
    # Only if nothing else changed either: a template may show a call in other words.
    is_same = "".join(x.text for x in rendered) == "".join(x.text for x in segments)
    return hidden if is_same else 0
