"""Multiple choice: find a model's most likely continuation of a context, by three measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.post.evaluation.examples import EvalItem, encode_continuation, make_example
from trainkit.post.evaluation.score import ExampleScores
from trainkit.post.evaluation.texts import make_items
from trainkit.text.tokenizers.documents import get_text
from trainkit.types import DataError, Tokenizer

MEASURES = ("plain", "per_token", "per_byte")
"""Divisors of log-probabilities: none, the choice's tokens, its bytes of UTF-8."""


def read_choices(
    path: Path | str,
    tokenizer: Tokenizer,
    *,
    context: int,
    add_bos: bool = False,
    sources: dict[str, str] | None = None,
) -> list[EvalItem]:
    """Read questions from a file as items with one example per choice.

    A record is `{"context": ..., "choices": [..., ...], "answer": 0}`. A choice is appended to the
    context directly: a space between them must be in one of the two.

    Args:
        path: A JSON lines file, or any other source of `corpora.read_records`.
        tokenizer: The model's tokenizer.
        context: Maximum number of tokens in the model's input; a longer one is truncated on its
            left.
        add_bos: Prepend BOS to contexts.
        sources: Receives the hash of each file by its name.

    Raises:
        DataError: As `read_records`; or a record has fewer than two choices, a choice that is empty
            or no text, or an answer that is not among them. The message names the line.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.jsonl"
        ...     _ = path.write_text('{"context": "1 + 1 =", "choices": [" 2", " 11"], "answer": 0}')
        ...     (item,) = read_choices(path, make_byte_tokenizer(), context=64)
        >>> item.metadata, [example.scored for example in item.examples]
        ({'answer': 0, 'tokens': [2, 3], 'bytes': [2, 3]}, [2, 3])
    """
    return make_items(
        Path(path),
        lambda record: make_choice_item(record, tokenizer, context=context, add_bos=add_bos),
        sources,
    )


def make_choice_item(
    record: Mapping[str, Any], tokenizer: Tokenizer, *, context: int, add_bos: bool = False
) -> EvalItem:
    """Make an item with one example per choice from a record of `read_choices`.

    Raises:
        DataError: The record is not a question with choices and an answer.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> make_choice_item({"context": "a", "choices": ["b"]}, make_byte_tokenizer(), context=8)
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: there must be two choices or more, got 1
    """
    text = get_text(record, "context")
    choices = record.get("choices")
    answer = record.get("answer")
    if not isinstance(choices, list) or not all(isinstance(x, str) and x for x in choices):
        raise DataError("'choices' must be a list of texts that are not empty", got=choices)
    if len(choices) < 2:
        raise DataError(f"there must be two choices or more, got {len(choices)}", got=len(choices))
    # No choice has another index, so that the model's answer would always count as wrong.
    if type(answer) is not int or not 0 <= answer < len(choices):  # true is no index
        raise DataError(
            f"'answer' must be the index of a choice, from 0 to {len(choices) - 1}, got {answer!r}",
            got=answer,
        )
    # Encoded with the context each: the tokens at the boundary depend on both.
    pairs = [encode_continuation(tokenizer, text, choice, add_bos=add_bos) for choice in choices]
    return EvalItem(
        [make_example(*pair, context=context) for pair in pairs],
        {
            "answer": answer,
            # The divisors of two of the measures.
            "tokens": [len(continuation) for _, continuation in pairs],
            "bytes": [len(choice.encode()) for choice in choices],
        },
    )


def make_choice_record(item: EvalItem, scored: Sequence[ExampleScores]) -> dict[str, Any]:
    """Make the result of a question: the scores of all choices, and the best by each measure.

    Among equal scores the first is best, as for numpy's `argmax` and `lm-eval`; "ties" lists the
    measures where this decided.

    Examples:
        >>> item = EvalItem([], {"answer": 0, "tokens": [1, 2], "bytes": [4, 4]})
        >>> record = make_choice_record(item, [ExampleScores(-np.ones(n), True) for n in (1, 2)])
        >>> record["logprobs"], record["best"], record["ties"]
        ([-1.0, -2.0], {'plain': 0, 'per_token': 0, 'per_byte': 0}, ['per_token'])
    """
    logprobs = np.array([scores.logprob for scores in scored])
    # Longer choices are less likely; both other measures correct for the length.
    values = {
        "plain": logprobs,
        "per_token": logprobs / item.metadata["tokens"],
        "per_byte": logprobs / item.metadata["bytes"],
    }
    return {
        **item.metadata,
        "logprobs": logprobs.tolist(),
        "greedy": [scores.greedy for scores in scored],
        "cut": sum(example.cut for example in item.examples),
        "best": {name: int(x.argmax()) for name, x in values.items()},
        # A model that gives all choices one score would be right by the order of the choices.
        "ties": [name for name, x in values.items() if (x == x.max()).sum() > 1],
    }


def accuracy(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the fraction of questions whose best choice is the answer, by each measure.

    Args:
        records: Results of questions, from `make_choice_record`.

    Returns:
        "questions", "accuracy", "accuracy_per_token" and "accuracy_per_byte" (the `acc` and
        `acc_bytes` of `lm-eval`); "ties" and "cut", the number of questions with a tie in some
        measure and with a truncated context.

    Raises:
        DataError: There is no question.

    Examples:
        >>> best = {"plain": 0, "per_token": 1, "per_byte": 0}
        >>> accuracy([{"answer": 0, "best": best, "ties": [], "cut": 0}])["accuracy_per_token"]
        0.0
    """
    if not records:
        raise DataError("accuracy: there is no question")
    # Ties and truncated contexts are reported with it: with many, the figure says little.
    correct = {
        name: sum(record["best"][name] == record["answer"] for record in records) / len(records)
        for name in MEASURES
    }
    return {
        "questions": len(records),
        "accuracy": correct["plain"],
        "accuracy_per_token": correct["per_token"],
        "accuracy_per_byte": correct["per_byte"],
        "ties": sum(bool(record["ties"]) for record in records),
        "cut": sum(record["cut"] > 0 for record in records),
    }
