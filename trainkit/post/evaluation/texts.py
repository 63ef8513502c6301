"""Texts and pairs of a context and its continuation: read, scored, and what they come to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.post.evaluation.examples import (
    EvalItem,
    encode_continuation,
    get_prefix_id,
    make_example,
    make_rolling_windows,
    with_bos,
)
from trainkit.post.evaluation.score import ExampleScores
from trainkit.text.corpora.records import describe_record, read_records
from trainkit.text.tokenizers.documents import get_text
from trainkit.types import DataError, Tokenizer


def read_texts(
    path: Path | str,
    tokenizer: Tokenizer,
    *,
    context: int,
    add_bos: bool = False,
    field: str = "text",
    sources: dict[str, str] | None = None,
) -> list[EvalItem]:
    r"""Return the texts and the pairs of a file, ready to be scored.

    A record is `{"context": ..., "continuation": ...}`, of which the continuation counts, or
    `{"text": ...}`, all of whose tokens count: `make_rolling_windows` of any length.

    Args:
        path: What `corpora.read_records` takes: lines of JSON, a text file, a folder of them.
        tokenizer: The model's.
        context: The most tokens that the model is given.
        add_bos: Begin contexts with BOS; a text follows upon `get_prefix_id` in any case.
        field: The field that holds a text.
        sources: Gets the hash of each file by its name.

    Raises:
        DataError: As `read_records`; or a record is neither, its continuation is empty or does not
            fit. The message names the file and the line.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.jsonl"
        ...     _ = path.write_text('{"text": "two words"}\n{"context": "a", "continuation": "b"}')
        ...     one, two = read_texts(path, make_byte_tokenizer(), context=6)
        >>> one.facts, [window.scored for window in one.examples], two.examples[0].ids
        ({'tokens': 9, 'words': 2, 'bytes': 9}, [6, 3], array([97, 98]))
    """
    return items_of(
        Path(path),
        lambda record: make_text_item(
            record, tokenizer, context=context, add_bos=add_bos, field=field
        ),
        sources,
    )


def make_text_item(
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    context: int,
    add_bos: bool = False,
    field: str = "text",
) -> EvalItem:
    """Return a text or a pair, ready to be scored: what `read_texts` makes of a record.

    Raises:
        DataError: It is neither, its continuation is empty or does not fit.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> make_text_item({"text": "two words"}, make_byte_tokenizer(), context=64).facts
        {'tokens': 9, 'words': 2, 'bytes': 9}
    """
    if "continuation" in record:
        if field in record:
            what = f"it has both {field!r} and 'continuation'"
            raise DataError(f"{what}: it is a text, or a pair with a context")
        texts = get_text(record, "context"), get_text(record, "continuation")
        pair = encode_continuation(tokenizer, *texts, add_bos=add_bos)
        return EvalItem([make_example(*pair, context=context)], {"tokens": len(pair[1])})
    text = get_text(record, field)
    ids, first = with_bos(tokenizer, text, add=False), get_prefix_id(tokenizer)
    facts = {"tokens": len(ids), "words": count_words(text), "bytes": len(text.encode())}
    return EvalItem(make_rolling_windows(ids, prefix=first, context=context), facts)


def items_of(
    path: Path, of_record: Callable[[Mapping[str, Any]], EvalItem], sources: dict[str, str] | None
) -> list[EvalItem]:
    """Return what each record of a file is; an error names the file and the line.

    Raises:
        DataError: As `of_record` does, or `corpora.read_records`; or there is no record.

    Examples:
        >>> items_of(Path("/does/not/exist"), EvalItem, None)
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: /does/not/exist: No such file or directory...
    """
    items = []
    for name, record in read_records(path, sources=sources):
        with _placed(path, name):
            items.append(of_record(record))
    if not items:
        raise DataError(f"{path}: there is nothing to score in it", where=path)
    return items


@contextmanager
def _placed(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        place = describe_record(path, name)
        facts = {"got": error.got, "want": error.want, "hint": error.hint}
        raise DataError(f"{place}: {error.what}", where=place, **facts) from error


def count_words(text: str) -> int:
    r"""Return how many words a text has, as `lm-eval` counts: the parts between blanks.

    Examples:
        >>> count_words("two words"), count_words("two words\n")
        (2, 3)
    """
    return len(re.split(r"\s+", text))


def make_text_record(item: EvalItem, scored: Sequence[ExampleScores]) -> dict[str, Any]:
    """Return the line of a text or a pair: what it scores as a whole, and each token.

    Examples:
        >>> make_text_record(
        ...     EvalItem([], {"words": 1}), [ExampleScores(np.array([-0.5, -1.0]), False)]
        ... )
        {'words': 1, 'logprob': -1.5, 'greedy': False, 'cut': 0, 'token_logprobs': [-0.5, -1.0]}
    """
    logprobs = np.concatenate([part.logprobs for part in scored]) if scored else np.zeros(0)
    return {
        **item.facts,
        "logprob": float(logprobs.sum()),
        "greedy": all(part.greedy for part in scored),
        "cut": sum(example.cut for example in item.examples),
        "token_logprobs": logprobs.tolist(),
    }


def perplexity(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what the lines of texts come to, per token, word and byte.

    Perplexities are exp(-log-probability / how many), over all texts together, as `lm-eval` has
    them; per token they can be compared only where the tokenizer is the same.

    Args:
        lines: Lines of texts with "logprob", "tokens", "words" and "bytes".

    Raises:
        DataError: There is no text, or none with a token.

    Examples:
        >>> perplexity([{"logprob": -2 * math.log(2), "tokens": 2, "words": 1, "bytes": 4}])
        {'documents': 1, 'tokens': 2, 'words': 1, 'bytes': 4, 'token_perplexity': 2.0, ...
    """
    texts = [line for line in lines if "bytes" in line]
    totals = {name: sum(line[name] for line in texts) for name in ("tokens", "words", "bytes")}
    logprob = math.fsum(line["logprob"] for line in texts)
    if not totals["tokens"]:
        raise DataError("perplexity: there is no text with a token", got=len(texts))
    return {
        "documents": len(texts),
        **totals,
        **{f"{name[:-1]}_perplexity": _exp(-logprob / n) for name, n in totals.items()},
        "bits_per_byte": -logprob / totals["bytes"] / math.log(2),
        "nats_per_token": -logprob / totals["tokens"],
    }


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf
