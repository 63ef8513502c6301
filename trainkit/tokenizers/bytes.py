"""From text to token ids and back. Any object with `encode` and `decode` serves.

Two kinds come with trainkit: the bytes of UTF-8, which need no file, and what a `tokenizer.json` of
the `tokenizers` library says, downloaded or trained here. A special token that stands in a text is
read as that token by both, as in `transformers`; none is added but by `encode_document`.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.tokenizers.hf import BOS, EOS, PAD, HFTokenizer, Offsets, byte_name, hf_tokenizer
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainkit.types import IntArray, Tokenizer

_FIRST_SPECIAL = 259

CHAT_SPECIAL = (
    *("<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
"""The special tokens of every native template of `trainkit.chat`."""


# ------------------------------------------------------------------------------------------- bytes


@attrs.frozen
class ByteTokenizer:
    """The 256 bytes of UTF-8, three special tokens, and special tokens of your own after them."""

    special: tuple[str, ...] = ()
    bos_id: int = 256
    eos_id: int = 257
    pad_id: int = 258

    @property
    def vocab_size(self) -> int:
        """The number of ids: 259 and your special tokens."""
        return _FIRST_SPECIAL + len(self.special)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The id of each of your special tokens, by its text."""
        return {text: _FIRST_SPECIAL + i for i, text in enumerate(self.special)}

    @property
    def identity(self) -> str:
        """A text that changes with the ids it gives."""
        return repr(self)

    @property
    def covers(self) -> tuple[ByteTokenizer, ...]:
        """Those with fewer of its special tokens, in its order: their ids mean the same here."""
        return tuple(attrs.evolve(self, special=self.special[:i]) for i in range(len(self.special)))

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text, and the ids of your special tokens that stand in it."""
        return _byte_ids(self, text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[IntArray]:
        """Return what `encode` does of each text, as int64 arrays."""
        return [_byte_ids(self, text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Return the ids, and of each the characters `[begin, end)` that it belongs to."""
        ids: list[int] = []
        offsets: Offsets = []
        for begin, part, special in _byte_parts(self, text):
            if special is not None:
                ids.append(special)
                offsets.append((begin, begin + len(part)))
                continue
            for place, character in enumerate(part, begin):
                data = character.encode()
                ids += data
                offsets += [(place, place + 1)] * len(data)
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; special tokens are dropped, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each id alone: `<0xC3>` for a byte that is no character by itself."""
        names = (BOS, EOS, PAD, *self.special)
        return [byte_name(int(i)) if i < 256 else names[int(i) - 256] for i in ids]


def byte_tokenizer(special: Sequence[str] = ()) -> ByteTokenizer:
    """Return the tokenizer that needs no training: one token per byte of UTF-8.

    Args:
        special: Texts that are one token each, wherever they stand, with ids from 259 on. Where two
            fit, the longer one is taken.

    Raises:
        ValueError: A special token is empty, or is there twice.

    Examples:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.encode("hi"), tokenizer.decode([256, 104, 105, 257])
        ([104, 105], 'hi')
        >>> byte_tokenizer(["<|end|>"]).encode("a<|end|>")
        [97, 259]
    """
    special = (special,) if isinstance(special, str) else tuple(special)
    if "" in special or len(set(special)) < len(special):
        raise ValueError(f"byte_tokenizer: special tokens must be different texts, got {special}")
    return ByteTokenizer(special)


def _byte_parts(tokenizer: ByteTokenizer, text: str) -> Iterator[tuple[int, str, int | None]]:
    """Yield (begin, part, None or the special token's id) of the parts of a text, in order."""
    if not tokenizer.special:
        yield 0, text, None
        return
    longest_first = sorted(tokenizer.special, key=len, reverse=True)
    ids, end = tokenizer.special_ids, 0
    for found in re.finditer("|".join(map(re.escape, longest_first)), text):
        if found.start() > end:
            yield end, text[end : found.start()], None
        yield found.start(), found[0], ids[found[0]]
        end = found.end()
    if end < len(text):
        yield end, text[end:], None


def _byte_ids(tokenizer: ByteTokenizer, text: str) -> IntArray:
    parts = [
        np.frombuffer(part.encode(), np.uint8).astype(np.int64)
        if special is None
        else np.array([special], np.int64)
        for _, part, special in _byte_parts(tokenizer, text)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.array([], np.int64)])


# ----------------------------------------------------------------------------------- of any kind


def open_tokenizer(name: str | os.PathLike[str]) -> ByteTokenizer | HFTokenizer:
    """Return the tokenizer that a command line names.

    Args:
        name: `bytes`, which are those of UTF-8 and `CHAT_SPECIAL`, so that what learns to write can
            be taught to talk; or a `tokenizer.json`, or a folder that has one.

    Raises:
        DataError: There is no such file, or it is no tokenizer.
        ConfigError: The library that reads it is missing: `pip install "trainkit-lm[hf]"`.

    Examples:
        >>> open_tokenizer("bytes").vocab_size
        271
    """
    if name == "bytes":
        return byte_tokenizer(CHAT_SPECIAL)
    if not Path(name).exists():
        raise DataError(
            f"open_tokenizer: there is no {os.fspath(name)!r}; give `bytes`, a tokenizer.json, or "
            "a folder that holds one",
            where=name,
        )
    return hf_tokenizer(name)


def find_tokenizer(name: str | None, data: Iterable[Path]) -> str:
    """Return the name of a tokenizer: that given, or that which `prepare` left beside the data.

    Args:
        name: What a command line names; None where it names none.
        data: The files of the corpora; beside `n.tokens` a tokenizer is `n.tokenizer.json`.

    Returns:
        A name for `open_tokenizer`, "bytes" where there is no such file.

    Examples:
        >>> find_tokenizer(None, [Path("web.tokens")]), find_tokenizer("t.json", [])
        ('bytes', 't.json')
    """
    beside = (path.with_suffix(".tokenizer.json") for path in data if path.suffix == ".tokens")
    return name or next((str(path) for path in beside if path.is_file()), "bytes")


def encode_document(tokenizer: Tokenizer, text: str) -> IntArray:
    """Return a document's tokens: `bos_id`, the text's, `eos_id`, where the tokenizer has them.

    Returns:
        int64 `[N]`.

    Raises:
        ValueError: A token is below 0, or not below the tokenizer's `vocab_size`.

    Examples:
        >>> encode_document(byte_tokenizer(), "hi")
        array([256, 104, 105, 257])
    """
    return _document(tokenizer, tokenizer.encode(text))


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[IntArray]:
    """Return what `encode_document` does of each text, by the tokenizer's `encode_batch` if any.

    Examples:
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


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return what tells one tokenizer from another: 16 hex digits of a hash.

    It is made from the tokenizer's `identity`, a text that changes with its ids; give one to a
    tokenizer of your own.

    Raises:
        ValueError: It has no `identity`.

    Examples:
        >>> tokenizer_hash(byte_tokenizer()) == tokenizer_hash(byte_tokenizer(["<|end|>"]))
        False
    """
    identity = getattr(tokenizer, "identity", None)
    if identity is None:
        raise ValueError(
            f"tokenizer_hash: cannot tell one {type(tokenizer).__name__} from another; give it an "
            "attribute `identity`, a text that changes with its ids"
        )
    text = f"{type(tokenizer).__qualname__} {identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def covered_hashes(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the hashes of the tokenizers whose ids mean the same in this one; its own is the last.

    Those are its own and those that it names in an attribute `covers`: bytes with special tokens
    cover bytes with the first of these, and bytes alone.

    Returns:
        Hashes as `tokenizer_hash` gives them; none for a tokenizer without an `identity`.

    Examples:
        >>> ours = covered_hashes(byte_tokenizer(["<|end|>"]))
        >>> ours == tuple(map(tokenizer_hash, [byte_tokenizer(), byte_tokenizer(["<|end|>"])]))
        True
    """
    if getattr(tokenizer, "identity", None) is None:
        return ()
    return tuple(map(tokenizer_hash, (*getattr(tokenizer, "covers", ()), tokenizer)))


def _encode_text(tokenizer: Tokenizer, field: str, record: Mapping[str, Any]) -> IntArray:
    return encode_document(tokenizer, text_of(record, field))


def _document(tokenizer: Tokenizer, ids: Sequence[int] | IntArray) -> IntArray:
    begin, end = (getattr(tokenizer, name, None) for name in ("bos_id", "eos_id"))
    tokens = np.concatenate(
        [
            np.array([] if begin is None else [begin], np.int64),
            np.asarray(ids, np.int64),
            np.array([] if end is None else [end], np.int64),
        ]
    )
    vocab_size = getattr(tokenizer, "vocab_size", None)
    if tokens.size and (tokens.min() < 0 or (vocab_size and tokens.max() >= vocab_size)):
        raise ValueError(
            f"encode_document: tokens {tokens.min()} to {tokens.max()} do not lie in "
            f"[0, {vocab_size}), the vocabulary of {type(tokenizer).__name__}"
        )
    return tokens
