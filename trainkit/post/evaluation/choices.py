"""Multiple choice: which continuation of a context a model finds likeliest, by three measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.post.evaluation.examples import EvalItem, encode_continuation, make_example
from trainkit.post.evaluation.score import ExampleScores
from trainkit.post.evaluation.texts import items_of
from trainkit.text.tokenizers.documents import get_text
from trainkit.types import DataError, Tokenizer

MEASURES = ("plain", "per_token", "per_byte")
"""By what log-probabilities are divided: nothing, the choice's tokens, its bytes of UTF-8."""


def read_choices(
    path: Path | str,
    tokenizer: Tokenizer,
    *,
    context: int,
    add_bos: bool = False,
    sources: dict[str, str] | None = None,
) -> list[EvalItem]:
    """Return the questions of a file, ready to be scored: an example for each choice.

    A record is `{"context": ..., "choices": [..., ...], "answer": 0}`. A choice follows upon the
    context as it stands: the blank between them belongs to one of the two.

    Args:
        path: Lines of JSON, or all else that `corpora.read_records` takes.
        tokenizer: The model's.
        context: The most tokens that the model is given; a longer context is cut on its left.
        add_bos: Begin contexts with BOS.
        sources: Gets the hash of each file by its name.

    Raises:
        DataError: As `read_records`; or a record is no question: there are fewer than two choices,
            one is empty or no text, or the answer is none of them. The message names the line.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.jsonl"
        ...     _ = path.write_text('{"context": "1 + 1 =", "choices": [" 2", " 11"], "answer": 0}')
        ...     (item,) = read_choices(path, make_byte_tokenizer(), context=64)
        >>> item.facts, [example.scored for example in item.examples]
        ({'answer': 0, 'tokens': [2, 3], 'bytes': [2, 3]}, [2, 3])
    """
    return items_of(
        Path(path),
        lambda record: make_choice_item(record, tokenizer, context=context, add_bos=add_bos),
        sources,
    )


def make_choice_item(
    record: Mapping[str, Any], tokenizer: Tokenizer, *, context: int, add_bos: bool = False
) -> EvalItem:
    """Return a question, ready to be scored: what `read_choices` makes of a record.

    Raises:
        DataError: It is no question.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> make_choice_item({"context": "a", "choices": ["b"]}, make_byte_tokenizer(), context=8)
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: there must be two choices or more, got 1
    """
    before, choices, answer = get_text(record, "context"), *_checked(record)
    pairs = [encode_continuation(tokenizer, before, choice, add_bos=add_bos) for choice in choices]
    examples = [make_example(*pair, context=context) for pair in pairs]
    sizes = [len(choice.encode()) for choice in choices]
    return EvalItem(
        examples, {"answer": answer, "tokens": [len(x) for _, x in pairs], "bytes": sizes}
    )


def _checked(record: Mapping[str, Any]) -> tuple[list[str], int]:
    choices, answer = record.get("choices"), record.get("answer")
    if not isinstance(choices, list) or not all(isinstance(x, str) and x for x in choices):
        raise DataError("'choices' must be a list of texts that are not empty", got=choices)
    if len(choices) < 2:
        raise DataError(f"there must be two choices or more, got {len(choices)}", got=len(choices))
    if type(answer) is not int or not 0 <= answer < len(choices):
        must = f"'answer' must be the number of a choice, from 0 to {len(choices) - 1}"
        raise DataError(f"{must}, got {answer!r}", got=answer)
    return choices, answer


def make_choice_record(item: EvalItem, scored: Sequence[ExampleScores]) -> dict[str, Any]:
    """Return the line of a question: what each choice scores, and which is best by each measure.

    Of choices that score the same the first is best, as for numpy's `argmax` and `lm-eval`;
    "ties" says by which measures that decided.

    Examples:
        >>> item = EvalItem([], {"answer": 0, "tokens": [1, 2], "bytes": [4, 4]})
        >>> line = make_choice_record(item, [ExampleScores(np.full(n, -1.0), True) for n in (1, 2)])
        >>> line["logprobs"], line["best"], line["ties"]
        ([-1.0, -2.0], {'plain': 0, 'per_token': 0, 'per_byte': 0}, ['per_token'])
    """
    logprobs = np.array([part.logprob for part in scored])
    tokens, sizes = item.facts["tokens"], item.facts["bytes"]
    measured = dict(zip(MEASURES, (logprobs, logprobs / tokens, logprobs / sizes), strict=True))
    return {
        **item.facts,
        "logprobs": logprobs.tolist(),
        "greedy": [part.greedy for part in scored],
        "cut": sum(example.cut for example in item.examples),
        "best": {name: int(values.argmax()) for name, values in measured.items()},
        "ties": [name for name, x in measured.items() if (x == x.max()).sum() > 1],
    }


def accuracy(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of questions whose best choice is the answer, by each measure.

    Args:
        lines: The lines of questions, from `make_choice_record`.

    Returns:
        "questions", "accuracy", "accuracy_per_token" and "accuracy_per_byte" (the `acc` and
        `acc_bytes` of `lm-eval`); of how many questions a tie decided by some measure, and of how
        many the context was cut.

    Raises:
        DataError: There is no question.

    Examples:
        >>> best = {"plain": 0, "per_token": 1, "per_byte": 0}
        >>> accuracy([{"answer": 0, "best": best, "ties": [], "cut": 0}])["accuracy_per_token"]
        0.0
    """
    if not lines:
        raise DataError("accuracy: there is no question")
    right = {
        name: sum(line["best"][name] == line["answer"] for line in lines) / len(lines)
        for name in MEASURES
    }
    return {
        "questions": len(lines),
        "accuracy": right["plain"],
        "accuracy_per_token": right["per_token"],
        "accuracy_per_byte": right["per_byte"],
        "ties": sum(bool(line["ties"]) for line in lines),
        "cut": sum(line["cut"] > 0 for line in lines),
    }
