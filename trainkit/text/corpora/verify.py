"""Verify a corpus, and describe its content."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.text.corpora.open import open_corpus
from trainkit.text.corpora.records import read_records
from trainkit.text.corpora.shards import find_token_files, open_parts
from trainkit.text.corpora.text_files import check_readable
from trainkit.types import DataError, DiskError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_SHOWN_TOKENS = 32


def verify_corpus(path: str | os.PathLike[str], *, vocab_size: int | None = None) -> dict[str, Any]:
    """Read all of a corpus: compare every byte with its hash, every token with the vocabulary.

    Args:
        path: Any path that `open_corpus` takes.
        vocab_size: Exclusive upper bound of the ids, for files that do not store one.

    Returns:
        `path`; `ok`; `problems`, a list of messages, at most one for each file; `documents` and
        `tokens`, the numbers of valid ones. `tokens` is None for text.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     verify_corpus(folder)["ok"]
        True
    """
    path = Path(path)
    root = path if path.is_dir() else path.parent
    problems: list[str] = []
    # None if not even the search succeeded; empty for text and records.
    names: list[str] | None = None
    documents = 0
    tokens = 0

    @contextmanager
    def collect_problem() -> Iterator[None]:
        try:
            yield
        except (DataError, DiskError) as error:
            problems.append(str(error))

    with collect_problem():
        check_readable(path)
        names = find_token_files(path)
    for name in names or ():
        with collect_problem():
            # One by one: a damaged file must not hide the problems of the others.
            [corpus] = open_parts(root, [name], vocab_size=vocab_size, full=True)
            documents += len(corpus.offsets) - 1
            tokens += len(corpus.tokens)
    if names == []:  # text or records
        with collect_problem():
            # Reading decodes every text and parses every record, and there are no hashes to
            # compare.
            for _ in read_records(path):
                documents += 1
            if not documents:
                raise DataError(f"{path}: there are no documents", where=path)
    return {
        "path": str(path),
        "ok": not problems,
        "problems": problems,
        "documents": documents,
        "tokens": tokens if names else None,
    }


def describe_corpus(path: str | os.PathLike[str], *, document: int = 0) -> dict[str, Any]:
    """Describe a corpus: its size, its columns, and the first tokens of one document.

    Args:
        path: Any path that `open_corpus` takes; text is counted in bytes.
        document: The index of the document to show.

    Raises:
        DataError: The corpus cannot be opened.
        ValueError: There is no such document.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hi")
        ...     describe_corpus(folder)["lengths"]
        {'min': 4, 'median': 4.0, 'max': 4}
    """
    # As a run opens it: what this cannot open, a run cannot either.
    corpus = open_corpus(path)
    lengths = corpus.lengths
    if not 0 <= document < len(lengths):
        raise ValueError(
            f"describe_corpus: {path}: there is no document {document} of {len(lengths)}"
        )
    names = corpus.names
    size = int(lengths[document])
    return {
        "path": str(path),
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        # The parts of a directory may have different dtypes.
        "dtype": sorted({part.tokens.dtype.name for part in getattr(corpus, "parts", [corpus])}),
        "vocab_size": corpus.vocab_size,
        "columns": {name: attrs.asdict(column) for name, column in corpus.columns.items()},
        "lengths": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "max": int(lengths.max()),
        },
        "document": {
            "number": document,
            "name": None if names is None else names[document],
            "length": size,
            "first_tokens": corpus.read(document, 0, min(size, _SHOWN_TOKENS)).tolist(),
        },
    }
