"""Rollouts: answers that were sampled, here or elsewhere, as what a policy gradient trains on.

A rollout is a list of answers, several to each prompt. `sample_answers` draws it of a model,
`read_answers` makes it of what another sampler has written; `answer_corpus` puts log-probabilities
and advantages beside the tokens, and `minibatches` cuts it for several updates. From there on it is
dealt to ranks like any corpus, groups whole or not: advantages are there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from trainkit.corpora.tokens import TokenCorpus, memory_corpus
from trainkit.data.packed import Packed
from trainkit.generation.generate import generate
from trainkit.generation.sampling import Sampling
from trainkit.packing import pack_bins
from trainkit.tokenizers import ByteTokenizer, HFTokenizer
from trainkit.types import Call, Column, DataError, Sample, at_least

AnyTokenizer = ByteTokenizer | HFTokenizer


@attrs.frozen(eq=False)
class Answer:
    """An answer that was sampled, as it is trained on.

    Attributes:
        prompt: What it answers.
        prompt_ids: The tokens of that, at least one.
        text: What it says; an empty one ended at once.
        ids: Its tokens, at least one, with the one that ended it.
        group: The number of its prompt in the rollout.
        truncated: Whether it was cut off before it had ended.
        logprobs: What another sampler says of each of `ids`; None where the trainer sampled.
    """

    prompt: str
    prompt_ids: Sequence[int]
    text: str
    ids: Sequence[int]
    group: int
    truncated: bool = False
    logprobs: Sequence[float] | None = None


def sample_answers(
    model: nn.Module,
    prompts: Sequence[str],
    *,
    tokenizer: AnyTokenizer,
    max_new_tokens: int,
    context: int,
    each: int = 1,
    first: int = 0,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    call: Call | None = None,
) -> list[Answer]:
    """Return a rollout that is drawn of a model, from all words that it has.

    A prompt begins with BOS, and an answer ends with EOS, which is trained on as part of it.

    Args:
        model: As for `generate`.
        prompts: What is asked.
        tokenizer: One with an EOS.
        max_new_tokens: An answer is truncated after so many tokens, at least 1.
        context: The longest text that the model sees.
        each: How many answers each prompt gets; those of the first come first.
        first: The number of the first answer; its noise, and that of the following ones, is a
            function of the number and of the sampling's seed.
        sampling: How a token is chosen.
        call: From `parallel.bind_call`, for a model of any layout.

    Raises:
        ValueError: A number is below 1; or as `generate`.

    Effects:
        Those of `generate`.

    Examples:
        >>> from trainkit.models import build_decoder, decoder_config
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> how = {"tokenizer": byte_tokenizer(), "max_new_tokens": 2, "context": 16, "each": 2}
        >>> model = build_decoder(decoder_config("tiny"), seed=0)
        >>> [answer.group for answer in sample_answers(model, ["1+1=", "2+2="], **how)]
        [0, 0, 1, 1]
    """
    at_least(1, "sample_answers", each=each, max_new_tokens=max_new_tokens)
    begins, stop_id = _begins(tokenizer), tokenizer.eos_id
    asked = [[*begins, *tokenizer.encode(prompt)] for prompt in prompts for _ in range(each)]
    drawn = generate(
        model,
        asked,
        max_new_tokens=max_new_tokens,
        context=context,
        sampling=sampling,
        stop_ids=[stop_id],
        tokenizer=tokenizer,
        row_ids=range(first, first + len(asked)),
        call=call,
    )
    found = []
    for number, (prompt_ids, said) in enumerate(zip(asked, drawn, strict=True)):
        group, cut = number // each, said.ended == "length"
        ids = [*said.ids] if cut or stop_id is None else [*said.ids, stop_id]
        found.append(Answer(prompts[group], prompt_ids, said.text or "", ids, group, cut))
    return found


def read_answers(records: Iterable[Mapping[str, Any]], *, tokenizer: AnyTokenizer) -> list[Answer]:
    """Return a rollout of what another sampler has written down.

    Args:
        records: Each with "prompt" and "answer", texts; "logprobs", of each token of the answer and
            of the one that ended it; and "truncated", if it was cut off before. Answers to one
            prompt follow one another.
        tokenizer: What the sampler has, too; prompts begin with its BOS, if it has one, and answers
            that are not truncated end with its EOS.

    Raises:
        DataError: A field is missing or no such thing, a text does not come back from its tokens,
            or there are not as many log-probabilities as tokens. The message names the record.

    Examples:
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> record = {"prompt": "1+1=", "answer": "2", "logprobs": [-0.1, -0.2]}
        >>> read_answers([record], tokenizer=byte_tokenizer())[0].ids
        [50, 257]
    """
    found, group, before = list[Answer](), -1, None
    for number, record in enumerate(records):
        prompt, answer = (_text(record, name, number) for name in ("prompt", "answer"))
        group, before = group + (prompt != before), prompt
        cut, logprobs = bool(record.get("truncated", False)), record.get("logprobs")
        prompt_ids, ids = (_round_trip(x, tokenizer, number) for x in (prompt, answer))
        ids += [] if cut or tokenizer.eos_id is None else [tokenizer.eos_id]
        is_list = isinstance(logprobs, Sequence) and not isinstance(logprobs, str)
        if not is_list or len(logprobs) != len(ids) or not ids:
            got = f"{len(logprobs)}" if is_list else f"{logprobs!r}"
            raise DataError(
                f"read_answers: record {number} has {len(ids)} tokens to train on, its end among "
                f"them, and logprobs: {got}; give one for each, at least one",
                where=f"record {number}",
                got=got,
                want=len(ids),
            )
        found.append(
            Answer(prompt, [*_begins(tokenizer), *prompt_ids], answer, ids, group, cut, logprobs)
        )
    return found


def _begins(tokenizer: AnyTokenizer) -> tuple[int, ...]:
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)


def _text(record: Mapping[str, Any], name: str, number: int) -> str:
    if not isinstance(text := record.get(name), str):
        what = f"read_answers: record {number} has {name}={text!r}; it must be a text"
        raise DataError(what, where=f"record {number}")
    return text


def _round_trip(text: str, tokenizer: AnyTokenizer, number: int) -> list[int]:
    ids = [*tokenizer.encode(text)]
    if (back := tokenizer.decode(ids)) != text:
        raise DataError(
            f"read_answers: {text!r} of record {number} comes back from its tokens as {back!r}; "
            "what is trained would not be what was checked: use the sampler's own tokenizer",
            where=f"record {number}",
            got=back,
            want=text,
        )
    return ids


def nth_rollout(answers: Sequence[Answer], number: int, *, size: int) -> Sequence[Answer]:
    """Return rollout `number` of answers of another sampler, which are `size` in each.

    Raises:
        DataError: There are not so many.

    Examples:
        >>> nth_rollout([], 0, size=4)
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: nth_rollout: rollout 0 needs answers 0 to 3, and there are 0; ...
    """
    if len(answers) < (number + 1) * size:
        needs = f"answers {number * size} to {(number + 1) * size - 1}"
        raise DataError(
            f"nth_rollout: rollout {number} needs {needs}, and there are {len(answers)}; "
            "sample more and add them at the end, or take fewer steps",
            got=len(answers),
            want=(number + 1) * size,
        )
    return answers[number * size : (number + 1) * size]


def check_logprobs(
    answers: Sequence[Answer], logprobs: Sequence[ArrayLike], *, tolerance: float = 0.1
) -> float:
    """Refuse answers whose sampler is not the model that is trained; return how far it is from it.

    Args:
        answers: With log-probabilities of their own.
        logprobs: What the trainer says of their tokens.
        tolerance: How far they may be apart, in nats, in the mean over all tokens. Engines that
            compute in bf16 differ by some hundredths; another temperature or tokenizer, by tenths.

    Returns:
        The mean absolute difference.

    Raises:
        DataError: It is above the tolerance, or no number.

    Examples:
        >>> answer = Answer("1+1=", [1], "2", [2], 0, logprobs=[-0.5])
        >>> check_logprobs([answer], [[-0.25]], tolerance=0.5)
        0.25
    """
    given = np.concatenate([np.asarray(answer.logprobs, np.float64) for answer in answers])
    apart = float(np.abs(given - np.concatenate([np.asarray(x) for x in logprobs])).mean())
    if not apart <= tolerance:
        raise DataError(
            f"check_logprobs: the given log-probabilities are {apart:.3g} nats from the trainer's "
            f"own in the mean, and may be {tolerance:.3g}: give those of the temperature 1, of "
            "tokens of this tokenizer, sampled with the weights that are trained",
            got=apart,
            want=tolerance,
        )
    return apart


def answer_corpus(
    answers: Sequence[Answer], *, old_logprobs: Sequence[ArrayLike], advantages: ArrayLike
) -> TokenCorpus:
    """Return answers as documents behind their prompts; only what was sampled is trained on.

    Args:
        answers: The rollout.
        old_logprobs: Of each answer, those of its tokens under the model that is trained.
        advantages: One for each answer, which each of its tokens has.

    Returns:
        A corpus with the columns "old_logprobs" and "advantages"; and "sampler_logprobs", where the
        answers have log-probabilities of their own.

    Raises:
        DataError: A number is not finite, or not there for each token.

    Examples:
        >>> answer = Answer("1+1=", [256, 49], "2", [50, 257], 0)
        >>> corpus = answer_corpus([answer], old_logprobs=[[-0.5, -1.0]], advantages=[2.0])
        >>> corpus.trained.tolist(), corpus.values["old_logprobs"].tolist()
        ([0, 0, 1, 1], [0.0, 0.0, -0.5, -1.0])
    """
    from_elsewhere = any(answer.logprobs is not None for answer in answers)

    def sample(answer: Answer, old: ArrayLike, advantage: float) -> Sample:
        before, ids = len(answer.prompt_ids), np.array([*answer.prompt_ids, *answer.ids], np.int64)
        own = {"old_logprobs": old, "advantages": np.full(len(answer.ids), advantage)}
        if from_elsewhere:
            own["sampler_logprobs"] = answer.logprobs or []
        columns = {name: np.concatenate([np.zeros(before), x]) for name, x in own.items()}
        return Sample(ids, np.arange(len(ids)) >= before, columns)

    names = ["old_logprobs", "advantages", *(["sampler_logprobs"] if from_elsewhere else [])]
    given = zip(answers, old_logprobs, np.asarray(advantages).tolist(), strict=True)
    return memory_corpus((sample(*x) for x in given), columns={name: Column() for name in names})


def minibatches(
    corpus: TokenCorpus, count: int, *, capacity: int, multiple_of: int = 1
) -> list[Packed]:
    """Cut a rollout into so many parts of consecutive answers, each packed: one for each update.

    What update n trains on was sampled n updates before, count - 1 at most.

    Args:
        corpus: From `answer_corpus`.
        count: How many parts.
        capacity: Tokens in a row; a longer answer is refused.
        multiple_of: As for `pack_bins`.

    Raises:
        ValueError: There are fewer answers than parts, or an answer is longer than a row.

    Examples:
        >>> corpus = memory_corpus([[1, 2], [3], [4, 5]])
        >>> [part.bins.documents.tolist() for part in minibatches(corpus, 2, capacity=4)]
        [[0, 1], [2]]
    """
    lengths = corpus.lengths
    at_least(1, "minibatches", count=count, answers_for_each=len(lengths) // max(1, count))
    part_of, size = np.arange(len(lengths)) * count // len(lengths), {"multiple_of": multiple_of}
    return [
        Packed(corpus, pack_bins(own, capacity, overlong="error", group_size=0, **size))
        for own in (np.where(part_of == part, lengths, 0) for part in range(count))
    ]
