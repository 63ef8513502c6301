"""Rollouts for policy gradients, from the model in training or from another sampler.

A rollout is a list of answers, several per prompt. `sample_answers` generates one,
`make_answer_reader` reads those of another sampler; `make_answer_corpus` adds advantages, and
`split_minibatches` splits the corpus for several updates. From there on its rows are sharded over
ranks like those of any corpus: advantages are known, so a group of answers need not stay together.
`compute_old_logprobs` is for `parallel.add_columns`, before the first update.
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
from trainkit.post.generation.completions import AnyTokenizer, generate_sharded
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
    """A sampled answer to train on.

    Attributes:
        prompt: The prompt.
        prompt_ids: Its tokens, at least one.
        text: The text of the answer; it may be empty.
        ids: Its tokens, at least one, with the stop token.
        group: Index of its prompt in the rollout.
        truncated: Whether it reached the maximum length before it ended.
        logprobs: Log-probabilities of `ids` by another sampler; None if the trainer sampled.
        choices: Experts that the sampler used for each token of prompt and answer, those of all
            layers concatenated; None to let the routers choose.
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
    answers_per_prompt: int = 1,
    first: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    call: Call | None = None,
    axis: Axis = SOLO,
) -> list[Answer]:
    """Sample a rollout from the model's full vocabulary.

    A prompt starts with BOS, and an answer ends with EOS, which is in the loss.

    Args:
        stages_or_model: As for `generate`.
        prompts: The prompts.
        tokenizer: A tokenizer with an EOS.
        max_new_tokens: Maximum number of tokens of an answer, at least 1.
        context: Maximum number of tokens in the model's input.
        answers_per_prompt: Answers per prompt; those of the first prompt come first.
        first: Index of the first answer; the noise of an answer is a function of its index and the
            seed.
        temperature: Divides the logits; 0 takes the most likely token. A policy gradient needs 1,
            without filters of tokens: the trainer's log-probabilities are those of all tokens.
        seed: Seed of the noise.
        call: As for `generate_sharded`.
        axis: As for `generate_sharded`.

    Raises:
        ValueError: A number is below 1; or as `generate`.

    Effects:
        Those of `generate`; communicates on `axis`.

    Examples:
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> model = build_decoder(make_decoder_config("tiny"), seed=0)
        >>> answers = sample_answers(
        ...     model,
        ...     ["1+1=", "2+2="],
        ...     tokenizer=make_byte_tokenizer(),
        ...     max_new_tokens=2,
        ...     context=16,
        ...     answers_per_prompt=2,
        ... )
        >>> [answer.group for answer in answers]
        [0, 0, 1, 1]
    """
    check_range(
        "sample_answers",
        at_least=1,
        answers_per_prompt=answers_per_prompt,
        max_new_tokens=max_new_tokens,
    )
    # Several answers to a prompt are rows of their own, whose ids give them different noise.
    stop_id = tokenizer.eos_id
    prompt_ids = [  # a row per answer
        [*_get_bos(tokenizer), *tokenizer.encode(prompt)]
        for prompt in prompts
        for _ in range(answers_per_prompt)
    ]
    completions = generate_sharded(
        stages_or_model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        context=context,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop_ids=[stop_id],
        tokenizer=tokenizer,
        row_ids=range(first, first + len(prompt_ids)),  # other noise for each rollout of a run
        call=call,
        axis=axis,
    )
    answers = []
    for index, (ids, completion) in enumerate(zip(prompt_ids, completions, strict=True)):
        group = index // answers_per_prompt
        truncated = completion.ended == "length"
        # generate drops the stop token, but the model must learn to end its answers.
        answer_ids = completion.ids + ([] if truncated or stop_id is None else [stop_id])
        answers.append(
            Answer(prompts[group], ids, completion.text or "", answer_ids, group, truncated)
        )
    return answers


def read_answers(
    records: Iterable[Mapping[str, Any]],
    *,
    tokenizer: AnyTokenizer,
    vocab_size: int | None = None,
    first: int = 0,
) -> list[Answer]:
    """Read a rollout of another sampler from records.

    The sampled tokens are "ids", and `logprobs` belong to them. If a record has only the text, its
    tokens may differ from the sampled ones. That is rejected where it can be detected: when the
    number of tokens differs, or when the text does not round-trip through its tokens.

    Args:
        records: Each with "prompt", a text, and "ids", all sampled tokens with the EOS unless the
            answer is truncated, or "answer", their text, or both; "prompt_ids", the tokens of the
            prompt (default: BOS and the encoded text); "logprobs" of all sampled tokens with the
            EOS; "truncated", true if the answer reached the maximum length; and "choices", for
            models with experts: for each token of prompt and answer, optionally without the last,
            a list of experts for each layer. Answers to the same prompt are consecutive.
        tokenizer: The sampler's tokenizer.
        vocab_size: The model's, if larger than the tokenizer's.
        first: Index of the first record, for messages.

    Raises:
        DataError: A field is missing or of a wrong type, ids are outside of the vocabulary or do
            not match the answer, a text does not round-trip, a log-probability is above 0 or not
            finite, or the number of log-probabilities or choices is not that of the tokens. The
            message names the record.

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
    answers: list[Answer] = []
    group = -1
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    for index, record in enumerate(records, start=first):
        prompt = _read_text(record, "prompt", index)
        # Without the ids an engine used, those of the encoded text stand in for them.
        if record.get("prompt_ids") is None:
            prompt_ids = [*_get_bos(tokenizer), *_encode(prompt, "prompt", tokenizer, index)]
        else:
            prompt_ids = _read_ids(record, "prompt_ids", vocab_size, index)
        text, ids, truncated = _read_answer(record, tokenizer, vocab_size, index)
        logprobs = _read_logprobs(record, ids, index)
        choices = None
        if record.get("choices") is not None:
            count = len(prompt_ids) + len(ids)
            by_layer = _read_token_values(record, "choices", [count, count - 1], index)
            # A column holds one list per token: L layers of k experts, one after another.
            choices = [[expert for layer in token for expert in layer] for token in by_layer]
            # Engines run the last token through no layer. It is the input of no label, so any
            # choice does.
            choices += choices[-1:] * (count - len(choices))
        # Consecutive records of a prompt are a group, over which advantages are normalized.
        previous = answers[-1] if answers else None
        if previous is None or (prompt, prompt_ids) != (previous.prompt, previous.prompt_ids):
            group += 1
        answers.append(
            Answer(
                prompt,
                prompt_ids,
                text,
                ids,
                group,
                truncated,
                logprobs=logprobs,
                choices=choices,
            )
        )
    return answers


def _read_answer(
    record: Mapping[str, Any], tokenizer: AnyTokenizer, vocab_size: int, index: int
) -> tuple[str, list[int], bool]:
    """Return (text, ids, truncated) of a record's answer."""
    truncated = record.get("truncated")  # None, in a record without it, is False
    stop_id = tokenizer.eos_id
    if truncated not in (None, False, True):
        raise DataError(
            f"read_answers: record {index} has truncated={truncated!r}; it must be true or false",
            where=f"record {index}",
            got=truncated,
        )
    if record.get("ids") is None:  # the text alone, and the sampler may have drawn other tokens
        text = _read_text(record, "answer", index)
        ids = _encode(text, "answer", tokenizer, index)
        return text, ids + ([] if truncated or stop_id is None else [stop_id]), bool(truncated)
    ids = _read_ids(record, "ids", vocab_size, index)
    # The EOS is in the loss: an answer that lacks it would never be taught to end.
    if stop_id is not None and (ids[-1] == stop_id) == bool(truncated):
        raise DataError(
            f"read_answers: record {index} is {'' if truncated else 'not '}truncated, but its ids "
            f"end with {ids[-1]}; the ids of an answer end with EOS, {stop_id}, unless it was "
            "truncated",
            where=f"record {index}",
            got=ids[-1],
            want=stop_id,
        )
    decoded = tokenizer.decode(ids)
    if record.get("answer") is not None and _read_text(record, "answer", index) != decoded:
        raise DataError(
            f"read_answers: record {index} has the answer {record['answer']!r:.200}, but its ids "
            f"decode to {decoded!r:.200}: the reward would be for another text than the one that "
            'is trained; use the sampler\'s tokenizer, or leave "answer" out',
            where=f"record {index}",
            got=record["answer"],
            want=decoded,
        )
    return decoded, ids, bool(truncated)


def _read_logprobs(record: Mapping[str, Any], ids: Sequence[int], index: int) -> list[float]:
    """Return the log-probability of each sampled token."""
    # The one trace of other tokens that a text without ids leaves.
    values = record.get("logprobs")
    if record.get("ids") is None and isinstance(values, list) and len(values) != len(ids):
        raise DataError(
            f"read_answers: record {index} has {len(values)} log-probabilities, but its answer "
            f"{record['answer']!r:.200} is encoded into {len(ids)} tokens, with the EOS unless it "
            'was truncated: the sampler drew other tokens; give the sampled tokens as "ids", and '
            'those of the prompt as "prompt_ids"',
            where=f"record {index}",
            got=len(values),
            want=len(ids),
        )
    values = _read_token_values(record, "logprobs", [len(ids)], index)
    for position, value in enumerate(values):
        # JSON's true is an int in Python, and NaN fails the comparison.
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if not (is_number and -math.inf < value <= 0):
            raise DataError(
                f"read_answers: record {index} has the log-probability {value!r} for token "
                f"{position} of its answer; it must be a finite number, at most 0",
                where=f"record {index}",
                got=value,
            )
    return [*values]


def _read_ids(
    record: Mapping[str, Any],
    name: str,
    vocab_size: int,
    index: int,
) -> list[int]:
    values = record[name]
    # A text is a Sequence, too. `type(x) is int`, since true is an instance of int.
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if is_list and values and all(type(x) is int and 0 <= x < vocab_size for x in values):
        return [*values]
    raise DataError(
        f"read_answers: record {index} has {name}={values!r:.200}; it must be a list of token ids, "
        f"at least one, from 0 to {vocab_size - 1}",
        where=f"record {index}",
        want=vocab_size,
    )


def _read_token_values(
    record: Mapping[str, Any], name: str, counts: Sequence[int], index: int
) -> Sequence[Any]:
    """Return a list with one value per token; its length must be one of `counts`."""
    values = record.get(name)
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if is_list and values and len(values) in counts:
        return values
    got = len(values) if is_list else repr(values)
    raise DataError(
        f"read_answers: record {index} has {counts[0]} tokens that need {name}, but {name}: {got}; "
        "give one per token, at least one",
        where=f"record {index}",
        got=got,
        want=counts[0],
    )


def _read_text(record: Mapping[str, Any], name: str, index: int) -> str:
    text = record.get(name)
    if not isinstance(text, str):
        raise DataError(
            f"read_answers: record {index} has {name}={text!r}; it must be a text",
            where=f"record {index}",
        )
    return text


def _get_bos(tokenizer: AnyTokenizer) -> tuple[int, ...]:
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)


def _encode(text: str, name: str, tokenizer: AnyTokenizer, index: int) -> list[int]:
    """Encode a text, and raise DataError if it does not round-trip."""
    ids = [*tokenizer.encode(text)]
    decoded = tokenizer.decode(ids)
    if decoded != text:  # a normalizing tokenizer, or one without some bytes
        raise DataError(
            f"read_answers: the {name} {text!r:.200} of record {index} comes back from its tokens "
            f"as {decoded!r:.200}: the reward would be for another text than the one that is "
            'trained; use the sampler\'s tokenizer, and give the sampled tokens as "ids" and '
            '"prompt_ids"',
            where=f"record {index}",
            got=decoded,
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
    """Make a function that reads the rollouts of another sampler on demand.

    Args:
        records: As for `read_answers`, of all rollouts from the first one on: a list, or an
            iterator that may wait for an engine; or a file, as for `corpora.read_records`.
        tokenizer: As for `read_answers`.
        size: Number of answers of a rollout.
        vocab_size: As for `read_answers`.
        axis: The ranks that call this together; the first one reads for all.

    Returns:
        `read(index)`: the answers of that rollout; earlier ones are skipped. It raises DataError as
        `read_answers`, and if there are too few records, or if an iterator has passed them already.

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
        trainkit.types.DataError: make_answer_reader: rollout 3 needs answers 3 to 3, but there are
        3; ...
    """
    if isinstance(records, Path):
        records = [record for _, record in read_records(records)]
    iterator = iter(records)
    position = 0  # the index of the next record of the iterator

    def read_on_first_rank(index: int) -> list[dict[str, Any]]:
        nonlocal iterator, position
        start, end = index * size, (index + 1) * size
        # A list starts again from its first record; an iterator is its own iterator, and cannot.
        if start < position and iterator is not records:
            iterator = iter(records)
            position = 0
        if start < position:
            raise DataError(
                f"make_answer_reader: rollout {index} needs answers {start} to {end - 1}, but the "
                f"iterator is at {position}; give a list, or start again"
            )
        # Skips to the rollout; `position` counts the records, also if they end before it.
        position += sum(1 for _ in islice(iterator, start - position))
        selected = [*islice(iterator, size)]
        position += len(selected)
        if len(selected) < size:
            raise DataError(
                f"make_answer_reader: rollout {index} needs answers {start} to {end - 1}, but "
                f"there are {position}; sample more and append them, or take fewer steps",
                got=position,
                want=end,
            )
        answers = read_answers(selected, tokenizer=tokenizer, vocab_size=vocab_size, first=start)
        # Plain values, which go to the other ranks as JSON.
        return [attrs.asdict(answer) for answer in answers]

    def read(index: int) -> list[Answer]:
        # Other ranks take part with an empty list, and get that of the first one.
        work = partial(read_on_first_rank, index) if axis.index == 0 else list
        return [Answer(**fields) for fields in run_on_all_ranks(work, axis)[0]]

    return read


def compute_old_logprobs(output: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Compute the log-probability of each label, as a column for `parallel.add_columns`.

    Args:
        output: Logits or a `Hidden`.
        batch: A batch with "labels".

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
    """Add the column "old_logprobs" to microbatches: log-probabilities by the current weights.

    Args:
        stages_or_model: As for `parallel.add_columns`.
        microbatches: This rank's microbatches.
        call: As for `parallel.add_columns`.

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
    """Check that the sampler's log-probabilities are the model's, and return their mean difference.

    Args:
        microbatches: This rank's microbatches, with "sampler_logprobs" and, on the last stage of a
            pipeline, "old_logprobs".
        axis: The ranks that call this together, `ps.world`.
        tolerance: Maximum of the mean absolute difference over all tokens, in nats. Engines that
            compute in bf16 differ by some hundredths; another temperature or tokenizer, by tenths.

    Returns:
        The mean absolute difference.

    Raises:
        DataError: It is above the tolerance, or NaN.

    Effects:
        Communicates on `axis`, and waits for the device.

    Examples:
        >>> batch = {"labels": torch.tensor([[2]]), "sampler_logprobs": torch.tensor([[-0.5]])}
        >>> check_logprobs([batch | {"old_logprobs": torch.tensor([[-0.25]])}], tolerance=0.5)
        0.25
    """
    # [sum of differences, number of labels], of all ranks by one all-reduce.
    total = torch.zeros(2, dtype=torch.float64, device=microbatches[0]["labels"].device)
    for batch in microbatches:
        if "old_logprobs" in batch:  # only the last stage of a pipeline computes them
            difference = (batch["sampler_logprobs"] - batch["old_logprobs"]).abs().double()
            is_label = batch["labels"] != IGNORED_LABEL
            total += torch.stack([difference[is_label].sum(), is_label.sum().double()])
    difference_sum, count = all_sum(total, axis).tolist()
    mean = difference_sum / max(1, count)
    if not mean <= tolerance:  # also for NaN
        raise DataError(
            f"check_logprobs: the sampler's log-probabilities differ from the trainer's by "
            f"{mean:.3g} nats on average, above the tolerance {tolerance:.3g}: they must be at "
            "temperature 1, for tokens of this tokenizer, from the weights in training",
            got=mean,
            want=tolerance,
        )
    return mean


def make_answer_corpus(answers: Sequence[Answer], *, advantages: ArrayLike) -> TokenCorpus:
    """Make a corpus of prompts with their answers; only sampled tokens are in the loss.

    Args:
        answers: The rollout.
        advantages: One per answer, for all of its tokens.

    Returns:
        A corpus with the column "advantages"; and, if the answers have log-probabilities or
        choices of experts, "sampler_logprobs" and "choices".

    Raises:
        DataError: A number is not finite, values are missing for a token, or a log-probability is
            above 0.

    Examples:
        >>> answer = Answer("1+1=", [256, 49], "2", [50, 257], 0)
        >>> corpus = make_answer_corpus([answer], advantages=[2.0])
        >>> corpus.loss_mask.tolist(), corpus.values["advantages"].tolist()
        ([0, 0, 1, 1], [0.0, 0.0, 2.0, 2.0])
    """
    # One answer stands for all: a sampler gives every answer the same fields.
    columns = {"advantages": Column()}
    if answers[0].logprobs is not None:
        columns["sampler_logprobs"] = Column()
    if answers[0].choices is not None:
        # Of tokens and not of labels: a router chooses for the input, also in the prompt.
        columns["choices"] = Column("int64", (len(answers[0].choices[0]),), of="token")

    def make_sample(index: int, answer: Answer, advantage: float) -> Sample:
        # Answers need not come from read_answers, which checks this, too.
        largest = 0.0 if answer.logprobs is None else max(answer.logprobs)
        if largest > 0:
            raise DataError(
                f"make_answer_corpus: answer {index} has the log-probability {largest}; it must "
                "be at most 0",
                where=f"answer {index}",
            )
        prompt_length = len(answer.prompt_ids)
        ids = np.array([*answer.prompt_ids, *answer.ids], np.int64)
        # Values at the prompt's tokens are outside of the loss, and never read.
        values = {
            "advantages": [0.0] * prompt_length + [advantage] * len(answer.ids),
            "sampler_logprobs": [0.0] * prompt_length + [*(answer.logprobs or ())],
            "choices": answer.choices,
        }
        return Sample(
            ids,
            np.arange(len(ids)) >= prompt_length,
            {name: np.array(values[name]) for name in columns},
        )

    samples = (
        make_sample(index, answer, advantage)
        for index, (answer, advantage) in enumerate(
            zip(answers, np.asarray(advantages).tolist(), strict=True)
        )
    )
    return make_corpus(samples, columns=columns)


def split_rollout(
    answers: Sequence[Answer],
    advantages: ArrayLike,
    count: int,
    *,
    capacity: int,
    multiple_of: int = 1,
) -> list[PackedCorpus]:
    """Pack a rollout into `count` minibatches, one per update.

    Chains `make_answer_corpus` and `split_minibatches`; see those for the arguments.

    Examples:
        >>> answers = [Answer("1+1=", [256, 49], text, [50, 257], 0) for text in "23"]
        >>> minibatches = split_rollout(answers, [1.0, -1.0], 2, capacity=8)
        >>> [len(minibatch) for minibatch in minibatches]
        [1, 1]
    """
    corpus = make_answer_corpus(answers, advantages=advantages)
    return split_minibatches(corpus, count, capacity=capacity, multiple_of=multiple_of)


def split_minibatches(
    corpus: TokenCorpus, count: int, *, capacity: int, multiple_of: int = 1
) -> list[PackedCorpus]:
    """Split a rollout into `count` packed minibatches of consecutive answers, one per update.

    Minibatch n is trained n updates after it was sampled.

    Args:
        corpus: From `make_answer_corpus`.
        count: Number of minibatches.
        capacity: Tokens in a row; a longer answer is an error.
        multiple_of: As for `pack_bins`.

    Raises:
        ValueError: There are fewer answers than minibatches, or an answer is longer than a row.

    Examples:
        >>> corpus = make_corpus([[1, 2], [3], [4, 5]])
        >>> [part.bins.documents.tolist() for part in split_minibatches(corpus, 2, capacity=4)]
        [[0, 1], [2]]
    """
    lengths = corpus.lengths
    check_range(
        "split_minibatches",
        at_least=1,
        count=count,
        answers_per_minibatch=len(lengths) // max(1, count),
    )
    # Consecutive answers, and sizes that differ by one at most.
    minibatch_indices = np.arange(len(lengths)) * count // len(lengths)
    minibatches = []
    for index in range(count):
        # Packing skips empty documents, so a length of 0 excludes an answer of another minibatch.
        local_lengths = np.where(minibatch_indices == index, lengths, 0)
        # All answers in one group: they are few, and the fit may combine any of them.
        bins = pack_bins(
            local_lengths,
            capacity,
            overlong="error",
            group_size=0,
            multiple_of=multiple_of,
        )
        minibatches.append(PackedCorpus(corpus, bins))
    return minibatches
