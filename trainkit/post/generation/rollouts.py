"""Rollouts: answers that were sampled, here or elsewhere, as what a policy gradient trains on.

A rollout is a list of answers, several to each prompt. `sample_answers` draws it of a model,
`make_answer_reader` reads it of what another sampler writes; `make_answer_corpus` puts advantages
beside the tokens, and `split_minibatches` cuts it for several updates. From there on it is dealt to
ranks like any
corpus, groups whole or not: advantages are there already. `compute_old_logprobs` is what the
    trainer says
of a microbatch before the first update, for `parallel.add_columns`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from trainkit.collectives import all_sum, run_on_all_ranks
from trainkit.data.corpus import TokenCorpus, make_corpus
from trainkit.data.packed import PackedCorpus
from trainkit.losses.terms import output_logprobs
from trainkit.packing import pack_bins
from trainkit.parallel.frozen_model import add_columns
from trainkit.post.generation.generate import AnyTokenizer, generate_dealt
from trainkit.post.generation.sampling import Sampling
from trainkit.text.corpora.records import read_records
from trainkit.types import (
    IGNORED_LABEL,
    SOLO,
    Axis,
    Batch,
    Call,
    Column,
    DataError,
    Sample,
    Stages,
    check_range,
)


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
        choices: The experts that the sampler took for each token of both, one layer's after the
            other's; None where routers shall choose.
    """

    prompt: str
    prompt_ids: Sequence[int]
    text: str
    ids: Sequence[int]
    group: int
    truncated: bool = False
    logprobs: Sequence[float] | None = None
    choices: Sequence[Sequence[int]] | None = None


def sample_answers(
    stages_or_model: Stages | nn.Module,
    prompts: Sequence[str],
    *,
    tokenizer: AnyTokenizer,
    max_new_tokens: int,
    context: int,
    each: int = 1,
    first: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    call: Call | None = None,
    axis: Axis = SOLO,
) -> list[Answer]:
    """Return a rollout that is drawn of a model, from all words that it has.

    A prompt begins with BOS, and an answer ends with EOS, which is trained on as part of it.

    Args:
        stages_or_model: As for `generate`.
        prompts: What is asked.
        tokenizer: One with an EOS.
        max_new_tokens: An answer is truncated after so many tokens, at least 1.
        context: The longest text that the model sees.
        each: How many answers each prompt gets; those of the first come first.
        first: The number of the first answer; its noise, and that of the following ones, is a
            function of the number and of the seed.
        temperature: What logits are divided by; 0 takes the likeliest token. A policy gradient
            wants 1: there is no choice among fewer tokens, since the trainer knows none.
        seed: The seed of the choices.
        call: As for `generate_dealt`.
        axis: As for `generate_dealt`.

    Raises:
        ValueError: A number is below 1; or as `generate`.

    Effects:
        Those of `generate`; communicates on `axis`.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> how = {
        ...     "tokenizer": make_byte_tokenizer(),
        ...     "max_new_tokens": 2,
        ...     "context": 16,
        ...     "each": 2,
        ... }
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> [answer.group for answer in sample_answers(model, ["1+1=", "2+2="], **how)]
        [0, 0, 1, 1]
    """
    check_range("sample_answers", at_least=1, each=each, max_new_tokens=max_new_tokens)
    begins, stop_id = _begins(tokenizer), tokenizer.eos_id
    asked = [[*begins, *tokenizer.encode(prompt)] for prompt in prompts for _ in range(each)]
    drawn = generate_dealt(
        stages_or_model,
        asked,
        max_new_tokens=max_new_tokens,
        context=context,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop_ids=[stop_id],
        tokenizer=tokenizer,
        row_ids=range(first, first + len(asked)),
        call=call,
        axis=axis,
    )
    found = []
    for number, (prompt_ids, said) in enumerate(zip(asked, drawn, strict=True)):
        group, cut = number // each, said.ended == "length"
        ids = [*said.ids] if cut or stop_id is None else [*said.ids, stop_id]
        found.append(Answer(prompts[group], prompt_ids, said.text or "", ids, group, cut))
    return found


def read_answers(
    records: Iterable[Mapping[str, Any]],
    *,
    tokenizer: AnyTokenizer,
    vocab_size: int | None = None,
    first: int = 0,
) -> list[Answer]:
    """Return a rollout of what another sampler has written down.

    The tokens that the sampler drew are "ids", which `logprobs` belong to. A text alone may be
    encoded into others: that is refused where it shows, by another number of tokens or by a text
    that does not come back from them. It shows no more where the number happens to be the same.

    Args:
        records: Each with "prompt", a text, and "ids", all tokens that were drawn, with the EOS
            unless the answer is truncated, or "answer", their text, or both; "prompt_ids", the
            tokens that the prompt had, else those of its text behind BOS; "logprobs" of each drawn
            token, the EOS too; "truncated", true if it was cut off before it ended; and "choices",
            where experts were chosen: for each token of prompt and answer, but perhaps the last,
            those of each layer. Answers to one prompt follow one another.
        tokenizer: What the sampler has, too.
        vocab_size: How many words the model has, if more than the tokenizer.
        first: The number of the first record, for messages.

    Raises:
        DataError: A field is missing or no such thing, ids are not in the vocabulary or not those
            of the answer, a text does not come back from its tokens, a log-probability is above 0
            or no finite number, or there are not as many log-probabilities or choices as tokens.
            The message names the record.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> record = {"prompt": "1+1=", "ids": [50, 257], "logprobs": [-0.1, -0.2]}
        >>> read_answers([record], tokenizer=make_byte_tokenizer())[0].text
        '2'
        >>> text = {"prompt": "1+1=", "answer": "2", "logprobs": [-0.1, 12.0]}
        >>> read_answers([text], tokenizer=make_byte_tokenizer())
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: read_answers: record 0 has the log-probability 12.0 for token 1...
    """
    found, group, before = list[Answer](), -1, None
    words = tokenizer.vocab_size if vocab_size is None else vocab_size
    for number, record in enumerate(records, start=first):
        prompt, prompt_ids = _read_prompt(record, tokenizer, words, number)
        answer, ids, cut = _read_answer(record, tokenizer, words, number)
        group, before = group + ((prompt, prompt_ids) != before), (prompt, prompt_ids)
        logprobs = _read_logprobs(record, ids, number)
        choices = None
        if record.get("choices") is not None:
            whole = len(prompt_ids) + len(ids)
            given = _of_each(record, "choices", [whole, whole - 1], number)
            choices = [[e for layer in token for e in layer] for token in given]
            choices += choices[-1:] * (whole - len(choices))
        parts = prompt, prompt_ids, answer, ids, group, cut, logprobs, choices
        found.append(Answer(*parts))
    return found


def _read_prompt(
    record: Mapping[str, Any], tokenizer: AnyTokenizer, words: int, number: int
) -> tuple[str, list[int]]:
    """Return the prompt of a record and its tokens."""
    prompt = _text(record, "prompt", number)
    if record.get("prompt_ids") is not None:
        return prompt, _ids(record, "prompt_ids", words, number)
    return prompt, [*_begins(tokenizer), *_encode(prompt, "prompt", tokenizer, number)]


def _read_answer(
    record: Mapping[str, Any], tokenizer: AnyTokenizer, words: int, number: int
) -> tuple[str, list[int], bool]:
    """Return the answer of a record, its tokens, and whether it is truncated."""
    cut, stop_id = record.get("truncated"), tokenizer.eos_id
    if cut not in (None, False, True):
        raise DataError(
            f"read_answers: record {number} has truncated={cut!r}; it must be true or false",
            where=f"record {number}",
            got=cut,
        )
    if record.get("ids") is None:
        answer = _text(record, "answer", number)
        ids = _encode(answer, "answer", tokenizer, number)
        return answer, [*ids, *([] if cut or stop_id is None else [stop_id])], bool(cut)
    ids = _ids(record, "ids", words, number)
    if stop_id is not None and (ids[-1] == stop_id) == bool(cut):
        raise DataError(
            f"read_answers: record {number} is {'' if cut else 'not '}truncated, and its ids end "
            f"with {ids[-1]}; those of an answer end with EOS, {stop_id}, unless it was truncated",
            where=f"record {number}",
            got=ids[-1],
            want=stop_id,
        )
    answer = tokenizer.decode(ids)
    if record.get("answer") is not None and (given := _text(record, "answer", number)) != answer:
        raise DataError(
            f"read_answers: record {number} has the answer {given!r:.200}, and its ids are "
            f"{answer!r:.200}: what is trained would not be what is checked; use the sampler's own "
            'tokenizer, or leave "answer" out',
            where=f"record {number}",
            got=given,
            want=answer,
        )
    return answer, ids, bool(cut)


def _read_logprobs(record: Mapping[str, Any], ids: Sequence[int], number: int) -> list[float]:
    """Return the log-probability of each token that was drawn."""
    values = record.get("logprobs")
    if record.get("ids") is None and isinstance(values, list) and len(values) != len(ids):
        raise DataError(
            f"read_answers: record {number} has {len(values)} log-probabilities, and its answer "
            f"{record['answer']!r:.200} is encoded into {len(ids)} tokens, with the EOS unless it "
            'was truncated: the sampler drew other tokens; give those that it drew as "ids", and '
            'those of the prompt as "prompt_ids"',
            where=f"record {number}",
            got=len(values),
            want=len(ids),
        )
    values = _of_each(record, "logprobs", [len(ids)], number)
    for place, value in enumerate(values):
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if not (is_number and -math.inf < value <= 0):
            raise DataError(
                f"read_answers: record {number} has the log-probability {value!r} for token "
                f"{place} of its answer; it must be a finite number, at most 0",
                where=f"record {number}",
                got=value,
            )
    return [*values]


def _ids(record: Mapping[str, Any], name: str, words: int, number: int) -> list[int]:
    values = record[name]
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if is_list and values and all(type(x) is int and 0 <= x < words for x in values):
        return [*values]
    raise DataError(
        f"read_answers: record {number} has {name}={values!r:.200}; it must be a list of ids of "
        f"tokens, at least one, from 0 to {words - 1}",
        where=f"record {number}",
        want=words,
    )


def _of_each(
    record: Mapping[str, Any], name: str, counts: Sequence[int], number: int
) -> Sequence[Any]:
    """Return what a record has of each token, which are so many."""
    values = record.get(name)
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if is_list and values and len(values) in counts:
        return values
    got, want = len(values) if is_list else repr(values), counts[0]
    raise DataError(
        f"read_answers: record {number} has {want} tokens that {name} are needed of, and {name}: "
        f"{got}; give one for each, at least one",
        where=f"record {number}",
        got=got,
        want=want,
    )


def _begins(tokenizer: AnyTokenizer) -> tuple[int, ...]:
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)


def _text(record: Mapping[str, Any], name: str, number: int) -> str:
    if not isinstance(text := record.get(name), str):
        what = f"read_answers: record {number} has {name}={text!r}; it must be a text"
        raise DataError(what, where=f"record {number}")
    return text


def _encode(text: str, name: str, tokenizer: AnyTokenizer, number: int) -> list[int]:
    """Return the tokens of a text that comes back from them."""
    ids = [*tokenizer.encode(text)]
    if (back := tokenizer.decode(ids)) != text:
        raise DataError(
            f"read_answers: the {name} {text!r:.200} of record {number} comes back from its tokens "
            f"as {back!r:.200}; what is trained would not be what was checked: use the sampler's "
            'own tokenizer, and give the tokens that it drew as "ids" and "prompt_ids"',
            where=f"record {number}",
            got=back,
            want=text,
        )
    return ids


def make_answer_reader(
    records: Iterable[Mapping[str, Any]] | Path,
    *,
    tokenizer: AnyTokenizer,
    size: int,
    vocab_size: int | None = None,
    axis: Axis = SOLO,
) -> Callable[[int], list[Answer]]:
    """Return what reads the rollouts of another sampler one by one, when they are asked for.

    Args:
        records: As for `read_answers`, of all rollouts from the first one on: a list, or an
            iterator that waits for an engine; or a file of them, as for `corpora.read_records`.
        tokenizer: As there.
        size: How many answers a rollout has.
        vocab_size: As there.
        axis: The ranks that call this together; the first one reads for all.

    Returns:
        `read(number)`: the answers of that rollout. Those of rollouts before it are passed over. It
        raises DataError as `read_answers`, where there are not so many, and where an iterator would
        have to go back.

    Effects:
        None here. The returned function reads from the iterator; communicates on `axis`.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> written = ({"prompt": "a", "answer": x, "logprobs": [-1.0, -1.0]} for x in "bcd")
        >>> read = make_answer_reader(written, tokenizer=make_byte_tokenizer(), size=1)
        >>> [answer.text for answer in read(1)]
        ['c']
        >>> read(3)
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: make_answer_reader: rollout 3 needs answers 3 to 3, and there are
        3; ...
    """
    if isinstance(records, Path):
        records = [record for _, record in read_records(records)]
    waiting, taken = iter(records), 0

    def take(number: int) -> list[dict[str, Any]]:
        nonlocal waiting, taken
        begin, end = number * size, (number + 1) * size
        asked = f"make_answer_reader: rollout {number} needs answers {begin} to {end - 1}, and"
        if begin < taken and waiting is not records:
            waiting, taken = iter(records), 0
        if begin < taken:
            raise DataError(f"{asked} the iterator is at {taken}; give a list, or start again")
        taken += sum(1 for _ in islice(waiting, begin - taken))
        part = [*islice(waiting, size)]
        taken += len(part)
        if len(part) < size:
            raise DataError(
                f"{asked} there are {taken}; sample more and add them at the end, or take fewer "
                "steps",
                got=taken,
                want=end,
            )
        answers = read_answers(part, tokenizer=tokenizer, vocab_size=vocab_size, first=begin)
        return [attrs.asdict(answer) for answer in answers]

    def read(number: int) -> list[Answer]:
        work = partial(take, number) if axis.index == 0 else list
        return [Answer(**fields) for fields in run_on_all_ranks(work, axis)[0]]

    return read


def compute_old_logprobs(output: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a model says of each label, as a column of the batch: for `add_columns`.

    Args:
        output: Logits or a `Hidden`.
        batch: Has the labels.

    Returns:
        {"old_logprobs": `[B, S]`}, 0 where there is no label.

    Examples:
        >>> batch = {"labels": torch.tensor([[1, -100]])}
        >>> compute_old_logprobs(torch.zeros(1, 2, 4), batch)
        {'old_logprobs': tensor([[-1.3863, -0.0000]])}
    """
    return {"old_logprobs": output_logprobs("old_logprobs", output, batch)[0]}


def add_old_logprobs(
    stages_or_model: Stages | nn.Module, microbatches: Sequence[Batch], *, call: Call | None = None
) -> list[Batch]:
    """Return microbatches with the column "old_logprobs": what the model says of their labels now.

    Args:
        stages_or_model: As for `parallel.add_columns`, and so are the others.
        microbatches: Those of this rank.
        call: How a batch enters the model.

    Effects:
        Those of `parallel.add_columns`.

    Examples:
        >>> from trainkit.batch import make_padding_batch
        >>> call = lambda model, batch: model(torch.zeros(1, 2, 1))
        >>> [batch] = add_old_logprobs(nn.Linear(1, 4), [make_padding_batch(1, 2)], call=call)
        >>> batch["old_logprobs"].shape
        torch.Size([1, 2])
    """
    return add_columns(stages_or_model, microbatches, compute_old_logprobs, call=call)


def check_logprobs(
    microbatches: Sequence[Mapping[str, Any]], *, axis: Axis = SOLO, tolerance: float = 0.1
) -> float:
    """Refuse answers whose sampler is not the model that is trained; return how far it is from it.

    Args:
        microbatches: Those of this rank, with "sampler_logprobs" and "old_logprobs"; without these
            where a pipeline's last stage is not.
        axis: The ranks that call this together, `ps.world`.
        tolerance: How far the two may be apart, in nats, in the mean over all tokens. Engines that
            compute in bf16 differ by some hundredths; another temperature or tokenizer, by tenths.

    Returns:
        The mean absolute difference.

    Raises:
        DataError: It is above the tolerance, or no number.

    Effects:
        Communicates on `axis`, and waits for the device.

    Examples:
        >>> batch = {"labels": torch.tensor([[2]]), "sampler_logprobs": torch.tensor([[-0.5]])}
        >>> check_logprobs([batch | {"old_logprobs": torch.tensor([[-0.25]])}], tolerance=0.5)
        0.25
    """
    total = torch.zeros(2, dtype=torch.float64, device=microbatches[0]["labels"].device)
    for batch in microbatches:
        if "old_logprobs" in batch:
            far = (batch["sampler_logprobs"] - batch["old_logprobs"]).abs().double()
            is_label = batch["labels"] != IGNORED_LABEL
            total += torch.stack([far[is_label].sum(), is_label.sum().double()])
    far, count = all_sum(total, axis).tolist()
    if not (apart := far / max(1, count)) <= tolerance:
        raise DataError(
            f"check_logprobs: the given log-probabilities are {apart:.3g} nats from the trainer's "
            f"own in the mean, and may be {tolerance:.3g}: give those of the temperature 1, of "
            "tokens of this tokenizer, sampled with the weights that are trained",
            got=apart,
            want=tolerance,
        )
    return apart


def make_answer_corpus(answers: Sequence[Answer], *, advantages: ArrayLike) -> TokenCorpus:
    """Return answers as documents behind their prompts; only what was sampled is trained on.

    Args:
        answers: The rollout.
        advantages: One for each answer, which each of its tokens has.

    Returns:
        A corpus with the column "advantages"; and, where the answers have log-probabilities or
        choices of experts of their own, "sampler_logprobs" and "choices".

    Raises:
        DataError: A number is not finite, or not there for each token, or a log-probability is
            above 0.

    Examples:
        >>> answer = Answer("1+1=", [256, 49], "2", [50, 257], 0)
        >>> corpus = make_answer_corpus([answer], advantages=[2.0])
        >>> corpus.trained.tolist(), corpus.values["advantages"].tolist()
        ([0, 0, 1, 1], [0.0, 0.0, 2.0, 2.0])
    """
    columns = {"advantages": Column()}
    if answers[0].logprobs is not None:
        columns["sampler_logprobs"] = Column()
    if answers[0].choices is not None:
        columns["choices"] = Column("int64", (len(answers[0].choices[0]),), of="token")

    def sample(number: int, answer: Answer, advantage: float) -> Sample:
        largest = 0.0 if answer.logprobs is None else max(answer.logprobs)
        if largest > 0:
            raise DataError(
                f"make_answer_corpus: answer {number} has the log-probability {largest}; it must "
                "be at most 0",
                where=f"answer {number}",
            )
        before, ids = len(answer.prompt_ids), np.array([*answer.prompt_ids, *answer.ids], np.int64)
        values = {
            "advantages": [0.0] * before + [advantage] * len(answer.ids),
            "sampler_logprobs": [0.0] * before + [*(answer.logprobs or ())],
            "choices": answer.choices,
        }
        own = {name: np.array(values[name]) for name in columns}
        return Sample(ids, np.arange(len(ids)) >= before, own)

    given = zip(answers, np.asarray(advantages).tolist(), strict=True)
    samples = (sample(number, *each) for number, each in enumerate(given))
    return make_corpus(samples, columns=columns)


def split_rollout(
    answers: Sequence[Answer],
    advantages: ArrayLike,
    count: int,
    *,
    capacity: int,
    multiple_of: int = 1,
) -> list[PackedCorpus]:
    """Return a rollout as packed rows, in as many parts as it gets updates.

    `make_answer_corpus` and then `split_minibatches`, which see for the arguments.

    Examples:
        >>> answers = [Answer("1+1=", [256, 49], text, [50, 257], 0) for text in "23"]
        >>> parts = split_rollout(answers, [1.0, -1.0], 2, capacity=8)
        >>> [len(part) for part in parts]
        [1, 1]
    """
    corpus = make_answer_corpus(answers, advantages=advantages)
    return split_minibatches(corpus, count, capacity=capacity, multiple_of=multiple_of)


def split_minibatches(
    corpus: TokenCorpus, count: int, *, capacity: int, multiple_of: int = 1
) -> list[PackedCorpus]:
    """Cut a rollout into so many parts of consecutive answers, each packed: one for each update.

    What update n trains on was sampled n updates before, count - 1 at most.

    Args:
        corpus: From `make_answer_corpus`.
        count: How many parts.
        capacity: Tokens in a row; a longer answer is refused.
        multiple_of: As for `pack_bins`.

    Raises:
        ValueError: There are fewer answers than parts, or an answer is longer than a row.

    Examples:
        >>> corpus = make_corpus([[1, 2], [3], [4, 5]])
        >>> [part.bins.documents.tolist() for part in split_minibatches(corpus, 2, capacity=4)]
        [[0, 1], [2]]
    """
    lengths = corpus.lengths
    check_range(
        "minibatches", at_least=1, count=count, answers_for_each=len(lengths) // max(1, count)
    )
    part_of, size = np.arange(len(lengths)) * count // len(lengths), {"multiple_of": multiple_of}
    return [
        PackedCorpus(corpus, pack_bins(own, capacity, overlong="error", group_size=0, **size))
        for own in (np.where(part_of == part, lengths, 0) for part in range(count))
    ]
