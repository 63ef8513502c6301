"""Preference pairs: a chosen and a rejected answer to one prompt, side by side in one row.

A preference loss compares the two halves of a pair, so that both must lie in the same row of the
same step. Document 2i of a corpus of pairs is the chosen half of pair i, 2i + 1 the rejected one;
`pack_pairs` places them next to each other, so that of a row's documents 2j and 2j + 1 are a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from trainkit.packing import best_fit, pack_bins
from trainkit.text.chat.encode import encode_chat
from trainkit.text.chat.messages import checked_messages, tools_of, wrong_message
from trainkit.text.chat.templates import chatml
from trainkit.types import Bins, DataError, Sample, check_choice, check_range

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator

    from numpy.typing import ArrayLike

    from trainkit.text.chat.templates import Template
    from trainkit.types import Fit, Tokenizer


def encode_preference_pair(
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    template: Template = chatml,
    max_length: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    counts: Counter[str] | None = None,
) -> tuple[Sample, Sample]:
    """Return the chosen and the rejected half of a record, trained on their answers alone.

    Each half is a whole conversation: the prompt, which is the same in both and trained in neither,
    and the answer, of which the assistant's turns are trained on.

    Args:
        record: `chosen` and `rejected`, each a text (one answer of the assistant), or messages: the
            answer alone, or the prompt and the answer. `prompt`, a text (one message of the user)
            or messages; without it the prompt is what both halves begin with in common. `tools`, a
            list of JSON schemas, or JSON of one.
        tokenizer: As in `encode_chat`.
        template: As in `encode_chat`.
        max_length: As in `encode_chat`; halves keep whole turns.
        tools: As in `encode_chat`; the record's by default.
        counts: As in `encode_chat`, of each half.

    Returns:
        The chosen and the rejected sample.

    Raises:
        DataError: A half is missing or wrong, both are the same, their prompts differ (the message
            names the first difference), or there is no prompt.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> from trainkit.text.chat import CHATML_SPECIAL
        >>> record = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
        >>> chosen, rejected = encode_preference_pair(record, make_byte_tokenizer(CHATML_SPECIAL))
        >>> chosen.tokens[chosen.trained], rejected.tokens[rejected.trained]
        (array([ 50, 260]), array([ 51, 260]))
    """
    tools = tools_of(record) if tools is None else tools
    halves, prompt_length = _halves(record)
    for name, messages in halves.items():
        if messages[prompt_length]["role"] != "assistant":
            why = "an answer begins with an assistant's message, so the prompts differ"
            what = f"is where the halves begin to differ; {why}"
            error = wrong_message(prompt_length, messages[prompt_length], what)
            raise _no_pair(f"the {name} half's {error}", where=prompt_length, got=error.got)
    _check_prompts(halves, prompt_length, template, tools)
    samples: list[Sample] = []
    for name, messages in halves.items():
        answers = [
            i for i, m in enumerate(messages) if i >= prompt_length and m["role"] == "assistant"
        ]
        try:
            samples.append(
                encode_chat(
                    messages,
                    tokenizer,
                    template=template,
                    train=answers,
                    max_length=max_length,
                    tools=tools,
                    counts=counts,
                )
            )
        except DataError as error:
            raise _no_pair(f"the {name} half: {error}", where=name) from error
    if np.array_equal(samples[0].tokens, samples[1].tokens):
        raise _no_pair(_SAME, where="chosen")
    return samples[0], samples[1]


def flatten_pairs(pairs: Iterable[tuple[Sample, Sample]]) -> Iterator[Sample]:
    """Yield the halves of pairs as documents: 2i is the chosen one of pair i, 2i + 1 the rejected.

    For `make_corpus` or `write_corpus`.

    Raises:
        DataError: A pair does not have two halves with tokens each.

    Examples:
        >>> halves = [Sample(np.array([i]), np.array([True])) for i in range(4)]
        >>> [int(half.tokens[0]) for half in flatten_pairs([(halves[0], halves[1])])]
        [0, 1]
    """
    for i, pair in enumerate(pairs):
        if len(pair) != 2 or not all(len(half.tokens) for half in pair):
            sizes = [len(half.tokens) for half in pair]
            what = f"pair {i} must have two halves with tokens, got {sizes}"
            raise DataError(f"flatten_pairs: {what}", where=i)
        yield from pair


def mismatch_answers(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield each sample's prompt with the answer of the next sample; the last gets the first's.

    What a model and its reference say of answers that are not the prompt's own is how far the two
    have come apart: the reference point of `losses.kto`. The answer is all from the first trained
    token on.

    Args:
        samples: At least two, each with a trained token.

    References:
        Ethayarajh et al., "KTO: model alignment as prospect theoretic optimization" (2024).

    Examples:
        >>> halves = [Sample(np.array([i, i + 5]), np.array([False, True])) for i in range(3)]
        >>> [sample.tokens.tolist() for sample in mismatch_answers(halves)]
        [[0, 6], [1, 7], [2, 5]]
    """
    every = list(samples)
    cuts = [int(np.argmax(sample.trained)) for sample in every]
    for i in range(len(every)):
        j = (i + 1) % len(every)
        parts = [(every[i], slice(cuts[i])), (every[j], slice(cuts[j], None))]
        tokens = np.concatenate([sample.tokens[part] for sample, part in parts])
        yield Sample(tokens, np.concatenate([sample.trained[part] for sample, part in parts]))


def pack_pairs(
    lengths: ArrayLike,
    capacity: int,
    *,
    fit: Fit = best_fit,
    group_size: int = 100_000,
    overlong: Literal["error", "drop"] = "error",
    multiple_of: int = 1,
) -> Bins:
    """Pack pairs of documents into rows, both halves of a pair in the same row, chosen first.

    Of the documents of a row, 2j and 2j + 1 are a pair: `document_ids // 2` numbers the pairs,
    below 0 for padding.

    Args:
        lengths: Tokens of each document, `[2N]`: 2i and 2i + 1 are a pair, which is left out where
            both are 0.
        capacity: Tokens per row, which both halves together must not exceed.
        fit: As in `pack_bins`; it sees the two halves as one piece.
        group_size: As in `pack_bins`, in pairs.
        overlong: What becomes of a pair longer than the capacity: "error" or "drop". A pair is
            never split or cut. Those dropped are N minus half the pieces of the result, and minus
            those left out.
        multiple_of: As in `pack_bins`; each half is aligned by itself.

    Returns:
        The `Bins`.

    Raises:
        ValueError: The lengths do not come in pairs, a half has no tokens, or an argument is out of
            its range.
        DataError: A pair is longer than the capacity, and `overlong` is "error".

    Examples:
        >>> bins = pack_pairs([3, 2, 1, 1, 2, 1], 8)
        >>> [bins[row] for row in range(len(bins))]
        [[(0, 0, 3), (1, 0, 2), (4, 0, 2), (5, 0, 1)], [(2, 0, 1), (3, 0, 1)]]
    """
    check_choice(("error", "drop"), "pack_pairs", overlong=overlong)
    halves = _checked_pairs(lengths)
    check_range("pack_pairs", at_least=1, multiple_of=multiple_of)
    pairs = (-(-halves // multiple_of) * multiple_of).sum(axis=1)
    longest = int(pairs.argmax()) if len(pairs) else 0
    if overlong == "error" and pairs.max(initial=0) > capacity:
        one, other = halves[longest]
        what = f"pair {longest}, of {one} and {other} tokens, does not fit into {capacity}"
        mend = 'raise the capacity, or ask for overlong="drop"'
        facts = {"where": longest, "got": int(pairs[longest]), "want": capacity}
        raise DataError(f"pack_pairs: {what}: {mend}", **facts)
    how: dict[str, Any] = {"fit": fit, "group_size": group_size, "multiple_of": multiple_of}
    bins = pack_bins(pairs, capacity, overlong="drop", **how)
    documents = (2 * bins.documents[:, None] + np.arange(2)).ravel()
    return attrs.evolve(
        bins,
        offsets=2 * bins.offsets,
        documents=documents,
        starts=np.zeros_like(documents),
        lengths=halves.ravel()[documents],
    )


def _checked_pairs(lengths: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return lengths as int64 `[N, 2]`."""
    array = np.asarray(lengths)
    if array.ndim != 1 or len(array) % 2 or (array.size and array.dtype.kind not in "iu"):
        must = "must be an even number of integers, two for each pair"
        raise ValueError(f"pack_pairs: lengths {must}; got {array.dtype} {array.shape}")
    pairs: np.ndarray[Any, np.dtype[np.int64]] = array.astype(np.int64).reshape(-1, 2)
    wrong = (pairs < 1) & (pairs != 0).any(axis=1, keepdims=True)
    if wrong.any():
        document = wrong.ravel().argmax()
        what = f"document {document} has {array[document]} tokens; a pair needs both halves"
        raise ValueError(f"pack_pairs: {what}")
    return pairs


_SAME = "both halves are the same, so there is nothing to prefer"


def _no_pair(what: str, **facts: Any) -> DataError:
    return DataError(f"encode_pair: {what}", **facts)


def _halves(record: Mapping[str, Any]) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Return the conversations of both halves, and how many messages are the prompt."""
    halves: dict[str, list[dict[str, Any]]] = {}
    for name in ("chosen", "rejected"):
        if record.get(name) is None:
            raise _no_pair(f"the record has no {name!r}; it has {', '.join(record)}", want=name)
        halves[name] = _messages(record[name], "assistant", name)
    chosen, rejected = halves.values()
    if chosen == rejected:
        raise _no_pair(_SAME, where="chosen")
    if record.get("prompt") is None:
        common = next(i for i, (a, b) in enumerate(zip_longest(chosen, rejected)) if a != b)
        if common == 0:
            what = "the record has no 'prompt', and its halves differ from message 0 on"
            raise _no_pair(f"{what}: {chosen[0]} and {rejected[0]}", where=0)
    else:
        prompt = _messages(record["prompt"], "user", "prompt")
        common = len(prompt)
        halves = {name: _with_prompt(prompt, half, name) for name, half in halves.items()}
    for name, messages in halves.items():
        if len(messages) == common:
            raise _no_pair(f"the {name} half has no answer of its own", where=name)
    return halves, common


def _messages(value: Any, role: str, name: str) -> list[dict[str, Any]]:
    try:
        return checked_messages(
            [{"role": role, "content": value}] if isinstance(value, str) else value
        )
    except DataError as error:
        raise _no_pair(f"{name}: {error}", where=name) from error


def _with_prompt(
    prompt: list[dict[str, Any]], messages: list[dict[str, Any]], name: str
) -> list[dict[str, Any]]:
    """Return the prompt and the answer, where the half may hold the prompt too."""
    if messages[0]["role"] == "assistant" and messages[: len(prompt)] != prompt:
        return prompt + messages
    for i, message in enumerate(prompt):
        if i >= len(messages) or messages[i] != message:
            found = messages[i] if i < len(messages) else "nothing"
            what = f"the prompt of the {name} half differs from 'prompt' in message {i}"
            raise _no_pair(f"{what}: {found} and {message}", where=i, got=found, want=message)
    return messages


def _check_prompts(
    halves: Mapping[str, list[dict[str, Any]]],
    prompt_length: int,
    template: Template,
    tools: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Refuse halves whose prompts a template renders differently: what follows may change them."""
    texts: list[str] = []
    for messages in halves.values():
        segments = template(messages, tools=tools)
        first = next(
            (k for k, p in enumerate(segments) if p.body and p.message == prompt_length),
            len(segments),
        )
        texts.append("".join(segment.text for segment in segments[:first]))
    if texts[0] != texts[1]:
        place = next(k for k, (a, b) in enumerate(zip_longest(*texts)) if a != b)
        one, other = (text[place : place + 30] for text in texts)
        what = "the template renders the prompts of both halves differently"
        raise _no_pair(f"{what}, from character {place} on: {one!r} and {other!r}", where=place)
