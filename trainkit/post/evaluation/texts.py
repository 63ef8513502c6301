"""Texts, and pairs of a context and a continuation: read them, and compute perplexities."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.post.evaluation.examples import (
    EvalItem,
    encode_continuation,
    encode_with_bos,
    get_prefix_id,
    make_example,
    make_rolling_windows,
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
    r"""Read texts and pairs from a file as items to score.

    A record is `{"context": ..., "continuation": ...}`, whose continuation is scored, or
    `{"text": ...}`, all of whose tokens are scored, in `make_rolling_windows`.

    Args:
        path: A source of `corpora.read_records`: a JSON lines file, a text file, a folder of them.
        tokenizer: The model's tokenizer.
        context: Maximum number of tokens in the model's input.
        add_bos: Prepend BOS to contexts; a text always has `get_prefix_id` before it.
        field: The field of a text.
        sources: Receives the hash of each file by its name.

    Raises:
        DataError: As `read_records`; or a record is neither, or its continuation is empty or too
            long. The message names the file and the line.

    Examples:
        >>> import tempfile
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.jsonl"
        ...     _ = path.write_text('{"text": "two words"}\n{"context": "a", "continuation": "b"}')
        ...     one, two = read_texts(path, make_byte_tokenizer(), context=6)
        >>> one.metadata, [window.scored for window in one.examples], two.examples[0].ids
        ({'tokens': 9, 'words': 2, 'bytes': 9}, [6, 3], array([97, 98]))
    """
    return make_items(
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
    """Make an item to score from a record of `read_texts`.

    Raises:
        DataError: It is neither a text nor a pair, or its continuation is empty or too long.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> make_text_item({"text": "two words"}, make_byte_tokenizer(), context=64).metadata
        {'tokens': 9, 'words': 2, 'bytes': 9}
    """
    # Which of the two kinds a record is follows from its fields.
    if "continuation" in record:
        if field in record:
            raise DataError(
                f"it has both {field!r} and 'continuation': it must be a text, or a pair with a "
                "context"
            )
        context_ids, continuation_ids = encode_continuation(
            tokenizer,
            get_text(record, "context"),
            get_text(record, "continuation"),
            add_bos=add_bos,
        )
        example = make_example(context_ids, continuation_ids, context=context)
        return EvalItem([example], {"tokens": len(continuation_ids)})
    text = get_text(record, field)
    # The prefix, BOS or else EOS, stands before the first window, and is not scored.
    ids = encode_with_bos(tokenizer, text, add_bos=False)
    return EvalItem(
        make_rolling_windows(ids, prefix=get_prefix_id(tokenizer), context=context),
        # The divisors of a perplexity; words and bytes do not depend on the tokenizer.
        {"tokens": len(ids), "words": count_words(text), "bytes": len(text.encode())},
    )


def make_items(
    path: Path, make_item: Callable[[Mapping[str, Any]], EvalItem], sources: dict[str, str] | None
) -> list[EvalItem]:
    """Make an item from each record of a file; an error names the file and the line.

    Raises:
        DataError: As `make_item`, or `corpora.read_records`; or there is no record.

    Examples:
        >>> make_items(Path("/does/not/exist"), EvalItem, None)
        Traceback (most recent call last):
        ...
        trainkit.types.DataError: /does/not/exist: No such file or directory...
    """
    items = []
    for name, record in read_records(path, sources=sources):
        # `make_item` does not know the file, so the place is added to its error here.
        try:
            items.append(make_item(record))
        except DataError as error:
            raise DataError(
                f"{describe_record(path, name)}: {error.what}",
                where=describe_record(path, name),
                got=error.got,
                want=error.want,
                hint=error.hint,
            ) from error
    if not items:
        raise DataError(f"{path}: there is nothing to score in it", where=path)
    return items


def count_words(text: str) -> int:
    r"""Count the words of a text as `lm-eval` does: the strings between white space.

    Examples:
        >>> count_words("two words"), count_words("two words\n")
        (2, 3)
    """
    # Not text.split(), which drops the empty strings at both ends.
    return len(re.split(r"\s+", text))


def make_text_record(item: EvalItem, scored: Sequence[ExampleScores]) -> dict[str, Any]:
    """Make the result of a text or a pair: the log-probability of all and of each token.

    Examples:
        >>> make_text_record(
        ...     EvalItem([], {"words": 1}), [ExampleScores(np.array([-0.5, -1.0]), False)]
        ... )
        {'words': 1, 'logprob': -1.5, 'greedy': False, 'cut': 0, 'token_logprobs': [-0.5, -1.0]}
    """
    # An empty text has no window, and numpy cannot concatenate nothing.
    logprobs = np.concatenate([scores.logprobs for scores in scored]) if scored else np.zeros(0)
    return {
        **item.metadata,
        "logprob": float(logprobs.sum()),
        "greedy": all(scores.greedy for scores in scored),
        "cut": sum(example.cut for example in item.examples),
        "token_logprobs": logprobs.tolist(),
    }


def perplexity(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute perplexities per token, word and byte over all texts.

    A perplexity is exp(-log-probability / count), with both summed over all texts, as in `lm-eval`.
    Those per token are comparable only between models with the same tokenizer.

    Args:
        records: Results of texts with "logprob", "tokens", "words" and "bytes"; others are skipped.

    Raises:
        DataError: There is no text, or none with a token.

    Examples:
        >>> perplexity([{"logprob": -2 * math.log(2), "tokens": 2, "words": 1, "bytes": 4}])
        {'documents': 1, 'tokens': 2, 'words': 1, 'bytes': 4, 'token_perplexity': 2.0, ...
    """
    texts = [record for record in records if "bytes" in record]  # and no pairs
    tokens = sum(record["tokens"] for record in texts)
    words = sum(record["words"] for record in texts)
    num_bytes = sum(record["bytes"] for record in texts)
    # fsum: millions of documents, whose order should not change the result.
    logprob = math.fsum(record["logprob"] for record in texts)
    if not tokens:  # texts may be empty
        raise DataError("perplexity: there is no text with a token", got=len(texts))
    return {
        "documents": len(texts),
        "tokens": tokens,
        "words": words,
        "bytes": num_bytes,
        "token_perplexity": _exp(-logprob / tokens),
        "word_perplexity": _exp(-logprob / words),
        "byte_perplexity": _exp(-logprob / num_bytes),
        "bits_per_byte": -logprob / num_bytes / math.log(2),
        "nats_per_token": -logprob / tokens,
    }


def _exp(x: float) -> float:
    # math.exp raises OverflowError above 709.78.
    return math.exp(x) if x < 709 else math.inf
