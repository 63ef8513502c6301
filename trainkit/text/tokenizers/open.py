"""Which tokenizer it is: by the name that a command line gives, and by a hash of what it does."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.text.tokenizers.bytes import ByteTokenizer, make_byte_tokenizer
from trainkit.text.tokenizers.hf import HFTokenizer, open_hf_tokenizer
from trainkit.text.tokenizers.special import CHAT_SPECIAL
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainkit.types import Tokenizer


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
        return make_byte_tokenizer(CHAT_SPECIAL)
    if not Path(name).exists():
        mend = "give `bytes`, a tokenizer.json, or a folder that holds one"
        raise DataError(f"open_tokenizer: there is no {os.fspath(name)!r}; {mend}", where=name)
    return open_hf_tokenizer(name)


def find_tokenizer(name: str | None, data: Iterable[Path] = (), *, init: Path | None = None) -> str:
    """Return the name of a tokenizer: that given, or found with what a run begins with or reads.

    Args:
        name: What a command line names; None where it names none.
        data: The files of the corpora; beside `n.tokens` a tokenizer is `n.tokenizer.json`, where
            `prepare` left it.
        init: What a run begins with: a Hugging Face folder, which has a `config.json`, goes before.

    Returns:
        A name for `open_tokenizer`, "bytes" where there is no such file.

    Examples:
        >>> find_tokenizer(None, [Path("web.tokens")]), find_tokenizer("t.json", [])
        ('bytes', 't.json')
    """
    if name is None and init is not None and (init / "config.json").is_file():
        return str(init)
    beside = (path.with_suffix(".tokenizer.json") for path in data if path.suffix == ".tokens")
    return name or next((str(path) for path in beside if path.is_file()), "bytes")


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return what tells one tokenizer from another: 16 hex digits of a hash.

    It is made from the tokenizer's `identity`, a text that changes with its ids; give one to a
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
            f"tokenizer_hash: cannot tell one {type(tokenizer).__name__} from another; give it an "
            "attribute `identity`, a text that changes with its ids"
        )
    text = f"{type(tokenizer).__qualname__} {identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_compatible_hashes(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the hashes of the tokenizers whose ids mean the same in this one; its own is the last.

    Those are its own and those that it names in an attribute `covers`: bytes with special tokens
    cover bytes with the first of these, and bytes alone.

    Returns:
        Hashes as `tokenizer_hash` gives them; none for a tokenizer without an `identity`.

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
