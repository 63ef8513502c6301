"""Encode documents with any tokenizer, with BOS and EOS around the text of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.types import DataError, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainkit.types import Column, IntArray, Tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> IntArray:
    """Encode a document: `bos_id`, the ids of the text, `eos_id`, if the tokenizer has them.

    Returns:
        int64 `[N]`.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> encode_document(make_byte_tokenizer(), "hi")
        array([256, 104, 105, 257])
    """
    return _add_bos_eos(tokenizer, tokenizer.encode(text))


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[IntArray]:
    """Encode documents as `encode_document`, with the tokenizer's `encode_batch` if it has one.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> encode_documents(make_byte_tokenizer(), ["hi", ""])
        [array([256, 104, 105, 257]), array([256, 257])]
    """
    # Optional; that of the `tokenizers` library uses all cores.
    encode_batch: Callable[[Sequence[str]], Sequence[Any]] | None
    encode_batch = getattr(tokenizer, "encode_batch", None)
    rows = map(tokenizer.encode, texts) if encode_batch is None else encode_batch(texts)
    return [_add_bos_eos(tokenizer, ids) for ids in rows]


def _add_bos_eos(tokenizer: Tokenizer, ids: Sequence[int] | IntArray) -> IntArray:
    # Of a tokenizer anything but `encode` and `decode` is optional.
    bos = getattr(tokenizer, "bos_id", None)
    eos = getattr(tokenizer, "eos_id", None)
    # An empty array stands for a token that the tokenizer does not have.
    return np.concatenate(
        [
            np.array([] if bos is None else [bos], np.int64),
            np.asarray(ids, np.int64),
            np.array([] if eos is None else [eos], np.int64),
        ]
    )


def make_text_encoder(
    tokenizer: Tokenizer, *, field: str = "text"
) -> Callable[[Mapping[str, Any]], IntArray]:
    """Make a function from a record with a text to its tokens.

    Args:
        tokenizer: Encodes the text, by `encode_document`.
        field: The record's field that holds the text.

    Returns:
        `encode(record) -> ids`, int64 `[N]`. It raises DataError if the field is missing or no
        string.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> make_text_encoder(make_byte_tokenizer())({"text": "hi"})
        array([256, 104, 105, 257])
    """

    def encode(record: Mapping[str, Any]) -> IntArray:
        return encode_document(tokenizer, get_text(record, field))

    return encode


def make_sample_encoder(
    tokenizer: Tokenizer | None = None,
    *,
    tokens: str = "tokens",
    loss_mask: str | None = None,
    columns: Mapping[str, Column] | None = None,
) -> Callable[[Mapping[str, Any]], Sample]:
    """Make a function from a record of token ids, and a value for each, to a `Sample`.

    For the output of a sampler or a scorer: `open_corpus(encode=...)` takes the result,
    `prepare_corpus(make_encode=...)` this function, or a `functools.partial` of it.

    Args:
        tokenizer: The tokenizer of the ids; its `vocab_size` bounds them.
        tokens: The record's field that holds the ids, a list of integers `[N]`.
        loss_mask: The field that holds the loss mask, a list of booleans or of 0 and 1 `[N]`;
            without it all tokens are in the loss.
        columns: Further columns of a token; a record has each in the field of its name, a list
            `[N]` or `[N, k]`.

    Returns:
        `encode(record) -> Sample`, with `columns` and `vocab_size` as its attributes. It raises
        DataError if a field is missing or `loss_mask` is not as above. The values of the columns
        are checked when a corpus is made of the samples.

    Examples:
        >>> from trainkit.types import Column
        >>> encode = make_sample_encoder(loss_mask="answer", columns={"advantages": Column()})
        >>> sample = encode({"tokens": [5, 6], "answer": [0, 1], "advantages": [0.0, 0.5]})
        >>> sample.tokens, sample.loss_mask, sample.columns
        (array([5, 6]), array([False,  True]), {'advantages': [0.0, 0.5]})
    """
    return _SampleEncoder(tokens, loss_mask, columns or {}, getattr(tokenizer, "vocab_size", None))


@attrs.frozen
class _SampleEncoder:
    tokens: str
    loss_mask: str | None
    columns: Mapping[str, Column]
    vocab_size: int | None

    def __call__(self, record: Mapping[str, Any]) -> Sample:
        # All of them first: the error of a missing one lists the record's fields.
        for field in filter(None, (self.tokens, self.loss_mask, *self.columns)):
            _check_field(record, field)
        ids = np.asarray(record[self.tokens])
        # An empty list is an array of float64.
        ids = ids if ids.size else np.arange(0)
        mask = np.ones(ids.shape, bool)
        if self.loss_mask is not None:
            mask = np.asarray(record[self.loss_mask])
            # Another number would be a weight, which a mask cannot express.
            if not np.isin(mask, (0, 1)).all():
                raise DataError(
                    f"field {self.loss_mask!r} must be booleans, or 0 and 1, for each token, got "
                    f"{mask.dtype} {mask.shape}",
                    where=self.loss_mask,
                )
        columns = {name: record[name] for name in self.columns}
        return Sample(ids, mask.astype(bool), columns)


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
