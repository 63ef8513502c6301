"""Open a tokenizer by its name on a command line, and identify one by a hash."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.buckets.files import mount_files
from trainkit.text.tokenizers.bytes import ByteTokenizer, make_byte_tokenizer
from trainkit.text.tokenizers.hf import HFTokenizer, open_hf_tokenizer
from trainkit.text.tokenizers.special import CHAT_SPECIAL
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainkit.types import Tokenizer


def open_tokenizer(name: str | os.PathLike[str]) -> ByteTokenizer | HFTokenizer:
    """Open a tokenizer by its name on a command line.

    Args:
        name: `bytes`, a byte tokenizer with `CHAT_SPECIAL`, so that a model that was pretrained
            with it can be finetuned on chats; or a `tokenizer.json`, or a folder that has one.

    Raises:
        DataError: There is no such file, or it is no tokenizer.
        ConfigError: The library that reads it is missing: `pip install "trainkit-lm[hf]"`.

    Examples:
        >>> open_tokenizer("bytes").vocab_size
        271
    """
    if name == "bytes":
        return make_byte_tokenizer(CHAT_SPECIAL)
    if not Path(name).exists():
        raise DataError(
            f"open_tokenizer: there is no {os.fspath(name)!r}; give `bytes`, a tokenizer.json, or "
            "a folder that holds one",
            where=name,
        )
    return open_hf_tokenizer(name)


def find_tokenizer(name: str | None, data: Iterable[Path] = (), *, init: Path | None = None) -> str:
    """Find the name of a run's tokenizer: the given one, the model's, or the corpus'.

    Args:
        name: The name on the command line; None if there is none.
        data: The files of the corpora; the tokenizer of `n.tokens` is `n.tokenizer.json` in the
            same directory, where `prepare` writes it.
        init: The initial model: a Hugging Face folder, which has a `config.json`, comes before
            `data`.

    Returns:
        A name for `open_tokenizer`; "bytes" if there is no such file.

    Examples:
        >>> find_tokenizer(None, [Path("web.tokens")]), find_tokenizer("t.json", [])
        ('bytes', 't.json')
    """
    if name:
        return name
    # A model that is finetuned keeps its tokenizer, whatever made the corpus.
    if init is not None and (init / "config.json").is_file():
        return str(init)
    for path in data:
        file = path.with_suffix(".tokenizer.json")
        if path.suffix == ".tokens":
            # Of a URL the copy is named, which a later start finds again.
            with contextlib.suppress(DataError):
                file = mount_files(file)
            if file.is_file():
                return str(file)
    return "bytes"


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a hash of a tokenizer, 16 hex digits.

    It is computed from the tokenizer's `identity`, a text that changes with its ids; give one to a
    tokenizer of your own.

    Raises:
        ValueError: It has no `identity`.

    Examples:
        >>> tokenizer_hash(make_byte_tokenizer()) == tokenizer_hash(
        ...     make_byte_tokenizer(["<|end|>"])
        ... )
        False
    """
    identity = getattr(tokenizer, "identity", None)
    if identity is None:
        raise ValueError(
            f"tokenizer_hash: a {type(tokenizer).__name__} has nothing that identifies it; give it "
            "an attribute `identity`, a text that changes with its ids"
        )
    # With the class: two classes may have the same text for other ids.
    text = f"{type(tokenizer).__qualname__} {identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_compatible_hashes(tokenizer: Tokenizer) -> tuple[str, ...]:
    """List the hashes of the tokenizers whose ids mean the same in this one; its own is the last.

    The others are in its attribute `covers`: a byte tokenizer with special tokens covers those with
    a prefix of these.

    Returns:
        Hashes from `tokenizer_hash`; none for a tokenizer without an `identity`.

    Examples:
        >>> ours = list_compatible_hashes(make_byte_tokenizer(["<|end|>"]))
        >>> ours == tuple(
        ...     map(tokenizer_hash, [make_byte_tokenizer(), make_byte_tokenizer(["<|end|>"])])
        ... )
        True
    """
    if getattr(tokenizer, "identity", None) is None:
        return ()
    return tuple(map(tokenizer_hash, (*getattr(tokenizer, "covers", ()), tokenizer)))
