"""trainkit's token file: write one, or map one as a corpus."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainkit.data.corpus import TokenCorpus
from trainkit.data.documents import check_columns, smallest_dtype
from trainkit.files import atomic_write
from trainkit.text.corpora.content import write_content
from trainkit.text.corpora.text_files import (
    check_readable,
    map_content,
    open_file,
    view_section,
)
from trainkit.text.corpora.token_file import (
    BLOCK,
    DTYPES,
    SAMPLED,
    Header,
    check_chunks,
    check_ids,
    read_token_header,
    sample_chunks,
)
from trainkit.types import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike, DTypeLike

    from trainkit.types import Column, Sample

SUFFIX = ".tokens"
Check = Literal["sample", "full", "none"]
"""How much of a file opening it checks; see `open_tokens`."""


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
    """Write documents into a token file, atomically, and open it.

    Args:
        path: The file, which ends in `.tokens`. An existing one is replaced at the end, in one
            step.
        documents: Sequences of token ids, or `Sample`s; read once, one at a time. Only offsets
            stay in memory.
        dtype: uint8, uint16 or uint32; by default the smallest that fits `vocab_size`, or uint32.
        vocab_size: Exclusive upper bound of the ids; stored, and compared with a tokenizer that the
            file is opened with.
        tokenizer_hash: Hash of the tokenizer that made the ids, from `tokenizer_hash`; stored, and
            compared with a tokenizer that the file is opened with.
        columns: Further columns of a token, by name; each `Sample` has values for them.
        template_hash: Hash of the chat template of the conversations, from `template_hash`; stored,
            and compared with a template that the file is opened with.
        made_with: The names of the "tokenizer" and the "template"; stored, and named in the error
            when the file is opened with another one.

    Returns:
        The corpus, mapped from the file.

    Raises:
        ValueError: The suffix or the dtype is not one of the above, or a column has the name of one
            of the batch's tensors.
        DataError: A document is not a sequence of ids in range, there is no document, some are
            `Sample`s and others are not, or columns are missing. The message names it.
        DiskError: The file cannot be written, or the disk is full.

    Effects:
        Writes `path`, through a temporary file in the same directory (and nameless ones for
        `Sample`s) that is removed on failure. The data is on the disk before this returns.

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
    # The dtype is fixed before the first document, as the file is written in one pass.
    token_dtype = np.dtype(dtype) if dtype is not None else smallest_dtype(vocab_size)
    if token_dtype.name not in DTYPES:
        raise ValueError(
            f"write_corpus: dtype must be one of {', '.join(DTYPES)}, got {token_dtype}"
        )
    # A reader sees the old file or the complete new one.
    with atomic_write(path, by="write_corpus") as file:
        write_content(
            file,
            path,
            documents,
            dtype=token_dtype,
            vocab_size=vocab_size,
            tokenizer_hash=tokenizer_hash,
            columns=check_columns("write_corpus", columns),
            template_hash=template_hash,
            made_with=made_with or {},
        )
    # What has just been written need not be read again.
    return open_tokens(path, check="none")


def open_tokens(path: str | os.PathLike[str], *, check: Check = "sample") -> TokenCorpus:
    """Map a token file; check its header, its size, its offsets and a sample of its content.

    Args:
        path: The file.
        check: "sample" reads up to 32 chunks of 4 MiB, others at each start: all of a file of up to
            128 MiB. "full" compares all hashes with the content, and all tokens with the
            vocabulary; "none" reads only the header and the offsets.

    Raises:
        DataError: The file is missing, truncated, damaged, of another format or version, or holds
            a token outside its vocabulary. The message names the byte.
    """
    # How many chunks are compared with their hashes.
    max_chunks = {"sample": SAMPLED, "full": None, "none": 0}
    if check not in max_chunks:
        raise ValueError(
            f"open_tokens: check must be one of {', '.join(max_chunks)}, got {check!r}"
        )
    return open_part(Path(path), max_chunks=max_chunks[check])


def open_part(
    path: Path,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    max_chunks: int | None,
) -> TokenCorpus:
    """Open a token file, and compare up to `max_chunks` chunks of it with their hashes.

    Args:
        path: The file.
        vocab_size: Exclusive upper bound of the ids, if the file does not store one.
        eos_id: Not allowed: the file stores document offsets.
        max_chunks: The number of chunks to check; None checks all.
    """
    # `open_corpus` passes it whatever the format is.
    if eos_id is not None:
        raise ValueError(f"open_corpus: {path}: a token file says where documents end: no eos_id")
    check_readable(path)
    with open_file(path) as file:
        header = read_token_header(file, path)
        # Before the map: a read error raises here, and would kill the process there.
        checked = list(check_chunks(file, header, sample_chunks(header.chunks, max_chunks), path))
        content, mapped = map_content(file, path)
    dtype = header.token_dtype
    # All sections are views of the map, or read by ranges, whatever the size of the file.
    tokens = view_section(content, BLOCK, header.tokens, dtype)
    loss_mask = None
    if header.loss_mask:
        loss_mask = view_section(content, header.loss_mask_at, header.tokens, "uint8")
    values = {
        name: view_section(content, start, header.tokens, column.dtype, column.inner)
        for (name, column), start in zip(header.columns.items(), header.values_at, strict=False)
    }
    # Of a file that is read by ranges these alone are in memory.
    offsets = np.asarray(view_section(content, header.offsets_at, header.documents + 1, "<i8"))
    _check_offsets(offsets, header, path, is_hashed=max_chunks != 0)
    for start, end in checked:
        # Chunks may reach beyond the tokens; slices end there.
        # From bytes of the file to tokens; a chunk begins at a whole token.
        first = (start - BLOCK) // dtype.itemsize
        check_ids(
            tokens[first : (end - BLOCK) // dtype.itemsize],
            first,
            vocab_size=header.vocab_size or vocab_size,
            offsets=offsets,
            first_byte=BLOCK,
            path=path,
        )
    return TokenCorpus(
        tokens,
        offsets,
        header.vocab_size,
        digest=header.digest,
        loss_mask=loss_mask,
        sources={path.name: header.digest[:16]},
        file=mapped,
        tokenizer_hash=header.tokenizer,
        columns=header.columns,
        values=values,
        template_hash=header.template,
        made_with=header.made_with,
    )


def _check_offsets(
    offsets: np.ndarray[Any, Any], header: Header, path: Path, *, is_hashed: bool
) -> None:
    has_ends = offsets[0] == 0 and offsets[-1] == header.tokens
    if not has_ends or (offsets[1:] < offsets[:-1]).any():
        raise DataError(
            f"{path}: this token file has offsets that do not rise from 0 to {header.tokens}",
            where=path,
        )
    # Whichever chunks were sampled: a wrong offset may shift documents throughout the file.
    if is_hashed and hashlib.sha256(offsets.tobytes()).hexdigest() != header.offsets_sha256:
        raise DataError(
            f"{path}: this token file has offsets that were changed after they were written",
            where=path,
        )
