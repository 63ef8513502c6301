"""Token files that others made: `.npy`, raw numbers with a sidecar, Megatron's indexed datasets."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainkit.data.corpus import TokenCorpus
from trainkit.data.mapped import map_file
from trainkit.files import bad_file
from trainkit.text.corpora.layouts import (
    FileLayout,
    Sidecar,
    megatron_layout,
    npy_layout,
    raw_layout,
    read_sidecar,
    sidecar_of,
)
from trainkit.text.corpora.text import BLOCK, hash_of, opened, read_at, wrong_size
from trainkit.text.corpora.token_file import check_ids

if TYPE_CHECKING:
    from pathlib import Path

    from trainkit.types import IntArray

FOREIGN_SUFFIXES = (".npy", ".bin", ".idx")
WHOLE = 1 << 30
"""Bytes up to which a file is read as a whole when it is opened."""
SAMPLES = 64
"""Pieces of 1 MiB that are read of a larger one."""


def open_foreign(
    path: Path, *, vocab_size: int | None = None, eos_id: int | None = None, full: bool = False
) -> TokenCorpus:
    """Open a `.npy`, `.bin` or `.idx` file of tokens, and map it.

    A `.bin` file with an `.idx` file beside it is Megatron's, another is raw and needs a sidecar.

    A file of up to 1 GiB is read once: all tokens are compared with the vocabulary, and `sources`
    has the SHA-256 of the file. Of a larger one 64 pieces of 1 MiB are, and `sources` has a hash of
    these, of the size and of the time it was last written to.

    Args:
        path: The file.
        vocab_size: No token may be this large or larger, where the sidecar does not say.
        eos_id: A document ends after each of these tokens, where the file has no document ends.
            Without either the whole file is one document.
        full: Read all of the file whatever its size, and compare it with the sidecar's hash.

    Raises:
        DataError: The file is not what its name, its header or its sidecar says, or a token is not
            in the vocabulary. The message names the file and the place.
        ValueError: `eos_id` was given for a file that has document ends or another eos.
    """
    layout, side = _layout_of(path)
    if eos_id is not None and (layout.offsets is not None or side.eos_id not in {None, eos_id}):
        says = f"has {side.eos_id}" if layout.offsets is None else "does"
        what = f"eos_id={eos_id} is for files that do not say where documents end; this one {says}"
        raise ValueError(f"open_corpus: {path}: {what}")
    eos_id = side.eos_id if eos_id is None else eos_id
    return _opened(layout, side, side.vocab_size or vocab_size, eos_id, full=full)


def _layout_of(path: Path) -> tuple[FileLayout, Sidecar]:
    """Return where a file's tokens lie: names alone say of which kind it is."""
    if path.suffix == ".npy":
        side = read_sidecar(path)
        return npy_layout(path, side), side
    if path.suffix == ".bin" and not path.with_suffix(".idx").exists():
        side = read_sidecar(path)
        return raw_layout(path, side), side
    side = sidecar_of(path.with_suffix(".bin"))
    if side.exists():
        what = f"the .bin file has both an .idx file and {side.name}"
        raise bad_file(path, f"{what}; keep the one that is its own")
    return megatron_layout(path), Sidecar()


# ------------------------------------------------------------------------------------------ content


def _opened(
    layout: FileLayout, side: Sidecar, vocab_size: int | None, eos_id: int | None, *, full: bool
) -> TokenCorpus:
    path, kind = layout.path, layout.dtype
    if layout.count == 0:
        raise bad_file(path, "the file holds no tokens")
    with opened(path) as file:
        whole = full or os.fstat(file.fileno()).st_size <= WHOLE
        sha256 = _content_hash(file, path, whole=whole)
        data, told = map_file(file, path)
    if told.size != layout.begin + layout.count * kind.itemsize:
        raise wrong_size(path, told.size, layout.begin + layout.count * kind.itemsize)
    if whole and side.sha256 not in {None, sha256}:
        what = "its content does not have the fingerprint (sha256) of its sidecar"
        raise bad_file(path, what, got=sha256, want=side.sha256)
    tokens = data[layout.begin :].view(kind)
    offsets = layout.offsets if layout.offsets is not None else _ends(tokens, eos_id)
    step = BLOCK // kind.itemsize
    count = -(-layout.count // step)
    for number in range(count) if whole else _spread(count):
        check_ids(
            tokens[number * step : (number + 1) * step],
            number * step,
            vocab_size=vocab_size,
            offsets=offsets,
            first_byte=layout.begin,
            path=path,
        )
    facts = f"{kind.name} {sha256} {hashlib.sha256(offsets.tobytes()).hexdigest()}"
    return TokenCorpus(
        tokens.view(f"u{kind.itemsize}"),
        offsets,
        vocab_size,
        digest=hashlib.sha256(facts.encode()).hexdigest(),
        sources={path.name: sha256[:16]} | layout.sources,
        file=told,
    )


def _content_hash(file: BinaryIO, path: Path, *, whole: bool) -> str:
    """Hash a file, or its size, its time and pieces of it; read errors are errors, not signals."""
    if whole:
        return hash_of(file, path)
    facts = os.fstat(file.fileno())
    digest = hashlib.sha256(f"{facts.st_size} {facts.st_mtime_ns}".encode())
    for number in _spread(-(-facts.st_size // BLOCK)):
        digest.update(read_at(file, path, number * BLOCK, BLOCK))
    return digest.hexdigest()


def _spread(count: int) -> list[int]:
    """Return which of `count` blocks are looked at: the same ones each time, the last too."""
    return sorted({number * (count - 1) // (SAMPLES - 1) for number in range(SAMPLES)})


def _ends(tokens: np.ndarray[Any, Any], eos_id: int | None) -> IntArray:
    """Return offsets of documents that each end with `eos_id`; the last one need not."""
    if eos_id is None:
        return np.array([0, len(tokens)])
    begins = range(0, len(tokens), BLOCK)
    found = [np.flatnonzero(tokens[begin : begin + BLOCK] == eos_id) + begin for begin in begins]
    ends = np.concatenate([np.zeros(1, np.int64), *(places + 1 for places in found)])
    return ends if ends[-1] == len(tokens) else np.append(ends, len(tokens))
