"""Documents of tokens, by any tokenizer: what stands before and after the text of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainkit.types import IntArray, Tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> IntArray:
    """Return a document's tokens: `bos_id`, the text's, `eos_id`, where the tokenizer has them.

    Returns:
        int64 `[N]`.

    Examples:
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> encode_document(byte_tokenizer(), "hi")
        array([256, 104, 105, 257])
    """
    return _document(tokenizer, tokenizer.encode(text))


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[IntArray]:
    """Return what `encode_document` does of each text, by the tokenizer's `encode_batch` if any.

    Examples:
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> encode_documents(byte_tokenizer(), ["hi", ""])
        [array([256, 104, 105, 257]), array([256, 257])]
    """
    encode_batch: Callable[[Sequence[str]], Sequence[Any]] | None
    encode_batch = getattr(tokenizer, "encode_batch", None)
    rows = map(tokenizer.encode, texts) if encode_batch is None else encode_batch(texts)
    return [_document(tokenizer, ids) for ids in rows]


def text_encoder(
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
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> text_encoder(byte_tokenizer())({"text": "hi"})
        array([256, 104, 105, 257])
    """
    return partial(_encode_text, tokenizer, field)


def text_of(record: Mapping[str, Any], field: str) -> str:
    """Return the text of a record.

    Raises:
        DataError: The field is missing, or no string.

    Examples:
        >>> text_of({"text": "hi"}, "text")
        'hi'
    """
    if field not in record:
        raise DataError(f"there is no field {field!r}; found {', '.join(record)}", want=field)
    text = record[field]
    if not isinstance(text, str):
        got = type(text).__name__
        raise DataError(f"field {field!r} must be a string, got {got}", got=got)
    return text


def _encode_text(tokenizer: Tokenizer, field: str, record: Mapping[str, Any]) -> IntArray:
    return encode_document(tokenizer, text_of(record, field))


def _document(tokenizer: Tokenizer, ids: Sequence[int] | IntArray) -> IntArray:
    marks = (getattr(tokenizer, name, None) for name in ("bos_id", "eos_id"))
    begin, end = (np.array([i for i in (mark,) if i is not None], np.int64) for mark in marks)
    return np.concatenate([begin, np.asarray(ids, np.int64), end])
