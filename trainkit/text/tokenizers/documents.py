"""Documents of tokens, by any tokenizer: what stands before and after the text of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.types import DataError, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainkit.types import Column, IntArray, Tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> IntArray:
    """Return a document's tokens: `bos_id`, the text's, `eos_id`, where the tokenizer has them.

    Returns:
        int64 `[N]`.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> encode_document(make_byte_tokenizer(), "hi")
        array([256, 104, 105, 257])
    """
    return _document(tokenizer, tokenizer.encode(text))


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[IntArray]:
    """Return what `encode_document` does of each text, by the tokenizer's `encode_batch` if any.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> encode_documents(make_byte_tokenizer(), ["hi", ""])
        [array([256, 104, 105, 257]), array([256, 257])]
    """
    encode_batch: Callable[[Sequence[str]], Sequence[Any]] | None
    encode_batch = getattr(tokenizer, "encode_batch", None)
    rows = map(tokenizer.encode, texts) if encode_batch is None else encode_batch(texts)
    return [_document(tokenizer, ids) for ids in rows]


def make_text_encoder(
    tokenizer: Tokenizer, *, field: str = "text"
) -> Callable[[Mapping[str, Any]], IntArray]:
    """Return the function from a record with a text to its tokens.

    Args:
        tokenizer: What encodes the text, by `encode_document`.
        field: The record's field that holds it.

    Returns:
        `encode(record) -> ids`, int64 `[N]`. It raises DataError where the field is missing or no
        string, and names it.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> make_text_encoder(make_byte_tokenizer())({"text": "hi"})
        array([256, 104, 105, 257])
    """
    return partial(_encode_text, tokenizer, field)


def make_sample_encoder(
    tokenizer: Tokenizer | None = None,
    *,
    tokens: str = "tokens",
    trained: str | None = None,
    columns: Mapping[str, Column] | None = None,
) -> Callable[[Mapping[str, Any]], Sample]:
    """Return the function from a record that holds token ids, and a value for each, to a `Sample`.

    For what a sampler or a scorer has written: `open_corpus(encode=...)` takes what this returns,
    `prepare_corpus(make_encode=...)` this function, or a `functools.partial` of it.

    Args:
        tokenizer: Whose ids they are; its `vocab_size` bounds them.
        tokens: The record's field that holds them, a list of integers `[N]`.
        trained: The field that says which of them are trained on, a list of booleans or of 0 and 1
            `[N]`; without it all are.
        columns: What there is of each token besides; a record has each in the field of its name, a
            list `[N]` or `[N, k]`.

    Returns:
        `encode(record) -> Sample`, with `columns` and `vocab_size` as its attributes. It raises
        DataError where a field is missing or `trained` is not as above; what values a column can
        have is seen to by whoever makes a corpus of them.

    Examples:
        >>> from trainkit.types import Column
        >>> encode = make_sample_encoder(trained="answer", columns={"advantages": Column()})
        >>> sample = encode({"tokens": [5, 6], "answer": [0, 1], "advantages": [0.0, 0.5]})
        >>> sample.tokens, sample.trained, sample.columns
        (array([5, 6]), array([False,  True]), {'advantages': [0.0, 0.5]})
    """
    return _SampleEncoder(tokens, trained, columns or {}, getattr(tokenizer, "vocab_size", None))


@attrs.frozen
class _SampleEncoder:
    tokens: str
    trained: str | None
    columns: Mapping[str, Column]
    vocab_size: int | None

    def __call__(self, record: Mapping[str, Any]) -> Sample:
        for field in filter(None, (self.tokens, self.trained, *self.columns)):
            _check_field(record, field)
        ids = np.asarray(record[self.tokens])
        ids = ids if ids.size else np.arange(0)
        columns = {name: record[name] for name in self.columns}
        if self.trained is None:
            return Sample(ids, np.ones(ids.shape, bool), columns)
        return Sample(ids, _choice(record, self.trained), columns)


def _choice(record: Mapping[str, Any], field: str) -> np.ndarray[Any, Any]:
    """Return which tokens are trained on; what is neither 0 nor 1 is a weight, not a choice."""
    found = np.asarray(record[field])
    if not np.isin(found, (0, 1)).all():
        what = f"field {field!r} must be booleans, or 0 and 1, for each token"
        raise DataError(f"{what}, got {found.dtype} {found.shape}", where=field)
    return found.astype(bool)


def get_text(record: Mapping[str, Any], field: str) -> str:
    """Return the text of a record.

    Raises:
        DataError: The field is missing, or no string.

    Examples:
        >>> get_text({"text": "hi"}, "text")
        'hi'
    """
    _check_field(record, field)
    text = record[field]
    if not isinstance(text, str):
        got = type(text).__name__
        raise DataError(f"field {field!r} must be a string, got {got}", got=got)
    return text


def _check_field(record: Mapping[str, Any], field: str) -> None:
    if field not in record:
        raise DataError(f"there is no field {field!r}; found {', '.join(record)}", want=field)


def _encode_text(tokenizer: Tokenizer, field: str, record: Mapping[str, Any]) -> IntArray:
    return encode_document(tokenizer, get_text(record, field))


def _document(tokenizer: Tokenizer, ids: Sequence[int] | IntArray) -> IntArray:
    marks = (getattr(tokenizer, name, None) for name in ("bos_id", "eos_id"))
    begin, end = (np.array([i for i in (mark,) if i is not None], np.int64) for mark in marks)
    return np.concatenate([begin, np.asarray(ids, np.int64), end])
