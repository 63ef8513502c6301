"""trainkit's token file: write one, and map one into memory as a corpus."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainkit.data.corpus import TokenCorpus
from trainkit.data.documents import checked_columns, smallest_dtype
from trainkit.data.mapped import map_file
from trainkit.files import atomic_write
from trainkit.text.corpora.content import write_content
from trainkit.text.corpora.text import check_readable, opened
from trainkit.text.corpora.token_file import (
    BLOCK,
    DTYPES,
    SAMPLED,
    Header,
    broken,
    check_chunks,
    check_ids,
    read_header,
    sampled,
)
from trainkit.types import Sample

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike, DTypeLike

    from trainkit.types import Column

SUFFIX = ".tokens"
Check = Literal["sample", "full", "none"]
"""How much of a file's content is read when it is opened."""


# ---------------------------------------------------------------------------------------- in memory


# ---------------------------------------------------------------------------------------- in a file


def write_corpus(
    path: str | os.PathLike[str],
    documents: Iterable[ArrayLike | Sample],
    *,
    dtype: DTypeLike | None = None,
    vocab_size: int | None = None,
    tokenizer_hash: str | None = None,
    columns: Mapping[str, Column] | None = None,
    template_hash: str | None = None,
    made_with: Mapping[str, str] | None = None,
) -> TokenCorpus:
    """Write documents of tokens into a token file, whole or not at all, and open it.

    Args:
        path: The file to make, which ends in `.tokens`; a file that is there is replaced at the
            end, in one step.
        documents: Sequences of token ids, or `Sample`s, read once, one at a time; only offsets
            stay in memory.
        dtype: uint8, uint16 or uint32; by default the smallest that holds `vocab_size`, or uint32.
        vocab_size: No token may be this large or larger; written down, and checked when the file is
            opened with a tokenizer.
        tokenizer_hash: Of the tokenizer that made the ids, as the function of that name gives it;
            written down, and compared when the file is opened with a tokenizer.
        columns: What there is of each token besides, by name; each `Sample` has its values.
        template_hash: Of the template that conversations were written with, as the function of that
            name gives it; written down, and compared when the file is opened with a template.
        made_with: The names of the "tokenizer" and the "template", which messages give to whoever
            opens the file with another.

    Returns:
        The corpus, mapped from the file.

    Raises:
        ValueError: The suffix or the dtype is not one of the above, or a column has a name of the
            batch's.
        DataError: A document is not a sequence of ids that fit, there is no document, some are
            `Sample`s and some are not, or one does not have the columns. The message names it.
        DiskError: The file cannot be written, or the disk is full.

    Effects:
        Writes `path`, through a temporary file beside it that is removed on failure (and more for
        `Sample`s, which have no names); both reach the disk before this returns.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     corpus = write_corpus(Path(folder) / "two.tokens", [[1, 2, 3], [4]], vocab_size=10)
        ...     corpus.lengths, corpus.read(0, 1, 2), corpus.tokens.dtype
        (array([3, 1]), array([2, 3], dtype=uint8), dtype('uint8'))
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"write_corpus: the file must end in {SUFFIX}, got {path}")
    kind = np.dtype(dtype) if dtype is not None else smallest_dtype(vocab_size)
    if kind.name not in DTYPES:
        raise ValueError(f"write_corpus: dtype must be one of {', '.join(DTYPES)}, got {kind}")
    with atomic_write(path, by="write_corpus") as file:
        write_content(
            file,
            path,
            documents,
            kind=kind,
            vocab_size=vocab_size,
            tokenizer_hash=tokenizer_hash,
            columns=checked_columns("write_corpus", columns),
            template_hash=template_hash,
            made_with=made_with or {},
        )
    return open_tokens(path, check="none")


def open_tokens(path: str | os.PathLike[str], *, check: Check = "sample") -> TokenCorpus:
    """Open a token file: check its header, its size, its offsets and its content, and map it.

    Args:
        path: The file.
        check: "sample" reads up to 32 chunks of 4 MiB, others at each start: all of a file of up to
            128 MiB. "full" compares all hashes with the content, and all tokens with the
            vocabulary; "none" reads only the header and the offsets.

    Raises:
        DataError: The file is missing, truncated, damaged, no token file of this version, or holds
            a token outside its vocabulary. The message names the byte.
    """
    most = {"sample": SAMPLED, "full": None, "none": 0}
    if check not in most:
        raise ValueError(f"open_tokens: check must be one of {', '.join(most)}, got {check!r}")
    return open_part(Path(path), most=most[check])


def open_part(path: Path, *, most: int | None, vocab_size: int | None = None) -> TokenCorpus:
    """Open a token file, reading up to `most` chunks of its content (None: all).

    Args:
        path: The file.
        most: How many chunks are compared with their hashes.
        vocab_size: What the file's tokens have to stay below where the file itself does not say.
    """
    check_readable(path)
    with opened(path) as file:
        header = read_header(file, path)
        parts = list(check_chunks(file, header, sampled(header.chunks, most), path))
        data, told = map_file(file, path)
    size = header.kind.itemsize
    tokens = data[BLOCK : BLOCK + header.tokens * size].view(header.kind)
    trained = (
        data[header.trained_at : header.trained_at + header.tokens] if header.trained else None
    )
    values = {
        name: data[begin:end].view(column.dtype)[: header.tokens * column.width]
        for (name, column), (begin, end) in zip(
            header.columns.items(), pairwise(header.values_at), strict=True
        )
    }
    offsets = data[header.offsets_at : header.table_at].view("<i8")
    _check_offsets(offsets, header, path, hashed=most != 0)
    limit = header.vocab_size or vocab_size
    for begin, end in parts:
        first, past = ((place - BLOCK) // size for place in (begin, end))
        ids = tokens[first:past]
        check_ids(ids, first, vocab_size=limit, offsets=offsets, first_byte=BLOCK, path=path)
    return TokenCorpus(
        tokens,
        offsets,
        header.vocab_size,
        digest=header.digest,
        trained=trained,
        sources={path.name: header.digest[:16]},
        file=told,
        tokenizer_hash=header.tokenizer,
        columns=header.columns,
        values={name: x.reshape(-1, *header.columns[name].inner) for name, x in values.items()},
        template_hash=header.template,
        made_with=header.made_with,
    )


def _check_offsets(
    offsets: np.ndarray[Any, Any], header: Header, path: Path, *, hashed: bool
) -> None:
    if offsets[0] != 0 or offsets[-1] != header.tokens or (offsets[1:] < offsets[:-1]).any():
        raise broken(path, f"offsets that do not rise from 0 to {header.tokens}")
    if hashed and hashlib.sha256(offsets.tobytes()).hexdigest() != header.offsets_sha256:
        raise broken(path, "offsets that were changed after they were written")
