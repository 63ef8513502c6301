"""Preference pairs: a chosen and a rejected answer to one prompt, next to each other in one row.

A preference loss compares the two halves of a pair, so both must be in the same row of the same
step. Documents 2i and 2i + 1 of a corpus of pairs are the chosen and the rejected half of pair i.
`pack_pairs` packs them into the same row, so that documents 2j and 2j + 1 of a row are a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from trainkit.packing import best_fit, pack_bins
from trainkit.text.chat.encode import encode_chat
from trainkit.text.chat.messages import normalize_messages, parse_tools, wrong_message
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
    counts: Counter[str] | None = None,
) -> tuple[Sample, Sample]:
    """Encode a preference pair; only the answers are in the loss.

    Each half is a whole conversation: the prompt, which is the same in both and not in the loss,
    and the answer, whose assistant's turns are.

    Args:
        record: `chosen` and `rejected`, each a text (one answer of the assistant), or messages: the
            answer alone, or the prompt and the answer. `prompt`, a text (one message of the user)
            or messages; without it the prompt is the common beginning of both halves. `tools`, a
            list of JSON schemas, or JSON of one.
        tokenizer: As in `encode_chat`.
        template: As in `encode_chat`.
        max_length: As in `encode_chat`; halves are truncated after whole turns.
        counts: As in `encode_chat`, for each half.

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
        >>> chosen.tokens[chosen.loss_mask], rejected.tokens[rejected.loss_mask]
        (array([ 50, 260]), array([ 51, 260]))
    """
    tools = parse_tools(record)
    halves, prompt_length = _split_record(record)
    for name, messages in halves.items():
        if messages[prompt_length]["role"] != "assistant":
            # Named like a message of any conversation, within its half.
            error = wrong_message(
                prompt_length,
                messages[prompt_length],
                "is where the halves begin to differ; an answer begins with an assistant's "
                "message, so the prompts differ",
            )
            raise DataError(
                f"encode_preference_pair: the {name} half's {error}",
                where=prompt_length,
                got=error.got,
            )
    _check_prompts(halves, prompt_length, template, tools)
    samples: list[Sample] = []
    for name, messages in halves.items():
        # A prompt may hold earlier answers of the assistant, which are not in the loss.
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
            raise DataError(
                f"encode_preference_pair: the {name} half: {error}", where=name
            ) from error
    # Different messages may render as the same text, or be truncated to it.
    if np.array_equal(samples[0].tokens, samples[1].tokens):
        raise DataError(_SAME, where="chosen")
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
        # A document without tokens gets no piece, and the pieces after it would pair up wrongly.
        if len(pair) != 2 or not all(len(half.tokens) for half in pair):
            sizes = [len(half.tokens) for half in pair]
            raise DataError(
                f"flatten_pairs: pair {i} must have two halves with tokens, got {sizes}", where=i
            )
        yield from pair


def mismatch_answers(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield each prompt with the answer of the next sample; the last prompt with the first answer.

    The reference point of `objectives.kto` is estimated from such mismatched pairs. An answer is
    everything from the first token in the loss on.

    Args:
        samples: At least two, each with a token in the loss.

    References:
        Ethayarajh et al., "KTO: model alignment as prospect theoretic optimization" (2024).

    Examples:
        >>> halves = [Sample(np.array([i, i + 5]), np.array([False, True])) for i in range(3)]
        >>> [sample.tokens.tolist() for sample in mismatch_answers(halves)]
        [[0, 6], [1, 7], [2, 5]]
    """
    pairs = list(samples)
    starts = [int(np.argmax(sample.loss_mask)) for sample in pairs]
    for i, sample in enumerate(pairs):
        # A derangement: with two pairs or more, no prompt has its own answer.
        j = (i + 1) % len(pairs)
        prompt = slice(starts[i])
        answer = slice(starts[j], None)
        yield Sample(
            np.concatenate([sample.tokens[prompt], pairs[j].tokens[answer]]),
            np.concatenate([sample.loss_mask[prompt], pairs[j].loss_mask[answer]]),
        )


def pack_pairs(
    lengths: ArrayLike,
    capacity: int,
    *,
    fit: Fit = best_fit,
    overlong: Literal["error", "drop"] = "error",
    multiple_of: int = 1,
) -> Bins:
    """Pack pairs of documents into rows, both halves of a pair in the same row, chosen first.

    Documents 2j and 2j + 1 of a row are a pair: `document_ids // 2` is the index of the pair, below
    0 for padding.

    Args:
        lengths: Tokens of each document, `[2N]`: 2i and 2i + 1 are a pair, which is skipped if both
            are 0.
        capacity: Tokens per row, for both halves together.
        fit: As in `pack_bins`; it sees the two halves as one piece.
        overlong: For a pair longer than the capacity: "error" or "drop"; a pair is never split or
            truncated. The number of dropped pairs is N minus half the pieces of the result, minus
            the skipped pairs.
        multiple_of: As in `pack_bins`; each half is aligned separately.

    Returns:
        The `Bins`.

    Raises:
        ValueError: The lengths do not come in pairs, a half has no tokens, or an argument is out of
            range.
        DataError: A pair is longer than the capacity, and `overlong` is "error".

    Examples:
        >>> bins = pack_pairs([3, 2, 1, 1, 2, 1], 8)
        >>> [bins[row] for row in range(len(bins))]
        [[(0, 0, 3), (1, 0, 2), (4, 0, 2), (5, 0, 1)], [(2, 0, 1), (3, 0, 1)]]
    """
    check_choice(("error", "drop"), "pack_pairs", overlong=overlong)
    halves = _check_pairs(lengths)
    check_range("pack_pairs", at_least=1, multiple_of=multiple_of)
    # Each half is aligned separately, so these are the tokens that a pair takes in a row.
    pairs = (-(-halves // multiple_of) * multiple_of).sum(axis=1)
    if overlong == "error" and pairs.max(initial=0) > capacity:
        longest = int(pairs.argmax())
        raise DataError(
            f"pack_pairs: pair {longest}, of {halves[longest, 0]} and {halves[longest, 1]} tokens, "
            f'does not fit into {capacity}: raise the capacity, or take overlong="drop"',
            where=longest,
            got=int(pairs[longest]),
            want=capacity,
        )
    # A pair is packed as one document of the aligned length of both halves.
    bins = pack_bins(
        pairs,
        capacity,
        fit=fit,
        overlong="drop",
        multiple_of=multiple_of,
    )
    # Then each pair becomes its two documents, chosen first.
    documents = (2 * bins.documents[:, None] + np.arange(2)).ravel()
    return attrs.evolve(
        bins,
        # Two pieces for each pair; none is split, so both halves start at their token 0.
        offsets=2 * bins.offsets,
        documents=documents,
        starts=np.zeros_like(documents),
        lengths=halves.ravel()[documents],
    )


def _check_pairs(lengths: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return lengths as int64 `[N, 2]`."""
    array = np.asarray(lengths)
    if array.ndim != 1 or len(array) % 2 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "pack_pairs: lengths must be an even number of integers, two for each pair; got "
            f"{array.dtype} {array.shape}"
        )
    pairs: np.ndarray[Any, np.dtype[np.int64]] = array.astype(np.int64).reshape(-1, 2)
    # Both are 0 in a pair that is skipped, as a held-out one is; one alone is an error.
    is_empty_half = (pairs < 1) & (pairs != 0).any(axis=1, keepdims=True)
    if is_empty_half.any():
        document = is_empty_half.ravel().argmax()
        raise ValueError(
            f"pack_pairs: document {document} has {array[document]} tokens; a pair needs both "
            "halves"
        )
    return pairs


_SAME = "encode_preference_pair: both halves are the same, so there is nothing to prefer"


def _split_record(record: Mapping[str, Any]) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Return the conversations of both halves, and the number of messages in the prompt."""
    # In the order of the documents of a pair.
    halves: dict[str, list[dict[str, Any]]] = {}
    for name in ("chosen", "rejected"):
        if record.get(name) is None:
            raise DataError(
                f"encode_preference_pair: the record has no {name!r}; it has {', '.join(record)}",
                want=name,
            )
        halves[name] = _read_messages(record[name], "assistant", name)
    chosen = halves["chosen"]
    rejected = halves["rejected"]
    if chosen == rejected:
        raise DataError(_SAME, where="chosen")
    if record.get("prompt") is None:
        # The halves differ somewhere: a shorter one ends where the other goes on.
        prompt_length = next(
            i for i, (one, other) in enumerate(zip_longest(chosen, rejected)) if one != other
        )
        if prompt_length == 0:
            raise DataError(
                "encode_preference_pair: the record has no 'prompt', and its halves differ from "
                f"message 0 on: {chosen[0]} and {rejected[0]}",
                where=0,
            )
    else:
        # A text is one message: of the user in a prompt, of the assistant in a half.
        prompt = _read_messages(record["prompt"], "user", "prompt")
        prompt_length = len(prompt)
        halves = {name: _add_prompt(prompt, half, name) for name, half in halves.items()}
    for name, messages in halves.items():
        if len(messages) == prompt_length:
            raise DataError(
                f"encode_preference_pair: the {name} half has no answer of its own", where=name
            )
    return halves, prompt_length


def _read_messages(value: Any, role: str, name: str) -> list[dict[str, Any]]:
    try:
        return normalize_messages(
            [{"role": role, "content": value}] if isinstance(value, str) else value
        )
    except DataError as error:
        raise DataError(f"encode_preference_pair: {name}: {error}", where=name) from error


def _add_prompt(
    prompt: list[dict[str, Any]], messages: list[dict[str, Any]], name: str
) -> list[dict[str, Any]]:
    """Return the prompt and the answer; the half may begin with the prompt already."""
    # A half that begins with an answer has no prompt of its own.
    if messages[0]["role"] == "assistant" and messages[: len(prompt)] != prompt:
        return prompt + messages
    # Otherwise the half repeats the prompt, message for message.
    for i, message in enumerate(prompt):
        if i >= len(messages) or messages[i] != message:
            actual = messages[i] if i < len(messages) else "nothing"
            raise DataError(
                f"encode_preference_pair: the prompt of the {name} half differs from 'prompt' in "
                f"message {i}: {actual} and {message}",
                where=i,
                got=actual,
                want=message,
            )
    return messages


def _check_prompts(
    halves: Mapping[str, list[dict[str, Any]]],
    prompt_length: int,
    template: Template,
    tools: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Raise DataError if a template renders the two prompts differently."""
    # A template may change the prompt by what follows it: Qwen 3 drops reasoning, for instance.
    texts: list[str] = []
    for messages in halves.values():
        segments = template(messages, tools=tools)
        # Up to the body of the answer: its header belongs to the prompt.
        first = next(
            (k for k, p in enumerate(segments) if p.body and p.message == prompt_length),
            len(segments),
        )
        texts.append("".join(segment.text for segment in segments[:first]))
    if texts[0] != texts[1]:
        # One text may be the beginning of the other.
        index = next(k for k, (a, b) in enumerate(zip_longest(*texts)) if a != b)
        chosen, rejected = (text[index : index + 30] for text in texts)
        raise DataError(
            "encode_preference_pair: the template renders the prompts of both halves differently, "
            f"from character {index} on: {chosen!r} and {rejected!r}",
            where=index,
        )
