"""`open_corpus`: whatever lies at a path, as documents of tokens."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.data.text import check_readable, directory_texts, jsonl_texts
from trainkit.data.tokenizers import byte_tokenizer, encode_document
from trainkit.data.tokens import SUFFIX, TokenCorpus, open_tokens, smallest_dtype
from trainkit.hashing import MASK64, hash_box
from trainkit.types import Corpus, DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from trainkit.types import Tokenizer

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")


def open_corpus(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    field: str = "text",
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    keep: Callable[[str], bool] | None = None,
) -> TokenCorpus:
    """Open a corpus: a directory of text files, a `.jsonl` file, or a `.tokens` file.

    Text is tokenised here, once, into memory; write it into a token file to do so only once for
    many runs.

    Args:
        path: A directory (each file one document, sorted by relative path), a `.jsonl` file (each
            line one), or a `.tokens` file. What it is follows from the path, never from the
            content.
        tokenizer: For text; bytes by default. For a token file it only has to cover the file's
            vocabulary.
        field: The field of each JSON line that holds the text.
        suffixes: How the names of a directory's text files end.
        keep: Which documents to take, by relative path or by line number (from 1, in decimal).

    Returns:
        The corpus.

    Raises:
        DataError: The path is missing, unreadable, empty, damaged, binary, or of no known kind.
        ValueError: `keep` was given for a token file, whose documents have no names.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     corpus = open_corpus(folder)
        >>> corpus.read(0, 0, 4)
        array([256, 104, 105, 257], dtype=uint16)
    """
    path = Path(path)
    check_readable(path)
    if path.is_dir():
        texts = directory_texts(path, suffixes=suffixes, keep=keep)
        return _tokenised(path, texts, tokenizer, f"files ending in {', '.join(suffixes)}")
    if path.suffix == ".jsonl":
        return _tokenised(path, jsonl_texts(path, field=field, keep=keep), tokenizer, "lines")
    if path.suffix != SUFFIX:
        raise DataError(
            f"open_corpus: {path}: neither a directory, nor a .jsonl or {SUFFIX} file", where=path
        )
    if keep is not None:
        raise ValueError(
            f"open_corpus: {path}: a token file's documents have no names for `keep` to choose by; "
            "choose when you write it"
        )
    corpus = open_tokens(path)
    known = getattr(tokenizer, "vocab_size", None)
    if corpus.vocab_size is not None and known is not None and corpus.vocab_size > known:
        raise DataError(
            f"open_corpus: {path}: its vocabulary of {corpus.vocab_size} is larger than the "
            f"tokenizer's, {known}",
            where=path,
            got=corpus.vocab_size,
            want=known,
        )
    return corpus


def held_out(name: str, *, one_in: int = 20) -> bool:
    """Say whether a document is held out from training, by a hash of its name alone.

    About one in `one_in` is. A document stays on its side when others come or go, everywhere.

    Examples:
        >>> sum(held_out(f"{i}.py") for i in range(1000))
        57
    """
    if one_in < 1:
        raise ValueError(f"held_out: one_in must be at least 1, got {one_in}")
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") % one_in == 0


def held_out_documents(corpus: TokenCorpus, *, one_in: int = 20) -> np.ndarray[Any, Any]:
    """Return which documents of a corpus are held out: bool `[N]`, by their names.

    A document without a name, as in a token file, goes by its number. Lengths that are set to 0
    where this is true pack into rows for training, and the other way round for evaluation.

    Examples:
        >>> corpus = TokenCorpus(np.arange(100), np.arange(101))
        >>> int(held_out_documents(corpus, one_in=10).sum())
        10
    """
    names = map(str, range(len(corpus.lengths))) if corpus.names is None else corpus.names
    return np.array([held_out(name, one_in=one_in) for name in names], dtype=bool)


def fingerprint(corpus: Corpus) -> str:
    """Return a hash of a corpus' tokens and offsets: 16 hex digits, to see that data is the same.

    A token file's is read from its header, since a large one takes long to hash; `verify_tokens`
    says whether the content still has that hash.

    Examples:
        >>> fingerprint(TokenCorpus(np.arange(4), np.array([0, 4]))) == fingerprint(
        ...     TokenCorpus(np.arange(4), np.array([0, 2, 4]))
        ... )
        False
    """
    if isinstance(corpus, TokenCorpus) and corpus.digest is not None:
        return corpus.digest[:16]
    arrays = {"tokens": np.asarray(corpus.tokens), "offsets": np.asarray(corpus.offsets)}
    parts = (hash_box(name, x, shape=x.shape, offset=(0,)) for name, x in arrays.items())
    return f"{sum(parts) & MASK64:016x}"


def _tokenised(
    path: Path, texts: Iterable[tuple[str, str]], tokenizer: Tokenizer | None, what: str
) -> TokenCorpus:
    """Encode texts one after the other into one array of the smallest dtype that holds them."""
    tokenizer = tokenizer or byte_tokenizer()
    vocab_size = getattr(tokenizer, "vocab_size", None)
    tokens, offsets = array("I"), [0]
    names: list[str] = []
    for name, text in texts:
        try:
            document = encode_document(tokenizer, text)
        except ValueError as error:
            raise DataError(f"{path}: {name}: {error}", where=name) from error
        tokens.frombytes(document.astype(np.uint32).tobytes())
        offsets.append(len(tokens))
        names.append(name)
    if not tokens:
        found = "none was kept" if len(offsets) == 1 else "they are all empty"
        raise DataError(f"open_corpus: {path}: no documents: of its {what}, {found}", where=path)
    return TokenCorpus(
        np.frombuffer(tokens, np.uint32).astype(smallest_dtype(vocab_size)),
        np.array(offsets),
        vocab_size,
        names,
    )
