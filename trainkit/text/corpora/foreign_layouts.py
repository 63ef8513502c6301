"""Layouts of foreign token files: where the tokens lie, and where documents end.

None of these formats stores everything that is needed, and nothing is guessed. The rest comes from
a sidecar, `FILE.json`: {"dtype": "uint16", "offsets": "ends.npy", "eos_id": 0, "vocab_size": 50257,
"sha256": "..."}. All keys are optional, except the dtype of a raw file.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import orjson

from trainkit.text.corpora.text_files import (
    check_readable,
    hash_open_file,
    make_damaged_error,
    measure_file,
    open_file,
    wrong_size,
)
from trainkit.types import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.types import IntArray

MEGATRON_MAGIC = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little")
"""The first bytes of an index, with its version."""
_MEGATRON_HEADER = struct.Struct("<17sBQQ")
"""The magic, the code of the dtype, and the numbers of sequences and of documents."""
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


@attrs.frozen
class Sidecar:
    """The content of a sidecar file; all None if there is none."""

    dtype: str | None = None
    offsets: list[int] | str | None = None
    eos_id: int | None = None
    vocab_size: int | None = None
    sha256: str | None = None


@attrs.frozen(eq=False)
class FileLayout:
    """Position and dtype of a file's tokens, and the document offsets if they are known.

    Attributes:
        path: The file that holds the tokens.
        dtype: The dtype of the tokens.
        start: The first byte of the tokens.
        count: The number of tokens.
        offsets: int64 `[N+1]`, where documents begin and end, in tokens; None if unknown.
        sources: Hashes of the files that the offsets come from, by name.
    """

    path: Path
    dtype: np.dtype[Any]
    start: int
    count: int
    offsets: IntArray | None
    sources: dict[str, str]


# ------------------------------------------------------------------------------------------ layouts


def read_raw_layout(path: Path, sidecar: Sidecar) -> FileLayout:
    """Return the layout of a file of raw integers.

    Raises:
        DataError: The sidecar is missing or has no dtype, or the file size does not fit.
    """
    if sidecar.dtype is None:
        raise DataError(
            f"{path}: a raw file of tokens does not store its dtype, and none is guessed; "
            f'write {{"dtype": "uint16"}}, or the right dtype, into {sidecar_path(path)}',
            where=path,
            want="dtype",
            hint="offsets, eos_id, vocab_size and sha256 are optional keys of it",
        )
    dtype = np.dtype(sidecar.dtype)
    size = _file_size(path)
    # A wrong dtype mostly shows here, or as ids outside of the vocabulary.
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size} bytes are no multiple of {dtype}, the dtype of its sidecar",
            where=path,
            got=size,
        )
    count = size // dtype.itemsize
    offsets, sources = _read_sidecar_offsets(path, sidecar, count)
    return FileLayout(path, dtype, 0, count, offsets, sources)


def read_npy_layout(path: Path, sidecar: Sidecar) -> FileLayout:
    """Return the layout of a file that `numpy.save` wrote, of integers in one dimension.

    Raises:
        DataError: It is no such file, or its size or its sidecar does not fit.
    """
    dtype, start, count = _read_npy_header(path)
    # The header has the dtype: the sidecar may repeat it, and must not contradict it.
    if sidecar.dtype not in {None, dtype.name}:
        raise DataError(
            f"{path}: its dtype is {dtype}, its sidecar says {sidecar.dtype}",
            where=path,
            got=dtype.name,
            want=sidecar.dtype,
        )
    offsets, sources = _read_sidecar_offsets(path, sidecar, count)
    return FileLayout(path, dtype, start, count, offsets, sources)


def _read_npy_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype, the first byte of the numbers, and their count. Nothing is unpickled."""
    size = _file_size(path)
    try:
        with open_file(path) as file:
            version = np.lib.format.read_magic(file)
            # Version 3.0 exists for the names of structured dtypes alone, so tokens never have it.
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read_header(file)
            start = file.tell()
    except (KeyError, OSError, ValueError) as error:
        raise make_damaged_error(path, ".npy", error) from error
    # A header is text that anybody can write, with a negative size too.
    if len(shape) != 1 or shape[0] < 0 or dtype.name not in DTYPES:
        raise DataError(
            f"{path}: tokens are integers in one dimension, got {dtype} {shape}",
            where=path,
            got=str(dtype),
        )
    # The mapped file is viewed as numbers, which must be native and aligned.
    if not dtype.isnative or start % dtype.itemsize:
        raise DataError(
            f"{path}: its numbers are big-endian, or not aligned; "
            "save it again with numpy as little-endian",
            where=path,
        )
    if size != start + shape[0] * dtype.itemsize:
        raise wrong_size(path, size, start + shape[0] * dtype.itemsize)
    return dtype, start, int(shape[0])


def read_megatron_layout(path: Path) -> FileLayout:
    """Return the layout of Megatron's indexed dataset; `path` is either of its two files.

    Raises:
        DataError: The index is no such file, or the two files do not fit each other.
    """
    index = path.with_suffix(".idx")
    path = path.with_suffix(".bin")
    for file_path in (index, path):
        check_readable(file_path)
    with open_file(index) as file:
        data = file.read(_MEGATRON_HEADER.size)
        # The length first: `unpack` raises for a truncated header.
        if len(data) < _MEGATRON_HEADER.size or data[:17] != MEGATRON_MAGIC:
            raise DataError(f"{index}: no Megatron index of version 1", where=index, got=data[:17])
        _, code, num_sequences, num_documents = _MEGATRON_HEADER.unpack(data)
        if code not in MEGATRON_DTYPES:
            raise DataError(
                f"{index}: dtype code {code} is no dtype of tokens", where=index, got=code
            )
        size = measure_file(file)
        # The header; for each sequence its length (int32) and its pointer (int64); for each
        # document the sequence at which it ends (int64).
        expected_size = 34 + 12 * num_sequences + 8 * num_documents
        if size != expected_size:
            raise wrong_size(index, size, expected_size)
        # Read in one piece: the hash covers all of it, and 12 bytes for each sequence are few.
        file.seek(0)
        data = file.read()
    dtype = np.dtype(MEGATRON_DTYPES[code])
    # The lengths of the sequences, their positions in bytes, and the documents' sequences.
    lengths = np.frombuffer(data, "<i4", num_sequences, 34)
    pointers = np.frombuffer(data, "<i8", num_sequences, 34 + 4 * num_sequences)
    ends = np.frombuffer(data, "<i8", num_documents, 34 + 12 * num_sequences)
    offsets = _megatron_offsets(index, lengths, pointers, ends, dtype.itemsize)
    sources = {index.name: hashlib.sha256(data).hexdigest()[:16]}
    return FileLayout(path, dtype, 0, int(offsets[-1]), offsets, sources)


def _megatron_offsets(
    index: Path,
    lengths: np.ndarray[Any, Any],
    pointers: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
    itemsize: int,
) -> IntArray:
    """Return the document offsets in tokens: a document is a run of sequences."""
    if (lengths < 0).any():
        worst = int((lengths < 0).argmax())
        raise DataError(f"{index}: sequence {worst} has {lengths[worst]} tokens", where=index)
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    # The pointers are redundant for contiguous sequences; others would need a copy of the tokens.
    misplaced = pointers != starts[:-1] * itemsize
    if misplaced.any():
        worst = int(misplaced.argmax())
        actual = int(pointers[worst])
        expected = int(starts[worst]) * itemsize
        raise DataError(
            f"{index}: sequence {worst} begins at byte {actual} of the .bin file instead of "
            f"{expected}, where the one before it ends",
            where=index,
            got=actual,
            want=expected,
        )
    _check_increasing(index, ends, len(lengths), "sequences")
    # `ends` has a leading 0, and one entry for each document: Megatron's `document_indices`.
    return starts[ends]


# ----------------------------------------------------------------------------------------- sidecars


def sidecar_path(path: Path) -> Path:
    """Return the path of a file's sidecar."""
    return path.with_name(f"{path.name}.json")


def offsets_path(path: Path) -> Path | None:
    """Return the path of the file of offsets that a file's sidecar names, if it names one."""
    name = read_sidecar(path).offsets
    return path.with_name(name) if isinstance(name, str) else None


def read_sidecar(path: Path) -> Sidecar:
    """Read the sidecar of a file; an empty one if there is none.

    Raises:
        DataError: The sidecar is not a JSON object with known keys.
    """
    sidecar = sidecar_path(path)
    if not sidecar.exists():
        return Sidecar()
    check_readable(sidecar)
    try:
        with open_file(sidecar) as file:
            values = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{sidecar}: bad JSON: {error}", where=sidecar) from error
    # `type(x) is int`, as JSON's `true` is an int for `isinstance`.
    rules: dict[str, Callable[[Any], bool]] = {
        "dtype": lambda x: x in DTYPES,
        # A name only: with a slash it could be any file of the machine.
        "offsets": lambda x: (
            (type(x) is str and Path(x).name == x and "\0" not in x)
            or (type(x) is list and all(type(i) is int for i in x))
        ),
        "eos_id": lambda x: type(x) is int and x >= 0,
        "vocab_size": lambda x: type(x) is int and x >= 1,
        "sha256": lambda x: type(x) is str,
    }
    if not isinstance(values, dict) or not values.keys() <= rules.keys():
        got = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise DataError(
            f"{sidecar}: must be a JSON object of {', '.join(rules)}, got {got}", where=sidecar
        )
    for name, value in values.items():
        if not rules[name](value):
            allowed = f"one of {', '.join(DTYPES)}" if name == "dtype" else "a valid value"
            raise DataError(
                f"{sidecar}: {name} {value!r} is not {allowed}", where=sidecar, got=value
            )
    return Sidecar(
        dtype=values.get("dtype"),
        offsets=values.get("offsets"),
        eos_id=values.get("eos_id"),
        vocab_size=values.get("vocab_size"),
        sha256=values.get("sha256"),
    )


def _read_sidecar_offsets(
    path: Path, sidecar: Sidecar, count: int
) -> tuple[IntArray | None, dict[str, str]]:
    """Return the offsets that a sidecar gives, and hashes of the files that hold them."""
    # The sidecar decides where documents end, so its hash is one of the corpus' sources.
    origin = sidecar_path(path)
    if not origin.exists():
        return None, {}
    sources = {origin.name: _short_hash(origin)}
    if sidecar.offsets is None:
        return None, sources
    # A list in the sidecar, or the name of a `.npy` file next to it.
    if isinstance(sidecar.offsets, list):
        offsets = np.array(sidecar.offsets, np.int64)
    else:
        origin = path.with_name(sidecar.offsets)
        check_readable(origin)
        dtype, start, size = _read_npy_header(origin)
        with open_file(origin) as file:
            offsets = np.frombuffer(file.read(), dtype, size, start).astype(np.int64)
        sources[origin.name] = _short_hash(origin)
    _check_increasing(origin, offsets, count, "tokens")
    return offsets, sources


def _check_increasing(path: Path, offsets: np.ndarray[Any, Any], end: int, unit: str) -> None:
    # Equal ones are allowed: a document may be empty.
    increases = len(offsets) > 1 and not (offsets[1:] < offsets[:-1]).any()
    if not increases or offsets[0] != 0 or offsets[-1] != end:
        raise DataError(
            f"{path}: where documents begin and end must rise from 0 to {end}, the number of "
            f"{unit}; got {len(offsets)} numbers, {offsets[:3].tolist()} to "
            f"{offsets[-1:].tolist()}",
            where=path,
        )


def _short_hash(path: Path) -> str:
    with open_file(path) as file:
        return hash_open_file(file, path)[:16]


def _file_size(path: Path) -> int:
    with open_file(path) as file:
        return measure_file(file)
