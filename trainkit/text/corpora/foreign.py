"""Token files of other tools: `.npy`, raw integers with a sidecar, Megatron's indexed datasets."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainkit.buckets.ranges import RangeFile
from trainkit.data.corpus import TokenCorpus
from trainkit.text.corpora.foreign_layouts import (
    FileLayout,
    Sidecar,
    offsets_path,
    read_megatron_layout,
    read_npy_layout,
    read_raw_layout,
    read_sidecar,
    sidecar_path,
)
from trainkit.text.corpora.text_files import (
    BLOCK,
    hash_open_file,
    map_content,
    measure_file,
    open_file,
    read_at,
    view_section,
    wrong_size,
)
from trainkit.text.corpora.token_file import check_ids
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainkit.types import IntArray

FOREIGN_SUFFIXES = (".npy", ".idx", ".bin")
WHOLE = 1 << 30
"""The size in bytes up to which opening a file reads all of it."""
SAMPLES = 64
"""The number of 1 MiB blocks that are read of a larger file."""


def open_foreign(
    path: Path,
    *,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    max_chunks: int | None = 1,
) -> TokenCorpus:
    """Open a `.npy`, `.bin` or `.idx` file of tokens, and map it.

    A `.bin` file with an `.idx` file of the same name is Megatron's; any other is raw and needs a
    sidecar.

    A file of up to 1 GiB is read once: all tokens are compared with the vocabulary, and `sources`
    has the SHA-256 of the file. Of a larger one 64 blocks of 1 MiB are read, and `sources` has a
    hash of these, of the size and of the time of the last write.

    Args:
        path: The file.
        vocab_size: Exclusive upper bound of the ids, if the sidecar has none.
        eos_id: A document ends after each of these tokens, in a file without document offsets.
            With neither, the whole file is one document.
        max_chunks: None reads all of a file of any size, and compares the sidecar's hash.

    Raises:
        DataError: The file does not fit its name, its header or its sidecar, or a token is outside
            the vocabulary. The message names the file and the position.
        ValueError: `eos_id` was given for a file that has document offsets or another eos.
    """
    layout, sidecar = _read_layout(path)
    eos_id = _choose_eos(path, layout, sidecar, eos_id)
    # The sidecar belongs to the file, and the argument to this run.
    vocab_size = sidecar.vocab_size or vocab_size
    path = layout.path
    dtype = layout.dtype
    # An empty file cannot be mapped.
    if layout.count == 0:
        raise DataError(f"{path}: the file holds no tokens", where=path)
    with open_file(path) as file:
        read_all = max_chunks is None or measure_file(file) <= WHOLE
        sha256 = hash_open_file(file, path) if read_all else _hash_samples(file, path)
        content, mapped = map_content(file, path)
        size = measure_file(file)
    # Compared again, since the file may have changed after its header was read.
    if size != layout.start + layout.count * dtype.itemsize:
        raise wrong_size(path, size, layout.start + layout.count * dtype.itemsize)
    if read_all and sidecar.sha256 not in {None, sha256}:
        raise DataError(
            f"{path}: its content does not have the fingerprint (sha256) of its sidecar",
            where=path,
            got=sha256,
            want=sidecar.sha256,
        )
    tokens = view_section(content, layout.start, layout.count, dtype)
    offsets = layout.offsets if layout.offsets is not None else _find_documents(tokens, eos_id)
    block_size = BLOCK // dtype.itemsize
    num_blocks = -(-layout.count // block_size)
    for block in range(num_blocks) if read_all else _sample_blocks(num_blocks):
        check_ids(
            tokens[block * block_size : (block + 1) * block_size],
            block * block_size,
            vocab_size=vocab_size,
            offsets=offsets,
            first_byte=layout.start,
            path=path,
        )
    # The same bytes in another dtype, or with other documents, are another corpus.
    identity = f"{dtype.name} {sha256} {hashlib.sha256(offsets.tobytes()).hexdigest()}"
    return TokenCorpus(
        # Checked ids are not negative, so signed ones can be viewed as unsigned, as elsewhere.
        view_section(content, layout.start, layout.count, f"u{dtype.itemsize}"),
        offsets,
        vocab_size,
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        sources={path.name: sha256[:16]} | layout.sources,
        file=mapped,
    )


def _read_layout(path: Path) -> tuple[FileLayout, Sidecar]:
    """Read a file's layout; its name alone decides on the format."""
    if path.suffix == ".npy":
        sidecar = read_sidecar(path)
        return read_npy_layout(path, sidecar), sidecar
    if path.suffix == ".bin" and not path.with_suffix(".idx").exists():
        sidecar = read_sidecar(path)
        return read_raw_layout(path, sidecar), sidecar
    # An index and a sidecar may disagree about dtype and documents.
    unexpected = sidecar_path(path.with_suffix(".bin"))
    if unexpected.exists():
        raise DataError(
            f"{path}: the .bin file has both an .idx file and {unexpected.name}; "
            "keep the one that belongs to it",
            where=path,
        )
    return read_megatron_layout(path), Sidecar()


def _choose_eos(path: Path, layout: FileLayout, sidecar: Sidecar, eos_id: int | None) -> int | None:
    """Return the sidecar's eos, or the given one if the file leaves it open."""
    if eos_id is None:
        return sidecar.eos_id
    if layout.offsets is not None:
        raise ValueError(
            f"open_corpus: {path}: eos_id={eos_id} is for files that do not say where documents "
            "end; this one does"
        )
    if sidecar.eos_id not in {None, eos_id}:
        raise ValueError(
            f"open_corpus: {path}: eos_id={eos_id} is for files that do not say where documents "
            f"end; this one has {sidecar.eos_id}"
        )
    return eos_id


# ------------------------------------------------------------------------------------------ content


def _hash_samples(file: BinaryIO, path: Path) -> str:
    """Hash the size of a file, the time of its last write, and a sample of its blocks."""
    # Read, not mapped: a read error raises, while one in mapped memory kills the process.
    size = measure_file(file)
    # The time, or the ETag, stands for the blocks that are not read.
    is_remote = isinstance(file, RangeFile)
    version = file.remote.etag if is_remote else os.fstat(file.fileno()).st_mtime_ns
    digest = hashlib.sha256(f"{size} {version}".encode())
    for block in _sample_blocks(-(-size // BLOCK)):
        digest.update(read_at(file, path, block * BLOCK, BLOCK))
    return digest.hexdigest()


def _sample_blocks(count: int) -> list[int]:
    """Return evenly spaced indices below `count`, the first and the last included."""
    return sorted({index * (count - 1) // (SAMPLES - 1) for index in range(SAMPLES)})


def _find_documents(tokens: np.ndarray[Any, Any], eos_id: int | None) -> IntArray:
    """Return the offsets of documents that each end with `eos_id`; the last one need not."""
    if eos_id is None:
        return np.array([0, len(tokens)])
    # In blocks, as the comparison makes an array of booleans as long as the tokens it compares.
    positions = [
        np.flatnonzero(tokens[start : start + BLOCK] == eos_id) + start
        for start in range(0, len(tokens), BLOCK)
    ]
    # A document includes its eos, so it ends one after it.
    ends = np.concatenate([np.zeros(1, np.int64), *(block + 1 for block in positions)])
    return ends if ends[-1] == len(tokens) else np.append(ends, len(tokens))


# ----------------------------------------------------------------------------- files of a directory


def select_npy(root: Path, names: Sequence[str], *, has_text: bool) -> list[str]:
    """Return the `.npy` files of a directory that hold tokens, not offsets.

    Args:
        root: The directory.
        names: The relative paths of all its files.
        has_text: Not used: a `.npy` file next to text holds tokens all the same.
    """
    del has_text
    available = set(names)
    # The files of offsets that sidecars name; a file without a sidecar names none.
    offsets = {
        offsets_path(root / name)
        for name in names
        if name.endswith((".npy", ".bin")) and sidecar_path(Path(name)).as_posix() in available
    }
    return [name for name in names if name.endswith(".npy") and root / name not in offsets]


def select_megatron(root: Path, names: Sequence[str], *, has_text: bool) -> list[str]:
    """Return the `.idx` files of a directory; next to text only those with a `.bin` file."""
    del root
    available = set(names)
    return [
        f"{stem}.idx"
        for stem in sorted(_index_stems(names))
        if not has_text or f"{stem}.bin" in available
    ]


def select_raw(root: Path, names: Sequence[str], *, has_text: bool) -> list[str]:
    """Return the `.bin` files without an `.idx` file; next to text only those with a sidecar."""
    del root
    available = set(names)
    indexed = _index_stems(names)
    return [
        name
        for name in names
        if name.endswith(".bin")
        and name.removesuffix(".bin") not in indexed
        and (not has_text or f"{name}.json" in available)
    ]


def _index_stems(names: Sequence[str]) -> set[str]:
    return {name.removesuffix(".idx") for name in names if name.endswith(".idx")}
